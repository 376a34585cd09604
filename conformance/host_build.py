"""Builds a .cu file for the CPU: g++, the shim in cuda/host, and a cache of what has been built.

A library is named by a hash of everything that goes into it: the source, our headers, the options, the compiler. The
parts of the shim that no kernel changes are built once for all kernels.
"""

from __future__ import annotations

import contextlib
import hashlib
import platform
import re
import shutil
import subprocess
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from engine.kernels.includes import own_headers
from engine.system import cache_dir

CUDA = Path(__file__).parent.parent / "cuda"
SHIM = ("runtime.cpp", "meetings.cpp", "checks.cpp")
OPTIONS = (
    *("-std=c++17", "-O1", "-g1", "-fPIC", "-fvisibility=hidden", "-fno-gnu-unique", "-fno-threadsafe-statics"),
    *(
        "-fno-strict-aliasing",
        "-ffp-contract=off",
        "-fno-math-errno",
        "-fmax-errors=3",
        "-Wall",
        "-Wno-unknown-pragmas",
    ),
)
CHECKS = "-fsanitize=alignment,bounds,signed-integer-overflow,integer-divide-by-zero,shift"  # answered by checks.cpp
SANITIZERS = {"": "HOST_PLAIN", "address": "HOST_ASAN", "thread": "HOST_TSAN"}  # what the shim is told
MIN_GXX = 12
DAYS_KEPT = 14
MISSING = re.compile(r"\.(?:h|cuh|hpp)\b.*: No such file or directory")
INCLUDE = re.compile(r'^\s*#include "(?:[./\w]*/)?([.\w]+)"', re.MULTILINE)
DYNAMIC_SHARED = re.compile(
    r"extern\s+__shared__\s+((?:__align__\(\d+\)\s+)?)([\w:]+(?:\s+\w+)*?)\s+(\w+)\s*\[\s*\]\s*;"
)


class BuildError(Exception):
    """No compiler, or one that does not take the source; the message ends with what the compiler said."""


@dataclass(frozen=True, slots=True)
class Binary:
    """A library, or with a sanitizer a program, that holds kernels.

    variables: (offset from the symbol host_kernels, bytes) of each __shared__ variable.
    """

    path: Path
    source: Path
    kernels: tuple[str, ...]
    sanitizer: str
    variables: tuple[tuple[int, int], ...]


def build(source: Path, kernels: Sequence[str], sanitizer: str = "", defines: Sequence[str] = ()) -> Binary:
    """The kernels of one .cu file for this CPU, from the cache if nothing has changed.

    Args:
        source: includes are looked for beside it and in cuda/include; of a copy of cuda/, with its host/, in its own.
        kernels: names of __global__ functions as C++ writes them, with template arguments: "rmsnorm<bf16, 1>".
        sanitizer: "", "address" or "thread".
        defines: NAME or NAME=VALUE.
    Raises:
        BuildError: see there.
    """
    tree = source.parent if (source.parent / "host" / SHIM[0]).is_file() else CUDA
    own = [] if source.parent == tree else ["-idirafter", str(source.parent.resolve())]
    options = [*OPTIONS, *_cpu_options(), *(f"-D{define}" for define in (SANITIZERS[sanitizer], *defines))]
    watch = [f"-fsanitize={sanitizer}"] if sanitizer else []
    text = _translation_unit(source, kernels)
    # The shim's own parts are not watched: their memory is none of a kernel's.
    parts = [_shim_part(tree, name, options) for name in (*SHIM, *(["runner.cpp"] if sanitizer else []))]
    headers = own_headers(source.parent, text) if own else ()
    names = (part.name for part in parts)
    key = _hash(_with_includes(text, tree), *headers, *names, *options, *watch, _compiler_version())
    path = _folder() / f"{source.stem}-{key}{'' if sanitizer else '.so'}"
    if path.exists():
        path.touch()
        with contextlib.suppress(BuildError):  # cut short, as by a disk that was full: it is built again
            return Binary(path, source, tuple(kernels), sanitizer, _shared_variables(path))
    _remove_old_builds()
    _compile_and_link(text, tree, [*own, *options, CHECKS, "-fsanitize-recover=all", *watch], parts, watch, path)
    return Binary(path, source, tuple(kernels), sanitizer, _shared_variables(path))


def _translation_unit(source: Path, kernels: Sequence[str]) -> str:
    """The source and a table of its kernels. `extern __shared__ T name[];` is no C++, so it becomes a pointer."""
    text = DYNAMIC_SHARED.sub(r"\2* const \3 = reinterpret_cast<\2*>(host::block.shared);", source.read_text("utf-8"))
    table = "".join(f"  HOST_KERNEL({name}),\n" for name in kernels)
    return (
        f'#include "launch.h"\n#include "ptx.h"\n#line 1 "{source.name}"\n{text}\n#line 1 "kernels named to build()"\n'
        f"const host::Kernel host_kernels[] = {{\n{table}}};\nconst int host_num_kernels = {len(kernels)};\n"
    )


