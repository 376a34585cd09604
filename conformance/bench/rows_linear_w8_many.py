"""Rows of linear layers with weights of 8 bits and many tokens, whose quantization is in the time: shapes of Llama."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from conformance.bench.place import Place, spread
from conformance.bench.row import Call, Goal, Row, Sample, Work
from engine.coded8 import FP8, INT8, TILE
from engine.weights import LinearWeight
from ref.quant.coded import CodedWeight, quantized_linear

Array = Any
Numbers = NDArray[Any]

SHAPES = {  # out_features, in_features
    "8b-qkv": (6144, 4096),
    "8b-o": (4096, 4096),
    "8b-gate_up": (28672, 4096),
    "8b-down": (4096, 14336),
    "70b-qkv": (10240, 8192),
    "70b-gate_up": (57344, 8192),
    "70b-down": (8192, 28672),
    "square": (8192, 8192),
}
TOKENS = (512, 2048, 4096, 8192)
GOAL_TOKENS = 4096
KINDS = {  # of scales → the format, and what is asked of the square shape in TFLOP/s
    "tensor": (FP8, 900),
    "channel": (FP8, 900),
    "block": (FP8, 800),
    "int8": (INT8, None),
}
# of the product alone, by torch 2.11 on one H200; beside ours in bursts of 8 ms it had 1460, ours 1387
CUBLASLT, CUBLASLT_TFLOPS = "cuBLASLt, a scale a tensor", 1250.0
POOL = (1 << 22) + 3  # different codes
SEEN = TILE  # features at either end of an answer that are looked at


def rows() -> list[Row]:
    return [
        row(kind, name, num_tokens, *shape) for kind in KINDS for name, shape in SHAPES.items() for num_tokens in TOKENS
    ]


def row(kind: str, name: str, num_tokens: int, out_features: int, in_features: int) -> Row:
    format, tflops = KINDS[kind]
    is_asked = tflops is not None and num_tokens == GOAL_TOKENS and name == "square"
    is_peers = kind == "tensor" and name == "square" and num_tokens >= GOAL_TOKENS
    return Row(
        op="linear",
        name=f"{format}-{kind}-{name}-{out_features}x{in_features}-tokens={num_tokens}",
        work=Work(
            bytes_read=in_features * (out_features + 2 * num_tokens),
            bytes_written=2 * num_tokens * out_features,
            flops=2 * num_tokens * out_features * in_features,
            pace=2.0,
        ),
        make=partial(_call, kind=kind, num_tokens=num_tokens, out_features=out_features, in_features=in_features),
        goal=Goal(tflops=tflops) if is_asked and tflops is not None else None,
        peer=CUBLASLT if is_peers else "",
        peer_tflops=CUBLASLT_TFLOPS if is_peers else 0.0,
    )


def operands(
    place: Place, kind: str, num_tokens: int, out_features: int, in_features: int
) -> tuple[Array, LinearWeight]:
    """x [num_tokens, in_features], and a weight."""
    format = KINDS[kind][0]
    tiles = -(-out_features // TILE), -(-in_features // TILE)
    tensors = {
        "weight": _codes(place, format, out_features, in_features),
        "scale": _scales(place, *{"tensor": (1,), "block": tiles}.get(kind, (out_features,))),
    }
    return place.normal(num_tokens, in_features), LinearWeight(format, out_features, in_features, tensors, None)


def _call(place: Place, kind: str, num_tokens: int, out_features: int, in_features: int) -> Call:
    x, weight = operands(place, kind, num_tokens, out_features, in_features)

    def watch() -> Callable[[Array], list[Sample]]:
        tokens = spread(num_tokens)
        seen = place.get_rows(x, tokens)
        ends = (slice(0, SEEN), slice(max(out_features - SEEN, 0) // TILE * TILE, out_features))
        parts = [part(place, weight, kind, end) for end in ends]

        def truth(rows: CodedWeight, dtype: Any, storage: str | None) -> Numbers:
            return quantized_linear(seen.astype(dtype), rows)

        return lambda y: [
            Sample(f"y[:, {end.start}:]", place.get_rows(y[:, end], tokens), partial(truth, rows), place.storage)
            for end, rows in zip(ends, parts, strict=True)
        ]

    return Call(run=lambda: place.ops.linear(x, weight), watch=watch)


def part(place: Place, weight: LinearWeight, kind: str, rows: slice) -> CodedWeight:
    """Some rows of a weight, as ref has it; with tiles, from the first row of one on."""
    codes, scale = place.get(weight.tensors["weight"][rows]), place.get(weight.tensors["scale"])
    if kind == "block":
        scale = scale[rows.start // TILE : -(-rows.stop // TILE)]
        return CodedWeight(codes, scale, (TILE, TILE), "group")
    return CodedWeight(codes, scale[0] if kind == "tensor" else scale[rows], None, "token")


def _codes(place: Place, format: str, rows: int, columns: int) -> Array:
    """Of normally distributed numbers, the largest of which are four spreads away."""
    return place.repeated(place.shared(f"codes of {format}", partial(_pool, place, format)), rows, columns)


def _pool(place: Place, format: str) -> Array:
    numbers = np.random.default_rng(2).standard_normal(POOL, np.float32).clip(-4, 4) / 4
    if format == INT8:
        return place.put(np.rint(numbers * 127).astype(np.int8))
    return place.put((numbers * 448).astype(ml_dtypes.float8_e4m3fn).view(np.uint8))


def _scales(place: Place, *shape: int) -> Array:
    numbers = np.random.default_rng(3).uniform(5e-4, 1e-3, 8191).astype(np.float32)
    return place.repeated(place.shared("scales", lambda: place.put(numbers)), *shape)
