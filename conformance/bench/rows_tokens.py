"""Rows of the ops that take every token by itself, on the sizes of Llama-3.1-8B; norms of heads as in Qwen3-8B."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.bench.place import Place, spread
from conformance.bench.row import Call, Row, Sample, Work
from ref.activation import act, gate_up_act
from ref.attention import logn_query
from ref.layernorm import add_layernorm, layernorm
from ref.rmsnorm import add_rmsnorm, qk_norm, rmsnorm
from ref.rope import rope

Array = Any
Numbers = NDArray[Any]
Watch = Callable[[], Callable[[Any], list[Sample]]]

TOKENS = (1, 64, 8192)
HIDDEN, INTERMEDIATE, VOCAB, POSITIONS = 4096, 14336, 128256, 8192
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 32, 8, 128, 16
EPS = 1e-5
ITEM = 2  # bytes of bfloat16


def rows() -> list[Row]:
    return [row for num_tokens in TOKENS for row in rows_of(num_tokens)]


def rows_of(
    num_tokens: int, hidden: int = HIDDEN, intermediate: int = INTERMEDIATE, vocab: int = VOCAB, heads: int = HEADS
) -> list[Row]:
    size, weights, ids = ITEM * num_tokens * hidden, ITEM * hidden, 4 * num_tokens
    gated = ITEM * num_tokens * intermediate
    queries, keys = (ITEM * num_tokens * HEAD_DIM * count for count in (heads, KV_HEADS))
    qkv, beside = queries + 2 * keys, ids * (HEAD_DIM + 1)  # cos_sin and slots
    found: list[tuple[str, Work, Callable[..., Call], tuple[int, ...]]] = [
        ("rmsnorm", Work(size + weights, size), _rmsnorm, (hidden,)),
        ("add_rmsnorm", Work(2 * size + weights, 2 * size), _add_rmsnorm, (hidden,)),
        ("layernorm", Work(size + weights, size), _layernorm, (hidden,)),
        ("add_layernorm", Work(2 * size + weights, 2 * size), _add_layernorm, (hidden,)),
        ("gate_up_act", Work(2 * gated, gated), _gate_up_act, (intermediate,)),
        ("act", Work(gated, gated), _act, (intermediate,)),
        ("rope_kv_write", Work(qkv + beside, qkv), partial(_rope, False), (heads,)),
        ("qk_norm_rope_kv_write", Work(qkv + beside + 2 * ITEM * HEAD_DIM, qkv), partial(_rope, True), (heads,)),
        ("kv_cache_write", Work(2 * keys + ids, 2 * keys), _kv_cache_write, ()),
        ("logn_query", Work(queries + ids, queries), _logn_query, (heads,)),
        ("embedding", Work(size + ids, size), _embedding, (vocab, hidden)),
        ("position_embedding", Work(2 * (size + ids), size), _position_embedding, (vocab, hidden)),
    ]
    return [
        Row(op=op, name=f"tokens={num_tokens}", work=work, make=partial(_call, make, num_tokens, sizes))
        for op, work, make, sizes in found
    ]


def _call(make: Callable[..., Call], num_tokens: int, sizes: tuple[int, ...], place: Place) -> Call:
    return make(place, num_tokens, *sizes)


def _watch(
    place: Place, truth: Callable[..., Any], by_token: Sequence[Array], whole: Sequence[Array], *names: str
) -> Watch:
    """Looks at some tokens. truth: of those rows of by_token, all of whole, and storage, the parts of the answer."""
    rows = spread(len(by_token[0]))

    def watch() -> Callable[[Any], list[Sample]]:
        seen = [place.get_rows(array, rows) for array in by_token] + [place.get(array) for array in whole]

        def expected(which: int, dtype: Any, storage: str | None) -> Numbers:
            found = truth(*(a.astype(dtype) if a.dtype.kind != "i" else a for a in seen), storage=storage)
            part: Numbers = found[which] if isinstance(found, tuple) else found
            return part

        def look(answer: Any) -> list[Sample]:
            parts = answer if isinstance(answer, tuple) else (answer,)
            return [
                Sample(name, place.get_rows(part, rows), partial(expected, which), place.storage)
                for which, (name, part) in enumerate(zip(names, parts, strict=True))
            ]

        return look

    return watch


def _rmsnorm(place: Place, num_tokens: int, hidden: int) -> Call:
    x, weight = place.normal(num_tokens, hidden), place.normal(hidden)
    return Call(
        run=lambda: place.ops.rmsnorm(x, weight, EPS),
        watch=_watch(place, lambda x, weight, storage: rmsnorm(x, weight, EPS), [x], [weight], "normed"),
        inputs={"x": x, "weight": weight, "eps": EPS},
    )


def _add_rmsnorm(place: Place, num_tokens: int, hidden: int) -> Call:
    x, residual, weight = place.normal(num_tokens, hidden), place.normal(num_tokens, hidden), place.normal(hidden)
    truth = partial(add_rmsnorm, eps=EPS)
    return Call(
        run=lambda: place.ops.add_rmsnorm(x, residual, weight, EPS),
        watch=_watch(place, truth, [x, residual], [weight], "normed", "new_residual"),
        inputs={"x": x, "residual": residual, "weight": weight, "eps": EPS},
    )


def _layernorm(place: Place, num_tokens: int, hidden: int) -> Call:
    """Without a bias, as Command-R has it."""
    x, weight = place.normal(num_tokens, hidden), place.normal(hidden)
    return Call(
        run=lambda: place.ops.layernorm(x, weight, None, EPS),
        watch=_watch(place, lambda x, weight, storage: layernorm(x, weight, None, EPS), [x], [weight], "normed"),
        inputs={"x": x, "weight": weight, "bias": None, "eps": EPS},
    )


def _add_layernorm(place: Place, num_tokens: int, hidden: int) -> Call:
    x, residual, weight = place.normal(num_tokens, hidden), place.normal(num_tokens, hidden), place.normal(hidden)
    truth = partial(add_layernorm, bias=None, eps=EPS)
    return Call(
        run=lambda: place.ops.add_layernorm(x, residual, weight, None, EPS),
        watch=_watch(place, truth, [x, residual], [weight], "normed", "new_residual"),
    )


def _gate_up_act(place: Place, num_tokens: int, intermediate: int) -> Call:
    gate_up = place.normal(num_tokens, 2 * intermediate)
    return Call(
        run=lambda: place.ops.gate_up_act(gate_up, "silu"),
        watch=_watch(place, lambda gate_up, storage: gate_up_act(gate_up, "silu"), [gate_up], [], "y"),
        inputs={"gate_up": gate_up},
    )


def _act(place: Place, num_tokens: int, intermediate: int) -> Call:
    x = place.normal(num_tokens, intermediate)
    return Call(
        run=lambda: place.ops.act(x, "gelu_new"),
        watch=_watch(place, lambda x, storage: act(x, "gelu_new"), [x], [], "y"),
        inputs={"x": x, "activation": "gelu_new"},
    )


def _logn_query(place: Place, num_tokens: int, heads: int) -> Call:
    q = place.normal(num_tokens, heads, HEAD_DIM)
    positions = place.put(place.rng.integers(0, POSITIONS, num_tokens).astype(np.int32))
    length = POSITIONS // 4
    return Call(
        run=lambda: place.ops.logn_query(q, positions, length),
        watch=_watch(place, lambda q, positions, storage: logn_query(q, positions, length), [q, positions], [], "q"),
    )


def _embedding(place: Place, num_tokens: int, vocab: int, hidden: int) -> Call:
    """The table is far larger than any cache, and the ids are random."""
    ids = place.rng.integers(0, vocab, num_tokens).astype(np.int32)
    table, token_ids = place.shared(f"table-{hidden}", lambda: place.normal(vocab, hidden)), place.put(ids)
    rows = spread(num_tokens)

    def watch() -> Callable[[Array], list[Sample]]:
        seen = place.get_rows(table, ids[rows].tolist())
        return lambda y: [
            Sample("y", place.get_rows(y, rows), lambda dtype, storage: seen.astype(dtype), place.storage)
        ]

    inputs = {"token_ids": token_ids, "table": table}
    return Call(run=lambda: place.ops.embedding(token_ids, table), watch=watch, inputs=inputs)


def _position_embedding(place: Place, num_tokens: int, vocab: int, hidden: int) -> Call:
    ids, at = (place.rng.integers(0, count, num_tokens).astype(np.int32) for count in (vocab, POSITIONS))
    table = place.shared(f"table-{hidden}", lambda: place.normal(vocab, hidden))
    learned = place.shared(f"positions-{hidden}", lambda: place.normal(POSITIONS, hidden))
    token_ids, positions, rows = place.put(ids), place.put(at), spread(num_tokens)

    def watch() -> Callable[[Array], list[Sample]]:
        seen = [place.get_rows(part, where[rows].tolist()) for part, where in ((table, ids), (learned, at))]

        def truth(dtype: Any, storage: str | None) -> Numbers:
            return seen[0].astype(dtype) + seen[1].astype(dtype)

        return lambda y: [Sample("y", place.get_rows(y, rows), truth, place.storage)]

    return Call(run=lambda: place.ops.position_embedding(token_ids, positions, table, learned), watch=watch)


def _slots(place: Place, num_tokens: int) -> tuple[NDArray[np.int32], list[Array]]:
    """Where the tokens go, in blocks of shuffled order, and both caches."""
    blocks = place.rng.permutation(-(-num_tokens // BLOCK_SIZE) + 1)
    slots = (blocks[:, None] * BLOCK_SIZE + np.arange(BLOCK_SIZE)).reshape(-1)[:num_tokens].astype(np.int32)
    shape = (len(blocks), BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    return slots, [place.device.empty(shape, place.dtype) for _ in range(2)]


def _kv_cache_write(place: Place, num_tokens: int) -> Call:
    k, v = (place.normal(num_tokens, KV_HEADS, HEAD_DIM) for _ in range(2))
    slots, caches = _slots(place, num_tokens)
    where, rows = place.put(slots), spread(num_tokens)

    def watch() -> Callable[[None], list[Sample]]:
        seen = [place.get_rows(part, rows) for part in (k, v)]
        return lambda _: [
            Sample(name, _written(place, cache, slots[rows]), partial(_cast, part), place.storage)
            for name, cache, part in zip("kv", caches, seen, strict=True)
        ]

    return Call(run=lambda: place.ops.kv_cache_write(k, v, where, *caches), watch=watch)


def _written(place: Place, cache: Array, slots: NDArray[np.int32]) -> Numbers:
    return place.get_rows(cache.reshape(-1, KV_HEADS, HEAD_DIM), slots.tolist())


def _cast(array: Numbers, dtype: Any, storage: str | None) -> Numbers:
    return array.astype(dtype)


def _rope(norms: bool, place: Place, num_tokens: int, heads: int) -> Call:
    """q, k and v are parts of the rows that one projection gives."""
    qkv = place.normal(num_tokens, heads + 2 * KV_HEADS, HEAD_DIM)
    q, k, v = qkv[:, :heads], qkv[:, heads : heads + KV_HEADS], qkv[:, heads + KV_HEADS :]
    cos_sin = place.normal(num_tokens, HEAD_DIM, dtype=np.float32)
    slots, caches = _slots(place, num_tokens)
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

        def look(answer: Array) -> list[Sample]:
            found = [place.get_rows(answer, rows), *(_written(place, cache, slots[rows]) for cache in caches)]
            return [
                Sample(name, part, partial(truth, which), place.storage)
                for which, (name, part) in enumerate(zip("qkv", found, strict=True))
            ]

        return look

    if norms:
        return Call(run=lambda: place.ops.qk_norm_rope_kv_write(q, k, v, *weights, EPS, *where), watch=watch)
    return Call(run=lambda: place.ops.rope_kv_write(q, k, v, *where), watch=watch)
