"""python -m conformance.bench: limits and verdicts by hand, and the tables of stored runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from conformance.bench import table
from conformance.bench.readme import ROOT, engine_table, foreign_table, kernel_table, tables, with_tables
from conformance.bench.readme import lines as table_lines
from conformance.bench.row import Goal, Rates, Work, limit_of
from conformance.bench.table import Figure
from conformance.report import result_lines
from engine.kernels.device import Instance

RATES = Rates(read=4e12, copy=2e12, flops=5e14)


def test_limit() -> None:
    """Of reading, of copying where more than a tenth is written, of computing: whichever takes longest."""
    assert limit_of(Work(4_000_000, 0), RATES) == 1.0
    assert limit_of(Work(4_000_000, 400_000), RATES) == pytest.approx(1.1)
    assert limit_of(Work(4_000_000, 4_000_000), RATES) == 4.0
    assert limit_of(Work(4_000_000, 0, 10**9), RATES) == 2.0
    assert limit_of(Work(2_000_000, 0, 10**9, pace=2.0), RATES) == 1.0


def test_goals() -> None:
    work = Work(0, 0, 900_000_000)
    assert Goal(share=0.8).reached_at(work, 4.0) == 5.0
    assert Goal(tflops=450).reached_at(work, 4.0) == 2.0
    assert Goal(microseconds=60).reached_at(work, 4.0) == 60.0
    assert list(map(str, (Goal(share=0.85), Goal(tflops=450), Goal(microseconds=60)))) == ["85%", "450 TF", "60 µs"]


@pytest.mark.parametrize(
    ("time", "changes", "verdict"),
    [
        (10.0, {}, "met"),
        (10.1, {}, "short"),
        (10.1, {"goal": None}, ""),
        (12.2, {}, "short"),  # what two runs of the same differ by
        (12.3, {}, "BEHIND"),
        (9.0, {"others": {"cuBLAS": 8.0}}, "BEHIND"),
        (9.0, {"peer": "", "others": {"cuBLAS": 8.0}}, "met"),
        (12.3, {"peer_tflops": 0.0}, "short"),
        (9.0, {"problem": "y is wrong"}, "WRONG"),
    ],
)
def test_verdicts(time: float, changes: dict[str, Any], verdict: str) -> None:
    """A goal of 80 % of 8 µs, and a peer that is known to do 1.2 GFLOP at 100 TFLOP/s: 12 µs."""
    figure = Figure(
        **{
            **{"op": "linear", "name": "n", "microseconds": time, "work": Work(32, 0, 1_200_000_000), "limit": 8.0},
            **{"goal": Goal(share=0.8), "peer": "cuBLAS", "peer_tflops": 100.0, **changes},
        }
    )
    assert figure.verdict == verdict
    assert table.status([figure]) == (verdict in ("WRONG", "BEHIND"))


def test_a_line() -> None:
    figure = Figure(
        **{"op": "linear", "name": "qkv", "microseconds": 10.0, "work": Work(32_000_000, 0, 10**6), "limit": 8.0},
        **{"goal": Goal(share=0.8), "peer": "cuBLAS", "others": {"cuBLAS": 12.0, "torch": 13.0}},
        kernels=(Instance("linear", "linear_skinny<bf16>"), None),
    )
    assert table.line(figure).split() == [
        *("linear", "qkv", "10.00", "8.00", "80%", "3.20", "TB/s", "80%", "12.00", "met", "torch", "13.00"),
        *("linear_skinny<bf16>", "+", "cuBLAS"),
    ]
    assert replace(figure, work=Work(10**6, 0, 4 * 10**9)).rate == "400 TF/s"


def stored(arch: str, verdict: str) -> dict[str, Any]:
    row = {"op": "linear", "us": 10.0, "limit_us": 8.0, "share": 0.8, "flops": 0, "goal": "85%", "verdict": verdict}
    cases = [f"qkv-6144x4096-tokens={count}" for count in (1, 2)]
    return {
        **{"gpu": "NVIDIA H200", "driver": "580.1", "cuda": "runtime 13000, NVRTC 13.0", "cupy": "14.2.0"},
        **{"date": "2026-01-02T03:04:05+00:00", "arch": arch},
        "limits": {"read_tb_per_s": 4.0, "copy_tb_per_s": 2.0, "cublas_tflop_per_s": 500.0},
        "rows": [{**row, "case": case, "peer": "cuBLAS", "peer_us": 16.0} for case in cases],
    }


def test_table_of_kernels() -> None:
    lines = kernel_table([stored("sm_90", "short"), stored("sm_80", "")], table_lines())
    assert lines[2] == "| what | sm_90 | sm_80 | peer | goal |"
    linear = next(line for line in lines if "6144" in line)
    assert linear.endswith("| 80 / 80 | 80 / 80 | cuBLAS 50 / 50 | 85%; short: 1, 2 |")


def test_table_of_the_engine() -> None:
    """Figures of an older arch stand beside those of the GPU's own; what is not known is left empty."""
    known = {"limit": 11.0, "goal": 14.0, "peer": 14.7, "tflops": 600.0, "share": 0.8}
    figures = [
        {"name": "cold start", "value": 31.0, "limit": None, "goal": 60.0, "peer": None, "verdict": "met"},
        {"name": "prefill 512", "value": 14.12345, "verdict": "ahead of the peer", **known},
    ]
    older = {"sm_86": {"figures": [{"name": "prefill 512", "value": 20.0}]}}
    assert engine_table({"figures": figures}, older) == [
        "| what | Glint | as sm_86 | TFLOP/s | vLLM | limit | share | goal | |",
        "|---|---|---|---|---|---|---|---|---|",
        "| cold start, s | 31 | – |  |  |  |  | 60 | met |",
        "| prefill 512 tokens, ms | 14.12 | 20 | 600 | 14.7 | 11 | 80% | 14 | ahead of the peer |",
    ]


