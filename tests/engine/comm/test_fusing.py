"""Where one kernel adds up and computes the norm."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from engine.comm.fusing import APART, FUSED, fused_bytes, fused_plans, of_sums, rivals
from engine.comm.ways import Plan, Trial, Way
from engine.errors import KernelError

X = np.arange(64, dtype=np.float16).reshape(2, 32)
WEIGHT = np.ones(32, np.float16)


def norm(x: Any, weight: Any, eps: float) -> Any:
    return (x.astype(np.float32) / np.sqrt((x.astype(np.float32) ** 2).mean(1, keepdims=True) + eps)).astype(x.dtype)


def doubled(x: Any, residual: Any, carried: Any) -> Any:
    return x + x if residual is None else x + x + residual


def ways(fused: Any) -> dict[str, Way]:
    return {"window": Way("window", doubled, 8000, fused=fused), "nccl": Way("nccl", doubled)}


def right(x: Any, residual: Any, weight: Any, eps: float) -> Any:
    total = doubled(x, residual, None)
    return norm(total, weight, eps), total


def test_both_forms_give_the_sum() -> None:
    """Of ways whose kernel can do both; they take somewhat less than the way: rows are whole there."""
    found = rivals(ways(right), norm, WEIGHT)
    assert list(found) == ["window+norm", "window-norm"]
    for way in found.values():
        assert way.most_bytes == 7000
        assert (way.sum(X, None, None) == X + X).all()
        assert (way.sum(X, X, None) == X + X + X).all()


def test_a_wrong_norm_is_a_problem_of_the_way() -> None:
    def wrong(x: Any, residual: Any, weight: Any, eps: float) -> Any:
        normed, total = right(x, residual, weight, eps)
        normed[1, 3] *= np.float16(1.01)
        return normed, total

    with pytest.raises(KernelError, match=r"a norm is 1[0-9] steps of its type off"):
        rivals(ways(wrong), norm, WEIGHT)["window-norm"].sum(X, None, None)


def test_rows_that_no_kernel_takes_have_no_rivals() -> None:
    assert rivals(ways(right), norm, np.ones(36, np.float16)) == {}
    assert rivals(ways(right), norm, np.ones(16384, np.float16)) == {}


def trials(name: str, apart: tuple[float, ...], fused: tuple[float, ...]) -> list[Trial]:
    forms = ((APART, apart), (FUSED, fused))
    return [Trial(name + form, 1 << i, us) for form, times in forms for i, us in enumerate(times)]


def test_one_kernel_is_taken_as_far_as_it_is_the_quicker() -> None:
    """From the smallest array on; no further than the first where it is not."""
    found = trials("window", (6.0, 6.5, 8.0, 20.0), (5.0, 6.4, 9.0, 10.0)) + trials("peer", (3.0,), (3.0,))
    assert fused_bytes(found) == {"window": 2}
    assert fused_plans(found) == [Plan((2,), ("window-norm",))]
    sums = [Trial("window", 1, 4.0), Trial("window-pieces", 1, 5.0)]
    assert of_sums([*found, *sums]) == sums


def test_what_went_wrong_is_not_taken() -> None:
    found = trials("window", (6.0, 7.0), (5.0, 6.0))
    assert fused_bytes([*found[:2], found[2], Trial("window-norm", 2, 6.0, "wrong")]) == {"window": 1}
    assert fused_bytes(found[2:]) == {"window": 2}, "what it would be compared with is broken"
