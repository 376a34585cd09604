"""The ways in which sums of ranks can go, and which is the quickest for which size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from engine.errors import ConfigError
from engine.kernels import all_reduce_pair, all_reduce_pieces, int8_all_reduce
from engine.kernels.all_reduce import all_reduce, all_reduce_add_rmsnorm
from engine.kernels.all_reduce_islands import all_reduce_islands
from engine.kernels.carried import Carried
from engine.kernels.channel import MAX_RANKS, Channel, Exchange
from engine.kernels.device import Device, Instance
from engine.kernels.int8_codes import codes_bytes, quantize_codes, sum_codes
from engine.kernels.notes import Notes
from engine.kernels.partials import GROUP
from engine.kernels.sum_parts import sum_parts

Array = Any
# (partial, residual or None, what is carried if anything is); the answer may be written over either of the first two
Sum = Callable[[Array, Array | None, Carried | None], Array]
# (partial, residual, weight and eps of an rmsnorm) → (normed, sum)
Fused = Callable[[Array, Array, Array, float], tuple[Array, Array]]
Gather = Callable[[Array], Array]  # an array of this rank, contiguous, → those of the others, [world_size − 1, …]

INT8, NCCL, ISLANDS = "int8", "nccl", "islands"
COPIES = "copies"
LEAST_COPIED = 1 << 20  # bytes
BESIDE = 1.5  # a kernel that waits hides nothing: large products leave it no multiprocessor, and wait for those it has


@dataclass(frozen=True, slots=True)
class Way:
    """One way to add up; most_bytes: of an array that it takes, in bytes."""

    name: str
    sum: Sum
    most_bytes: int = 1 << 40
    least_bytes: int = 0  # with fewer it is of no use
    is_exact: bool = True
    fused: Fused | None = None  # with a norm behind it, if its kernel can


@dataclass(frozen=True, slots=True)
class Plan:
    """names[i] is the way of arrays of up to sizes[i] bytes, the last one of all larger ones too."""

    sizes: tuple[int, ...]
    names: tuple[str, ...]

    def way(self, num_bytes: int) -> str:
        return next(
            (name for size, name in zip(self.sizes, self.names, strict=True) if num_bytes <= size), self.names[-1]
        )

    def text(self) -> str:
        """ "window to 64 KiB, window-pieces beyond" """
        borders = [
            f"{name} to {size >> 10} KiB"
            for size, name, following in zip(self.sizes, self.names, self.names[1:], strict=False)
            if name != following
        ]
        return ", ".join([*borders, f"{self.names[-1]} beyond" if borders else f"{self.names[-1]} for all sizes"])


@dataclass(frozen=True, slots=True)
class Trial:
    """What came of one way at one size: microseconds of the slowest rank, or a problem."""

    way: str
    num_bytes: int
    us: float
    problem: str = ""


def may_use_peer(environment: Mapping[str, str]) -> bool:
    """Whether memory of other GPUs is tried: NCCL's own switch for GPUs that reach each other wrongly is ours too."""
    return environment.get("NCCL_P2P_DISABLE", "0") in ("", "0")


def ways_of(
    channels: Mapping[str, Channel],
    exchanges: Mapping[str, Exchange],
    nccl: Callable[[Array], Array] | None,
    device: Device,
    rotate: bool = True,
    gather: Gather | None = None,
    islands: Exchange | None = None,
) -> dict[str, Way]:
    """All ways of a group, by name, over memory of these names; nccl: adds up in place; gather: by copies; islands: of
    make_islands.

    rotate: what travels as int8, which alone carries errors then.
    """
    found = []
    for name, channel in channels.items():
        found.append(Way(name, _one_trip(channel, device), channel.most_bytes, fused=_normed(channel, device)))
        most = all_reduce_pair.most_packet_bytes(channel) if channel.world_size == 2 else channel.most_bytes
        found.append(Way(f"{name}-int8", _int8(channel, rotate, device), most, is_exact=False))
    for name, exchange in exchanges.items():
        found.append(Way(f"{name}-pieces", _pieces(exchange, device)))
        found.append(Way(f"{name}-pieces-int8", _int8_pieces(exchange, rotate, device), is_exact=False))
    if islands is not None:
        found.append(Way(ISLANDS, _islands(islands, device)))
    if gather is not None:
        rank = next(iter(channels.values())).rank
        exact, in_codes = _copies(gather, rank, device), _int8_copies(gather, rank, rotate, device)
        found.append(Way(f"window-{COPIES}", exact, least_bytes=LEAST_COPIED))
        found.append(Way(f"window-{COPIES}-{INT8}", in_codes, least_bytes=LEAST_COPIED, is_exact=False))
    if nccl is not None:
        found.append(Way(NCCL, _nccl(nccl)))
    return {way.name: way for way in found}


