"""Launches kernels that were built for the CPU on NumPy arrays.

What an argument may be is read from the kernel's own signature: an array where it has a pointer, of the type pointed
to, or None; a NumPy scalar of the exact type elsewhere; a numpy.void for a structure. A bare Python number has no
size, so it is refused.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.host_build import Binary, BuildError, build

Array = NDArray[Any]
Dims = tuple[int, ...]  # one to three numbers

SCHEDULES = ("in_step", "greedy", "random")
MAX_SHARED_BYTES = 101376  # of dynamic shared memory: what sm_86 and sm_89 have, the least of the supported GPUs
DTYPES = {
    "float": "float32",
    "double": "float64",
    "bf16": "bfloat16",
    "fp16": "float16",
    "e4m3": "float8_e4m3fn",
    "bool": "bool",
    "signed char": "int8",
    "char": "int8",
    "unsigned char": "uint8",
    "short": "int16",
    "unsigned short": "uint16",
    "int": "int32",
    "unsigned": "uint32",
    "long": "int64",
    "unsigned long": "uint64",
    "long long": "int64",
    "unsigned long long": "uint64",
}


class KernelFault(Exception):
    """A kernel did what no kernel may; says which kernel, block and thread, and what."""


@dataclass(frozen=True, slots=True)
class Strided:
    """An array that need not be contiguous: the kernel gets the address of its first element, and strides apart."""

    array: Array


class _Variable(ctypes.Structure):
    _fields_ = (("offset", ctypes.c_longlong), ("bytes", ctypes.c_longlong))


class _Launch(ctypes.Structure):
    _fields_ = (
        ("kernel", ctypes.c_int),
        ("grid", ctypes.c_uint * 3),
        ("block", ctypes.c_uint * 3),
        ("shared_bytes", ctypes.c_ulonglong),
        ("seed", ctypes.c_ulonglong),
        ("schedule", ctypes.c_int),
        ("first", ctypes.c_uint),
        ("stride", ctypes.c_uint),
        ("num_variables", ctypes.c_int),
        ("variables", ctypes.POINTER(_Variable)),
        ("arguments", ctypes.POINTER(ctypes.c_void_p)),
    )


@dataclass(frozen=True, slots=True)
class Parameter:
    """One of a kernel's parameters: a value of this C++ type, or a pointer to such values (const: only read).

    type is "struct" for every structure of a kernel's own. bytes: of the value or the pointer.
    """

    type: str
    is_pointer: bool
    is_const: bool
    bytes: int

    def __str__(self) -> str:
        return f"{'const ' if self.is_const else ''}{self.type}{'*' if self.is_pointer else ''}"


@dataclass(frozen=True, slots=True)
class _Argument:
    """bytes of a value, or the memory [begin, begin + size) of a buffer and the address in it that the kernel gets."""

    value: bytes = b""
    begin: int = 0
    size: int = 0
    address: int = 0
    is_written: bool = False


class Library:
    """Kernels of one .cu file, ready to be launched on this CPU.

    Args:
        source, kernels, defines: see host_build.build.
        sanitizer: "address" or "thread" runs every launch in a program of its own that the sanitizer watches.
        num_threads: how many blocks may run at once, each on a thread and in a copy of the library of its own.
    Raises:
        BuildError: see host_build.build.
    """

    def __init__(
        self,
        source: Path,
        kernels: Sequence[str],
        sanitizer: str = "",
        num_threads: int = 1,
        defines: Sequence[str] = (),
    ) -> None:
        self._binary = build(source, kernels, sanitizer, defines)
        self._copies = [] if sanitizer else _load(self._binary, num_threads)
        self._of_ranks: dict[int, ctypes.CDLL] = {}
        self._loading = Lock()
        self._team = ThreadPoolExecutor(num_threads, "host-kernel")
        self.parameters: dict[str, list[Parameter]] = {name: [] for name in kernels}
        for line in self._description().splitlines():
            number, is_pointer, is_const, size, type_name = line.split(maxsplit=4)
            parameter = Parameter(type_name, is_pointer == "1", is_const == "1", int(size))
            self.parameters[self._binary.kernels[int(number)]].append(parameter)

    def _description(self) -> str:
        if self._copies:
            described: bytes = self._copies[0].host_describe()
            return described.decode()
        return subprocess.run(_program(self._binary), capture_output=True, text=True, check=True).stdout

    def launch(
        self,
        kernel: str,
        grid: Dims,
        block: Dims,
        arguments: Sequence[Array | Strided | np.generic | None],
        shared_bytes: int = 0,
        schedule: str = "in_step",
        seed: int = 0,
        rank: int | None = None,
    ) -> None:
        """Runs all blocks of a grid and returns when they have ended.

        Args:
            schedule: the order of blocks, warps and lanes: see cuda/host/runtime.cpp. seed: of "random".
            rank: ranks that wait for each other are threads of the caller, each in a copy of the library of its own.
        Raises:
            TypeError, ValueError: a launch that CUDA would refuse or read as something else; names the argument.
            KernelFault: the kernel did something wrong, or the sanitizer found something.
        """
        if not 0 <= shared_bytes <= MAX_SHARED_BYTES:
            raise ValueError(f"{kernel}: {shared_bytes} bytes of shared memory; a block has at most {MAX_SHARED_BYTES}")
        grid, block = _dims(kernel, "grid", grid), _dims(kernel, "block", block)
        if block[0] * block[1] * block[2] > 1024:
            raise ValueError(f"{kernel}: a block of {block} threads; at most 1024 are possible")
        parameters = self.parameters[kernel]
        if len(arguments) != len(parameters):
            raise TypeError(f"{kernel}: {len(arguments)} arguments; it has {len(parameters)} parameters")
        checked = [
            _check(f"{kernel}: argument {number} ({parameter})", parameter, argument)
            for number, (parameter, argument) in enumerate(zip(parameters, arguments, strict=True))
        ]
        setup = (grid, block, shared_bytes, SCHEDULES.index(schedule), seed)
        if not self._copies:
            _run_watched(self._binary, self._binary.kernels.index(kernel), setup, checked)
            return
        if rank is not None:
            errors = [self._run(self._copy_of(rank), (0, 1), kernel, setup, checked)]
        elif len(self._copies) == 1:
            errors = [self._run(self._copies[0], (0, 1), kernel, setup, checked)]
        else:
            shares = [(copy, (number, len(self._copies))) for number, copy in enumerate(self._copies)]
            runs = [self._team.submit(self._run, copy, share, kernel, setup, checked) for copy, share in shares]
            errors = [run.result() for run in runs]
        if any(errors):
            raise KernelFault("\n".join(filter(None, errors)))

    def _copy_of(self, rank: int) -> ctypes.CDLL:
        """A copy of the library that no other rank runs in."""
        with self._loading:
            if rank not in self._of_ranks:
                self._of_ranks[rank] = _load(self._binary, 2)[1]
            return self._of_ranks[rank]

    def _run(
        self,
        copy: ctypes.CDLL,
        share: tuple[int, int],
        kernel: str,
        setup: tuple[Any, ...],
        arguments: Sequence[_Argument],
    ) -> str:
        """A copy's share of the blocks, (first, stride); what went wrong, or nothing."""
        grid, block, shared_bytes, schedule, seed = setup
        memory = [ctypes.create_string_buffer(a.value or struct.pack("Q", a.address)) for a in arguments]
        pointers = (ctypes.c_void_p * max(len(memory), 1))(*map(ctypes.addressof, memory))
        variables = (_Variable * max(len(self._binary.variables), 1))(*(_Variable(*v) for v in self._binary.variables))
        launch = _Launch(
            self._binary.kernels.index(kernel),
            *((ctypes.c_uint * 3)(*grid), (ctypes.c_uint * 3)(*block), shared_bytes, seed, schedule),
            *(*share, len(self._binary.variables), variables, pointers),
        )
        error: bytes | None = copy.host_launch(ctypes.byref(launch))
        return error.decode() if error else ""


