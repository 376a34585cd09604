"""What must find a mutant: the cases and edges that `make test` runs on the kernels of its file."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from functools import cache, partial
from pathlib import Path

from conformance.case import Case
from conformance.check import check
from conformance.host import KernelFault
from conformance.host_build import CUDA
from conformance.host_device import ORDERS, HostDevice
from conformance.machines import host_machine, kernels_of
from conformance.suite import quick
from engine.cpu import sampling as cpu_sampling
from engine.kernels.device import Instance
from engine.kernels.table import kernel_ops
from tests.conformance.test_kernel_cases import HOST, is_slow
from tests.cuda import (
    test_all_reduce,
    test_all_reduce_islands,
    test_all_reduce_pair,
    test_all_reduce_pieces,
    test_linear,
    test_linear_w8,
    test_repack4,
    test_sampling,
)
from tests.cuda.edges import EDGES
from tests.cuda.usual import usual

GPU_ONLY = ("_sm90",)  # endings of .cu files
# Inline PTX, for which cuda/host/ptx.h stands; GPU-only kernels'; an enum alone.
NOT_RUN = ("ptx.cuh", "ptx_sm90.cuh", "grouped_sm90.cuh", "tile_walk.cuh", "wire.cuh")
SHARED = {  # header that many include → whose cases must find its mutants, in this order
    "include/activation.cuh": ("activation", "linear"),
    "include/channel.cuh": ("all_reduce", "int8_all_reduce", "all_gather", "all_reduce_pieces", "all_reduce_pair"),
    "include/dtype.cuh": ("rmsnorm", "embedding"),
    "include/ranked_row.cuh": ("sampling", "sampling_logprobs", "sampling_edits"),
    "include/reduce.cuh": ("rmsnorm", "rope"),
    "include/row.cuh": ("rmsnorm", "layernorm"),
    "include/vec.cuh": ("rmsnorm", "embedding", "linear", "sampling"),
}


def files() -> list[str]:
    """The portable files of cuda/ that a CPU compiles."""
    kernels = [path.name for path in sorted(CUDA.glob("*.cu")) if not path.stem.endswith(GPU_ONLY)]
    return [
        *kernels,
        *(f"include/{path.name}" for path in sorted(CUDA.glob("include/*.cuh")) if path.name not in NOT_RUN),
    ]


@cache
def stems_of(file: str) -> tuple[str, ...]:
    """Of a header without an entry in SHARED all kernels that include it, by itself or through another."""
    if file in SHARED or file.endswith(".cu"):
        return SHARED.get(file, (file.removesuffix(".cu"),))
    include = f'#include "{file.removeprefix("include/")}"'
    found = [stems_of(name) for name in files() if include in (CUDA / name).read_text("utf-8")]
    return tuple(dict.fromkeys(stem for stems in found for stem in stems))


@cache
def _launched() -> list[tuple[Case, list[Instance]]]:
    """The cases, each with the kernels that it launches, found by a dry run; whole models are left to others."""
    cases = [case for case in HOST if not is_slow(case) and case.stem != "llama"]
    return [(case, list(kernels_of([case], HostDevice()))) for case in cases]


@cache
def cases_of(stem: str) -> list[Case]:
    """Those that launch a kernel of a .cu."""
    return [case for case, kernels in _launched() if any(kernel.stem == stem for kernel in kernels)]


@cache
def of_one_instance(stem: str) -> list[Case]:
    """Those of them that need but one instance of each kernel, the one that most cases need: a quick build."""
    of_stem = [(case, [one for one in kernels if one.stem == stem]) for case, kernels in _launched()]
    return usual([(case, kernels) for case, kernels in of_stem if kernels])


def first_finding(stem: str, folder: Path) -> str:
    """The first thing that is wrong with the kernels of a stem in a copy of cuda/; "" = nothing.

    Raises:
        BuildError: it does not compile.
    """
    for cases in (of_one_instance(stem), cases_of(stem)):
        if found := _of_cases(cases, folder):
            return found
    try:
        for edge in EDGES.get(stem, ()):
            for order in ORDERS:
                if problems := edge(kernel_ops(HostDevice(*order, folder=folder), cpu_sampling)):
                    return f"{edge.__name__}: {problems[0]}"
        return MORE[stem](stem, folder) if stem in MORE else ""
    except (KernelFault, AssertionError) as fault:
        return f"{type(fault).__name__} {fault}"


def watched_finding(stem: str, folder: Path, sanitizer: str) -> str:
    """What a sanitizer sees in a few cases; "" = nothing."""
    return _of_cases([case for case in quick(cases_of(stem)) if "sanitizer" not in case.skip], folder, sanitizer)


def _of_cases(cases: list[Case], folder: Path, sanitizer: str = "") -> str:
    machine = host_machine(cases, folder=folder, sanitizer=sanitizer)
    for case in cases:
        problems = check(case, machine.ops, memory=machine.memory, repeats=not sanitizer).problems
        if problems:
            return f"{case.name}: {problems[0]}"
    return ""


SAMPLING_DEVICE = test_sampling.device  # before anybody has put another in its place


def _sampling_tests(stem: str, folder: Path) -> str:
    """Of test_sampling, which gets its kernels from this folder; in a process that does nothing else."""
    test_sampling.device = partial(SAMPLING_DEVICE, folder=folder)  # type: ignore[assignment]
    if stem == "sampling":
        test_sampling.test_greedy_over_parts_of_a_row_launch_after_launch()
        test_sampling.test_rows_that_cannot_be_sampled_say_so_and_touch_nobody()
    test_sampling.test_the_sampler_over_kernels_gives_what_it_gives_over_numpy()
    if found := test_sampling.finding(folder, stem):
        return found
    if stem == "sampling":
        test_sampling.test_sample_on_a_real_vocabulary("ties")
    return ""


def _linear_tests(stem: str, folder: Path) -> str:
    """Of test_linear, in the same way."""
    test_linear.HostDevice = partial(HostDevice, folder=folder)  # type: ignore[misc]
    for choice, storage, shapes in test_linear.RUNS.values():
        for shape in shapes:
            for order in test_linear.ORDERS:
                if problems := test_linear.problems(test_linear.device(order), choice, shape, storage):
                    return problems[0]
    for choice, gated, activation in test_linear.GATED.values():
        test_linear.test_gated_is_linear_and_then_the_activation(choice, gated, activation)
    test_linear.test_float32_out()
    test_linear.test_nothing_outside_is_touched()
    return ""


def _linear_w8_tests(stem: str, folder: Path) -> str:
    """Of test_linear_w8: tokens that the kernel quantizes, and weights that it decodes."""
    for kind, fixed in test_linear_w8.QUANTIZED:
        test_linear_w8.check_quantized(kind, fixed, HostDevice(folder=folder))
    for kind, storage in test_linear_w8.DECODED:
        test_linear_w8.check_decoded(kind, storage, HostDevice(folder=folder, has_fp8=False))
    return ""


def _repack_tests(stem: str, folder: Path) -> str:
    """Of test_repack4: layers that together need each layout, gated and not."""
    host = HostDevice(folder=folder)
    for name, shape in test_repack4.FEW:
        with tempfile.TemporaryDirectory() as files:
            test_repack4.test_qnt_04_what_is_packed(name, shape, host, Path(files))
    return ""


def _wait_tests(stem: str, folder: Path) -> str:
    """Of test_all_reduce: waits in vain, which say so and end."""
    machine = host_machine(test_all_reduce.few_cases(), folder=folder)
    test_all_reduce.test_a_rank_that_is_waited_for_in_vain_is_named(machine)
    test_all_reduce.test_who_waits_long_says_for_whom_again_and_again(machine)
    test_all_reduce.test_an_alarm_ends_a_wait(machine)
    return ""


def _wait_in_pieces_tests(stem: str, folder: Path) -> str:
    """The same for messages in pieces."""
    module = {"all_reduce_pieces": test_all_reduce_pieces, "all_reduce_pair": test_all_reduce_pair}[stem]
    module.test_a_rank_that_is_waited_for_in_vain_is_named(host_machine(module.few_cases(), folder=folder).ops)
    return ""


def _island_tests(stem: str, folder: Path) -> str:
    """The same over islands, and the very bits of ref."""
    ops = test_all_reduce_islands.ranked(folder)
    for missing in (0, 1, 3):
        test_all_reduce_islands.test_a_rank_that_is_waited_for_in_vain_is_named(missing, ops)
    return test_all_reduce_islands.other_bits(ops, 6, 2)


MORE: dict[str, Callable[[str, Path], str]] = {  # they may raise AssertionError or KernelFault instead
    "all_reduce": _wait_tests,
    "all_reduce_islands": _island_tests,
    "all_reduce_pair": _wait_in_pieces_tests,
    "all_reduce_pieces": _wait_in_pieces_tests,
    "linear": _linear_tests,
    "linear_w8": _linear_w8_tests,
    "repack4": _repack_tests,
    "sampling": _sampling_tests,
    "sampling_edits": _sampling_tests,
    "sampling_logprobs": _sampling_tests,
}
