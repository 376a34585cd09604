"""Which launches the kernels are asked for on a kind of GPU, and what each takes of it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import ml_dtypes
import numpy as np

from engine.config import ModelConfig, StepLimits
from engine.kernels.arches import ARCHES, MAX_THREADS
from engine.kernels.compile import Compiled
from engine.kernels.device import Instance
from engine.kernels.dry_run import run_dry
from engine.kernels.notes import Launch, Notes

DTYPES = (np.dtype(ml_dtypes.bfloat16), np.dtype(np.float16))
LIMITS = StepLimits(max_num_seqs=256, max_num_batched_tokens=8192)


@dataclass(frozen=True, slots=True)
class Use:
    """What a kernel takes of a GPU, at its largest launch. Sizes in bytes."""

    stem: str
    entry: str
    num_registers: int  # of a thread
    spill_bytes: int  # of a thread
    static_shared_bytes: int  # of a block
    dynamic_shared_bytes: int  # of a block
    threads: int  # of a block
    blocks_per_sm: int

    @property
    def shared_bytes(self) -> int:
        return self.static_shared_bytes + self.dynamic_shared_bytes


def notes_for(arch: str) -> Notes:
    """A device that takes notes as a common card of this arch would be used."""
    about = ARCHES[arch]
    return Notes(about.num_sms, about.block_shared_bytes, arch == "sm_90", about.has_fp8)


def launches_of(configs: Iterable[ModelConfig], arch: str, dtypes: Iterable[Any] = DTYPES) -> tuple[Launch, ...]:
    """All that these models launch on a GPU of this arch, in each of these types. Raises KernelError."""
    notes = notes_for(arch)
    for config in configs:
        for dtype in dtypes:
            run_dry(config, dtype, LIMITS, notes)
    return tuple(notes.launches)


def uses(launches: Iterable[Launch], compiled: Mapping[Instance, Compiled], arch: str) -> list[Use]:
    """One of each kernel: that of its launch with the fewest blocks per SM."""
    found: dict[Instance, Use] = {}
    for launch in launches:
        code = compiled[launch.instance]
        shared_bytes = code.static_shared_bytes + launch.shared_bytes
        blocks = ARCHES[arch].blocks_per_sm(launch.threads, code.num_registers, shared_bytes)
        use = Use(
            *(launch.instance.stem, launch.instance.entry, code.num_registers, code.spill_bytes),
            *(code.static_shared_bytes, launch.shared_bytes, launch.threads, blocks),
        )
        known = found.get(launch.instance)
        if known is None or (use.blocks_per_sm, -use.shared_bytes) < (known.blocks_per_sm, -known.shared_bytes):
            found[launch.instance] = use
    return sorted(found.values(), key=lambda use: (use.stem, use.entry))


def problem(use: Use, arch: str) -> str:
    """Why no SM can hold a block of it, or "" if one can."""
    if use.blocks_per_sm:
        return ""
    most = ARCHES[arch].block_shared_bytes
    if use.threads > MAX_THREADS:
        return f"{use.threads} threads a block; there can be {MAX_THREADS}"
    if use.shared_bytes > most:
        return f"{use.shared_bytes} bytes of shared memory a block; {arch} has {most}"
    return f"{use.num_registers} registers x {use.threads} threads are more than an SM has"


def table(found: Iterable[Use], arch: str) -> str:
    """For people."""
    lines = [
        f"{'kernel of ' + arch:<64}{'threads':>8}{'regs':>6}{'spill':>6}{'static':>8}{'dynamic':>9}{'blocks/SM':>10}"
    ]
    for use in found:
        lines.append(
            f"{use.entry:<64}{use.threads:>8}{use.num_registers:>6}{use.spill_bytes:>6}{use.static_shared_bytes:>8}"
            f"{use.dynamic_shared_bytes:>9}{use.blocks_per_sm:>10}  {problem(use, arch)}".rstrip()
        )
    return "\n".join(lines)


def as_dicts(found: Iterable[Use]) -> list[dict[str, Any]]:
    """For JSON."""
    return [asdict(use) for use in found]
