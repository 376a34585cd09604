"""python -m conformance.bench without a GPU: counts by hand, rows on the CPU's op table."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conformance.bench import __main__ as command
from conformance.bench import measure as measuring
from conformance.bench import place as place_module
from conformance.bench import (
    rows_attention,
    rows_linear,
    rows_linear_w4,
    rows_linear_w4_many,
    rows_linear_w4a8,
    rows_sampling,
    rows_tokens,
    table,
)
from conformance.bench.measure import kernels_of_rows, measure, num_calls, num_passes
from conformance.bench.place import Place
from conformance.bench.row import Rates, Row, Work
from engine.kernels.notes import Notes
from engine.ops import OpTable, cpu_ops
from engine.weights import ActivationKind, LinearWeight
from ref.quant.fp8 import fp8_decode, fp8_quantize
from ref.quant.int8 import int8_quantize

RATES = Rates(read=4e12, copy=2e12, flops=5e14)
ROWS = command.all_rows()


@pytest.fixture(autouse=True)
def _few_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(place_module, "POOL", 5003)


class Clock:
    """A timer that runs what it is given and says how long that took: a microsecond a call."""

    def __init__(self) -> None:
        self.counts: list[int] = []
        self.stream = 0

    def microseconds(self, calls: Sequence[Any]) -> float:
        for call in calls:
            call()
        self.counts.append(len(calls))
        return float(len(calls))

    def rates(self, place: Place) -> Rates:
        return RATES


def row_named(op: str, name: str) -> Row:
    return next(row for row in ROWS if (row.op, row.name) == (op, name))


def small_rows() -> list[Row]:
    """One of every op, on sizes for a CPU."""
    return [
        rows_attention.decode_row(16, 2, 100, 160),
        rows_attention.prefill_row(True, 70, 100.0, None),
        rows_linear.linear_row("qkv", 3, 96, 64),
        rows_linear.linear_row("lm_head", 3, 96, 64),
        rows_linear.gated_row(3, 96, 64),
        rows_linear_w4.row("o", 3, 128, 256, True),
        rows_linear_w4.row("gate_up", 2, 192, 128, False),
        rows_linear_w4_many.row("72b-o", 70, 128, 256),
        rows_linear_w4_many.row("72b-gate_up", 70, 192, 128),
        *rows_sampling.rows(3, 1000),
        *rows_tokens.rows_of(5, 64, 96, 50, 4),
    ]


SMALL = small_rows()


def cpu_place(ops: OpTable | None = None) -> Place:
    return Place(Notes(), cpu_ops() if ops is None else ops, np.float32)


@pytest.mark.parametrize(
    ("op", "name", "work"),
    [
        ("attention_decode", "heads=64/8-batch=64-context=4096", (1073741824 + 1048576, 1048576, 8589934592)),
        ("attention_prefill", "sm90-tokens=8192", (33554432 + 67108864, 67108864, 549755813888)),
        ("linear", "qkv-6144x4096-tokens=8", (50331648 + 65536, 98304, 402653184)),
        ("linear", "lm_head-128256x4096-tokens=1", (1050673152 + 8192, 513024, 1050673152)),
        ("sampling", "greedy-model-128x128256", (65667072, 1024, 0)),
        ("rmsnorm", "tokens=64", (524288 + 8192, 524288, 0)),
        ("add_rmsnorm", "tokens=64", (1048576 + 8192, 1048576, 0)),
        ("layernorm", "tokens=1", (16384, 8192, 0)),
        ("gate_up_act", "tokens=64", (3670016, 1835008, 0)),
        ("rope_kv_write", "tokens=1", (12288 + 512 + 4, 12288, 0)),
        ("qk_norm_rope_kv_write", "tokens=1", (12288 + 512 + 4 + 512, 12288, 0)),
        ("embedding", "tokens=64", (524288 + 256, 524288, 0)),
        ("position_embedding", "tokens=64", (1048576 + 512, 524288, 0)),
        ("add_layernorm", "tokens=64", (1048576 + 8192, 1048576, 0)),
        ("act", "tokens=64", (1835008, 1835008, 0)),
        ("kv_cache_write", "tokens=64", (262144 + 256, 262144, 0)),
        ("logn_query", "tokens=64", (524288 + 256, 524288, 0)),
        ("linear", "w4-8b-o-4096x4096-tokens=4", (8388608 + 262144 + 32768, 32768, 134217728)),
        ("linear", "w4-zeros-8b-o-4096x4096-tokens=1", (8388608 + 262144 + 131072 + 8192, 8192, 33554432)),
        ("linear_gate_up_act", "gate_up-28672x4096-tokens=8", (234881024 + 65536, 229376, 1879048192)),
        ("linear", "fp8-block-square-8192x8192-tokens=4096", (67108864 + 67108864, 67108864, 549755813888, 2)),
    ],
)
def test_bytes_and_flops(op: str, name: str, work: tuple[int, ...]) -> None:
    """Weights, keys, values and tokens once each: 64 · 4096 · 8 · 128 · 2 caches · 2 bytes, and so on."""
    assert row_named(op, name).work == Work(*work)


def test_names_are_unique_and_every_kernel_op_is_there() -> None:
    names = [(row.op, row.name) for row in ROWS]
    assert len(set(names)) == len(names)
    assert {row.op for row in ROWS} == {row.op for row in SMALL}


def test_buffers_are_more_than_a_cache_holds() -> None:
    assert [num_calls(size) for size in (1000, 100_000_000, 10**9)] == [128, 4, 3]
    assert num_passes(1000, 0.1) == 1, "small ones do not push each other out, so that each is used once"
    assert num_passes(100_000_000, 100.0) == 5, "four calls of 100 µs are 0.4 ms of 2"
    assert num_passes(10**9, 4000.0) == 1


@pytest.mark.parametrize(("is_rounded", "is_chosen"), [(True, True), (False, True), (True, False), (False, False)])
@pytest.mark.parametrize("kind", ["int8", "fp8"])
@pytest.mark.parametrize(("name", "out_features"), [("72b-o", 128), ("72b-gate_up", 192)])
def test_rows_of_w4a8_want_activations_of_8_bits(
    kind: ActivationKind,
    name: str,
    out_features: int,
    is_rounded: bool,
    is_chosen: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where the engine would quantize them; else as they are. The op table of a CPU has none, so they are rounded
    before it."""
    monkeypatch.setattr(measuring, "MOST", 2)
    monkeypatch.setattr("engine.kernels.linear_w4a8.MIN_TOKENS", 5 if is_chosen else 6)

    def rounded(x: Any, weight: LinearWeight) -> Any:
        if not (weight.activations and is_rounded):
            return x
        codes, scale = int8_quantize(x) if kind == "int8" else fp8_quantize(x)
        return (codes if kind == "int8" else fp8_decode(codes, x.dtype)) * scale[:, None]

    ops = cpu_ops()
    ops = replace(
        ops,
        linear=lambda x, weight: cpu_ops().linear(rounded(x, weight), weight),
        linear_gate_up_act=lambda x, weight, act: cpu_ops().linear_gate_up_act(rounded(x, weight), weight, act),
    )
    row = rows_linear_w4a8.row(kind, name, 5, out_features, 256)
    figure = measure(row, cpu_place(ops), Clock(), RATES)
    assert ("has an error of" in figure.problem) is (is_rounded is not is_chosen)
    assert set(figure.others) == {row.peer} == {rows_linear_w4a8.W4A16}


