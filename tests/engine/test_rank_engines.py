"""Engines over four MPI ranks, and requests that are aborted while steps of theirs are on their way (DST-08)."""

from tests.mpi import mpirun


def test_dst_08_four_stages_and_four_ranks_that_share_ids() -> None:
    """DST-08: what goes on is right, who is gone gets nothing more, and all blocks are free at the end."""
    assert mpirun(4, "-m", "tests.engine.engines_over_mpi", timeout=180).split() == ["ok"] * 4
