"""Rows of linear layers with weights of 4 bits in groups and many tokens: the shapes of Qwen2-72B."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from numpy.typing import NDArray

from conformance.bench import rows_linear_w4
from conformance.bench.place import LIBRARY, Place, spread
from conformance.bench.row import Call, Goal, Row, Sample
from conformance.bench.rows_linear_w4 import GATED, integers_of_quad, packed_tensors
from engine.kernels.linear_w4_many import linear_w4_dequantize
from engine.packed4 import PACKED, PACKED_GATED, ROWS
from engine.weights import LinearWeight
from ref.activation import gate_up_act
from ref.numerics import round_to
from ref.quant.groups import GroupedInt, grouped_linear

Array = Any
Numbers = NDArray[Any]

SHAPES = {name: shape for name, shape in rows_linear_w4.SHAPES.items() if name.startswith("72b")}
TOKENS = (128, 256, 512, 1024, 2048, 8192)
MANY = 512  # tokens from which 95 % of the limit are asked for
SEEN = 16  # tokens of an answer that are looked at
DECODED = f"dequantize + {LIBRARY}"


def rows() -> list[Row]:
    return [row(name, num_tokens, *SHAPES[name]) for name in SHAPES for num_tokens in TOKENS]


def row(name: str, num_tokens: int, out_features: int, in_features: int) -> Row:
    """Beside it: the weight written out, and a product of the vendor's library."""
    found = rows_linear_w4.row(name, num_tokens, out_features, in_features, zeros=False)
    goal = Goal(share=0.95) if num_tokens >= MANY else None
    make = partial(
        _call, num_tokens=num_tokens, out_features=out_features, in_features=in_features, gated=name.endswith(GATED)
    )
    return replace(found, make=make, goal=goal, peer=DECODED)


def _call(place: Place, num_tokens: int, out_features: int, in_features: int, gated: bool) -> Call:
    x, tensors = place.normal(num_tokens, in_features), packed_tensors(place, out_features, in_features, zeros=False)
    format = PACKED_GATED if gated else PACKED
    weight = LinearWeight(format, out_features, in_features, tensors, None)
    stored = place.ops.prepare(weight)
    z = place.device.empty((num_tokens, out_features), place.dtype)

    def watch() -> Callable[[Array], list[Sample]]:
        tokens = sorted({*range(0, num_tokens, max(1, num_tokens // SEEN)), num_tokens - 1})
        seen = place.get_rows(x, tokens)
        step = ROWS // 2 if gated else ROWS
        quads = {
            quad: integers_of_quad(place, tensors, quad, in_features, gated) for quad in spread(out_features // ROWS)
        }

        def truth(part: GroupedInt, dtype: Any, storage: str | None) -> Numbers:
            found = grouped_linear(seen.astype(dtype), part, None, storage=storage)
            return gate_up_act(round_to(found, storage), "silu") if gated else found

        return lambda y: [
            Sample(
                f"y[:, {step * quad}:]",
                place.get_rows(y[:, step * quad : step * (quad + 1)], tokens),
                partial(truth, part),
                place.storage,
            )
            for quad, part in quads.items()
        ]

    def library() -> Array:
        place.device.matmul(x, linear_w4_dequantize(weight, place.dtype, device=place.device), z)
        return place.ops.gate_up_act(z, "silu") if gated else z

    run = partial(place.ops.linear_gate_up_act, x, stored, "silu") if gated else partial(place.ops.linear, x, stored)
    return Call(run=run, watch=watch, rivals={DECODED: library})