def _load(binary: Binary, count: int) -> list[ctypes.CDLL]:
    """Copies of a library, each with a state of its own. Raises BuildError where one cannot be loaded."""
    with tempfile.TemporaryDirectory() as scratch:
        paths = [binary.path]
        paths += [Path(shutil.copy(binary.path, Path(scratch) / f"{number}.so")) for number in range(1, count)]
        try:
            copies = [ctypes.CDLL(str(path)) for path in paths]
        except OSError as error:
            raise BuildError(f"{binary.path} is damaged; remove it, and it is built again: {error}") from error
    for copy in copies:
        copy.host_launch.restype = copy.host_describe.restype = ctypes.c_char_p
    return copies


def _program(binary: Binary) -> list[str]:
    """How to call a watched program. ThreadSanitizer can place its memory only where addresses are not random."""
    return ["setarch", "-R", str(binary.path)] if binary.sanitizer == "thread" else [str(binary.path)]


def _dims(kernel: str, name: str, dims: Dims) -> Dims:
    if not 1 <= len(dims) <= 3 or min(dims) < 1:
        raise ValueError(f"{kernel}: {name} is {dims}; it must be one to three numbers, each at least 1")
    return (*dims, *(1,) * (3 - len(dims)))


def _check(where: str, parameter: Parameter, argument: Array | Strided | np.generic | None) -> _Argument:
    """The argument as bytes or an address; raises TypeError or ValueError, which begin with `where`."""
    expected = DTYPES.get(parameter.type)
    if parameter.type == "struct" and not parameter.is_pointer:
        if not isinstance(argument, np.void) or argument.nbytes != parameter.bytes:
            found = f"{argument.nbytes}" if isinstance(argument, np.void) else type(argument).__name__
            raise TypeError(f"{where} must be a NumPy void of {parameter.bytes} bytes, found {found}")
        return _Argument(value=argument.tobytes())
    if not parameter.is_pointer:
        if not isinstance(argument, np.generic) or argument.dtype.name != expected:
            found = argument.dtype.name if isinstance(argument, np.generic) else type(argument).__name__
            raise TypeError(f"{where} must be a NumPy {expected}, found {found}")
        return _Argument(value=argument.tobytes())
    if argument is None:
        return _Argument()
    array = argument.array if isinstance(argument, Strided) else argument
    if not isinstance(array, np.ndarray):
        raise TypeError(f"{where} must be an array or None, found {type(array).__name__}")
    if expected is not None and array.dtype.name != expected:
        raise TypeError(f"{where} must be an array of {expected}, found {array.dtype.name}")
    if not isinstance(argument, Strided) and not array.flags.c_contiguous:
        raise ValueError(f"{where} must be contiguous, found strides {array.strides} for shape {array.shape}")
    if not parameter.is_const and not array.flags.writeable:
        raise ValueError(f"{where} is written by the kernel, but the array is read-only")
    if array.ctypes.data % array.dtype.alignment:
        raise ValueError(f"{where} must be aligned to its elements")
    begin, end = np.lib.array_utils.byte_bounds(array) if array.size else (array.ctypes.data, array.ctypes.data)
    return _Argument(b"", begin, end - begin, array.ctypes.data, not parameter.is_const)


