"""Cases of the token embedding, alone and with a learned vector for the position."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import HALVES, Case, Inputs, Kept
from conformance.inputs import guarded, normal
from conformance.tolerance import EXACT
from ref.embedding import embedding, position_embedding

Array = NDArray[Any]


SHAPES = {  # num_tokens, vocab_size, hidden_size
    "none": (0, 50, 8),
    "one": (1, 1, 1),
    "odd": (37, 101, 33),
    "wide": (5, 1000, 576),
    "wider-than-a-block": (2, 3, 2056),
}
PARTS = ("odd", "wide")


FIRST = 40  # the id of the first row of a table that is one rank's, of more rows before and behind


def cases() -> list[Case]:
    return [
        *(_case(name, *shape) for name, shape in SHAPES.items()),
        *(make_position_case(f"positions-{name}", *shape) for name, shape in SHAPES.items()),
        *(_case(f"part-{name}", *SHAPES[name], FIRST) for name in PARTS),
        *(make_position_case(f"part-positions-{name}", *SHAPES[name], FIRST) for name in PARTS),
    ]


def _case(name: str, num_tokens: int, vocab_size: int, hidden_size: int, first: int | None = None) -> Case:
    axes = {"num_tokens": num_tokens, "vocab_size": vocab_size, "hidden_size": hidden_size}
    return Case(
        stem="embedding",
        name=name,
        axes=axes,
        make_inputs=partial(_inputs, first=first, **axes),
        reference=lambda token_ids, table, storage=None: {"out": embedding(token_ids, table, first)},
        candidate=lambda ops, token_ids, table: {"out": ops.embedding(token_ids, table, **_part(first))},
        tolerance=EXACT,
        disturb=_disturb if first is None else _disturb_part,
        storages=(*HALVES, "float32"),
        skip={"cpu": "the CPU's op table holds ref.embedding itself"},
    )


def make_position_case(name: str, num_tokens: int, vocab_size: int, hidden_size: int, first: int | None = None) -> Case:
    axes = {"num_tokens": num_tokens, "vocab_size": vocab_size, "hidden_size": hidden_size}
    return Case(
        stem="embedding",
        name=name,
        axes=axes,
        make_inputs=partial(_position_inputs, first=first, **axes),
        reference=lambda storage=None, **inputs: {"out": position_embedding(first=first, **inputs)},
        candidate=lambda ops, **inputs: {"out": ops.position_embedding(**inputs, **_part(first))},
        disturb=_disturb_positions if first is None else _disturb_part,
        storages=(*HALVES, "float32"),
        skip={"cpu": "the CPU's op table holds ref.embedding itself"},
    )


def _part(first: int | None) -> dict[str, int]:
    return {} if first is None else {"first": first}


def _inputs(seed: int, num_tokens: int, vocab_size: int, hidden_size: int, first: int | None = None) -> Inputs:
    """Ids with the first and the last of the table among them, and one twice; of a part the ids beside them too."""
    rng = np.random.default_rng(seed)
    token_ids = rng.integers(0, vocab_size, num_tokens, np.int32)
    if num_tokens > 3:
        token_ids[:4] = [0, vocab_size - 1, token_ids[-1], vocab_size - 1]
    if first is not None:
        token_ids += first
        token_ids[2:5] = [first - 1, first + vocab_size, 0]
    return {"token_ids": token_ids, "table": guarded(normal(rng, vocab_size, hidden_size), num_axes=1)}


def _disturb(inputs: Inputs, rng: np.random.Generator) -> Kept:
    """Rows of the table that the first token does not read, and the ids of all other tokens."""
    token_ids, table = inputs["token_ids"], inputs["table"]
    others = np.arange(len(table)) != (token_ids[0] if len(token_ids) else -1)
    table[others] = normal(rng, int(others.sum()), table.shape[1])
    token_ids[1:] = rng.integers(0, len(table), max(len(token_ids) - 1, 0))
    return {"out": slice(0, 1)}


def _disturb_part(inputs: Inputs, rng: np.random.Generator) -> Kept:
    """The whole table, of which an id of another rank reads nothing."""
    inputs["table"][...] = normal(rng, *inputs["table"].shape)
    return {"out": slice(3, 5)}


def _position_inputs(seed: int, first: int | None = None, **axes: int) -> Inputs:
    """As many positions as rows of the table, in an order of their own."""
    inputs, more = _inputs(seed, first=first, **axes), _inputs(seed + 1, **axes)
    return {**inputs, "positions": more["token_ids"][::-1].copy(), "position_table": more["table"]}


def _disturb_positions(inputs: Inputs, rng: np.random.Generator) -> Kept:
    """The same of both tables."""
    _disturb({"token_ids": inputs["positions"], "table": inputs["position_table"]}, rng)
    return _disturb(inputs, rng)
