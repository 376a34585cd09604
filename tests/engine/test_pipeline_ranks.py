"""Four stages over MPI, each with a step, and requests that are aborted while theirs are on their way (DST-08)."""

from tests.mpi import mpirun


def test_dst_08_four_stages() -> None:
    """DST-08: what goes on is right, who is gone gets nothing more, and all blocks are free at the end."""
    assert mpirun(4, "-m", "tests.engine.pipeline_over_mpi", timeout=120) == "ok\n"
