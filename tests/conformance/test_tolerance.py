"""The one place of tolerances."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from conformance import layernorm, tolerance
from conformance.check import check
from conformance.suite import cases
from conformance.tolerance import RULE, Tolerance
from engine.ops import cpu_ops


@pytest.mark.parametrize("reason", ["", " ", "because", "too strict, raised it"])
@pytest.mark.parametrize("numbers", [(3.0, 8.0), (2.0, 9.0), (0.0, 0.0)])
def test_an_override_needs_a_reason_in_words(numbers: tuple[float, float], reason: str) -> None:
    with pytest.raises(ValueError, match="needs a reason in words"):
        Tolerance(*numbers, reason)


def test_the_rule_needs_none() -> None:
    assert Tolerance() == RULE
    assert Tolerance(3.0, 8.0, "five words are a reason").factor == 3.0


def test_cases_use_tolerances_of_the_one_file() -> None:
    """None is made in a case file, and every one that is not the rule says why."""
    known = [value for value in vars(tolerance).values() if isinstance(value, Tolerance)]
    for case in cases("cpu") + cases("golden"):
        assert any(case.tolerance is one for one in known), case.name
    assert all(one.reason for one in known if one is not RULE)


def test_limit() -> None:
    assert RULE.limit(1e-3, "float32") == 2e-3 + 8 * 2.0**-24
    assert RULE.limit(0.0, "bfloat16") == 2.0**-8 + 8 * 2.0**-24
    assert RULE.limit(1e-3, "float16") == 2e-3 + 2.0**-11 + 8 * 2.0**-24
    assert tolerance.EXACT.limit(1e-3, "bfloat16") == 0.0
    assert tolerance.EXACT.limit(1e-3, "float32") == 0.0


def summed_by_lanes(x: Any, weight: Any, bias: Any, eps: float) -> Any:
    """layernorm with the sums of 32 threads, each of every 32nd element, one after the other."""
    count = np.float32(x.shape[-1])

    def total(rows: Any) -> Any:
        lanes = [np.cumsum(rows[:, lane::32], axis=1)[:, -1:] for lane in range(min(32, rows.shape[1]))]
        return np.sum(lanes, axis=0, dtype=np.float32)

    centred = x - total(x) / count
    normed = centred / np.sqrt(total(np.square(centred)) / count + np.float32(eps)) * weight
    return normed if bias is None else normed + bias


def test_another_order_of_the_sums_passes_whatever_the_seed() -> None:
    """By the rule alone it would not: in some seed ref is lucky with the one mean that matters."""
    ops = replace(cpu_ops(), layernorm=summed_by_lanes)
    case = layernorm.make_case("wide", layernorm.SHAPES["wide"], bias=False)
    statuses = {
        name: [check(one, ops, seed).status for seed in range(12)]
        for name, one in (("own", case), ("rule", replace(case, tolerance=RULE)))
    }
    assert statuses["own"] == ["ok"] * 12
    assert "FAIL" in statuses["rule"]
