"""Cases of the token embedding."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import HALVES, Case, Inputs, Kept, Outputs
from conformance.inputs import guarded, normal
from conformance.tolerance import EXACT
from engine.ops import OpTable
from ref.embedding import embedding

Array = NDArray[Any]


def cases() -> list[Case]:
    shapes = {
        "none": (0, 50, 8),
        "one": (1, 1, 1),
        "odd": (37, 101, 33),
        "wide": (5, 1000, 576),
        "wider-than-a-block": (2, 3, 2056),
    }
    return [
        Case(
            stem="embedding",
            name=name,
            axes=(axes := {"num_tokens": num_tokens, "vocab_size": vocab_size, "hidden_size": hidden_size}),
            make_inputs=partial(_inputs, **axes),
            reference=lambda token_ids, table, storage=None: {"out": embedding(token_ids, table)},
            candidate=_candidate,
            tolerance=EXACT,
            disturb=_disturb,
            storages=(*HALVES, "float32"),
            skip={"cpu": "the CPU's op table holds ref.embedding itself"},
        )
        for name, (num_tokens, vocab_size, hidden_size) in shapes.items()
    ]


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