def _compile_and_link(
    text: str, tree: Path, options: Sequence[str], parts: Sequence[Path], watch: Sequence[str], path: Path
) -> None:
    """A library, or a program if something is to watch it."""
    with tempfile.TemporaryDirectory() as scratch:
        unit, made, linked = (Path(scratch) / name for name in ("unit.cpp", "unit.o", "linked"))
        unit.write_text(text, "utf-8")
        _run([gxx(), *options, *_paths(tree), "-c", str(unit), "-o", str(made)])
        _run([gxx(), *(watch or ["-shared"]), str(made), *map(str, parts), "-o", str(linked)])
        _keep(linked, path)


def _shim_part(tree: Path, name: str, options: Sequence[str]) -> Path:
    """One file of the shim as an object, from the cache if nothing has changed."""
    source = tree / "host" / name
    key = _hash(_with_includes(source.read_text("utf-8"), tree), *options, _compiler_version())
    path = _folder() / f"{source.stem}-{key}.o"
    if path.exists():
        path.touch()
    else:
        with tempfile.TemporaryDirectory() as scratch:
            made = Path(scratch) / "made.o"
            _run([gxx(), *options, "-O3", *_paths(tree), "-c", str(source), "-o", str(made)])
            _keep(made, path)
    return path


def _paths(tree: Path) -> list[str]:
    """Where includes are, and names without the place of the tree, so that equal trees share what is built."""
    return [f"-I{tree / 'host'}", f"-I{tree / 'include'}", f"-ffile-prefix-map={tree}=cuda"]


def _folder() -> Path:
    return cache_dir() / "host"


def _remove_old_builds() -> None:
    """What no build has asked for in DAYS_KEPT days."""
    oldest = time.time() - DAYS_KEPT * 86400
    for file in _folder().glob("*"):
        with contextlib.suppress(FileNotFoundError):  # another process may do the same
            if file.stat().st_mtime < oldest:
                shutil.rmtree(file) if file.is_dir() else file.unlink()


def _keep(made: Path, path: Path) -> None:
    """Moves a finished file into the cache in one step, so that nobody ever sees a half of it.

    Threads may make the same file at the same time: each has a folder of its own.
    """
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(dir=path.parent, prefix="part-") as scratch:
            part = Path(shutil.copy2(made, scratch))
            part.replace(path)
    except OSError as error:
        raise BuildError(
            f"what was built cannot be kept in {path.parent}: {error.strerror}; make room, or set XDG_CACHE_HOME to a "
            "folder that can be written"
        ) from error


def _shared_variables(path: Path) -> tuple[tuple[int, int], ...]:
    """Uninitialised variables of functions: __shared__ ones, as neither kernels nor the shim have others."""
    variables, base = [], 0
    for line in _run(["nm", "--format=posix", "--defined-only", str(path)]).splitlines():
        name, kind, address, *size = line.split()
        if name == "host_kernels":
            base = int(address, 16)
        elif name.startswith("_ZZ") and kind in "bB":
            variables.append((int(address, 16), int(size[0], 16)))
    return tuple((address - base, size) for address, size in variables)


@cache
def gxx() -> str:
    """Path of g++.

    Raises:
        BuildError: there is none, or it is too old.
    """
    path = shutil.which("g++")
    if path is None:
        raise BuildError(
            f"kernels are checked on the CPU with g++ {MIN_GXX} or later, and there is no g++ in the PATH; install it "
            "(Debian and Ubuntu: apt install g++; Fedora: dnf install gcc-c++)"
        )
    version = subprocess.run([path, "-dumpversion"], capture_output=True, text=True, check=True).stdout.strip()
    if int(version.split(".")[0]) < MIN_GXX:
        raise BuildError(f"kernels are checked on the CPU with g++ {MIN_GXX} or later; {path} is {version}")
    return path


@cache
def _compiler_version() -> str:
    return subprocess.run([gxx(), "--version"], capture_output=True, text=True, check=True).stdout.splitlines()[0]


@cache
def _cpu_options() -> tuple[str, ...]:
    """Vector instructions that this machine has; without them the shim is right, but slower."""
    if platform.machine() != "x86_64":
        return ()
    flags = Path("/proc/cpuinfo").read_text("utf-8").split()
    return tuple(f"-m{name}" for name in ("avx2", "fma", "f16c") if name in flags)


def _with_includes(text: str, tree: Path) -> str:
    """A text and all own headers that it includes, by itself or through others, each once."""
    found: dict[str, str] = {}
    pending = [text]
    while pending:
        for name in INCLUDE.findall(pending.pop()):
            file = next((f for f in (tree / "include" / name, tree / "host" / name) if f.exists()), None)
            if file is not None and file.name not in found:
                found[file.name] = file.read_text("utf-8")
                pending.append(found[file.name])
    return "\0".join([text, *(f"{name}\0{found[name]}" for name in sorted(found))])


def _hash(*parts: str) -> str:
    return hashlib.sha256("\0".join(parts).encode()).hexdigest()[:24]


def _run(command: list[str]) -> str:
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        hint = "\nkernels include only cuda/include and what lies beside them" if MISSING.search(done.stderr) else ""
        raise BuildError(f"{' '.join(command[:1])} ended with {done.returncode}:\n{done.stderr.strip()}{hint}")
    return done.stdout
