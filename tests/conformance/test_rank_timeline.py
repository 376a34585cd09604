"""What streams do when: figures and lanes by hand, events of a GPU that is played, and a run on two MPI ranks."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from xml.etree import ElementTree

import numpy as np
import pytest

from conformance.golden_models import rand_model
from conformance.ranks import recorder
from conformance.ranks.dual_stream import main
from conformance.ranks.recorder import COPY, SUM, GpuClock, HostClock, Recorder, Span, marked_copies
from conformance.ranks.timeline import KINDS, Timeline, table
from conformance.ranks.timeline_picture import lanes_of, picture
from engine.comm.communicator import ALONE, OneRank
from engine.ops import cpu_ops
from engine.weights import LinearWeight, Norm, Weights
from tests.mpi import mpirun


def spans(rank: int) -> list[Span]:
    """Two parts of 10 µs, and a sum of 12 from the end of the first on: 8 of it lie beside the second."""
    return [
        Span(rank, "compute", 3, 1, "qkv", 0, 10),
        Span(rank, "sums", 3, 1, SUM, 10, 22),
        Span(rank, "compute", 3, 2, "qkv", 12, 20),
        Span(rank, "out 1", 3, 1, COPY, 11, 19),
        Span(rank, "in 1", 3, 1, COPY, 12, 21),
    ]


HALVED = Timeline("dual streams", 40, tuple(spans(0) + spans(1)))
WHOLE = Timeline("whole", 40, (Span(0, "compute", 3, 0, "qkv", 0, 16), Span(0, "compute", 3, 0, SUM, 16, 30)))


def test_what_of_sums_lies_beside_the_other_half() -> None:
    assert HALVED.of_sums() == (12, 8)
    assert WHOLE.of_sums() == (14, 0)
    assert (HALVED.us, WHOLE.us, HALVED.num_layers) == (22, 30, 1)


def test_the_table() -> None:
    rows = [line.split() for line in table([WHOLE, HALVED]).splitlines()]
    assert rows[0] == ["µs", "a", "layer", "whole", "dual", "streams"]
    assert rows[2:4] == [["qkv", "16", "10", "8"], ["sum", "+", "norm", "14", "12"]]
    assert rows[4:] == [
        ["from", "begin", "to", "end", "30", "22"],
        ["of", "sums", "beside", "parts", "0%", "67%"],
    ]


def test_lanes_and_bars() -> None:
    assert lanes_of(HALVED) == [(rank, lane) for rank in (0, 1) for lane in ("compute", "sums", "out 1", "in 1")]
    root = ElementTree.fromstring(picture([WHOLE, HALVED], "a model", "by hand"))
    svg = "{http://www.w3.org/2000/svg}"
    bars = [element for element in root.iter(f"{svg}rect") if element.find(f"{svg}title") is not None]
    assert len(bars) == len(WHOLE.spans) + len(HALVED.spans)
    words = [element.text for element in root.iter(f"{svg}text")]
    assert {
        "a model",
        "by hand",
        "rank 1 sums",
        "whole: a layer in 30 µs, 0% of the sums beside parts that compute",
    } <= {*words}
    sum_bar = next(bar for bar in bars if (bar.findtext(f"{svg}title") or "").startswith(f"{SUM}, layer 3, first half"))
    assert float(sum_bar.attrib["width"]) == pytest.approx(840 * 12 / (30 * 1.02), abs=0.5)


def test_parts_are_named_by_layer_half_and_weight() -> None:
    weight = LinearWeight("dense", 2, 2, {"weight": np.ones((2, 2), np.float32)})
    watch = Recorder(HostClock())
    ops = watch.ops(cpu_ops(), Weights({"layers.4.qkv_proj": weight}, {}))
    first, second = object(), object()
    watch.halves = first, second

    def forward(hidden: Any, batch: Any, cache: Any) -> Any:
        return ops.linear(hidden, weight)

    piece = SimpleNamespace(name="layers.4.attention", forward=forward)
    call = watch._placed(piece)  # type: ignore[arg-type]
    x = np.ones((1, 2), np.float32)
    comm = watch.comm(OneRank(cpu_ops()))
    watch.is_on = True
    comm.reduce(x)
    call(x, second, None)
    comm.reduce_add_norm(x, x, Norm(np.ones(2, np.float32), 1e-5), ALONE)
    call(x, object(), None)
    watch.is_on = False
    call(x, first, None)
    found = watch.take(7)
    assert [(span.rank, span.lane, span.layer, span.half, span.part) for span in found] == [
        (7, "compute", 4, 2, "qkv"),
        (7, "compute", 4, 2, SUM),
        (7, "compute", 4, 0, "qkv"),
    ]
    assert all(0 <= span.begin <= span.end for span in found)
    assert watch.take(7) == []
    assert comm.is_last, "all else is the inner one's"


class PlayedGpu:
    """CUDA as far as it is used: an event takes the time at which it is recorded; each takes one µs more."""

    def __init__(self) -> None:
        self.now, self.current = 0.0, SimpleNamespace(ptr=1)
        gpu = self

        class Event:
            def record(self, stream: Any = None) -> None:
                gpu.now += 1
                self.at = gpu.now

            def synchronize(self) -> None: ...

        self.cuda = SimpleNamespace(
            Event=Event,
            get_current_stream=lambda: self.current,
            get_elapsed_time=lambda begin, end: (end.at - begin.at) / 1e3,
        )


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> PlayedGpu:
    played = PlayedGpu()
    monkeypatch.setattr(recorder, "find_cupy", lambda: played)
    return played


def test_events_are_of_the_current_stream(gpu: PlayedGpu) -> None:
    clock = GpuClock()
    assert clock.lane() == "compute"
    gpu.current = SimpleNamespace(ptr=2)
    assert clock.lane() == "sums"
    gpu.current = SimpleNamespace(ptr=1)
    assert clock.lane() == "compute"
    assert clock.us(clock.mark(), clock.mark()) == pytest.approx(1)


def test_copies_show_their_streams(gpu: PlayedGpu, monkeypatch: pytest.MonkeyPatch) -> None:
    waits: list[Any] = []

    class Copies:
        def __init__(self) -> None:
            self._streams = [SimpleNamespace(wait_event=waits.append) for _ in range(4)]

        def gather(self, x: Any, device: Any) -> Any:
            gpu.now += 10
            return x

    plain: Callable[..., Any] = Copies.gather
    monkeypatch.setitem(sys.modules, "engine.comm.copies", SimpleNamespace(Copies=Copies))  # type: ignore[arg-type]
    monkeypatch.setattr(recorder.importlib.util, "find_spec", lambda name: name)
    watch = Recorder(GpuClock())
    watch.clock.lane()
    with marked_copies(watch, True):
        assert Copies().gather(1, None) == 1
        watch.is_on = True
        watch.start()
        watch._place = 0, 1
        assert Copies().gather(2, None) == 2
    assert Copies.gather is plain
    assert len(waits) == 4, "none before the caller has what is copied"
    found = watch.take(0)
    assert [span.lane for span in found] == ["out 1", "out 2", "in 1", "in 2"]
    assert [span.end - span.begin for span in found] == pytest.approx([14] * 4)
    with marked_copies(watch, False):
        assert Copies.gather is plain, "a CPU has none"


def test_what_is_not_for_it_is_refused(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    drawn = ["--timeline", str(tmp_path / "line.svg")]
    assert main([*drawn, "--decodes", "5"]) == 1
    assert "--timeline: draws one prompt" in capsys.readouterr().err
    assert main([*drawn, "--device", "cpu"]) == 1
    assert "there is one rank, and so no wire" in capsys.readouterr().err


def test_over_two_ranks(tmp_path: Path) -> None:
    """Every part of two layers of four, on both ranks, in halves and whole; text, picture and report agree."""
    folder = rand_model(tmp_path / "model", vocab_size=67, num_hidden_layers=4)
    report, drawn = tmp_path / "line.json", tmp_path / "line.svg"
    arguments = ["--model", str(folder), "--device", "cpu", "--prefills", "40"]
    printed = mpirun(
        2, "-m", "conformance.ranks.dual_stream", *arguments, "--timeline", str(drawn), "--json", str(report)
    )
    assert "by the host's clock" in printed
    found = json.loads(report.read_text())
    assert [one["kind"] for one in found] == list(KINDS)
    parts = {"qkv", "rope", "attention", "o", "gate, up", "down", SUM}
    for one in found:
        halves = (0,) if one["kind"] == "whole" else (1, 2)
        seen = [(span["rank"], span["layer"], span["half"], span["part"]) for span in one["spans"]]
        twice = {(rank, layer, half, part) for rank in (0, 1) for layer in (1, 2) for half in halves for part in parts}
        assert set(seen) == twice
        assert seen.count((1, 2, halves[0], SUM)) == 2, "behind attention and behind the MLP"
        for rank in (0, 1):
            of_rank = sorted((span["begin"], span["end"]) for span in one["spans"] if span["rank"] == rank)
            assert all(before[1] <= after[0] for before, after in pairwise(of_rank))
    ElementTree.fromstring(drawn.read_text())
