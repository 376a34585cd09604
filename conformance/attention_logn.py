"""Cases of log-n scaling: queries before, at and past the length from which they grow."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import HALVES, Case, Inputs, Kept, Outputs
from conformance.inputs import guarded, normal
from engine.ops import OpTable
from ref.attention import logn_query

Array = NDArray[Any]

SHAPES = {  # num_tokens, n_heads, head_dim, length
    "none": (0, 2, 64, 8),
    "one": (1, 1, 1, 2),
    "odd": (7, 3, 11, 4),
    "heads": (33, 4, 64, 2048),
    "wider-than-a-block": (5, 40, 128, 8192),
}


def cases() -> list[Case]:
    return [make_case(name, *shape) for name, shape in SHAPES.items()]


def make_case(name: str, num_tokens: int, n_heads: int, head_dim: int, length: int) -> Case:
    axes = {"num_tokens": num_tokens, "n_heads": n_heads, "head_dim": head_dim, "length": length}
    return Case(
        stem="attention_logn",
        name=name,
        axes=axes,
        make_inputs=partial(_inputs, **axes),
        reference=lambda q, positions, length, storage=None: {"q": logn_query(q, positions, length)},
        candidate=_candidate,
        disturb=_disturb,
        storages=(*HALVES, "float32"),
        skip={"cpu": "the CPU's op table holds ref.attention.logn_query itself"},
    )


def _inputs(seed: int, num_tokens: int, n_heads: int, head_dim: int, length: int) -> Inputs:
    """Heads of a token are neighbours, as rope leaves them; the edges of length are among the positions."""
    rng = np.random.default_rng(seed)
    q = guarded(normal(rng, num_tokens, n_heads * head_dim)).reshape(num_tokens, n_heads, head_dim)
    positions = rng.integers(0, 4 * length, num_tokens, np.int32)
    edges = np.array([length, length // 2, length - 1, length + 1, 0, 1_000_000], np.int32)[:num_tokens]
    positions[: len(edges)] = edges
    return {"q": q, "positions": positions, "length": length}


def _candidate(ops: OpTable, q: Array, positions: Array, length: int) -> Outputs:
    return {"q": ops.logn_query(q, positions, length)}


def _disturb(inputs: Inputs, rng: np.random.Generator) -> Kept:
    """All tokens but one."""
    num_tokens = len(inputs["q"])
    others = np.arange(num_tokens) != (int(rng.integers(num_tokens)) if num_tokens else 0)
    inputs["q"][others] = normal(rng, int(others.sum()), *inputs["q"].shape[1:])
    inputs["positions"][others] = rng.integers(0, 4 * inputs["length"], int(others.sum()))
    return {"q": ~others}
