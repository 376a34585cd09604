"""The kernels of cuda/ under their own wrappers, built for this CPU: every case against ref, in several orders.

`make test` runs bfloat16 and float32; of float16 a few, as both types are one template.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conformance import kernel_models
from conformance.case import Case
from conformance.check import check, in_dtype, stored_inputs
from conformance.machines import Machine, host_machine
from conformance.suite import cases, left_out, rerun_command
from engine.system import usable_cores

HOST = [case for case in cases("host") if "host" not in case.skip]
IN_FLOAT16_TOO = ("odd", "many", "part-dim80", "qk-norm-dim128", "nine-tokens", "decode-splits", "prefill-chunks")


def is_slow(case: Case) -> bool:
    return case.storage == "float16" and case.name.removesuffix("-float16") not in IN_FLOAT16_TOO


def name_of(case: Case) -> str:
    return f"{case.stem}-{case.name}"


@pytest.fixture(scope="module")
def machine(request: pytest.FixtureRequest) -> Iterator[Machine]:
    """With the kernels of all tests that were chosen, each .cu built once; those of later tests while others run."""
    items = [item for item in request.session.items if getattr(item, "originalname", "") == test_case.__name__]
    team = ThreadPoolExecutor(usable_cores())
    yield host_machine([item.callspec.params["case"] for item in items if item.module.__name__ == __name__], team=team)
    team.shutdown(cancel_futures=True)


@pytest.mark.parametrize(
    "case", [pytest.param(case, marks=[pytest.mark.slow] if is_slow(case) else [], id=name_of(case)) for case in HOST]
)
def test_case(case: Case, machine: Machine) -> None:
    result = check(case, machine.ops, memory=machine.memory)
    assert not result.problems, "\n".join([*result.problems, f"again: {rerun_command('host', case, seed=0)}"])


def test_what_has_no_kernel() -> None:
    """By stem, so that none can fall silent unseen."""
    stems = {"mla", "moe", "moe_routing", "attention_biased"}
    assert {case.stem for case in left_out("host")} == stems


def test_what_is_skipped() -> None:
    skipped = {f"{case.stem} {case.name}" for case in cases("host") if "host" in case.skip}
    assert skipped == {
        f"attention {half}-{name}-{storage}"
        for half in ("decode", "prefill")
        for name in ("dim10", "one-key-of-131072")
        for storage in ("bfloat16", "float16")
    } | {
        f"linear_w8 {name}-{storage}"
        for name in ("larger-tiles", "larger-tiles-fp8", "larger-tiles-block", "gated-larger-tiles-block")
        for storage in ("bfloat16", "float16")
    }


def test_greedy_ids_are_decided_by_and_large() -> None:
    """Where ref leaves a greedy id open, the kernels' is not checked; that must not become the rule."""
    for case in kernel_models.cases():
        inputs = stored_inputs(case, 0)
        outputs = case.reference(**in_dtype(inputs, np.dtype(np.float64)), storage=None)
        ids = np.concatenate([outputs[name] for name in outputs if name.startswith("token_ids")])
        assert np.mean(ids == kernel_models.UNDECIDED) < 0.45, case.name


def by_name(stem: str, name: str) -> Case:
    return next(case for case in HOST if (case.stem, case.name) == (stem, name))


def with_rmsnorm(rmsnorm: Callable[..., Any], machine: Machine) -> str:
    """What a check says of an op table with this function in place of the wrapper."""
    case = by_name("rmsnorm", "odd-bfloat16")
    ops = replace(machine.ops, rmsnorm=lambda x, weight, eps: rmsnorm(machine, x, weight, eps))
    return "; ".join(check(case, ops, memory=machine.memory).problems)


@pytest.fixture(scope="module")
def small() -> Machine:
    return host_machine([by_name("rmsnorm", "odd-bfloat16")])


def test_a_write_past_the_end_of_an_answer_is_seen(small: Machine) -> None:
    def rmsnorm(machine: Machine, x: Any, weight: Any, eps: float) -> Any:
        y = machine.ops.rmsnorm(x, weight, eps)
        past = np.ndarray((y.size + 1,), y.dtype, y.base.view(np.uint8), y.ctypes.data - y.base.ctypes.data)
        past[-1] = 1
        return y

    assert "the memory after the array number 0 that was allocated was written" in with_rmsnorm(rmsnorm, small)


def test_a_write_to_an_input_is_seen(small: Machine) -> None:
    def rmsnorm(machine: Machine, x: Any, weight: Any, eps: float) -> Any:
        y = machine.ops.rmsnorm(x, weight, eps)
        x[0, 0] += 1
        return y

    assert "input x was written" in with_rmsnorm(rmsnorm, small)


def test_a_write_beside_an_input_is_seen(small: Machine) -> None:
    def rmsnorm(machine: Machine, x: Any, weight: Any, eps: float) -> Any:
        whole = np.ndarray((x.shape[0], x.shape[1] + 1), x.dtype, x.base, x.ctypes.data - x.base.ctypes.data, x.strides)
        whole[:, -1] = 0
        return machine.ops.rmsnorm(x, weight, eps)

    assert "input x was written" in with_rmsnorm(rmsnorm, small)


def test_an_answer_in_another_type_is_seen(small: Machine) -> None:
    def rmsnorm(machine: Machine, x: Any, weight: Any, eps: float) -> Any:
        return machine.ops.rmsnorm(x, weight, eps).astype(np.float32)

    assert "output normed is float32, expected bfloat16" in with_rmsnorm(rmsnorm, small)


def test_an_element_that_is_never_written_is_seen(small: Machine) -> None:
    def rmsnorm(machine: Machine, x: Any, weight: Any, eps: float) -> Any:
        y = machine.ops.rmsnorm(x, weight, eps)
        y.view(np.uint16)[-1, -1] = 0xFFFF  # as fresh memory is
        return y

    assert "the worst, at [6, 32], is nan" in with_rmsnorm(rmsnorm, small)


def test_a_wrong_rounding_is_seen(small: Machine) -> None:
    """Every element off by a few steps of bfloat16 is more than ref in bfloat16 errs."""

    def rmsnorm(machine: Machine, x: Any, weight: Any, eps: float) -> Any:
        y = machine.ops.rmsnorm(x, weight, eps)
        y.view(np.uint16)[...] += 16
        return y

    assert "has an error of" in with_rmsnorm(rmsnorm, small)


def test_counters_that_are_not_left_at_zero_are_seen(small: Machine) -> None:
    def rmsnorm(machine: Machine, x: Any, weight: Any, eps: float) -> Any:
        machine.memory._device.counters[3] = 1
        return machine.ops.rmsnorm(x, weight, eps)

    assert "counters are not left at zero" in with_rmsnorm(rmsnorm, small)


def test_an_order_of_threads_that_shows_is_seen(small: Machine) -> None:
    """As a kernel would whose sum depends on which thread comes first."""
    runs = [0]

    def rmsnorm(machine: Machine, x: Any, weight: Any, eps: float) -> Any:
        y = machine.ops.rmsnorm(x, weight, eps)
        runs[0] += 1
        y.view(np.uint16)[0, 0] ^= runs[0] == 2
        return y

    assert "output normed has other bits on a second run" in with_rmsnorm(rmsnorm, small)
