"""Cases of the token embedding, alone and with a learned vector for the position."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import HALVES, Case, Inputs, Kept, Outputs
from conformance.inputs import guarded, normal
from conformance.tolerance import EXACT
from engine.ops import OpTable
from ref.embedding import embedding, position_embedding

Array = NDArray[Any]


SHAPES = {  # num_tokens, vocab_size, hidden_size
    "none": (0, 50, 8),
    "one": (1, 1, 1),
    "odd": (37, 101, 33),
    "wide": (5, 1000, 576),
    "wider-than-a-block": (2, 3, 2056),
}


def cases() -> list[Case]:
    return [_case(name, *shape) for name, shape in SHAPES.items()] + [
        make_position_case(f"positions-{name}", *shape) for name, shape in SHAPES.items()
    ]


def _case(name: str, num_tokens: int, vocab_size: int, hidden_size: int) -> Case:
    axes = {"num_tokens": num_tokens, "vocab_size": vocab_size, "hidden_size": hidden_size}
    return Case(
        stem="embedding",
        name=name,
        axes=axes,
        make_inputs=partial(_inputs, **axes),
        reference=lambda token_ids, table, storage=None: {"out": embedding(token_ids, table)},
        candidate=_candidate,
        tolerance=EXACT,
        disturb=_disturb,
        storages=(*HALVES, "float32"),
        skip={"cpu": "the CPU's op table holds ref.embedding itself"},
    )


def make_position_case(name: str, num_tokens: int, vocab_size: int, hidden_size: int) -> Case:
    axes = {"num_tokens": num_tokens, "vocab_size": vocab_size, "hidden_size": hidden_size}
    return Case(
        stem="embedding",
        name=name,
        axes=axes,
        make_inputs=partial(_position_inputs, **axes),
        reference=lambda storage=None, **inputs: {"out": position_embedding(**inputs)},
        candidate=lambda ops, **inputs: {"out": ops.position_embedding(**inputs)},
        disturb=_disturb_positions,
        storages=(*HALVES, "float32"),
        skip={"cpu": "the CPU's op table holds ref.embedding itself"},
    )


def _inputs(seed: int, num_tokens: int, vocab_size: int, hidden_size: int) -> Inputs:
    """Ids with the first and the last of the vocabulary among them, and one twice."""
    rng = np.random.default_rng(seed)
    token_ids = rng.integers(0, vocab_size, num_tokens, np.int32)
    if num_tokens > 3:
        token_ids[:4] = [0, vocab_size - 1, token_ids[-1], vocab_size - 1]
    return {"token_ids": token_ids, "table": guarded(normal(rng, vocab_size, hidden_size), num_axes=1)}


def _candidate(ops: OpTable, token_ids: Array, table: Array) -> Outputs:
    return {"out": ops.embedding(token_ids, table)}


def _disturb(inputs: Inputs, rng: np.random.Generator) -> Kept:
    """Rows of the table that the first token does not read, and the ids of all other tokens."""
    token_ids, table = inputs["token_ids"], inputs["table"]
    others = np.arange(len(table)) != (token_ids[0] if len(token_ids) else -1)
    table[others] = normal(rng, int(others.sum()), table.shape[1])
    token_ids[1:] = rng.integers(0, len(table), max(len(token_ids) - 1, 0))
    return {"out": slice(0, 1)}


def _position_inputs(seed: int, **axes: int) -> Inputs:
    """As many positions as token ids are possible, in an order of their own."""
    inputs, more = _inputs(seed, **axes), _inputs(seed + 1, **axes)
    return {**inputs, "positions": more["token_ids"][::-1].copy(), "position_table": more["table"]}


def _disturb_positions(inputs: Inputs, rng: np.random.Generator) -> Kept:
    """The same of both tables."""
    _disturb({"token_ids": inputs["positions"], "table": inputs["position_table"]}, rng)
    return _disturb(inputs, rng)
