"""Where the norm behind a sum is computed by the kernel that adds up: where that was quicker at start."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

from engine.comm.ways import Fused, Plan, Trial, Way
from engine.errors import KernelError
from engine.kernels.all_reduce import all_reduce_add_rmsnorm, can_fuse
from engine.kernels.carried import Carried
from engine.kernels.channel import Channel
from engine.kernels.device import Instance
from engine.kernels.notes import Notes
from engine.kernels.rmsnorm import rmsnorm

Array = Any
RmsNorm = Callable[[Array, Array, float], Array]  # (x, weight, eps)

APART, FUSED = "+norm", "-norm"  # behind the name of a way: in two kernels, in one
ROWS = (1, 4, 16, 64)  # of which both are tried
EPS = 1e-5
MOST_STEPS = 2  # of a number's type: the two kernels add up squares in another order


def rivals(ways: Mapping[str, Way], norm: RmsNorm, weight: Array) -> dict[str, Way]:
    """Both forms of each way that has a fused one; what they give is the sum.

    Args:
        weight: [hidden_size], of a norm.
    """
    found: dict[str, Way] = {}
    if not can_fuse(weight.reshape(1, -1)):
        return found
    for way in ways.values():
        if way.fused is not None:
            most = way.most_bytes * 7 // 8  # a row's last packet may be nearly empty
            found[way.name + APART] = Way(way.name + APART, _apart(way, norm, weight), most)
            found[way.name + FUSED] = Way(way.name + FUSED, _fused(way.fused, norm, weight), most)
    return found


def kernels_with_norm(channels: Mapping[str, Channel], weight: Array) -> tuple[Instance, ...]:
    """What has to be loaded on every rank before they are tried. weight: as of rivals, on any device."""
    notes, like = Notes(), np.zeros((max(ROWS), weight.size), weight.dtype)
    if not can_fuse(like):
        return ()
    for rows in ROWS:
        rmsnorm(like[:rows], like[0], EPS, device=notes)
    for channel in channels.values():
        all_reduce_add_rmsnorm(like[:1], like[:1], like[0], EPS, channel, device=notes)
    return notes.instances


def of_sums(trials: Sequence[Trial]) -> list[Trial]:
    """Those of sums without a norm."""
    return [trial for trial in trials if not trial.way.endswith((APART, FUSED))]


def fused_plans(trials: Sequence[Trial]) -> list[Plan]:
    """What fused_bytes leads to, to be checked."""
    return [Plan((num_bytes,), (name + FUSED,)) for name, num_bytes in fused_bytes(trials).items()]


def fused_bytes(trials: Sequence[Trial]) -> dict[str, int]:
    """By way: the bytes of the largest array that was tried up to which one kernel is always the quicker."""
    times = {(trial.way, trial.num_bytes): trial.us for trial in trials if not trial.problem}
    found: dict[str, int] = {}
    for name in dict.fromkeys(trial.way.removesuffix(FUSED) for trial in trials if trial.way.endswith(FUSED)):
        for size in sorted(trial.num_bytes for trial in trials if trial.way == name + FUSED):
            apart, fused = (times.get((name + form, size), float("inf")) for form in (APART, FUSED))
            if not fused < apart:
                break
            found[name] = size
    return found


def _apart(way: Way, norm: RmsNorm, weight: Array) -> Callable[[Array, Array | None, Carried | None], Array]:
    def add(x: Array, residual: Array | None, carried: Carried | None) -> Array:
        total = way.sum(x, residual, carried)
        norm(total, weight, EPS)
        return total

    return add


def _fused(fused: Fused, norm: RmsNorm, weight: Array) -> Callable[[Array, Array | None, Carried | None], Array]:
    def add(x: Array, residual: Array | None, carried: Carried | None) -> Array:
        if residual is not None:  # it is timed
            return fused(x, residual, weight, EPS)[1]
        nothing = x.copy()
        nothing.view(np.uint16)[...] = 0
        normed, total = fused(x, nothing, weight, EPS)
        apart = norm(total, weight, EPS)
        steps = abs(normed.view(np.uint16).astype(np.int32) - apart.view(np.uint16).astype(np.int32))
        if int(steps.max()) > MOST_STEPS:
            raise KernelError(f"a norm is {int(steps.max())} steps of its type off that of the kernel alone")
        return total

    return add
