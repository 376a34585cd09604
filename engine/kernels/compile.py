"""From cuda/<stem>.cu to machine code by NVRTC, with no CUDA toolkit and no GPU; what is made is kept in a cache.

A cubin is kept under a digest of everything that it depends on: the source, all headers of cuda/include, the kernel's
name with its template arguments, the options, and NVRTC's version. CuPy's own cache would not do: its key leaves out
what a header of ours holds, and it cannot say sm_90a.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from cupy.cuda import nvrtc
from tqdm import tqdm

from engine.errors import KernelError
from engine.kernels.device import Instance
from engine.system import usable_cores

CUDA = Path(__file__).parents[2] / "cuda"
INCLUDE = CUDA / "include"
ARCHES = ("sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120")
OPTIONS = ("-std=c++17", "-default-device", "-ftz=true", "--ptxas-options=-v", "-lineinfo")


@dataclass(frozen=True, slots=True)
class Cubin:
    """Machine code of one instance for one arch, and what ptxas said about it."""

    path: Path
    symbol: str  # the entry's name in the file
    num_registers: int  # of a thread
    spill_bytes: int  # of a thread: stores and loads
    static_shared_bytes: int  # of a block


def arch_of(compute_capability: str) -> str:
    """The arch that a GPU's kernels are compiled for: "90" → sm_90.

    Raises:
        KernelError: a GPU older than sm_80.
    """
    if int(compute_capability) < 80:
        raise KernelError(
            f"this GPU has compute capability {int(compute_capability) / 10}; the kernels need 8.0 (Ampere) or later"
        )
    return f"sm_{compute_capability}"


def compile_all(instances: Iterable[Instance], arch: str, folder: Path, progress: bool = True) -> dict[Instance, Cubin]:
    """Cubins of all instances, from the cache or made now, several at a time.

    Args:
        arch: one of ARCHES.
        folder: of the cache; made if it is not there.
        progress: show a bar on standard error if that is a terminal.
    Raises:
        KernelError: NVRTC's messages about the first instance that does not compile.
    """
    wanted = list(dict.fromkeys(instances))
    with (
        ThreadPoolExecutor(usable_cores()) as pool,
        tqdm(total=len(wanted), desc="kernels", disable=None if progress else True) as bar,
    ):
        made = {}
        for instance, cubin in zip(
            wanted, pool.map(lambda one: compile_kernel(one, arch, folder), wanted), strict=True
        ):
            made[instance] = cubin
            bar.update()
    return made


def compile_kernel(instance: Instance, arch: str, folder: Path) -> Cubin:
    """One instance, from the cache or made now.

    A stem that ends with _sm90 is made for sm_90a, the arch of what only Hopper has.

    Raises:
        KernelError: it does not compile; with NVRTC's messages.
    """
    if instance.stem.endswith("_sm90") and arch == "sm_90":
        arch = "sm_90a"
    source = _source(instance.stem)
    digest = _digest(source, instance.entry, arch)
    name = f"{re.sub(r'[^a-zA-Z0-9]+', '_', instance.entry).strip('_')}-{arch}-{digest}"
    path, facts = folder / f"{name}.cubin", folder / f"{name}.json"
    if not (path.exists() and facts.exists()):
        code, about = _compile(instance, source, arch)
        _write(path, code)
        _write(facts, json.dumps(about).encode())
    return Cubin(path=path, **json.loads(facts.read_text(encoding="utf-8")))


def _compile(instance: Instance, source: str, arch: str) -> tuple[bytes, dict[str, str | int]]:
    program = nvrtc.createProgram(source, f"{instance.stem}.cu", [], [])
    try:
        nvrtc.addNameExpression(program, instance.entry)
        try:
            nvrtc.compileProgram(program, (f"-arch={arch}", f"--include-path={INCLUDE}", *OPTIONS))
        except nvrtc.NVRTCError as error:
            log = nvrtc.getProgramLog(program)
            raise KernelError(
                f"cuda/{instance.stem}.cu: {instance.entry} does not compile for {arch}:\n{log}"
            ) from error
        symbol = nvrtc.getLoweredName(program, instance.entry)
        code = nvrtc.getCUBIN(program) + b"\0"  # CuPy takes it for a text and leaves the last byte out
        return code, {"symbol": symbol, **_resources(nvrtc.getProgramLog(program), symbol)}
    finally:
        nvrtc.destroyProgram(program)


def _resources(log: str, symbol: str) -> dict[str, int]:
    """What ptxas reports of one entry of a file."""
    about = log.partition(f"Compiling entry function '{symbol}'")[2]
    spills = re.search(r"(\d+) bytes spill stores, (\d+) bytes spill loads", about)
    registers = re.search(r"Used (\d+) registers", about)
    shared = re.search(r"(\d+) bytes smem", about.partition("Used ")[2].partition("\n")[0])
    return {
        "num_registers": int(registers[1]) if registers else 0,
        "spill_bytes": int(spills[1]) + int(spills[2]) if spills else 0,
        "static_shared_bytes": int(shared[1]) if shared else 0,
    }


def _source(stem: str) -> str:
    path = CUDA / f"{stem}.cu"
    try:
        return path.read_text(encoding="utf-8")
    except OSError as error:
        raise KernelError(f"{path}: cannot be read: {error.strerror}") from error


@cache
def _headers() -> tuple[str, ...]:
    """The text of every header that a kernel may include."""
    return tuple(path.read_text(encoding="utf-8") for path in sorted(INCLUDE.glob("*.cuh")))


def _digest(source: str, entry: str, arch: str) -> str:
    parts = [source, *_headers(), entry, arch, *OPTIONS, str(nvrtc.getVersion())]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _write(path: Path, content: bytes) -> None:
    """All or nothing: ranks that start together make the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_name(f"{path.name}.{os.getpid()}")
    part.write_bytes(content)
    part.replace(path)
