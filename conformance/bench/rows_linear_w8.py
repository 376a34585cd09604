"""Rows of linear layers with weights of 8 bits and few tokens, whose quantization is in the time: Llama-3.1-8B."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from conformance.bench import rows_linear_w8_many
from conformance.bench.place import Place
from conformance.bench.row import Call, Goal, Row, Sample
from ref.activation import gate_up_act
from ref.numerics import round_to
from ref.quant.coded import quantized_linear

Array = Any

SHAPES = {  # out_features, in_features
    "8b-qkv": (6144, 4096),
    "8b-o": (4096, 4096),
    "8b-down": (4096, 14336),
}
GATED = "8b-gate_up", 28672, 4096
TOKENS = (1, 2, 4, 8, 16, 32)
FEW, SHARE, SHARE_OF_MORE = 4, 0.8, 0.75  # tokens: up to so many the first share of the limit is asked for


def rows() -> list[Row]:
    found = []
    for kind in rows_linear_w8_many.KINDS:
        for num_tokens in TOKENS:
            goal = Goal(share=SHARE if num_tokens <= FEW else SHARE_OF_MORE)
            plain = [rows_linear_w8_many.row(kind, name, num_tokens, *shape) for name, shape in SHAPES.items()]
            found += [replace(row, goal=goal) for row in (*plain, gated_row(kind, num_tokens))]
    return found


def gated_row(kind: str, num_tokens: int) -> Row:
    """gate_up with the activation behind it."""
    plain = rows_linear_w8_many.row(kind, GATED[0], num_tokens, *GATED[1:])
    return replace(
        plain,
        op="linear_gate_up_act",
        work=replace(plain.work, bytes_written=plain.work.bytes_written // 2),
        make=partial(_gated, kind=kind, num_tokens=num_tokens),
    )


def _gated(place: Place, kind: str, num_tokens: int) -> Call:
    """size is a multiple of a tile of scales, so both halves of the weight are weights of their own."""
    x, weight = rows_linear_w8_many.operands(place, kind, num_tokens, *GATED[1:])
    half = GATED[1] // 2

    def watch() -> Callable[[Array], list[Sample]]:
        seen = place.get(x)
        ends = [slice(first, first + rows_linear_w8_many.SEEN) for first in (0, half - rows_linear_w8_many.SEEN)]
        parts = [
            [rows_linear_w8_many.part(place, weight, kind, slice(end.start + add, end.stop + add)) for add in (0, half)]
            for end in ends
        ]

        def truth(both: Any, dtype: Any, storage: str | None) -> Any:
            z = [round_to(quantized_linear(seen.astype(dtype), one), storage) for one in both]
            return gate_up_act(np.concatenate(z, axis=1))

        return lambda y: [
            Sample(f"y[:, {end.start}:]", place.get(y[:, end]), partial(truth, both), place.storage)
            for end, both in zip(ends, parts, strict=True)
        ]

    return Call(run=lambda: place.ops.linear_gate_up_act(x, weight, "silu"), watch=watch)
