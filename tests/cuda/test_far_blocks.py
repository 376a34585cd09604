"""KVM-01: blocks of the KV cache whose elements lie past 2³¹ and 2³² give the same bits as blocks at its beginning.

The caches are files with holes, of which only what is touched takes memory. A kernel that multiplies a block's number
by its size in 32 bits would read or write near the beginning, where other numbers lie.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.host_device import HostDevice
from conformance.inputs import normal
from engine.cpu import sampling
from engine.kernels.table import kernel_ops
from engine.ops import OpTable
from tests.cuda.edges import BF16, unbacked

Array = NDArray[Any]

BLOCK, KV_HEADS, HEAD_DIM = 16, 2, 64
N_HEADS = 6
ELEMENTS = BLOCK * KV_HEADS * HEAD_DIM  # of a block
NEAR = (5, 3, 8)  # not where a far block would wrap around to
EDGES = [2**31 // ELEMENTS, 2**32 // ELEMENTS]
LENS = np.array([41], np.int32)  # of the one sequence: two blocks and a part of a third


@pytest.fixture(scope="module")
def ops() -> OpTable:
    return kernel_ops(HostDevice(), sampling)


@pytest.fixture(scope="module")
def caches() -> tuple[Array, Array]:
    shape = (EDGES[-1] + 3, BLOCK, KV_HEADS, HEAD_DIM)
    return unbacked(shape), unbacked(shape)


@pytest.fixture(params=EDGES, ids=["2^31", "2^32"])
def far(request: pytest.FixtureRequest) -> tuple[int, ...]:
    """Blocks that begin before, at and after the edge."""
    edge: int = request.param
    return edge + 1, edge - 1, edge


def rows(seed: int, *shape: int) -> Array:
    return normal(np.random.default_rng(seed), *shape).astype(BF16)


def fill(caches: tuple[Array, Array], far: tuple[int, ...]) -> None:
    """The same numbers near and far, and others in the blocks that a number of 32 bits would wrap around to."""
    for number, cache in enumerate(caches):
        cache[:10] = rows(7 + number, 10, BLOCK, KV_HEADS, HEAD_DIM)
        cache[list(far)] = cache[list(NEAR)]


def slots(blocks: tuple[int, ...]) -> Array:
    """Of all tokens of the blocks, in order."""
    return (np.array(blocks)[:, None] * BLOCK + np.arange(BLOCK)).reshape(-1).astype(np.int32)


def test_attention_decode(ops: OpTable, caches: tuple[Array, Array], far: tuple[int, ...]) -> None:
    fill(caches, far)
    q = rows(1, 1, N_HEADS, HEAD_DIM)
    found = [ops.attention_decode(q, *caches, np.array([blocks], np.int32), LENS, 0.125) for blocks in (NEAR, far)]
    assert found[0].tobytes() == found[1].tobytes()
    assert found[0].astype(np.float32).any()


def test_attention_prefill(ops: OpTable, caches: tuple[Array, Array], far: tuple[int, ...]) -> None:
    fill(caches, far)
    q, bounds = rows(2, 20, N_HEADS, HEAD_DIM), np.array([0, 20], np.int32)
    found = [
        ops.attention_prefill(q, *caches, np.array([blocks], np.int32), bounds, LENS, 0.125) for blocks in (NEAR, far)
    ]
    assert found[0].tobytes() == found[1].tobytes()
    assert found[0].astype(np.float32).any()


@pytest.mark.parametrize("op", ["rope", "qk_norm_rope", "kv_cache"])
def test_write(op: str, ops: OpTable, caches: tuple[Array, Array], far: tuple[int, ...]) -> None:
    fill(caches, far)
    num_tokens = len(far) * BLOCK
    q = rows(3, num_tokens, N_HEADS, HEAD_DIM)
    k, v = rows(4, num_tokens, KV_HEADS, HEAD_DIM), rows(5, num_tokens, KV_HEADS, HEAD_DIM)
    weight, cos_sin = rows(6, HEAD_DIM), rows(7, num_tokens, HEAD_DIM).astype(np.float32)
    before = [cache[:10].copy() for cache in caches]
    for blocks in (far, NEAR):
        place = (slots(blocks), *caches)
        if op == "kv_cache":
            ops.kv_cache_write(k, v, *place)
        elif op == "rope":
            ops.rope_kv_write(q, k, v, cos_sin, *place)
        else:
            ops.qk_norm_rope_kv_write(q, k, v, weight, weight, 1e-5, cos_sin, *place)
        if blocks == far:
            assert all((cache[:10] == old).all() for cache, old in zip(caches, before, strict=True))
    for cache, old in zip(caches, before, strict=True):
        assert cache[list(far)].tobytes() == cache[list(NEAR)].tobytes()
        assert not (cache[list(NEAR)] == old[list(NEAR)]).all()


def test_copy_and_swap(ops: OpTable, caches: tuple[Array, Array], far: tuple[int, ...]) -> None:
    """Out of far blocks and into them, within the cache and between two."""
    fill(caches, far)
    numbers = [np.array(blocks, np.int32) for blocks in (far, (0, 1, 2), (2, 1, 0))]
    host = [np.zeros((3, *caches[0].shape[1:]), BF16) for _ in range(2)]
    ops.kv_cache_swap(*caches, *host, numbers[0], numbers[1])
    for kept, cache in zip(host, caches, strict=True):
        assert kept.tobytes() == cache[list(NEAR)].tobytes()
    ops.kv_cache_swap(*host, *caches, numbers[2], numbers[0])
    for kept, cache in zip(host, caches, strict=True):
        assert cache[list(far)].tobytes() == kept[::-1].tobytes()
    ops.kv_cache_copy(*caches, np.array(NEAR, np.int32), numbers[0])
    for cache in caches:
        assert cache[list(far)].tobytes() == cache[list(NEAR)].tobytes()
