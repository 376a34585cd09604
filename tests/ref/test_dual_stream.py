"""ref.dual_stream: timelines that can be checked with pencil and paper."""

import subprocess
import sys
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ref.dual_stream import Span, draw, dual, hidden_share, main, serial, total_time

MILLISECONDS = st.floats(0, 10, allow_subnormal=False)


def test_serial_by_hand() -> None:
    assert serial([2, 3], [1, 4]) == [
        Span("compute", "C", 0, 0, 2),
        Span("wire", "C", 0, 2, 3),
        Span("compute", "C", 1, 3, 6),
        Span("wire", "C", 1, 6, 10),
    ]


def test_dual_by_hand() -> None:
    """Two pieces of 2 + 2: B computes while A's sum travels, and only the last half all-reduce is seen."""
    spans = dual([2, 2], [2, 2])
    assert [(span.label, span.start, span.end) for span in spans if span.lane == "compute"] == [
        ("A", 0, 1),
        ("B", 1, 2),
        ("A", 2, 3),
        ("B", 3, 4),
    ]
    assert [(span.start, span.end) for span in spans if span.lane == "wire"] == [(1, 2), (2, 3), (3, 4), (4, 5)]
    assert hidden_share([2, 2], [2, 2], spans) == 1 - (5 - 4) / (8 - 4)


@pytest.mark.parametrize("num_pieces", [1, 2, 5, 40])
def test_closed_forms(num_pieces: int) -> None:
    """n c + w/2 while the wire is the shorter, c/2 + n w while it is the longer."""
    for compute, wire in ((2.0, 2.0), (2.0, 1.0), (2.0, 0.25)):
        spans = dual([compute] * num_pieces, [wire] * num_pieces)
        assert total_time(spans) == pytest.approx(num_pieces * compute + wire / 2)
        share = hidden_share([compute] * num_pieces, [wire] * num_pieces, spans)
        assert share == pytest.approx(1 - 1 / (2 * num_pieces))
    assert total_time(dual([1.0] * num_pieces, [3.0] * num_pieces)) == pytest.approx(0.5 + 3 * num_pieces)


def test_a_split_that_costs_more_than_it_hides() -> None:
    """One piece of 1 + 1: the halves take 0.5 + 1 each, the last wire half 0.5: 3.5 instead of 2."""
    spans = dual([1], [1], overhead=1)
    assert total_time(spans) == 3.5
    assert hidden_share([1], [1], spans) == 1 - 2.5


def test_no_wire() -> None:
    assert hidden_share([1, 2], [0, 0], dual([1, 2], [0, 0])) == 0


@settings(deadline=None, max_examples=100)
@given(st.lists(st.tuples(st.floats(0.01, 10), MILLISECONDS), min_size=1, max_size=8), st.floats(0.1, 0.9))
def test_any_timeline(times: list[tuple[float, float]], first_share: float) -> None:
    """No lane does two things at once, nothing starts before what it needs, and the total is between the limits."""
    compute, wire = [list(column) for column in zip(*times, strict=True)]
    spans = dual(compute, wire, first_share=first_share)
    for lane in ("compute", "wire"):
        ordered = [span for span in spans if span.lane == lane]
        assert all(before.end <= after.start for before, after in pairwise(ordered))
    for label in "AB":
        own = [span for span in spans if span.label == label]
        assert [span.lane for span in own] == ["compute", "wire"] * len(times)
        assert all(before.end <= after.start for before, after in pairwise(own))
    shortest, longest = max(sum(compute), sum(wire)), sum(compute) + sum(wire)
    assert shortest - 1e-9 <= total_time(spans) <= longest + 1e-9


def test_picture() -> None:
    assert draw(dual([4, 4], [4, 4]), 10, 10) == "compute AABBAABB..\nwire    ..aabbaabb"
    assert draw(serial([4, 4], [2, 2]), 12, 12) == "compute CCCC..CCCC..\nwire    ....cc....cc"


def test_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--compute-ms", "2", "--wire-ms", "2", "--pieces", "2", "--width", "16"]) == 0
    assert capsys.readouterr().out.splitlines() == [
        "serial  8.000 ms",
        "compute CCCC....CCCC....",
        "wire    ....cccc....cccc",
        "dual    5.000 ms",
        "compute AABBAABB..",
        "wire    ..aabbaabb",
        "compute alone 4.000 ms; hidden share 75.0%; 1.60 times as fast",
    ]


def test_runs_as_a_module() -> None:
    command = [sys.executable, "-m", "ref.dual_stream", "--compute-ms", "1,2", "--wire-ms", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    assert "hidden share" in done.stdout


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--compute-ms", "a", "--wire-ms", "1"], "--compute-ms is 'a'; wanted milliseconds"),
        (["--compute-ms", "1", "--wire-ms", "-1"], "times must be 0 or more"),
        (["--compute-ms", "nan", "--wire-ms", "1"], "times must be 0 or more"),
        (["--compute-ms", "0", "--wire-ms", "1"], "some compute time above 0"),
        (["--compute-ms", "1", "--wire-ms", "1", "--pieces", "0"], "--pieces is 0"),
        (["--compute-ms", "1", "--wire-ms", "1", "--first-share", "1"], "first_share is 1.0"),
    ],
)
def test_bad_input(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    assert message in capsys.readouterr().err
    with pytest.raises(ValueError, match="1 compute times and 2 wire times"):
        dual([1], [1, 2])
