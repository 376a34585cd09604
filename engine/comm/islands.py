"""Islands: runs of ranks whose GPUs reach each other's memory, where not all of a machine do (two sockets, pairs)."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from engine.comm.ways import may_use_peer
from engine.env import read_environment


def island_size(problems: Sequence[Sequence[str]], members: Sequence[int], largest: int) -> int:
    """How many ranks an island has: the most with which equal runs of a group's ranks make up all of it, and nothing is
    in the way within one. Sums go through ranks in their order, so an island is a run of them.

    Args:
        problems: [size, size], what keeps the GPU of a rank off memory of that of another; "" = nothing.
        members: [size], numbers of the ranks among all of the job.
        largest: GPUs of ranks of different runs of so many, of the job, are taken not to reach each other.
    Returns:
        size where all reach all; 1 where there are no islands.
    """
    total = len(members)

    def is_island(run: range) -> bool:
        one = len({members[rank] // largest for rank in run}) == 1
        return one and not any(problems[rank][peer] for rank in run for peer in run)

    sizes = (size for size in range(total, 1, -1) if total % size == 0)
    runs_of = {size: [range(first, first + size) for first in range(0, total, size)] for size in sizes}
    return next((size for size, runs in runs_of.items() if all(map(is_island, runs))), 1)


def largest_island(environment: Mapping[str, str]) -> int:
    """By GLINT_ISLAND_SIZE; 1, so that no GPU's memory is reached by others, where that is switched off.

    Raises:
        ConfigError: see read_environment.
    """
    return read_environment(environment).island_size if may_use_peer(environment) else 1
