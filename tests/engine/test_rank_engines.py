"""Engines over four MPI ranks, and requests that are aborted while steps of theirs are on their way (DST-08)."""

from tests.mpi import mpirun


def test_dst_08_four_stages_and_four_ranks_that_share_ids() -> None:
    """DST-08: what goes on is right, who is gone gets nothing more, and all blocks are free at the end."""
    assert mpirun(4, "-m", "tests.engine.engines_over_mpi", timeout=180).split() == ["ok"] * 4


def test_stages_of_different_kinds_share_the_layers_by_memory() -> None:
    """Ranks that pretend: 3 layers and 1, the answers of one rank; within a stage two kinds are refused."""
    assert mpirun(4, "-m", "tests.engine.engines_by_memory", timeout=180).split() == ["ok"] * 4