def test_table_of_others() -> None:
    failed = [{"stem": "layernorm", "case": "odd", "status": "FAIL", "error": 1.0, "tolerance": 0.1}]
    runs = [{"op": "layernorm", "impl": "a:layernorm", "what": "by running means", "passed": 3, "failed": failed}]
    lines = foreign_table({"gpu": "a GPU", "versions": {"torch": "2.11"}, "date": "2026-01-02T03", "runs": runs})
    assert lines[0] == "a GPU, torch 2.11, 2026-01-02:"
    assert lines[-1] == "| `--op layernorm --impl a:layernorm` | 3 | odd | by running means |"


def test_stored_runs_are_listed(tmp_path: Path) -> None:
    """python -m conformance --results: the benchmark by its verdicts, with the kernels that changed since."""
    bench = {**stored("sm_90", "short"), "kernels": {"rmsnorm": "0" * 64}}
    runs = [{"op": "rmsnorm", "impl": "a:b", "passed": 3, "failed": [{"case": "odd"}]}]
    (tmp_path / "bench.json").write_text(json.dumps(bench))
    (tmp_path / "foreign.json").write_text(json.dumps({"gpu": "a GPU", "date": "2026", "runs": runs}))
    assert result_lines(tmp_path) == [
        "bench.json: NVIDIA H200, 2026-01-02T03:04:05+00:00, 0 met, 2 short, 0 BEHIND, 0 WRONG; changed since: rmsnorm",
        "foreign.json: a GPU, 2026, 3 passed, 1 failed",
    ]


def test_tables_go_to_their_places() -> None:
    text = "a\n<!-- x -->\nold\n<!-- /x -->\nb\n"
    assert with_tables(text, {"x": ["new", "lines"]}) == "a\n<!-- x -->\nnew\nlines\n<!-- /x -->\nb\n"
    with pytest.raises(ValueError, match="<!-- y -->"):
        with_tables(text, {"y": []})


def test_readme_says_what_the_stored_runs_say() -> None:
    """python -m conformance.bench --readme README.md makes it so."""
    text = (ROOT / "README.md").read_text("utf-8")
    assert with_tables(text, tables()) == text
