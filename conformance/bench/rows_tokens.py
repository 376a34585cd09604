"""Rows of the ops that take every token by itself, on the sizes of Llama-3.1-8B; norms of heads as in Qwen3-8B."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.bench.place import Place, spread
from conformance.bench.row import Call, Row, Sample, Work
from ref.activation import gate_up_act
from ref.layernorm import layernorm
from ref.rmsnorm import add_rmsnorm, qk_norm, rmsnorm
from ref.rope import rope

Array = Any
Numbers = NDArray[Any]

TOKENS = (1, 64, 8192)
HIDDEN, INTERMEDIATE, VOCAB = 4096, 14336, 128256
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
EPS = 1e-5
ITEM = 2  # bytes of bfloat16


def rows() -> list[Row]:
    return [row for num_tokens in TOKENS for row in rows_of(num_tokens)]


def rows_of(
    num_tokens: int, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE, vocab: int = VOCAB, heads: int = HEADS
) -> list[Row]:
    size = ITEM * num_tokens * hidden
    weights = ITEM * hidden
    gated = ITEM * num_tokens * intermediate
    qkv = ITEM * num_tokens * HEAD_DIM * (heads + 2 * KV_HEADS)
    beside = 4 * num_tokens * (HEAD_DIM + 1)  # cos_sin and slots
    found: list[tuple[str, Work, Callable[..., Call], tuple[int, ...]]] = [
        ("rmsnorm", Work(size + weights, size), _rmsnorm, (hidden,)),
        ("add_rmsnorm", Work(2 * size + weights, 2 * size), _add_rmsnorm, (hidden,)),
        ("layernorm", Work(size + weights, size), _layernorm, (hidden,)),
        ("gate_up_act", Work(2 * gated, gated), _gate_up_act, (intermediate,)),
        ("rope_kv_write", Work(qkv + beside, qkv), partial(_rope, False), (heads,)),
        ("qk_norm_rope_kv_write", Work(qkv + beside + 2 * ITEM * HEAD_DIM, qkv), partial(_rope, True), (heads,)),
        ("embedding", Work(size + 4 * num_tokens, size), _embedding, (vocab, hidden)),
    ]
    return [
        Row(op=op, name=f"tokens={num_tokens}", work=work, make=partial(_call, make, num_tokens, sizes))
        for op, work, make, sizes in found
    ]


def _call(make: Callable[..., Call], num_tokens: int, sizes: tuple[int, ...], place: Place) -> Call:
    return make(place, num_tokens, *sizes)


def _rmsnorm(place: Place, num_tokens: int, hidden: int) -> Call:
    x, weight = place.normal(num_tokens, hidden), place.normal(hidden)
    rows = spread(num_tokens)

    def watch() -> Callable[[Array], list[Sample]]:
        seen, factors = place.get_rows(x, rows), place.get(weight)

        def truth(dtype: Any, storage: str | None) -> Numbers:
            return rmsnorm(seen.astype(dtype), factors.astype(dtype), EPS)

        return lambda y: [Sample("normed", place.get_rows(y, rows), truth, place.storage)]

    return Call(
        run=lambda: place.ops.rmsnorm(x, weight, EPS), watch=watch, inputs={"x": x, "weight": weight, "eps": EPS}
    )


def _add_rmsnorm(place: Place, num_tokens: int, hidden: int) -> Call:
    x, residual, weight = place.normal(num_tokens, hidden), place.normal(num_tokens, hidden), place.normal(hidden)
    rows = spread(num_tokens)

    def watch() -> Callable[[tuple[Array, Array]], list[Sample]]:
        seen, before, factors = place.get_rows(x, rows), place.get_rows(residual, rows), place.get(weight)

        def truth(which: int, dtype: Any, storage: str | None) -> Numbers:
            given = (part.astype(dtype) for part in (seen, before, factors))
            return add_rmsnorm(*given, EPS, storage=storage)[which]

        return lambda answer: [
            Sample(name, place.get_rows(part, rows), partial(truth, which), place.storage)
            for which, (name, part) in enumerate(zip(("normed", "new_residual"), answer, strict=True))
        ]

    inputs = {"x": x, "residual": residual, "weight": weight, "eps": EPS}
    return Call(run=lambda: place.ops.add_rmsnorm(x, residual, weight, EPS), watch=watch, inputs=inputs)


def _layernorm(place: Place, num_tokens: int, hidden: int) -> Call:
    """Without a bias, as Command-R has it."""
    x, weight = place.normal(num_tokens, hidden), place.normal(hidden)
    rows = spread(num_tokens)

    def watch() -> Callable[[Array], list[Sample]]:
        seen, factors = place.get_rows(x, rows), place.get(weight)

        def truth(dtype: Any, storage: str | None) -> Numbers:
            return layernorm(seen.astype(dtype), factors.astype(dtype), None, EPS)

        return lambda y: [Sample("normed", place.get_rows(y, rows), truth, place.storage)]

    inputs = {"x": x, "weight": weight, "bias": None, "eps": EPS}
    return Call(run=lambda: place.ops.layernorm(x, weight, None, EPS), watch=watch, inputs=inputs)


def _gate_up_act(place: Place, num_tokens: int, intermediate: int) -> Call:
    gate_up = place.normal(num_tokens, 2 * intermediate)
    rows = spread(num_tokens)

    def watch() -> Callable[[Array], list[Sample]]:
        seen = place.get_rows(gate_up, rows)
        return lambda y: [
            Sample(
                "y",
                place.get_rows(y, rows),
                lambda dtype, storage: gate_up_act(seen.astype(dtype), "silu"),
                place.storage,
            )
        ]

    return Call(run=lambda: place.ops.gate_up_act(gate_up, "silu"), watch=watch, inputs={"gate_up": gate_up})


def _embedding(place: Place, num_tokens: int, vocab: int, hidden: int) -> Call:
    """The table is far larger than any cache, and the ids are random."""
    ids = place.rng.integers(0, vocab, num_tokens).astype(np.int32)
    table, token_ids = place.shared("table", lambda: place.normal(vocab, hidden)), place.put(ids)
    rows = spread(num_tokens)

    def watch() -> Callable[[Array], list[Sample]]:
        seen = place.get_rows(table, ids[rows].tolist())
        return lambda y: [
            Sample("y", place.get_rows(y, rows), lambda dtype, storage: seen.astype(dtype), place.storage)
        ]

    inputs = {"token_ids": token_ids, "table": table}
    return Call(run=lambda: place.ops.embedding(token_ids, table), watch=watch, inputs=inputs)


def _rope(norms: bool, place: Place, num_tokens: int, heads: int) -> Call:
    """q, k and v are parts of the rows that one projection gives; the slots are those of shuffled blocks."""
    qkv = place.normal(num_tokens, heads + 2 * KV_HEADS, HEAD_DIM)
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + KV_HEADS], qkv[:, heads + KV_HEADS :]
    cos_sin = place.normal(num_tokens, HEAD_DIM, dtype=np.float32)
    blocks = place.rng.permutation(-(-num_tokens // BLOCK_SIZE) + 1)
    slots = (blocks[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1)[:num_tokens].astype(np.int32)
    caches = [place.device.empty((len(blocks), BLOCK_SIZE, KV_HEADS, HEAD_DIM), place.dtype) for _ in range(2)]
    weights = [place.normal(HEAD_DIM) for _ in range(2)] if norms else []
    where = (cos_sin, place.put(slots), *caches)
    rows = spread(num_tokens)

    def watch() -> Callable[[Array], list[Sample]]:
        seen, angles = [place.get_rows(part, rows) for part in (q, k, v)], place.get_rows(cos_sin, rows)
        factors = [place.get(weight) for weight in weights]

        def truth(which: int, dtype: Any, storage: str | None) -> Numbers:
            parts = [part.astype(dtype) for part in seen]
            if norms:
                parts[:2] = qk_norm(parts[0], parts[1], *(factor.astype(dtype) for factor in factors), EPS)
            return rope(parts[which], angles.astype(dtype)) if which < 2 else parts[which]

        def written(cache: Array) -> Numbers:
            return place.get_rows(cache.reshape(-1, KV_HEADS, HEAD_DIM), slots[rows].tolist())

        return lambda answer: [
            Sample(name, found, partial(truth, which), place.storage)
            for which, (name, found) in enumerate(
                (("q", place.get_rows(answer, rows)), ("k", written(caches[0])), ("v", written(caches[1])))
            )
        ]

    if norms:
        return Call(run=lambda: place.ops.qk_norm_rope_kv_write(q, k, v, *weights, EPS, *where), watch=watch)
    return Call(run=lambda: place.ops.rope_kv_write(q, k, v, *where), watch=watch)
