"""The tables of README.md that come from stored runs: python -m conformance.bench --readme README.md writes them anew.

Each stands between <!-- name --> and <!-- /name -->; a test holds README.md to what the files in the tree say.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
KERNELS = ROOT / "conformance" / "results"  # bench-h200.json, and bench-h200-sm_86.json for the paths of another arch
ENGINE = ROOT / "engine" / "bench" / "results"  # h200-llama-3.1-8b.json
ENGINE_TABLES = {  # place in README.md → stored run
    "gpu-engine": "h200-llama-3.1-8b",
    "gpu-engine-int8": "h200-llama-3.1-8b-int8",
    "gpu-engine-fp8": "h200-llama-3.1-8b-fp8",
    "gpu-engine-w4-8b": "h200-llama-3.1-8b-gptq-int4",
    "gpu-engine-w4": "h200-qwen2-72b-gptq-int4",
    "gpu-engine-w4-small": "h200-qwen2-72b-gptq-int4-small",
    "pair-70b-no-p2p": "h200x2-llama-3.1-70b-no-p2p",
    "pair-70b-p2p": "h200x2-llama-3.1-70b-p2p",
    "pair-72b-no-p2p": "h200x2-qwen2-72b-gptq-int4-no-p2p",
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
TOKENWISE = (1, 64, 8192)
LENGTHS = (2048, 8192, 16384)

Record = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table of kernels: rows of one op, one figure each."""

    what: str
    op: str
    cases: tuple[str, ...]
    show: Callable[[Record], str]


def _share(row: Record) -> str:
    return "–" if row["us"] is None else f"{row['share']:.0%}".removesuffix("%")


def _time(row: Record) -> str:
    if row["us"] is None:  # the kernel was refused
        return "–"
    return f"{row['us']:.3g}" if row["us"] < 1000 else f"{row['us']:.0f}"


def _tflops(row: Record) -> str:
    return "–" if row["us"] is None else f"{row['flops'] / row['us'] * 1e-6:.0f}"


def _peer(show: Callable[[Record], str]) -> Callable[[Record], str]:
    """The same figure of the peer."""

    def shown(row: Record) -> str:
        if row["peer_us"] is None:
            return "–"
        return show({**row, "us": row["peer_us"], "share": row["limit_us"] / row["peer_us"]})

    return shown


def lines() -> list[Line]:
    attention = "attention_decode"
    long = ("heads=64/8-batch=1-context=131072", "heads=64/8-batch=64-context=4096")
    batches = tuple(f"heads=32/8-batch={batch}-context=1024" for batch in (1, 8, 32, 64, 128))
    found = [
        Line("decode attention, 64 heads, 1 × 128k / 64 × 4k tokens, % of the limit", attention, long, _share),
        Line("decode attention, 32 heads, 1 / 8 / 32 / 64 / 128 × 1024 tokens, µs", attention, batches, _time),
    ]
    for name, label in (("sm90", "with wgmma"), ("portable", "with mma.sync")):
        cases = tuple(f"{name}-tokens={length}" for length in LENGTHS)
        what = f"prefill attention {label}, 2k / 8k / 16k tokens, TFLOP/s"
        found.append(Line(what, "attention_prefill", cases, _tflops))
    for name, shape in (
        ("qkv", "6144x4096"),
        ("o", "4096x4096"),
        ("gate_up", "28672x4096"),
        ("down", "4096x14336"),
        ("lm_head", "128256x4096"),
    ):
        cases = tuple(f"{name}-{shape}-tokens={count}" for count in TOKENS)
        what = f"linear {shape.replace('x', ' × ')}, {' / '.join(map(str, TOKENS))} tokens, % of the limit"
        found.append(Line(what, "linear", cases, _share))
    cases = tuple(f"gate_up-28672x4096-tokens={count}" for count in TOKENS)
    what = f"28672 × 4096 with the activation, {' / '.join(map(str, TOKENS))} tokens, % of the limit"
    found.append(Line(what, "linear_gate_up_act", cases, _share))
    drawn = ("greedy-model", "temperature-model", "top_k-random", "top_p-random", "logprobs-20-model")
    what = "128 rows of 128 256 logits: greedy / temperature / top-k 50 / top-p 0.9 / 20 logprobs, µs"
    found.append(Line(what, "sampling", tuple(f"{name}-128x128256" for name in drawn), _time))
    for op in (
        *("rmsnorm", "add_rmsnorm", "layernorm", "add_layernorm", "gate_up_act", "act"),
        *("rope_kv_write", "qk_norm_rope_kv_write", "kv_cache_write", "logn_query"),
        *("embedding", "position_embedding"),
    ):
        cases = tuple(f"tokens={count}" for count in TOKENWISE)
        found.append(Line(f"{op}, 1 / 64 / 8192 tokens, µs", op, cases, _time))
    return found


