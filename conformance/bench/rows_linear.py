"""Rows of the linear layers: the five shapes of Llama-3.1-8B, from one token to more than the kernels take."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.bench.place import LIBRARY, Place
from conformance.bench.row import Call, Goal, Row, Sample, Work
from conformance.tolerance import RULE, TENSOR_CORE_SUM
from engine.weights import LinearWeight
from ref.activation import gate_up_act
from ref.linear import linear
from ref.numerics import round_to

Array = Any
Numbers = NDArray[Any]

SHAPES = {  # out_features, in_features
    "qkv": (6144, 4096),
    "o": (4096, 4096),
    "gate_up": (28672, 4096),
    "down": (4096, 14336),
    "lm_head": (128256, 4096),
}
TOKENS = (1, 2, 4, 8, 16, 32, 64, 128, 256)
FEW, MANY = 8, 128  # tokens: up to the first 85 % of the limit are asked for, up to the second 80 %
LOGITS = "lm_head"  # float32 comes out of it
ITEM = 2  # bytes of bfloat16
WITH_ACT = f"{LIBRARY} + gate_up_act"
SEEN = 32  # features at either end of an answer that are looked at


def rows() -> list[Row]:
    found = [linear_row(name, num_tokens, *shape) for name, shape in SHAPES.items() for num_tokens in TOKENS]
    return found + [gated_row(num_tokens, *SHAPES["gate_up"]) for num_tokens in TOKENS]


def linear_row(name: str, num_tokens: int, out_features: int, in_features: int) -> Row:
    item = 4 if name == LOGITS else ITEM
    share = 0.85 if num_tokens <= FEW else 0.8
    return Row(
        op="linear",
        name=f"{name}-{out_features}x{in_features}-tokens={num_tokens}",
        work=Work(
            bytes_read=ITEM * in_features * (out_features + num_tokens),
            bytes_written=item * num_tokens * out_features,
            flops=2 * num_tokens * out_features * in_features,
        ),
        make=partial(
            _linear, num_tokens=num_tokens, out_features=out_features, in_features=in_features, logits=name == LOGITS
        ),
        goal=Goal(share=share) if num_tokens <= MANY else None,
        peer=LIBRARY,
    )


def gated_row(num_tokens: int, out_features: int, in_features: int) -> Row:
    """The same layer with the activation behind it."""
    plain = linear_row("gate_up", num_tokens, out_features, in_features)
    return replace(
        plain,
        op="linear_gate_up_act",
        work=replace(plain.work, bytes_written=plain.work.bytes_written // 2),
        make=partial(_gated, num_tokens=num_tokens, out_features=out_features, in_features=in_features),
        peer=WITH_ACT,
    )


def _gated(place: Place, num_tokens: int, out_features: int, in_features: int) -> Call:
    x, weight = place.normal(num_tokens, in_features), place.normal(out_features, in_features)
    stored = place.ops.prepare(LinearWeight("dense", out_features, in_features, {"weight": weight}, None))
    out = place.device.empty((num_tokens, out_features), place.dtype)
    half = out_features // 2

    def watch() -> Callable[[Array], list[Sample]]:
        seen = place.get(x)
        ends = (slice(0, SEEN), slice(max(half - SEEN, 0), half))
        parts = [(place.get(weight[end]), place.get(weight[half:][end])) for end in ends]

        def truth(part: tuple[Numbers, Numbers], dtype: Any, storage: str | None) -> Numbers:
            both = [round_to(linear(seen.astype(dtype), one.astype(dtype), None), storage) for one in part]
            return gate_up_act(np.concatenate(both, axis=1))

        return lambda y: [
            Sample(f"y[:, {end.start}:]", place.get(y[:, end]), partial(truth, part), place.storage)
            for end, part in zip(ends, parts, strict=True)
        ]

    def library() -> Array:
        place.device.matmul(x, weight, out)
        return place.ops.gate_up_act(out, "silu")

    return Call(run=lambda: place.ops.linear_gate_up_act(x, stored), watch=watch, rivals={WITH_ACT: library})


def _linear(place: Place, num_tokens: int, out_features: int, in_features: int, logits: bool) -> Call:
    x, weight = place.normal(num_tokens, in_features), place.normal(out_features, in_features)
    stored = LinearWeight("dense", out_features, in_features, {"weight": weight}, None)
    op, prepared = (place.ops.logits, stored) if logits else (place.ops.linear, place.ops.prepare(stored))
    dtype, tolerance = (np.dtype(np.float32), TENSOR_CORE_SUM) if logits else (place.dtype, RULE)
    out = place.device.empty((num_tokens, out_features), dtype)

    def watch() -> Callable[[Array], list[Sample]]:
        seen = place.get(x)
        ends = (slice(0, SEEN), slice(max(out_features - SEEN, 0), out_features))
        parts = [place.get(weight[end]) for end in ends]

        def truth(part: Numbers, dtype: Any, storage: str | None) -> Numbers:
            return linear(seen.astype(dtype), part.astype(dtype), None)

        return lambda y: [
            Sample(f"y[:, {end.start}:]", place.get(y[:, end]), partial(truth, part), dtype.name, tolerance)
            for end, part in zip(ends, parts, strict=True)
        ]

    return Call(
        run=lambda: op(x, prepared),
        watch=watch,
        inputs={"x": x, "weight": weight, "bias": None},
        rivals={LIBRARY: lambda: place.device.matmul(x, weight, out)},
    )