@pytest.mark.parametrize("row", SMALL, ids=[f"{row.op}-{row.name}" for row in SMALL])
def test_a_right_answer(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "MOST", 2)
    figure = measure(row, cpu_place(), Clock(), RATES)
    assert figure.problem == ""
    assert figure.error <= figure.tolerance


def off(value: Any) -> Any:
    """An answer with one element wrong, near its end."""
    array = np.array(value[0] if isinstance(value, tuple) else value)
    array.reshape(-1)[-1] += 1
    return (array, *value[1:]) if isinstance(value, tuple) else array


@pytest.mark.parametrize("row", SMALL, ids=[f"{row.op}-{row.name}" for row in SMALL])
def test_a_wrong_answer(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "MOST", 2)
    good = cpu_ops()
    sampling = good.sampling
    bad_sampling: Any = SimpleNamespace(
        sample_rows=lambda *args, **kwargs: off(sampling.sample_rows(*args, **kwargs)[::-1])[::-1],
        token_logprobs=lambda *args, **kwargs: off(sampling.token_logprobs(*args, **kwargs)),
    )
    op = "logits" if "lm_head" in row.name else row.op
    if op == "sampling":
        ops = replace(good, sampling=bad_sampling)
    elif op == "kv_cache_write":
        ops = replace(good, kv_cache_write=lambda *args: None)
    else:
        function = getattr(good, op)
        ops = replace(good, **{op: lambda *args, **kwargs: off(function(*args, **kwargs))})
    figure = measure(row, cpu_place(ops), Clock(), RATES)
    assert figure.verdict == "WRONG"
    assert table.status([figure]) == 1


