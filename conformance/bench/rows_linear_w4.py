"""Rows of linear layers with weights of 4 bits in groups: the shapes of Qwen2-72B and Llama-3.1-8B, for few tokens."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.bench.place import Place
from conformance.bench.row import Call, Goal, Row, Sample, Work
from engine.packed4 import PACKED, PACKED_GATED, ROWS, blank4, unpack4
from engine.weights import LinearWeight
from ref.activation import gate_up_act
from ref.numerics import round_to
from ref.quant.groups import GroupedInt, grouped_linear

Array = Any
Numbers = NDArray[Any]

SHAPES = {  # out_features, in_features; gate_up with the activation behind it
    "72b-qkv": (10240, 8192),
    "72b-o": (8192, 8192),
    "72b-gate_up": (59136, 8192),
    "72b-down": (8192, 29568),
    "8b-qkv": (6144, 4096),
    "8b-o": (4096, 4096),
    "8b-gate_up": (28672, 4096),
    "8b-down": (4096, 14336),
}
TOKENS = (1, 4, 8, 16, 32, 64, 96)
TOKENS_WITH_ZEROS = (1, 16)  # as AWQ has them
FEW = 16  # tokens up to which 75 % of the limit are asked for
GROUP_SIZE = 128
GATED = "gate_up"
ITEM = 2  # bytes of bfloat16
POOL = (1 << 20) + 3  # different numbers of a weight; odd, so that its rows differ


def rows() -> list[Row]:
    found = [(name, num_tokens, False) for name in SHAPES for num_tokens in TOKENS]
    found += [(name, num_tokens, True) for name in SHAPES for num_tokens in TOKENS_WITH_ZEROS]
    return [row(name, num_tokens, *SHAPES[name], zeros) for name, num_tokens, zeros in found]


def row(name: str, num_tokens: int, out_features: int, in_features: int, zeros: bool) -> Row:
    """Sizes: multiples of 64 and of 128."""
    gated = name.endswith(GATED)
    size = out_features // 2 if gated else out_features
    of_group = 3 if zeros else 2
    return Row(
        op="linear_gate_up_act" if gated else "linear",
        name=f"w4{'-zeros' if zeros else ''}-{name}-{out_features}x{in_features}-tokens={num_tokens}",
        work=Work(
            bytes_read=out_features * (in_features // 2 + of_group * in_features // GROUP_SIZE)
            + ITEM * num_tokens * in_features,
            bytes_written=ITEM * num_tokens * size,
            flops=2 * num_tokens * out_features * in_features,
        ),
        make=partial(
            _call, num_tokens=num_tokens, out_features=out_features, in_features=in_features, gated=gated, zeros=zeros
        ),
        goal=Goal(share=0.75) if num_tokens <= FEW else None,
    )


def _call(place: Place, num_tokens: int, out_features: int, in_features: int, gated: bool, zeros: bool) -> Call:
    x = place.normal(num_tokens, in_features)
    tensors = packed_tensors(place, out_features, in_features, zeros)
    format = PACKED_GATED if gated else PACKED
    stored = place.ops.prepare(LinearWeight(format, out_features, in_features, tensors, None))
    size = out_features // 2 if gated else out_features
    seen = ROWS // 2 if gated else ROWS  # outs of what is unpacked at either end

    def watch() -> Callable[[Array], list[Sample]]:
        tokens = place.get(x)
        ends = (slice(0, seen), slice(size - seen, size))
        parts = [integers_of_quad(place, tensors, quad, in_features, gated) for quad in (0, out_features // ROWS - 1)]

        def truth(part: GroupedInt, dtype: Any, storage: str | None) -> Numbers:
            z = grouped_linear(tokens.astype(dtype), part, None, storage=storage)
            if not gated:
                return z
            return gate_up_act(z if storage is None else round_to(z, storage), "silu")

        return lambda y: [
            Sample(f"y[:, {end.start}:]", place.get(y[:, end]), partial(truth, part), place.storage)
            for end, part in zip(ends, parts, strict=True)
        ]

    if gated:
        return Call(run=lambda: place.ops.linear_gate_up_act(x, stored, "silu"), watch=watch)
    return Call(run=lambda: place.ops.linear(x, stored), watch=watch)


def packed_tensors(place: Place, out_features: int, in_features: int, zeros: bool) -> dict[str, Array]:
    """Random words, as those of a real weight nearly are; scales near what keeps sums near 1."""
    rng = np.random.default_rng(2)
    pools = {
        "weight": place.shared("w4-weight", lambda: place.put(rng.integers(0, 1 << 32, POOL, np.uint32))),
        "scales": place.shared("w4-scales", lambda: place.put(rng.uniform(2e-3, 5e-3, POOL).astype(np.float16))),
        "zeros": place.shared("w4-zeros", lambda: place.put(rng.integers(0, 16, POOL, np.uint8))),
    }
    shapes = {name: array.shape for name, array in blank4(out_features, in_features, GROUP_SIZE, zeros).items()}
    return {name: place.repeated(pools[name], *shape) for name, shape in shapes.items()}


def integers_of_quad(place: Place, tensors: dict[str, Array], quad: int, in_features: int, gated: bool) -> GroupedInt:
    """One quad of row tiles, decoded."""
    tiles = slice(4 * quad, 4 * quad + 4)
    part = {
        name: place.get(array[tiles] if name == "weight" else array[:, quad : quad + 1])
        for name, array in tensors.items()
    }
    part["scales"] = part["scales"].astype(np.float16)
    q, scales, zero = unpack4(part, ROWS, in_features, gated=gated)
    return GroupedInt(4, q, scales, zero, np.arange(in_features) // GROUP_SIZE)
