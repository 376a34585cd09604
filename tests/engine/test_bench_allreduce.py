"""engine.bench allreduce: which way is the best of a size, what it is held to, and what is said of it."""

from __future__ import annotations

import importlib.util
import json
from typing import Any

import pytest

from engine.bench import allreduce
from engine.bench.allreduce import KIB, THROUGH_HOST, THROUGH_PEER, Known, Row, as_json, known, rows, table
from engine.comm.ways import Trial
from engine.errors import ConfigError

ABOUT = {
    "ranks": 2,
    "gpu": "NVIDIA H200",
    "cuda": 13010,
    "has_peer": False,
    "island_size": 0,
    "nccl": "",
    "seconds": 1.25,
}


def trials(**us: float) -> list[Trial]:
    """Of each way at every size."""
    return [Trial(way.replace("_", "-"), kib << 10, value) for way, value in us.items() for kib in KIB]


def row(us: float, **others: Any) -> Row:
    return Row(
        4096, "window", us, **{"nccl": None, "goal": None, "stretch": None, "peer": None, "limit": None} | others
    )


def test_figures_have_a_place_for_every_size() -> None:
    for values in (THROUGH_HOST.goal, THROUGH_HOST.stretch, THROUGH_HOST.peer, THROUGH_PEER.goal, THROUGH_PEER.peer):
        assert len(values) == len(KIB)
        assert list(values[5:]) == sorted(values[5:])
    assert all(len(limits) == len(KIB) for limits in allreduce.LIMITS.values())


def test_goals_are_those_of_two_h200() -> None:
    assert known("NVIDIA H200", 2, False) is THROUGH_HOST
    assert known("NVIDIA H200", 2, True) is THROUGH_PEER
    assert known("NVIDIA H200", 4, True) == known("NVIDIA A800", 2, True) == Known(goal=())


def test_a_verdict_says_the_best_that_holds() -> None:
    assert row(4.0, goal=5.2, stretch=4.2, nccl=14.5).verdict == "stretch"
    assert row(5.2, goal=5.2, stretch=4.2, nccl=5.0).verdict == "met"
    assert row(6.0, goal=5.2, nccl=6.0).verdict == "ahead"
    assert row(6.1, goal=5.2, nccl=6.0).verdict == "ahead", "two runs of one thing differ"
    assert row(6.2, goal=5.2, nccl=6.0).verdict == "BEHIND"
    assert row(6.2, goal=5.2).verdict == ""


def test_the_best_of_a_size_is_ours_and_exact_unless_int8_is_allowed() -> None:
    found = trials(window=8, window_pieces=7, window_int8=3, nccl=5)
    exact, coded = rows(found, False, THROUGH_HOST), rows(found, True, THROUGH_HOST)
    assert {(one.way, one.us, one.nccl) for one in exact} == {("window-pieces", 7, 5)}
    assert {(one.way, one.us) for one in coded} == {("window-int8", 3)}
    assert [one.num_bytes for one in exact] == [kib << 10 for kib in KIB]
    assert exact[5].limit == 2 * coded[5].limit == 4  # type: ignore[operator]
    assert exact[0].limit is None, "none is known"
    assert (exact[0].goal, exact[0].stretch, exact[0].peer) == (5.2, 4.2, 14.5)


def test_a_way_that_is_wrong_once_is_not_the_best_anywhere() -> None:
    found = [*trials(window=1, peer=2), Trial("window", 1 << 26, float("inf"), "3 numbers are wrong")]
    assert {one.way for one in rows(found, False, THROUGH_PEER)} == {"peer"}
    assert rows(trials(nccl=1), False, THROUGH_PEER) == []
    text = table(ABOUT, found, {"exact": rows(found, False, THROUGH_PEER)})
    assert "struck out: 3 numbers are wrong" in text


def test_the_table_has_ways_and_verdicts() -> None:
    found = [*trials(window_pieces=4.3, nccl=2541.2), Trial("window", 4096, 4.1)]
    text = table(ABOUT, found, {"exact": rows(found, False, THROUGH_HOST)})
    first, head, *lines = text.splitlines()
    assert first.startswith("2 x NVIDIA H200, CUDA 13.1, through the host; us")
    in_islands = table(ABOUT | {"ranks": 8, "island_size": 4}, found, {})
    assert "through the host, memory of each other in islands of 4; us" in in_islands
    assert head.split() == ["KiB", *map(str, KIB)]
    by_name = {line[:20].strip(): line[20:].split() for line in lines}
    assert by_name["nccl"] == ["2541"] * len(KIB)
    assert by_name["window"] == ["4.1"] + ["-"] * (len(KIB) - 1)
    assert by_name["exact, best"] == ["4.1"] + ["4.3"] * (len(KIB) - 1)
    assert by_name["verdict"][:2] == ["stretch", "stretch"]
    assert by_name["limit"][0] == "-"


def test_the_report_says_all(tmp_path: Any) -> None:
    found = trials(window=4.3, nccl=5)
    report = json.loads(as_json(ABOUT, found, {"exact": rows(found, False, THROUGH_HOST)}))
    assert report["gpu"] == "NVIDIA H200"
    assert report["trials"][0] == {"way": "window", "num_bytes": 4096, "us": 4.3, "problem": ""}
    assert report["best"]["exact"][0]["verdict"] == "met"
    assert len(report["best"]["exact"]) == len(KIB)


def test_without_ranks_or_gpus_it_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(ConfigError, match="this times GPUs"):
        allreduce.run(None)  # type: ignore[arg-type]
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: name)
    with pytest.raises(ConfigError, match="mpirun -n 2"):
        allreduce.run(None)  # type: ignore[arg-type]
