"""From cuda/<stem>.cu to machine code by NVRTC, with no CUDA toolkit and no GPU; what is made is kept in a cache.

A file is kept under a digest of everything that it depends on: the source, all headers of cuda/include and those
beside a source that is not of cuda/, the kernel's name with its template arguments, the options, and NVRTC's version. A
file that is not what was written is made again. A target is an arch such as sm_86, or compute_86: PTX of that arch,
which the driver of a later GPU compiles for it.
"""

from __future__ import annotations

import hashlib
import json
import re
import tempfile
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from cuda.bindings import nvrtc

from engine.errors import KernelError
from engine.kernels.device import Instance
from engine.kernels.includes import own_headers
from engine.progress import Progress
from engine.system import usable_cores

CUDA = Path(__file__).parents[2] / "cuda"
INCLUDE = CUDA / "include"
OPTIONS = ("-std=c++17", "-default-device", "-ftz=true", "-lineinfo")
NEEDS_CUDA = {100: "12.8", 120: "12.8", 103: "12.9", 121: "12.9"}  # the first that knows an arch of Blackwell


@dataclass(frozen=True, slots=True)
class Compiled:
    """One instance for one target, and what ptxas said about it; of PTX, which it has not seen, zeros."""

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


def compile_all(
    instances: Iterable[Instance], target: str, folder: Path, progress: bool = True
) -> dict[Instance, Compiled]:
    """All instances, from the cache or made now, several at a time.

    Args:
        target: one of arches.ARCHES, another that NVRTC knows, or compute_XX for PTX.
        folder: of the cache; made if it is not there.
        progress: say on standard error how far it is.
    Raises:
        KernelError: NVRTC's messages about the first instance that does not compile.
    """
    wanted = list(dict.fromkeys(instances))
    made: dict[Instance, Compiled] = {}
    with (
        ThreadPoolExecutor(usable_cores()) as pool,
        Progress(len(wanted), "kernels", hidden=not progress) as bar,
    ):
        try:
            for compiled in pool.map(lambda one: compile_kernel(one, target, folder), wanted):
                made[wanted[len(made)]] = compiled
                bar.update()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            raise
    return made


def compile_kernel(instance: Instance, target: str, folder: Path) -> Compiled:
    """One instance, from the cache or made now.

    A stem that ends with _sm90 is made for sm_90a, the arch of what only Hopper has.

    Raises:
        KernelError: it does not compile; with NVRTC's messages. Or no NVRTC that knows the target, or a cache that
            cannot be written.
    """
    if instance.stem.endswith("_sm90") and target == "sm_90":
        target = "sm_90a"
    source = _source(instance.stem)
    place = (CUDA / instance.stem).parent
    digest = _digest(source, instance.entry, target, () if place == CUDA else own_headers(place, source))
    name = f"{re.sub(r'[^a-zA-Z0-9]+', '_', instance.entry).strip('_')}-{target}-{digest}"
    path, facts = folder / f"{name}.{'ptx' if _is_ptx(target) else 'cubin'}", folder / f"{name}.json"
    about = _kept(path, facts)
    if about is None:
        code, about = _compile(instance, source, target)
        try:
            _write(path, code)
            _write(facts, json.dumps({**about, "sha256": hashlib.sha256(code).hexdigest()}).encode())
        except OSError as error:
            raise KernelError(
                f"compiled kernels cannot be kept in {folder}: {error.strerror}; make room, or set XDG_CACHE_HOME to a "
                "folder that can be written"
            ) from error
    return Compiled(path=path, **about)


def _kept(path: Path, facts: Path) -> dict[str, Any] | None:
    """What is known of a file of the cache; None if it is not there, or not as it was written."""
    try:
        about: dict[str, Any] = json.loads(facts.read_text(encoding="utf-8"))
        whole = about.pop("sha256") == hashlib.sha256(path.read_bytes()).hexdigest()
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
    return about if whole else None