def quantized_lines() -> list[Line]:
    """Of weights, activations and caches of 4 and 8 bits."""
    found = []
    few, many = (1, 8, 16), (512, 2048, 8192)
    models = {
        "72B": ("w4-72b", {"qkv": "10240x8192", "o": "8192x8192", "gate_up": "59136x8192", "down": "8192x29568"}),
        "8B": ("w4-8b", {"qkv": "6144x4096", "o": "4096x4096", "gate_up": "28672x4096", "down": "4096x14336"}),
    }
    for model, (prefix, shapes) in models.items():
        for name, shape in shapes.items():
            op = "linear_gate_up_act" if name == "gate_up" else "linear"
            of = f"{prefix}-{name}-{shape}-tokens="
            what = f"4-bit groups of 128, {name} of {model}"
            cases = tuple(f"{of}{count}" for count in few)
            found.append(Line(f"{what}, {_counts(few)} tokens, % of the limit", op, cases, _share))
            if model == "72B":
                cases = tuple(f"{of}{count}" for count in many)
                found.append(Line(f"{what}, {_counts(many)} tokens, TFLOP/s", op, cases, _tflops))
    kinds = {"int8-int8": "int8", "fp8-channel": "fp8, a scale a channel", "fp8-block": "fp8, a scale a block"}
    for kind, label in kinds.items():
        for name, shape in models["8B"][1].items():
            op = "linear_gate_up_act" if name == "gate_up" else "linear"
            cases = tuple(f"{kind}-8b-{name}-{shape}-tokens={count}" for count in few)
            found.append(Line(f"{label}, {name} of 8B, {_counts(few)} tokens, % of the limit", op, cases, _share))
    for kind, label in {"fp8-tensor": "fp8, a scale a tensor", **kinds}.items():
        case = f"{kind}-square-8192x8192-tokens=4096"
        found.append(Line(f"{label}, 8192 × 8192, 4096 tokens, TFLOP/s", "linear", (case,), _tflops))
    long = ("heads=64/8-batch=1-context=131072", "heads=64/8-batch=64-context=4096")
    coded = tuple(f"{long[i]}-kv-{codes}" for i, codes in ((0, "fp8"), (1, "fp8"), (1, "int8")))
    what = "decode attention, 64 heads, fp8 cache of 1 × 128k / 64 × 4k tokens, int8 of 64 × 4k, % of the limit"
    found.append(Line(what, "attention_decode", coded, _share))
    what = "prefill attention, fp8 cache, 8k tokens, TFLOP/s"
    return [*found, Line(what, "attention_prefill", ("portable-tokens=8192-kv-fp8",), _tflops)]


def _counts(tokens: Sequence[int]) -> str:
    return " / ".join(map(str, tokens))


def kernel_table(stored: Sequence[Record], found: Sequence[Line]) -> list[str]:
    """stored: reports of the benchmark on one GPU, the first for its own arch, the others for older ones."""
    own = stored[0]
    limits = own["limits"]
    arches = [report["arch"] for report in stored]
    table = [
        f"{own['gpu']}, driver {own['driver']}, {own['cuda']}, CuPy {own['cupy']}, {own['date'][:10]}. Limits measured "
        f"in the same run: reading {limits['read_tb_per_s']:.2f} TB/s, copying {limits['copy_tb_per_s']:.2f} TB/s, "
        f"cuBLAS {limits['cublas_tflop_per_s']:.0f} TFLOP/s.",
        "",
        f"| what | {' | '.join(arches)} | peer | goal |",
        f"|---|{'---|' * len(arches)}---|---|",
    ]
    for line in found:
        shown = [_cells(report, line, line.show) for report in stored]
        rows = _rows(own, line)
        if not any(_rows(report, line) for report in stored):  # a run of some rows only
            continue
        peers = list(dict.fromkeys(row["peer"] for row in rows if row["peer"]))
        peer = f"{' '.join(peers)} {_cells(own, line, _peer(line.show))}" if peers else ""
        table.append(f"| {line.what} | {' | '.join(shown)} | {peer} | {_goal(rows)} |")
    return table


def _rows(report: Record, line: Line) -> list[Record]:
    by_case = {row["case"]: row for row in report["rows"] if row["op"] == line.op}
    return [by_case[case] for case in line.cases if case in by_case]


def _cells(report: Record, line: Line, show: Callable[[Record], str]) -> str:
    return " / ".join(show(row) for row in _rows(report, line)) or "–"


def _goal(rows: Sequence[Record]) -> str:
    """The goals, and the cases that are short of them or behind the peer."""
    goals = " / ".join(dict.fromkeys(row["goal"] for row in rows if row["goal"]))
    found = [goals] if goals else []
    for verdict in ("short", "BEHIND", "WRONG"):
        names = [re.split("[-=]", row["case"])[-1] for row in rows if row["verdict"] == verdict]
        if names:
            found.append(f"{verdict.lower()}: {', '.join(names)}")
    has_goal = [row for row in rows if row["verdict"]]
    if has_goal and all(row["verdict"] == "met" for row in has_goal):
        found.append("met")
    return "; ".join(found)


