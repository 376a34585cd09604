"""Attention where others went wrong, with answers that can be worked out by hand; ref and the CPU's twins alike."""

from types import ModuleType
from typing import Any

import numpy as np
import pytest

import ref.attention
from conformance.inputs import guarded
from engine.cpu import attention

WINDOW = 4


def cache_of(rows: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """rows [seq_len, head_dim] of one KV head as a paged cache whose blocks run backwards, and its block table.

    Slots behind the last row are NaN.
    """
    num_blocks = -(-len(rows) // block_size)
    padded = np.full((num_blocks * block_size, 1, rows.shape[1]), np.nan, np.float32)
    padded[: len(rows), 0] = rows
    cache = padded.reshape(num_blocks, block_size, 1, -1)[::-1].copy()
    return cache, np.arange(num_blocks - 1, -1, -1, dtype=np.int32)[None]


def prefill(module: ModuleType, q: np.ndarray, seq_len: int, cache: dict[str, Any]) -> np.ndarray:
    """The last len(q) queries of a sequence that has seq_len tokens by now."""
    lens = np.array([seq_len], np.int32)
    return module.attention_prefill(q, **cache, cu_seqlens_q=np.array([0, len(q)], np.int32), seq_lens=lens)


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("seq_len", [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW])
@pytest.mark.parametrize("module", [attention, ref.attention], ids=["cpu", "ref"])
def test_sliding_window_edge(module: ModuleType, seq_len: int, block_size: int) -> None:
    """KRN-02: a query sees itself and the W − 1 keys before it; prefill, chunks of 3 and decode agree.

    All scores are 0, so the answer is the mean of the visible values, and value j is 2^j: every key has its own bit.
    """
    values = 2.0 ** np.arange(seq_len, dtype=np.float32)[:, None] * np.ones((1, 2), np.float32)
    v_cache, block_table = cache_of(values, block_size)
    k_cache, _ = cache_of(np.ones_like(values), block_size)
    cache = {"k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "sm_scale": 1.0, "window": WINDOW}
    q = np.zeros((seq_len, 1, 2), np.float32)
    seen = [range(max(0, place - WINDOW + 1), place + 1) for place in range(seq_len)]
    expected = np.array([sum(2.0**j for j in keys) / len(keys) for keys in seen])

    chunks = [prefill(module, q[i : i + 3], min(i + 3, seq_len), cache) for i in range(0, seq_len, 3)]
    decoded = [module.attention_decode(q[:1], **cache, seq_lens=np.array([i + 1], np.int32)) for i in range(seq_len)]
    for out in (prefill(module, q, seq_len, cache), np.concatenate(chunks), np.concatenate(decoded)):
        # a mean of at most 4: one rounding of 1/n, one a product, one a sum
        np.testing.assert_allclose(out[:, 0, 0], expected, rtol=8 * 2.0**-24)


@pytest.mark.parametrize("exponent", range(18))
def test_one_key_among_very_many(exponent: int) -> None:
    """KRN-09, the kernel's part: of 131072 keys one holds all the weight, at a power of two and beside it.

    Its score is 100 and all others are 0: together they weigh 131071 · e^−100, below 1e-38.
    """
    seq_len = 131072
    k_cache = guarded(np.zeros((seq_len // 64, 64, 1, 4), np.float32), num_axes=1)
    v_cache = np.random.default_rng(0).standard_normal(k_cache.shape, np.float32)
    block_table = np.random.default_rng(1).permutation(seq_len // 64).astype(np.int32)[None]
    cache = {"k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "sm_scale": 1.0}
    lens = np.array([seq_len], np.int32)
    q = np.full((1, 1, 4), 5.0, np.float32)
    for place in (2**exponent - 1, min(2**exponent, seq_len - 1), min(2**exponent + 1, seq_len - 1)):
        slot = (block_table[0, place // 64], place % 64)
        k_cache[slot] = 5.0
        expected = v_cache[slot]
        np.testing.assert_allclose(attention.attention_decode(q, **cache, seq_lens=lens)[0], expected, rtol=1e-6)
        np.testing.assert_allclose(prefill(attention, q, seq_len, cache)[0], expected, rtol=1e-6)
        k_cache[slot] = 0.0