@cache
def nvrtc_version() -> str:
    """Such as "13.0". Raises KernelError where there is no NVRTC."""
    try:
        major, minor = _check(nvrtc.nvrtcVersion())
    except RuntimeError as error:  # of the search for the library; its class goes by the version of cuda-bindings
        raise KernelError(
            f"the CUDA compiler NVRTC is not there ({str(error).splitlines()[0]}); install it: pip install "
            "nvidia-cuda-nvrtc for CUDA 13, nvidia-cuda-nvrtc-cu12 for 12"
        ) from error
    return f"{major}.{minor}"


def _is_ptx(target: str) -> bool:
    return target.startswith("compute_")


def _compile(instance: Instance, source: str, target: str) -> tuple[bytes, dict[str, str | int]]:
    _check_target(target)
    program = _check(nvrtc.nvrtcCreateProgram(source.encode(), f"{instance.stem}.cu".encode(), 0, [], []))
    try:
        entry = instance.entry.encode()
        _check(nvrtc.nvrtcAddNameExpression(program, entry))
        options = [f"-arch={target}", f"--include-path={INCLUDE}", *OPTIONS]
        if not _is_ptx(target):
            options.append("--ptxas-options=-v")
        (status,) = nvrtc.nvrtcCompileProgram(program, len(options), [option.encode() for option in options])
        log = _text(nvrtc.nvrtcGetProgramLogSize, nvrtc.nvrtcGetProgramLog, program).decode().rstrip("\0")
        if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
            raise KernelError(f"cuda/{instance.stem}.cu: {instance.entry} does not compile for {target}:\n{log}")
        symbol = _check(nvrtc.nvrtcGetLoweredName(program, entry)).decode()
        if _is_ptx(target):
            code = _text(nvrtc.nvrtcGetPTXSize, nvrtc.nvrtcGetPTX, program)
        else:
            code = _text(nvrtc.nvrtcGetCUBINSize, nvrtc.nvrtcGetCUBIN, program)
        return code, {"symbol": symbol, **_resources(log, symbol)}
    finally:
        nvrtc.nvrtcDestroyProgram(program)


def _check_target(target: str) -> None:
    """Raises KernelError for an arch that this NVRTC does not know."""
    version = nvrtc_version()
    number = int(re.sub(r"\D", "", target))
    known = _check(nvrtc.nvrtcGetSupportedArchs())
    if number not in known:
        wanted = f"{target} needs CUDA {NEEDS_CUDA[number]} or later" if number in NEEDS_CUDA else "a later one may"
        raise KernelError(
            f"NVRTC {version} does not compile for {target}, only for sm_{min(known)} to sm_{max(known)}; {wanted}: "
            "pip install --upgrade nvidia-cuda-nvrtc for CUDA 13, nvidia-cuda-nvrtc-cu12 for 12"
        )


def _check(result: tuple[Any, ...]) -> Any:
    """The value of a call of NVRTC, or its values. Raises KernelError with NVRTC's own words if it failed."""
    status, *values = result
    if status != nvrtc.nvrtcResult.NVRTC_SUCCESS:
        raise KernelError(f"NVRTC: {nvrtc.nvrtcGetErrorString(status)[1].decode()}")
    return values[0] if len(values) == 1 else values


def _text(size_of: Any, read: Any, program: Any) -> bytes:
    """What NVRTC gives in two calls, one for its size."""
    text = bytes(_check(size_of(program)))
    _check(read(program, text))
    return text


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


def _digest(source: str, entry: str, arch: str, own_headers: tuple[str, ...] = ()) -> str:
    parts = [source, *_headers(), *own_headers, entry, arch, *OPTIONS, nvrtc_version()]
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:16]


def _write(path: Path, content: bytes) -> None:
    """All or nothing: ranks that start together make the same file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent, prefix="part-") as scratch:
        part = Path(scratch) / path.name
        part.write_bytes(content)
        part.replace(path)