def engine_table(stored: Record, older: Mapping[str, Record]) -> list[str]:
    """stored: a report of engine.bench offline --model-shape; older: those with --arch, by arch."""
    units = {"prefill": "tokens, ms", "decode": "× 1024 tokens, ms a token", "throughput": ", tokens/s out"}
    head = ["what", "Glint", *(f"as {arch}" for arch in older), "TFLOP/s", "vLLM", "limit", "share", "goal", ""]
    table = [f"| {' | '.join(head)} |".replace("|  |", "| |"), "|---" * len(head) + "|"]
    on_older = [{one["name"]: one["value"] for one in report["figures"]} for report in older.values()]
    for one in stored["figures"]:
        name = one["name"].split()[0]
        what = f"{one['name']} {units[name]}".replace(" ,", ",") if name in units else f"{one['name']}, s"
        values = [_number(value) for value in (one["value"], *(found.get(one["name"]) for found in on_older))]
        tflops, share = one.get("tflops"), one.get("share")
        beside = ["" if one[key] is None else f"{one[key]:,g}" for key in ("peer", "limit", "goal")]
        cells = [what, *values, "" if tflops is None else f"{tflops:.0f}", *beside[:2]]
        cells += ["" if share is None else f"{share:.0%}", beside[2], one["verdict"].lower()]
        table.append(f"| {' | '.join(cells)} |")
    return table


def sums_table(stored: Record) -> list[str]:
    """stored: a report of engine.bench allreduce."""
    link = "memory of each other" if stored["has_peer"] else "the host"
    exact, int8 = stored["best"]["exact"], {row["num_bytes"]: row for row in stored["best"]["int8"]}
    head = ["KiB", "exact", "way", "with int8", "way", "NCCL, same run", "goal", "exact", "with int8"]
    table = [
        f"{stored['ranks']} × {stored['gpu']}, through {link}, driver {stored['driver']}, {stored['date'][:10]}; µs:",
        "",
        f"| {' | '.join(head)} |",
        "|---" * len(head) + "|",
    ]
    for row in exact:
        coded = int8[row["num_bytes"]]
        cells = [f"{row['num_bytes'] >> 10:,}", _us(row["us"]), row["way"], _us(coded["us"]), coded["way"]]
        cells += [_us(row["nccl"]), _us(row["goal"]), row["verdict"].lower(), coded["verdict"].lower()]
        table.append(f"| {' | '.join(cells)} |")
    return table


def _us(value: float | None) -> str:
    return "–" if value is None else f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _number(value: float | None) -> str:
    if value is None:
        return "–"
    return f"{value:,.4g}" if value < 1000 else f"{value:,.0f}"


def foreign_table(stored: Record) -> list[str]:
    """stored: a report of conformance.peers.table."""
    versions = ", ".join(f"{name} {version}" for name, version in stored["versions"].items())
    table = [
        f"{stored['gpu']}, {versions}, {stored['date'][:10]}:",
        "",
        "| what | passed | failed | |",
        "|---|---|---|---|",
    ]
    for run in stored["runs"]:
        failed = ", ".join(case["case"] for case in run["failed"]) or "–"
        table.append(f"| `--op {run['op']} --impl {run['impl']}` | {run['passed']} | {failed} | {run['what']} |")
    return table


def tables(kernels: Path = KERNELS, engine: Path = ENGINE) -> dict[str, list[str]]:
    """By the name of the place in README.md; those of which a run is stored."""

    def load(path: Path) -> Record:
        found: Record = json.loads(path.read_text("utf-8"))
        return found

    found = {}
    own = kernels / "bench-h200.json"
    if own.is_file():
        portable = map(load, sorted(kernels.glob("bench-h200-sm_*.json")))
        found["gpu-kernels"] = kernel_table([load(own), *portable], lines())
    if (kernels / "bench-h200-quantized.json").is_file():
        found["gpu-quantized"] = kernel_table([load(kernels / "bench-h200-quantized.json")], quantized_lines())
    for place, name in ENGINE_TABLES.items():
        if (engine / f"{name}.json").is_file():
            paths = sorted(engine.glob(f"{name}-sm_*.json"))
            older = {path.stem.removeprefix(f"{name}-"): load(path) for path in paths}
            found[place] = engine_table(load(engine / f"{name}.json"), older)
    for links in ("no-p2p", "p2p"):
        stored = engine / f"h200x2-allreduce-{links}.json"
        if stored.is_file():
            found[f"pair-sums-{links}"] = sums_table(load(stored))
    if (kernels / "foreign-h200.json").is_file():
        found["foreign"] = foreign_table(load(kernels / "foreign-h200.json"))
    return found


def with_tables(text: str, found: Mapping[str, Sequence[str]]) -> str:
    """README's text with these tables in their places. Raises ValueError where there is no such place."""
    for name, table in found.items():
        place = re.compile(rf"(<!-- {name} -->\n).*?(<!-- /{name} -->)", re.DOTALL)
        if not place.search(text):
            raise ValueError(f"README.md has no place <!-- {name} --> … <!-- /{name} -->")
        body = "\n".join(table) + "\n"
        text = place.sub(lambda match, body=body: f"{match[1]}{body}{match[2]}", text)  # type: ignore[misc]
    return text
