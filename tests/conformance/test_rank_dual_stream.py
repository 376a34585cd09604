"""What dual streams hide of the wire: the figures by hand, the picture, and a run on two MPI ranks."""

from __future__ import annotations

import json
from pathlib import Path
from xml.etree import ElementTree

import pytest

from conformance.golden_models import rand_model
from conformance.ranks.dual_stream import Times, decode_plan, main, picture, prompt_plan, table
from engine.batch import build_batch
from tests.mpi import mpirun

# Two layers, so four pieces of 2 ms and wires of 1 ms; halving costs nothing
STEP = Times("prefill", 2048, 4, plain=12.0, dual=9.0, int8=10.0, dual_int8=8.5, no_wire=8.0, no_wire_halves=8.0)


def test_figures_by_hand() -> None:
    assert STEP.hidden(STEP.dual) == 0.75
    assert STEP.hidden(STEP.plain) == 0
    assert STEP.hidden(STEP.no_wire) == 1
    assert STEP.foretold == pytest.approx(8.5), "n c + w/2"
    slower = Times("prefill", 64, 4, 12.0, 12.0, 12.0, 12.0, no_wire=8.0, no_wire_halves=10.0)
    assert slower.foretold > 10, "each half takes more than half"
    assert Times("prefill", 64, 4, 7.9, 8.0, 8.0, 8.0, 8.0, 8.0).hidden(8.0) == 0, "nothing to hide"


def test_the_table() -> None:
    head, row = table([STEP], 2).splitlines()
    assert head.split()[3:] == ["plain", "dual", "foretold", "int8", "both", "no", "wire", "halves", "hidden", "both"]
    numbers = ["6.000", "4.500", "4.250", "5.000", "4.250", "4.000", "4.000"]
    assert row.split() == ["prefill", "2048", *numbers, "75.0%", "87.5%"]


def test_the_picture() -> None:
    root = ElementTree.fromstring(picture([STEP, STEP], 2))
    words = [element.text for element in root.iter("{http://www.w3.org/2000/svg}text")]
    assert words.count("dual streams") == 2
    assert "prefill, 2048 tokens" in words
    assert len(list(root.iter("{http://www.w3.org/2000/svg}circle"))) == 8


def test_plans_have_blocks_of_their_own() -> None:
    for plan, num_tokens in ((prompt_plan(40), 40), (decode_plan(5), 5)):
        batch = build_batch(plan, 16, None)
        assert batch.num_tokens == num_tokens
        assert len(set(batch.slot_mapping.tolist())) == num_tokens
        assert plan.num_decodes in (0, num_tokens)


def test_one_rank_has_no_wire(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--device", "cpu"]) == 1
    assert "there is one rank, and so no wire" in capsys.readouterr().err


def test_over_two_ranks(tmp_path: Path) -> None:
    folder = rand_model(tmp_path / "model", vocab_size=67)
    report, drawn = tmp_path / "report.json", tmp_path / "steps.svg"
    arguments = ["--model", str(folder), "--device", "cpu", "--prefills", "40,7", "--decodes", "6"]
    written = ["--json", str(report), "--svg", str(drawn)]
    printed = mpirun(2, "-m", "conformance.ranks.dual_stream", *arguments, *written).splitlines()
    assert [line[:22].split() for line in printed[2:]] == [["prefill", "40"], ["prefill", "7"], ["decode", "6"]]
    steps = [Times(**step) for step in json.loads(report.read_text())]
    assert [step.num_pieces for step in steps] == [4, 4, 4]
    assert all(min(step.plain, step.dual, step.int8, step.dual_int8, step.no_wire) > 0 for step in steps)
    assert drawn.read_text().startswith("<svg")
