"""Rows of linear layers with weights of 4 bits in groups and activations of 8 bits, whose quantization is in the time:
the shapes of Qwen2-72B."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

from numpy.typing import NDArray

from conformance.bench import rows_linear_w4_many
from conformance.bench.place import Place, spread
from conformance.bench.row import Call, Row, Sample
from conformance.bench.rows_linear_w4 import GATED, integers_of_quad, packed_tensors
from engine.coded8 import FP8, INT8
from engine.kernels.linear_w4a8 import is_worth_it
from engine.packed4 import PACKED, PACKED_GATED, ROWS
from engine.weights import ActivationKind, LinearWeight
from ref.activation import gate_up_act
from ref.numerics import round_to
from ref.quant.groups import GroupedInt, grouped_linear
from ref.quant.w4a8 import w4a8_linear

Array = Any
Numbers = NDArray[Any]

SHAPES = rows_linear_w4_many.SHAPES
KINDS: tuple[ActivationKind, ...] = (INT8, FP8)
TOKENS = (256, 384, 512, 2048, 8192)
W4A16 = "activations of 16 bits"


def rows() -> list[Row]:
    return [row(kind, name, num_tokens, *SHAPES[name]) for kind in KINDS for name in SHAPES for num_tokens in TOKENS]


def row(kind: ActivationKind, name: str, num_tokens: int, out_features: int, in_features: int) -> Row:
    """Beside it: the same weight with activations as they are, which must not be quicker; they are so in the row too
    where the engine's own choice is not to quantize them."""
    found = rows_linear_w4_many.row(name, num_tokens, out_features, in_features)
    gated = name.endswith(GATED)
    return replace(
        found,
        name=f"w4a8-{kind}-{found.name.removeprefix('w4-')}",
        work=replace(found.work, pace=2.0),
        make=partial(
            _call, kind=kind, gated=gated, num_tokens=num_tokens, out_features=out_features, in_features=in_features
        ),
        goal=None,
        peer=W4A16,
    )


def _call(
    place: Place, kind: ActivationKind, gated: bool, num_tokens: int, out_features: int, in_features: int
) -> Call:
    x, tensors = place.normal(num_tokens, in_features), packed_tensors(place, out_features, in_features, zeros=False)
    weight = LinearWeight(PACKED_GATED if gated else PACKED, out_features, in_features, tensors, None)
    rival, stored = place.ops.prepare(weight), place.ops.prepare(replace(weight, activations=kind))

    coded = is_worth_it(x, stored, place.device)

    def watch() -> Callable[[Array], list[Sample]]:
        tokens = spread(num_tokens)
        seen = place.get_rows(x, tokens)
        step = ROWS // 2 if gated else ROWS
        quads = {
            quad: integers_of_quad(place, tensors, quad, in_features, gated) for quad in spread(out_features // ROWS)
        }

        def truth(part: GroupedInt, dtype: Any, storage: str | None) -> Numbers:
            if coded:
                z = w4a8_linear(seen.astype(dtype), part, kind=kind)
            else:
                z = grouped_linear(seen.astype(dtype), part, None, storage=storage)
            return gate_up_act(z if storage is None else round_to(z, storage), "silu") if gated else z

        return lambda y: [
            Sample(
                f"y[:, {step * quad}:]",
                place.get_rows(y[:, step * quad : step * (quad + 1)], tokens),
                partial(truth, part),
                place.storage,
            )
            for quad, part in quads.items()
        ]

    def run(of: LinearWeight) -> Array:
        return place.ops.linear_gate_up_act(x, of, "silu") if gated else place.ops.linear(x, of)

    return Call(run=partial(run, stored), watch=watch, rivals={W4A16: partial(run, rival)})