def kernels_of(
    channels: Mapping[str, Channel],
    exchanges: Mapping[str, Exchange],
    dtype: Any,
    rotate: bool = True,
    islands: Exchange | None = None,
) -> tuple[Instance, ...]:
    """What has to be loaded on every rank before the ways of one are tried: a kernel waits for those of others."""
    notes, x = Notes(), np.zeros((1, MAX_RANKS * GROUP), dtype)
    num_others = next(iter(channels.values())).world_size - 1

    def gather(array: Array) -> Array:
        return np.zeros((num_others, *array.shape), array.dtype)

    for way in ways_of(channels, exchanges, None, notes, rotate, gather, islands).values():
        way.sum(x, None, None)
    return notes.instances


def _one_trip(channel: Channel, device: Device) -> Sum:
    return lambda x, residual, carried: all_reduce(x, channel, residual, device=device)


def _normed(channel: Channel, device: Device) -> Fused:
    return lambda x, residual, weight, eps: all_reduce_add_rmsnorm(x, residual, weight, eps, channel, device=device)


def _pieces(exchange: Exchange, device: Device) -> Sum:
    function = all_reduce_pair.all_reduce_pair if exchange.world_size == 2 else all_reduce_pieces.all_reduce_pieces
    return lambda x, residual, carried: function(x, exchange, residual, device=device)


def _islands(exchange: Exchange, device: Device) -> Sum:
    return lambda x, residual, carried: all_reduce_islands(x, exchange, residual, device=device)


def _int8(channel: Channel, rotate: bool, device: Device) -> Sum:
    function = all_reduce_pair.int8_packets if channel.world_size == 2 else int8_all_reduce.int8_all_reduce
    return lambda x, residual, carried: function(
        x, channel, residual, carried if rotate else None, rotate=rotate, device=device
    )


def _int8_pieces(exchange: Exchange, rotate: bool, device: Device) -> Sum:
    is_pair = exchange.world_size == 2
    function = all_reduce_pair.int8_all_reduce_pair if is_pair else all_reduce_pieces.int8_all_reduce
    return lambda x, residual, carried: function(
        x, exchange, residual, carried if rotate else None, rotate=rotate, device=device
    )


def _copies(gather: Gather, rank: int, device: Device) -> Sum:
    return lambda x, residual, carried: sum_parts(x, gather(x), rank, residual, device=device)


def _int8_copies(gather: Gather, rank: int, rotate: bool, device: Device) -> Sum:
    def add(x: Array, residual: Array | None, carried: Carried | None) -> Array:
        codes = device.empty((codes_bytes(int(x.size)),), np.uint8)
        quantize_codes(x, codes, carried if rotate else None, rotate=rotate, device=device)
        return sum_codes(codes, gather(codes), rank, x, residual, rotate=rotate, device=device)

    return add


def _nccl(nccl: Callable[[Array], Array]) -> Sum:
    def add(x: Array, residual: Array | None, carried: Carried | None) -> Array:
        total = nccl(x)
        if residual is None:
            return total
        residual += total
        return residual

    return add


def choose(trials: Sequence[Trial], allowed: Callable[[str], bool], hidden_size: int, is_beside: bool = False) -> Plan:
    """The quickest allowed way of each power of two, from the least size that was tried to the largest. Between two of
    them a way takes what lies between its times there. is_beside: other rows are computed meanwhile, so copies are
    better as long as they take less than BESIDE times as long.

    Raises:
        ConfigError: none is left; says what became of each.
    """
    broken = {trial.way for trial in trials if trial.problem}
    times: dict[str, dict[int, float]] = {}
    for trial in trials:
        fits = not (trial.way.endswith(INT8) and hidden_size % GROUP)
        if trial.way not in broken and allowed(trial.way) and fits:
            handicap = BESIDE if is_beside and COPIES not in trial.way else 1.0
            times.setdefault(trial.way, {})[trial.num_bytes] = handicap * trial.us
    if not times:
        problems = "; ".join(f"{trial.way}: {trial.problem}" for trial in trials if trial.problem)
        raise ConfigError(f"there is no way for ranks to add up: {problems or 'none that --allreduce allows'}")
    tried = [num_bytes for of_way in times.values() for num_bytes in of_way]
    best = {}
    size = min(tried)
    while size <= max(tried):
        way = min(times, key=lambda name: _between(times[name], size))
        if _between(times[way], size) < float("inf"):
            best[size] = way
        size *= 2
    return Plan(tuple(best), tuple(best.values()))


def _between(times: Mapping[int, float], num_bytes: int) -> float:
    """Of a way at a size between two that it took, on a straight line; infinite beyond them."""
    below = max((size for size in times if size <= num_bytes), default=None)
    above = min((size for size in times if size >= num_bytes), default=None)
    if below is None or above is None:
        return float("inf")
    share = 0.0 if below == above else (num_bytes - below) / (above - below)
    return times[below] + share * (times[above] - times[below])


def table(trials: Sequence[Trial]) -> str:
    """A line a way: microseconds by size."""
    lines = []
    for name in dict.fromkeys(trial.way for trial in trials):
        of_way = [trial for trial in trials if trial.way == name]
        times = [f"{trial.num_bytes >> 10} KiB {trial.us:.1f}" for trial in of_way if not trial.problem]
        problem = next((f"struck out: {trial.problem}" for trial in of_way if trial.problem), "")
        lines.append(f"  {name}: {', '.join([*times, *([problem] if problem else [])])}")
    return "\n".join(lines)
