"""Every golden over MPI ranks of this CPU; and that ranks which do something else are seen."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from conformance.end_to_end import VARIANTS
from conformance.golden_families import FAMILY_GOLDENS
from conformance.golden_models import GOLDENS
from conformance.ranks import splits
from conformance.ranks.splits import MODELS, SPLITS, split_model
from conformance.whole_engine.goldens import CASES
from engine.comm import mpi_ranks
from tests.engine.rank_threads import on_ranks
from tests.mpi import mpirun

QUICK = ("TP2", "TP3", "TP2xPP2")


@pytest.mark.parametrize(
    "split", [pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow]) for name in SPLITS]
)
def test_goldens(split: str) -> None:
    tp, pp = SPLITS[split]
    lines = mpirun(tp * pp, "-m", "conformance.ranks", "--split", split).splitlines()
    assert [line.split(" (")[0] for line in lines] == [f"{split} {name}" for name in MODELS]
    assert all(line.endswith("): ok") for line in lines)


@pytest.mark.parametrize(
    "split", [pytest.param(name, marks=[] if name == "PP2" else [pytest.mark.slow]) for name in SPLITS]
)
def test_whole_engine(split: str) -> None:
    """With requests, prompt logprobs and preemption; with stages, and several steps on their way."""
    tp, pp = SPLITS[split]
    lines = mpirun(tp * pp, "-m", "conformance.ranks", "--split", split, "--engine").splitlines()
    assert [line.split(" (")[0] for line in lines] == [f"{split} {name}" for name in CASES]
    assert all(line.endswith("): ok") for line in lines)


@pytest.mark.parametrize(
    ("split", "kind"),
    [("TP2", []), *(pytest.param(*case, marks=pytest.mark.slow) for case in (("TP2xPP2", []), ("TP2", ["--engine"])))],
)
def test_in_halves(split: str, kind: list[str]) -> None:
    """Dual streams: every step in two, the sum of one half after the other's piece has begun."""
    tp, pp = SPLITS[split]
    lines = mpirun(tp * pp, "-m", "conformance.ranks", "--split", split, "--halves", *kind).splitlines()
    assert [line.split(" (")[0] for line in lines] == [f"{split} {name}" for name in (CASES if kind else MODELS)]
    assert all(line.endswith("): ok") for line in lines)


def test_all_goldens_are_there() -> None:
    assert set(MODELS) == {*GOLDENS, *FAMILY_GOLDENS, *VARIANTS}


def over_threads(name: str, split: str) -> list[str]:
    tp, pp = SPLITS[split]
    said: list[list[str]] = on_ranks(tp * pp, lambda comm: split_model(comm, name, tp, pp))
    assert not any(said[1:]), "rank 0 speaks"
    return said[0]


@pytest.mark.parametrize("split", SPLITS)
def test_ranks_that_are_threads(split: str) -> None:
    """Stand for MPI's in the tests below."""
    assert over_threads("llama3", split) == []


def test_a_part_that_is_left_out_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = mpi_ranks.make_sum

    def deaf(comm: Any, wire: Any) -> Any:
        add = plain(comm, wire)
        return lambda part, which: add(part * np.float32(comm.rank != 2), which)

    monkeypatch.setattr(mpi_ranks, "make_sum", deaf)
    (said,) = over_threads("llama3", "TP3")
    assert said.startswith("logprobs differ from those of one rank by ")


def test_logits_in_another_order_are_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    plain = splits.log_softmax
    calls = iter(range(100))
    monkeypatch.setattr(splits, "log_softmax", lambda x: plain(np.roll(x, next(calls) % 2, axis=-1)))
    assert over_threads("llama3", "TP2") != []


def test_no_split_of_so_many_ranks_is_said() -> None:
    with pytest.raises(AssertionError, match="2 ranks: none of TP3 has so many"):
        mpirun(2, "-m", "conformance.ranks", "--split", "TP3")


def test_a_rank_that_fails_ends_all() -> None:
    """MPI's abort, not a wait without end."""
    with pytest.raises(AssertionError, match=r"ZeroDivisionError"):
        mpirun(
            2,
            "-c",
            "import conformance.ranks.__main__ as r\n"
            "import sys, traceback\n"
            "plain = r.split_model\n"
            "r.split_model = lambda world, *a: plain(world, *a) if world.rank == 0 else 1 // 0\n"
            "sys.argv = ['x', '--split', 'TP2']\n"
            "r.run()",
            timeout=60,
        )
