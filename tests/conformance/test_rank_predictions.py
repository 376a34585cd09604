"""Predictions for four and eight GPUs: the model by hand, what it must not contradict, and the file that was kept."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from conformance.ranks.dual_stream import main
from conformance.ranks.predictions import (
    BITS4,
    CONTEXT,
    INT8_LATENCY,
    LATENCY,
    MEASURED,
    MEASURED_SUMS,
    Work,
    predict,
    report,
    splits,
    sum_seconds,
)
from engine.errors import ConfigError
from ref.roofline import LLAMA_3_1_70B

KEPT = Path(__file__).parents[2] / "conformance" / "results" / "predicted-tp4-tp8.txt"
BYTES = 1 << 25  # of 2048 tokens of 8192 numbers of 16 bits


def test_the_kept_file_is_what_the_command_prints(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--predict"]) == 0
    assert capsys.readouterr().out == KEPT.read_text("utf-8")


def test_sums_by_hand() -> None:
    """One trip of n − 1 arrays, or two of (n − 1)/n: the bytes of ref.collectives at the rate, and the latency."""
    assert sum_seconds(BYTES // 2, 2, 32e9) == pytest.approx(LATENCY + BYTES / 32e9), "two ranks: one trip is as good"
    assert sum_seconds(BYTES // 2, 4, 32e9) == pytest.approx(2 * LATENCY + 1.5 * BYTES / 32e9)
    assert sum_seconds(BYTES // 2, 8, 32e9) == pytest.approx(2 * LATENCY + 1.75 * BYTES / 32e9)
    assert sum_seconds(8192, 8, 32e9) == pytest.approx(LATENCY + 7 * 16384 / 32e9), "16 KiB: one trip"
    assert sum_seconds(16384, 8, 32e9) == pytest.approx(2 * LATENCY + 1.75 * 32768 / 32e9), "32 KiB: two"


def test_int8_only_where_it_is_quicker() -> None:
    share = 34 / 64
    assert sum_seconds(BYTES // 2, 2, 32e9, is_int8=True) == pytest.approx(INT8_LATENCY + share * BYTES / 32e9)
    assert sum_seconds(64, 2, 32e9, is_int8=True) == sum_seconds(64, 2, 32e9)


def test_computing_by_hand() -> None:
    """The limits are those of a data sheet's arithmetic: 70.6 · 10⁹ numbers, less an embedding."""
    read = 2 * (70.554e9 - 1.0507e9) + 327_680 * CONTEXT
    decode = Work(LLAMA_3_1_70B, "", "decode", 1)
    assert decode.compute(2) == pytest.approx(read / 2 / 4.37e12 + 80 * 24e-6, rel=1e-3)
    flops = 2 * 2048 * 68.452e9 + 2 * 1.0507e9 + 80 * 4 * 64 * 128 * 2048 * 2049 / 2
    prefill = Work(LLAMA_3_1_70B, "", "prefill", 2048)
    assert prefill.compute(4) == pytest.approx(flops / 4 / (0.945 * 700e12), rel=1e-3)
    four_bits = Work(LLAMA_3_1_70B, "gptq-int4", "decode", 1)
    read = BITS4 * 68.452e9 + 2 * 1.0507e9 + 327_680 * CONTEXT
    assert four_bits.compute(1) == pytest.approx(read / 4.37e12 + 80 * 33e-6, rel=1e-3)


def test_outside_of_sums_by_hand() -> None:
    work = Work(LLAMA_3_1_70B, "", "decode", 16)
    logits, hidden = 16 * 128256 * 2 * 3 / 4 / 35e9, 16 * 8192 * 2 / 35e9
    assert work.wire_outside(4, 1, 35e9) == pytest.approx(LATENCY + logits)
    assert work.wire_outside(4, 2, 35e9) == pytest.approx(2 * LATENCY + logits + hidden)


def test_order() -> None:
    """A wire costs something, int8 and halves never more than without; twice the ranks compute in less."""
    found = predict()
    assert {one.split for one in found} == {"TP2", "TP4", "TP8", "TP4 × PP2"}
    assert len(found) == 2 * 4 * 6 * 2
    for one in found:
        assert one.no_wire < one.int8 <= one.plain
        if one.dual is not None and one.dual_int8 is not None:
            assert one.no_wire < one.dual_int8 <= one.dual < one.plain
        assert (one.dual is None) == one.work.startswith("decode")
    alone = {(one.model, one.work, one.tp): one.no_wire for one in found}
    assert all(alone[model, work, 8] < alone[model, work, 4] < alone[model, work, 2] for model, work, _ in alone)


def test_two_ranks_are_near_what_was_measured() -> None:
    """At the rate of kernels within a tenth; of large sums within a quarter."""
    beside = [one for one in predict(ranks=(2,)) if one.measured is not None]
    assert len(beside) == 2 * len(MEASURED["llama-3.1-70b", "", 2, 1])
    for one in beside:
        if one.gb_per_s == 35:
            assert one.plain == pytest.approx(one.measured, rel=0.1)
    for kib in (4096, 16384, 65536):
        assert sum_seconds(kib * 512, 2, 35e9) * 1e6 == pytest.approx(MEASURED_SUMS[kib], rel=0.25)


def test_splits() -> None:
    assert splits((2, 4, 8), 8) == [(2, 1), (4, 1), (8, 1), (4, 2)]
    for wrong in (1, 3, 16):
        with pytest.raises(ConfigError, match=f"--ranks {wrong}: is not among 2, 4, 8, which share 8 KV heads evenly"):
            splits((2, wrong), 8)


def test_one_model_as_a_table_and_as_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "predicted.json"
    asked = ["--predict", "--model-shape", "llama-3.1-70b", "--ranks", "2", "--prefills", "512", "--decodes", "1"]
    assert main([*asked, "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("PREDICTED")
    (prefill,) = [line for line in printed.splitlines() if "prefill 512" in line]
    rows = json.loads(file.read_text())
    assert [(row["work"], row["gb_per_s"]) for row in rows] == [
        ("prefill 512", 35), ("prefill 512", 50), ("decode 1", 35), ("decode 1", 50),
    ]  # fmt: skip
    numbers = [f"{rows[0][name]:.1f}" for name in ("no_wire", "plain", "dual", "int8", "dual_int8")]
    assert prefill.split()[:8] == ["TP2", "prefill", "512", *numbers]
    assert prefill.split()[-3] == "97.3,"
    assert report(predict([("llama-3.1-70b", "")], (2,), (512,), (1,))) + "\n" == printed


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--predict", "--svg", "x.svg"], "--svg: draws what is measured"),
        (["--predict", "--quant", "gptq-int4"], "--quant gptq-int4: is for --model-shape"),
        (
            ["--predict", "--model-shape", "qwen2-72b", "--quant", "fp8"],
            "--quant fp8: predictions are there for gptq-int4",
        ),
        (["--predict", "--ranks", "3"], "--ranks 3: is not among 2, 4, 8"),
        (["--ranks", "2"], "--ranks: is for --predict"),
    ],
)
def test_refused(
    wrong: list[str], said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    assert main(wrong) == 1
    assert said in capsys.readouterr().err
