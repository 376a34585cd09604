"""What a report on a GPU says of where it was made, and with what."""

from __future__ import annotations

import datetime
import hashlib
from pathlib import Path

from engine.system import nvidia_driver

CUDA = Path(__file__).parents[2] / "cuda"


def about(device: str) -> dict[str, str]:
    """Where and with what; the digest is that of all files of cuda/."""
    digest = hashlib.sha256()
    for path in sorted(CUDA.glob("*.cu")) + sorted(CUDA.glob("include/*.cuh")):
        digest.update(f"{path.name}\0".encode() + path.read_bytes() + b"\0")
    return {
        "device": device,
        "driver": nvidia_driver(),
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "cuda_sources": digest.hexdigest(),
    }
