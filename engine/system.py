"""What this machine has for us: cores and memory, within the limits of a container."""

from __future__ import annotations

import contextlib
import importlib.metadata
import os
import platform
import re
from pathlib import Path

DRIVER_FILE = Path("/proc/driver/nvidia/version")
CUPY = ("cupy-cuda12x", "cupy-cuda13x")


def cache_dir() -> Path:
    """Where what was fetched or compiled is kept: $XDG_CACHE_HOME/glint, or ~/.cache/glint."""
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "glint"


def versions() -> str:
    """Of what numbers depend on."""
    found = [f"Python {platform.python_version()}"]
    for name in ("glint-llm", "numpy", *CUPY):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found.append(f"{name} {importlib.metadata.version(name)}")
    return ", ".join(found)


def usable_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def has_nvidia_driver() -> bool:
    """Whether the kernel has an NVIDIA driver loaded."""
    return DRIVER_FILE.exists()


def nvidia_driver() -> str:
    """Its version; empty where there is none."""
    found = re.search(r"\b\d{3}\.\d+(\.\d+)?\b", DRIVER_FILE.read_text("utf-8")) if has_nvidia_driver() else None
    return found[0] if found else ""


def available_memory() -> int:
    """Bytes that can still be used: what the kernel calls available, or less if a cgroup allows less."""
    available = _meminfo("MemAvailable") or 8 << 30
    for folder in ("/sys/fs/cgroup", "/sys/fs/cgroup/memory"):
        limit = _number(Path(folder, "memory.max")) or _number(Path(folder, "memory.limit_in_bytes"))
        used = _number(Path(folder, "memory.current")) or _number(Path(folder, "memory.usage_in_bytes"))
        if limit is not None and used is not None:
            available = min(available, max(0, limit - used))
    return available


def _meminfo(key: str) -> int | None:
    path = Path("/proc/meminfo")
    if not path.exists():
        return None
    for line in path.read_text().splitlines():
        name, _, value = line.partition(":")
        if name == key:
            return int(value.split()[0]) * 1024
    return None


def _number(path: Path) -> int | None:
    try:
        return int(path.read_text())
    except (OSError, ValueError):  # absent, unreadable, or "max"
        return None