def test_the_very_launches_are_timed_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """As often as calls and passes say; of a linear layer the vendor's library beside them."""
    monkeypatch.setattr(measuring, "COLD_BYTES", 0)
    monkeypatch.setattr(measuring, "FEWEST", 2)
    clock = Clock()
    place = Place(Notes(num_sms=132, max_shared_bytes=227 << 10, has_wgmma=True))
    figure = measure(rows_linear.linear_row("qkv", 2, 256, 128), place, clock, RATES)
    passes = measuring.MOST_PASSES
    assert clock.counts == [2 * passes, 2 * passes]
    assert figure.microseconds == 1.0
    assert figure.others == {"cuBLAS": 1.0}
    assert [kernel.stem for kernel in figure.kernels if kernel] == ["linear"]


def test_a_time_that_cannot_be_is_wrong(monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever a graph without the kernel takes is no time of it; from a cache a kernel may beat the memory's limit."""
    row = next(row for row in SMALL if row.op == "rmsnorm")
    rate = row.work.num_bytes * 0.6e6  # of which the limit is 1.67 µs, where the clock says 1
    slow = Rates(read=rate, copy=rate, flops=1e30)
    monkeypatch.setattr(measuring, "MOST", 1)
    assert measure(row, cpu_place(), Clock(), slow).problem == ""
    monkeypatch.setattr(measuring, "COLD_BYTES", 0)
    figure = measure(row, cpu_place(), Clock(), slow)
    assert "it was not the kernel that was timed" in figure.problem
    assert figure.verdict == "WRONG"


def test_where_the_library_is_chosen_it_is_its_own_peer() -> None:
    place = Place(Notes())
    figure = measure(rows_linear.linear_row("qkv", 256, 64, 128), place, Clock(), RATES)
    assert figure.launched == "cuBLAS"
    assert figure.peer_time == figure.microseconds


def test_rivals_are_run_on_the_same_inputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(measuring, "MOST", 1)
    seen = []

    def rivals(op: str, inputs: Any) -> dict[str, Any]:
        return {"other": lambda: seen.append((op, sorted(inputs)))}

    row = next(row for row in SMALL if row.op == "rmsnorm")
    figure = measure(row, cpu_place(), Clock(), RATES, rivals)
    assert figure.others == {"other": 1.0}
    assert seen[0] == ("rmsnorm", ["eps", "weight", "x"])


def test_kernels_are_known_before_the_first_launch() -> None:
    notes = Notes(num_sms=132, max_shared_bytes=227 << 10, has_wgmma=True)
    places = {False: Place(notes, dry=True), True: Place(notes, dry=True, has_wgmma=False)}
    stems = {kernel.stem for kernel in kernels_of_rows(ROWS, places)}
    assert {"attention_decode", "attention_prefill", "attention_prefill_sm90", "linear", "rmsnorm", "rope"} <= stems
    portable = [row for row in ROWS if row.portable]
    assert {kernel.stem for kernel in kernels_of_rows(portable, places)} == {"attention_prefill"}
