"""The ways in which sums of ranks can go, and which is the quickest for which size."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.errors import ConfigError
from engine.kernels import all_reduce_pieces, int8_all_reduce
from engine.kernels.all_reduce import all_reduce
from engine.kernels.channel import Channel, Exchange
from engine.kernels.device import Device

Array = Any
Sum = Callable[[Array, Array | None], Array]  # (partial, residual or None); the answer may be written over either

INT8, NCCL = "int8", "nccl"
LEAST_COPIED = 1 << 20  # bytes


@dataclass(frozen=True, slots=True)
class Way:
    """One way to add up; most_bytes: of an array that it takes, in bytes."""

    name: str
    sum: Sum
    most_bytes: int = 1 << 40
    least_bytes: int = 0  # with fewer it is of no use
    is_exact: bool = True


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
    copies: Sum | None = None,
) -> dict[str, Way]:
    """All ways of a group, by name, over memory of these names; nccl: adds up in place."""
    found = []
    for name, channel in channels.items():
        found.append(Way(name, _one_trip(channel, device), channel.most_bytes))
        found.append(Way(f"{name}-int8", _int8(channel, rotate, device), channel.most_bytes, is_exact=False))
    for name, exchange in exchanges.items():
        found.append(Way(f"{name}-pieces", _pieces(exchange, device)))
        found.append(Way(f"{name}-pieces-int8", _int8_pieces(exchange, rotate, device), is_exact=False))
    if copies is not None:
        found.append(Way("window-copies", copies, least_bytes=LEAST_COPIED))
    if nccl is not None:
        found.append(Way(NCCL, _nccl(nccl)))
    return {way.name: way for way in found}


def _one_trip(channel: Channel, device: Device) -> Sum:
    return lambda x, residual: all_reduce(x, channel, residual, device=device)


def _pieces(exchange: Exchange, device: Device) -> Sum:
    return lambda x, residual: all_reduce_pieces.all_reduce_pieces(x, exchange, residual, device=device)


def _int8(channel: Channel, rotate: bool, device: Device) -> Sum:
    return lambda x, residual: int8_all_reduce.int8_all_reduce(x, channel, residual, rotate=rotate, device=device)


def _int8_pieces(exchange: Exchange, rotate: bool, device: Device) -> Sum:
    return lambda x, residual: all_reduce_pieces.int8_all_reduce(x, exchange, residual, rotate=rotate, device=device)


def _nccl(nccl: Callable[[Array], Array]) -> Sum:
    def add(x: Array, residual: Array | None) -> Array:
        total = nccl(x)
        if residual is None:
            return total
        residual += total
        return residual

    return add


def choose(trials: Sequence[Trial], allowed: Callable[[str], bool], hidden_size: int) -> Plan:
    """The quickest allowed way of each size.

    Raises:
        ConfigError: none is left; says what became of each.
    """
    broken = {trial.way for trial in trials if trial.problem}
    sizes = sorted({trial.num_bytes for trial in trials})
    names = []
    for num_bytes in sizes:
        fitting = [
            trial
            for trial in trials
            if trial.num_bytes == num_bytes
            and trial.way not in broken
            and allowed(trial.way)
            and not (trial.way.endswith(INT8) and hidden_size % int8_all_reduce.GROUP)
        ]
        if fitting:
            names.append((num_bytes, min(fitting, key=lambda trial: trial.us).way))
    if not names:
        problems = "; ".join(f"{trial.way}: {trial.problem}" for trial in trials if trial.problem)
        raise ConfigError(f"there is no way for ranks to add up: {problems or 'none that --allreduce allows'}")
    return Plan(tuple(size for size, _ in names), tuple(name for _, name in names))


def table(trials: Sequence[Trial]) -> str:
    """A line a way: microseconds by size."""
    lines = []
    for name in dict.fromkeys(trial.way for trial in trials):
        of_way = [trial for trial in trials if trial.way == name]
        times = [f"{trial.num_bytes >> 10} KiB {trial.us:.1f}" for trial in of_way if not trial.problem]
        problem = next((f"struck out: {trial.problem}" for trial in of_way if trial.problem), "")
        lines.append(f"  {name}: {', '.join([*times, *([problem] if problem else [])])}")
    return "\n".join(lines)
