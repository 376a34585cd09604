"""Rows of attention over the paged cache: blocks of 16 in shuffled order, heads of 128 that share 8 KV heads."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.bench.place import Place
from conformance.bench.row import Call, Goal, Row, Sample, Work
from engine.coded_kv import CodedKV, KVArray, KVKind, parts_of
from ref.attention import attention_dense
from ref.quant.kv import kv_dequantize, kv_quantize

Array = Any
Numbers = NDArray[Any]

BLOCK_SIZE, HEAD_DIM, KV_HEADS = 16, 128, 8
ITEM = 2  # bytes of bfloat16
SM_SCALE = HEAD_DIM**-0.5
LONGEST = 16384  # tokens that a row of the engine's block table has room for, at a max_model_len of so many
DECODES = (  # heads, sequences, tokens of each, tokens that the table has room for, goal
    (64, 1, 131072, 131072, Goal(share=0.8)),
    (64, 64, 4096, 4096, Goal(share=0.8)),
    *((32, batch, 1024, LONGEST, None) for batch in (1, 8, 32, 64, 128)),
)
CODED_DECODES = (  # what the caches hold, and the rest of the same
    ("fp8", 64, 1, 131072, 131072, Goal(share=0.8)),
    ("fp8", 64, 64, 4096, 4096, Goal(share=0.8)),
    ("int8", 64, 64, 4096, 4096, Goal(share=0.8)),
    ("fp8", 32, 64, 1024, LONGEST, None),
)
SCALE = 4  # bytes of a head of a token
PREFILL_HEADS = 32
# tokens → TFLOP/s of the best that others reach on one H200 with keys side by side in memory, by torch 2.11: cuDNN
# with what Hopper alone has, FlashAttention 2 with mma.sync; and what is asked of ours
HOPPER = {2048: (401.0, None), 8192: (548.0, Goal(tflops=450)), 16384: (566.0, None)}
PORTABLE = {2048: (204.0, Goal(tflops=200)), 8192: (317.0, Goal(tflops=300)), 16384: (335.0, None)}
CUDNN, FLASH2 = "cuDNN", "FlashAttention 2"
POOL_ROWS = 32771  # heads with different codes; odd
SEEN = 8  # queries in a row that are looked at
SEEN_HEADS = (2, KV_HEADS - 1)  # and those of which KV heads


def rows() -> list[Row]:
    found = [decode_row(*sizes) for sizes in DECODES]
    found += [decode_row(*sizes, codes=codes) for codes, *sizes in CODED_DECODES]
    for portable, table in ((False, HOPPER), (True, PORTABLE)):
        found += [prefill_row(portable, length, *beside) for length, beside in table.items()]
    return [*found, prefill_row(True, 8192, 0.0, None, "fp8")]


def decode_row(
    heads: int, batch: int, length: int, room: int, goal: Goal | None = None, codes: KVKind | None = None
) -> Row:
    answer = ITEM * batch * heads * HEAD_DIM
    head = ITEM * HEAD_DIM if codes is None else HEAD_DIM + SCALE
    return Row(
        op="attention_decode",
        name=f"heads={heads}/{KV_HEADS}-batch={batch}-context={length}" + (f"-kv-{codes}" if codes else ""),
        work=Work(
            bytes_read=2 * batch * length * KV_HEADS * head + answer,
            bytes_written=answer,
            flops=4 * batch * length * heads * HEAD_DIM,
        ),
        make=partial(_decode, heads=heads, batch=batch, length=length, room=room, codes=codes),
        goal=goal,
    )


def prefill_row(portable: bool, length: int, peer_tflops: float, goal: Goal | None, codes: KVKind | None = None) -> Row:
    """Half of all pairs of tokens are hidden by the causal mask, and not counted."""
    answer = ITEM * length * PREFILL_HEADS * HEAD_DIM
    head = ITEM * HEAD_DIM if codes is None else HEAD_DIM + SCALE
    return Row(
        op="attention_prefill",
        name=f"{'portable' if portable else 'sm90'}-tokens={length}" + (f"-kv-{codes}" if codes else ""),
        work=Work(
            bytes_read=2 * length * KV_HEADS * head + answer,
            bytes_written=answer,
            flops=2 * length * length * PREFILL_HEADS * HEAD_DIM,
        ),
        make=partial(_prefill, length=length, codes=codes),
        goal=goal,
        peer="" if codes else FLASH2 if portable else CUDNN,
        peer_tflops=peer_tflops,
        hopper=not portable,
        portable=portable,
    )


def _cache(place: Place, batch: int, length: int, room: int, codes: KVKind | None) -> tuple[KVArray, KVArray, Numbers]:
    """k_cache, v_cache, and a block table with room columns' worth of tokens."""
    count = -(-length // BLOCK_SIZE)
    shape = (batch * count + 1, BLOCK_SIZE, KV_HEADS, HEAD_DIM)
    table = np.full((batch, -(-room // BLOCK_SIZE)), -1, np.int32)
    table[:, :count] = place.rng.permutation(batch * count).reshape(batch, count)
    if codes is None:
        return place.normal(*shape), place.normal(*shape), table

    def made() -> tuple[Array, Array]:
        numbers = np.random.default_rng(2).standard_normal((POOL_ROWS, HEAD_DIM), np.float32)
        of_rows, scales = kv_quantize(numbers, codes)
        return place.put(of_rows.reshape(-1)), place.put(scales)

    pool = [place.shared(f"{codes} {part}", lambda part=part: made()[part]) for part in (0, 1)]  # type: ignore[misc]
    k_cache, v_cache = (CodedKV(place.repeated(pool[0], *shape), place.repeated(pool[1], *shape[:3])) for _ in "kv")
    return k_cache, v_cache, table


def _keys(place: Place, cache: KVArray, blocks: Array, length: int) -> dict[int, Numbers]:
    """[length, 1, head_dim] of the KV heads that are looked at, in the order of the tokens."""
    numbers, scales = parts_of(cache)
    bits = numbers.view(np.uint16) if numbers.itemsize == 2 else numbers
    found = {head: place.get(bits[:, :, head][blocks].view(numbers.dtype)) for head in SEEN_HEADS}
    if scales is not None:
        found = {head: kv_dequantize(keys, place.get(scales[:, :, head][blocks])) for head, keys in found.items()}
    return {head: keys.reshape(-1, 1, HEAD_DIM)[:length] for head, keys in found.items()}


def _decode(place: Place, heads: int, batch: int, length: int, room: int, codes: KVKind | None) -> Call:
    k_cache, v_cache, table = _cache(place, batch, length, room, codes)
    q = place.normal(batch, heads, HEAD_DIM)
    block_table, seq_lens = place.put(table), place.put(np.full(batch, length, np.int32))
    group, count, row = heads // KV_HEADS, -(-length // BLOCK_SIZE), batch - 1

    def watch() -> Callable[[Array], list[Sample]]:
        seen = place.get(q[row : row + 1])
        keys, values = (_keys(place, cache, block_table[row, :count], length) for cache in (k_cache, v_cache))

        def truth(head: int, dtype: Any, storage: str | None) -> Numbers:
            part = seen[:, head * group : (head + 1) * group].astype(dtype)
            of_head = keys[head].astype(dtype), values[head].astype(dtype)
            return attention_dense(part, *of_head, sm_scale=SM_SCALE, storage=storage)

        def look(out: Array) -> list[Sample]:
            found = place.get(out[row : row + 1])
            return [
                Sample(
                    f"out, KV head {head}",
                    found[:, head * group : (head + 1) * group],
                    partial(truth, head),
                    place.storage,
                )
                for head in SEEN_HEADS
            ]

        return look

    inputs = {"q": q, "k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "seq_lens": seq_lens}
    return Call(
        run=lambda: place.ops.attention_decode(q, k_cache, v_cache, block_table, seq_lens, SM_SCALE),
        watch=watch,
        inputs=inputs,
    )


def _prefill(place: Place, length: int, codes: KVKind | None) -> Call:
    """One prompt, all of it new."""
    k_cache, v_cache, table = _cache(place, 1, length, length, codes)
    q = place.normal(length, PREFILL_HEADS, HEAD_DIM)
    block_table, seq_lens = place.put(table), place.put(np.array([length], np.int32))
    bounds = place.put(np.array([0, length], np.int32))
    group = PREFILL_HEADS // KV_HEADS

    def watch() -> Callable[[Array], list[Sample]]:
        keys, values = (_keys(place, cache, block_table[0], length) for cache in (k_cache, v_cache))
        ends = sorted({min(SEEN, length), length // 2 + 5, length})
        seen = {end: place.get(q[max(end - SEEN, 0) : end]) for end in ends}

        def truth(end: int, head: int, dtype: Any, storage: str | None) -> Numbers:
            part = seen[end][:, head * group : (head + 1) * group].astype(dtype)
            of_head = keys[head][:end].astype(dtype), values[head][:end].astype(dtype)
            return attention_dense(part, *of_head, sm_scale=SM_SCALE, storage=storage)

        def look(out: Array) -> list[Sample]:
            found = {end: place.get(out[max(end - SEEN, 0) : end]) for end in ends}
            return [
                Sample(
                    f"out[:{end}], KV head {head}",
                    found[end][:, head * group : (head + 1) * group],
                    partial(truth, end, head),
                    place.storage,
                )
                for end in ends
                for head in SEEN_HEADS
            ]

        return look

    where = {"block_table": block_table, "cu_seqlens_q": bounds, "seq_lens": seq_lens}
    return Call(
        run=lambda: place.ops.attention_prefill(q, k_cache, v_cache, block_table, bounds, seq_lens, SM_SCALE),
        watch=watch,
        inputs={"q": q, "k_cache": k_cache, "v_cache": v_cache, **where},
    )