def _run_watched(binary: Binary, kernel: int, setup: tuple[Any, ...], arguments: Sequence[_Argument]) -> None:
    """One launch in a program of its own (cuda/host/runner.cpp has the format); buffers come back if it went well."""
    grid, block, shared_bytes, schedule, seed = setup
    parts = [struct.pack("=i6I2Qi", kernel, *grid, *block, shared_bytes, seed, schedule)]
    parts += [struct.pack("=I", len(binary.variables)), *(struct.pack("=2q", *v) for v in binary.variables)]
    parts.append(struct.pack("=I", len(arguments)))
    buffers: list[_Argument] = []
    first_at: dict[tuple[int, int], int] = {}  # argument number by (begin, size)
    for number, argument in enumerate(arguments):
        place = (argument.begin, argument.size)
        offset = argument.address - argument.begin
        if argument.value or not argument.address:
            value = argument.value or bytes(8)
            parts += [struct.pack("=i3Q", 0, len(value), 0, 0), value]
        elif place in first_at:
            parts.append(struct.pack("=i3Q", 2, 0, first_at[place], offset))
        else:
            first_at[place] = number
            buffers.append(argument)
            parts.append(struct.pack("=i3Q", 1, argument.size, argument.begin % 16, offset))
            parts.append(ctypes.string_at(argument.begin, argument.size))
    written = {(a.begin, a.size) for a in arguments if a.is_written}
    with tempfile.TemporaryDirectory() as scratch:
        given, made = Path(scratch) / "launch", Path(scratch) / "buffers"
        given.write_bytes(b"".join(parts))
        options = "halt_on_error=1:exitcode=66:detect_leaks=0"
        done = subprocess.run(
            [*_program(binary), str(given), str(made)],
            capture_output=True,
            text=True,
            errors="replace",
            check=False,
            env={**os.environ, "ASAN_OPTIONS": options, "TSAN_OPTIONS": options},
        )
        if done.returncode:
            raise KernelFault(
                f"kernel {binary.kernels[kernel]}: {done.stderr.strip()}"
                if done.stderr
                else f"{binary.path.name} ended with {done.returncode}"
            )
        content = made.read_bytes()
    start = 0
    for buffer in buffers:
        if (buffer.begin, buffer.size) in written:
            ctypes.memmove(buffer.begin, content[start : start + buffer.size], buffer.size)
        start += buffer.size
