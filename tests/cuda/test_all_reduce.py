"""Kernels that wait for other ranks, where conformance does not look: waits that end, orders, and planted faults."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance import all_reduce as cases_of
from conformance import ranked
from conformance.case import Case
from conformance.check import check
from conformance.host_device import HostDevice
from conformance.machines import Machine, host_machine
from conformance.ranked import Group, RankedOps, make_group
from engine.errors import KernelError
from engine.kernels import all_reduce as kernels
from engine.kernels.channel import Report, last_wait, packets
from tests.cuda.isolated import isolated
from tests.cuda.mutants import Mutant, mutants
from tests.cuda.test_mutants import copy_of_cuda, copy_with

FEW = (  # cases that together see what the mutants below do
    "plain-rows-window-of-2",
    "plain-ragged-window-of-2",
    "add-rows-peer-of-3",
    "norm-large-peer-of-3",
    "plain-rows-window-of-3",
    "plain-rows-window-of-2-wraps",
)
MUTANTS = (
    *mutants(
        "all_reduce",
        "include/channel.cuh",
        ("nobody looks at flags", "all &= packets[u].w == number", "all &= true"),
        ("a stale number will do", "all &= packets[u].w == number", "all &= packets[u].w != 0"),
        ("one set of slots", "((number & 1) * static_cast<index_t>(channel.world_size) + rank)", "rank"),
        ("the number is not counted on", "kTurn - (gridDim.x - 1) : 1ull", "0ull : 0ull"),
        ("the blocks of a turn are one short", "kTurn - (gridDim.x - 1)", "kTurn - gridDim.x"),
        (
            "the first packet alone has a flag",
            "all &= packets[u].w == number",
            "all &= u > 0 || packets[u].w == number",
        ),
        ("numbers go through 0", "*count / kTurn % kLastNumber", "*count / kTurn"),
        ("one outbox only", "i < channel.num_outboxes", "i < 1"),
        ("words change places", "words.word[1], words.word[2], number", "words.word[2], words.word[1], number"),
    ),
    *mutants(
        "all_reduce",
        "all_reduce.cu",
        ("own share first, then the others", "channel.rank == p ? mine[j]", "p == 0 ? mine[j]"),
        ("the last rank is left out", "p < kWorld; ++p) {  //", "p < kWorld - 1; ++p) {  //"),
        ("the last packet is lost", "(size + kNumbers<T> - 1) / kNumbers<T>;\n  for", "size / kNumbers<T>;\n  for"),
        ("the residual is left out", "sum[j] += other[j]", "sum[j] += 0.0f * other[j]"),
        ("a row is read before others have written it", "    __syncthreads();  // the row", "    // the row"),
        ("rows of the neighbour", "row * row_packets, thread, threads);", "(row ^ 1) * row_packets, thread, threads);"),
    ),
)
QUICK = 5  # of the mutants, from the first on, are tried in every run


def few_cases() -> list[Case]:
    return [case.stored_as("bfloat16") for case in cases_of.cases() if case.name in FEW]


def finding(few: Sequence[Case], folder: Path) -> str:
    """What the first case finds that finds something in a copy of cuda/."""
    ranked.PATIENCE_S = 1.0
    machine = host_machine(few, folder=folder)
    for case in few:
        if problems := check(case, machine.ops, memory=machine.memory).problems:
            return f"{case.name}: {problems[0]}"
    return ""


def some_slow(faults: Sequence[Mutant], quick: int) -> list[Any]:
    """Parameters of a test: the first few for every run, the rest for the slow ones."""
    return [
        pytest.param(mutant, marks=[pytest.mark.slow] if number >= quick else [])
        for number, mutant in enumerate(faults)
    ]


@pytest.mark.parametrize("mutant", some_slow(MUTANTS, QUICK), ids=str)
def test_a_planted_fault_is_found(mutant: Mutant, tmp_path: Path) -> None:
    assert isolated(finding, few_cases(), copy_with(mutant, tmp_path)), "all cases pass"


def test_nothing_is_found_in_a_true_copy(tmp_path: Path) -> None:
    assert isolated(finding, few_cases(), copy_of_cuda(tmp_path)) == ""


@pytest.fixture(scope="module")
def machine() -> Machine:
    return host_machine(few_cases())


def ranked_ops(machine: Machine) -> RankedOps:
    assert isinstance(machine.ops, RankedOps)
    return machine.ops


def run_all(ops: RankedOps, group: Group, x: np.ndarray, ranks: range) -> list[np.ndarray]:
    def of(rank: int) -> Callable[[], np.ndarray]:
        return lambda: kernels.all_reduce(x[rank], group.channels[rank], device=ops.device)

    return ops.together([of(rank) for rank in ranks])


def test_a_rank_that_is_waited_for_in_vain_is_named(machine: Machine) -> None:
    """Rank 2 never comes: who waits says so, stops, and stops the others; nothing waits any more afterwards."""
    ops = ranked_ops(machine)
    x = np.ones((3, 8, 96), "bfloat16")
    group = make_group(ops, 3, "window", x[0].nbytes, patience_s=0.3)
    run_all(ops, group, x, range(2))
    found = group.reports()
    assert found
    assert {(report.peer, report.channel, report.number) for report in found} == {(2, 0, 1)}
    run_all(ops, group, x, range(1))
    assert group.reports() == found


def test_who_waits_long_says_for_whom_again_and_again(machine: Machine) -> None:
    """And gives no alarm, before it gives up."""
    ops = ranked_ops(machine)
    x = np.ones((3, 8, 96), "bfloat16")
    group = make_group(ops, 3, "window", x[0].nbytes, patience_s=1.0)
    waiting = threading.Thread(target=run_all, args=(ops, group, x, range(1, 3)))
    waiting.start()
    seen: list[Report] = []
    while waiting.is_alive():
        found = last_wait(np.frombuffer(group.alarm.tobytes(), np.uint32), 2)
        if found is not None and group.alarm[0] == 0:
            seen.append(found)
        time.sleep(0.01)
    assert {(report.rank, report.peer, report.channel, report.number) for report in seen} == {(2, 0, 0, 1)}
    times = [report.milliseconds for report in seen]
    assert len(set(times)) > 3
    assert 50 <= min(times) <= max(times) <= 1000
    assert last_wait(group.alarm, 0) is None


def test_an_alarm_ends_a_wait(machine: Machine) -> None:
    ops = ranked_ops(machine)
    x = np.ones((2, 8, 96), "bfloat16")
    group = make_group(ops, 2, "window", x[0].nbytes, patience_s=5.0)
    group.alarm[0] = 1
    run_all(ops, group, x, range(1))
    assert group.reports() == []


def test_a_late_rank_is_waited_for(machine: Machine) -> None:
    ops = ranked_ops(machine)
    x = np.arange(2 * 8 * 96).reshape(2, 8, 96).astype("bfloat16")
    group = make_group(ops, 2, "peer", x[0].nbytes)

    def late() -> Any:
        time.sleep(0.2)
        return kernels.all_reduce(x[1], group.channels[1], device=ops.device)

    found = ops.together([lambda: kernels.all_reduce(x[0], group.channels[0], device=ops.device), late])
    expected = (x[0].astype(np.float32) + x[1].astype(np.float32)).astype("bfloat16")
    assert all((one == expected).all() for one in found)


def test_nothing_to_add_up_is_no_call(machine: Machine) -> None:
    ops = ranked_ops(machine)
    group = make_group(ops, 2, "window", 1024, patience_s=0.2)
    assert kernels.all_reduce(np.ones((0, 96), "bfloat16"), group.channels[0], device=ops.device).shape == (0, 96)
    assert group.reports() == []


def test_what_does_not_fit_is_refused() -> None:
    ops = host_machine([]).ops
    assert isinstance(ops, RankedOps)
    group = make_group(ops, 2, "window", 4096)
    with pytest.raises(KernelError, match=f"8192 bytes are {packets(8192)} packets; the channel takes {packets(4096)}"):
        kernels.all_reduce(np.ones((32, 128), "bfloat16"), group.channels[0], device=ops.device)
    with pytest.raises(KernelError, match="x is not contiguous"):
        kernels.all_reduce(np.ones((8, 16), "bfloat16")[:, :8], group.channels[0], device=ops.device)
    with pytest.raises(KernelError, match="residual has shape"):
        kernels.all_reduce(
            np.ones((8, 16), "bfloat16"), group.channels[0], np.ones((4, 16), "bfloat16"), device=ops.device
        )
    with pytest.raises(KernelError, match="2 to 8"):
        make_group(ops, 9, "window", 4096)


def test_a_report_is_read() -> None:
    ops = host_machine([]).ops
    assert isinstance(ops, RankedOps)
    group = make_group(ops, 3, "window", 4096)
    waits = [*[0] * 4, *[0] * 4, 1, 4, 76, 250]
    group.alarm[:] = [1, 0, 0, 0, *[0] * 4, 3, 5, 77, 9, *[0] * 4, *waits]
    assert group.reports() == [Report(rank=1, peer=2, channel=5, number=77, milliseconds=9)]
    assert last_wait(group.alarm, 1) is None
    assert last_wait(group.alarm, 2) == Report(rank=2, peer=0, channel=4, number=76, milliseconds=250)


def test_a_sanitizer_refuses_ranks() -> None:
    with pytest.raises(RuntimeError, match="share memory"):
        HostDevice(sanitizer="address").together([])
