"""Which ranks form islands: by what keeps GPUs off each other's memory, and as if more did."""

from __future__ import annotations

import pytest

from engine.comm.islands import island_size, largest_island
from engine.errors import ConfigError

ALL = 1 << 30


def problems(of_rank: str) -> list[list[str]]:
    """Of ranks that reach those of the same letter: "aab" are 0 and 1, and 2 alone."""
    return [["" if mine == other else "far" for other in of_rank] for mine in of_rank]


@pytest.mark.parametrize(
    ("of_rank", "size"),
    [
        ("aa", 2),
        ("aaaaaaaa", 8),
        ("aaaabbbb", 4),
        ("aabbccdd", 2),
        ("aaabbb", 3),
        ("aabbcc", 2),
        ("ab", 1),
        ("abcd", 1),
        ("aaab", 1),  # unequal
        ("aabc", 1),
        ("abab", 1),  # no runs: a sum in rank order would go to and fro
        ("aaaabbcc", 2),  # the larger one is two
    ],
)
def test_the_largest_equal_runs_that_reach_each_other(of_rank: str, size: int) -> None:
    assert island_size(problems(of_rank), range(len(of_rank)), ALL) == size


def test_one_way_alone_is_no_way() -> None:
    found = problems("aaaa")
    found[3][2] = "the GPU of rank 3 cannot reach that of rank 2"
    assert island_size(found, range(4), ALL) == 1
    found = problems("aaaa")
    found[0][3] = "far"
    assert island_size(found, range(4), ALL) == 2


@pytest.mark.parametrize(("largest", "size"), [(8, 8), (4, 4), (2, 2), (3, 1), (1, 1), (5, 1)])
def test_runs_of_a_job_can_be_kept_apart(largest: int, size: int) -> None:
    assert island_size(problems("aaaaaaaa"), range(8), largest) == size


def test_ranks_are_kept_apart_by_their_numbers_in_the_job() -> None:
    """Of two stages of four on eight GPUs each is an island of its own, and neighbours in the pipeline are apart."""
    assert island_size(problems("aaaa"), range(4, 8), 4) == 4
    assert island_size(problems("aa"), (1, 5), 4) == 1


def test_what_the_environment_asks_for() -> None:
    assert largest_island({}) >= 8
    assert largest_island({"GLINT_ISLAND_SIZE": "4", "NCCL_P2P_DISABLE": "0"}) == 4
    assert largest_island({"GLINT_ISLAND_SIZE": "4", "NCCL_P2P_DISABLE": "1"}) == 1
    for wrong in ("0", "two", "-1"):
        with pytest.raises(ConfigError, match=f"GLINT_ISLAND_SIZE is '{wrong}'; it must be a number from 1 on"):
            largest_island({"GLINT_ISLAND_SIZE": wrong})
