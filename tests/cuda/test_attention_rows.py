"""A step that mixes decoding rows and prompts is answered in one array: each kernel writes its own rows alone."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conformance.host_device import HostDevice
from engine.errors import KernelError
from engine.kernels.attention import attention_decode, attention_prefill
from ref import attention

Array = np.ndarray[Any, Any]

N_HEADS, N_KV_HEADS, HEAD_DIM, BLOCK_SIZE, NUM_BLOCKS = 4, 2, 64, 16, 12
STARTS, COUNTS = (20, 3, 40, 5), (1, 1, 7, 12)  # two decode, two have prompts
NUM_DECODES, NUM_PADDED = 2, 3
SM_SCALE = 0.125


@pytest.fixture(scope="module")
def step() -> dict[str, Array]:
    rng = np.random.default_rng(5)
    num_rows = sum(COUNTS) + NUM_PADDED

    def numbers(*shape: int) -> Array:
        return rng.standard_normal(shape, np.float32).astype(ml_dtypes.bfloat16)

    return {
        "q": numbers(num_rows, N_HEADS, HEAD_DIM),
        "k_cache": numbers(NUM_BLOCKS, BLOCK_SIZE, N_KV_HEADS, HEAD_DIM),
        "v_cache": numbers(NUM_BLOCKS, BLOCK_SIZE, N_KV_HEADS, HEAD_DIM),
        "block_table": rng.permutation(NUM_BLOCKS).reshape(4, 3).astype(np.int32),
        "cu_seqlens_q": np.cumsum([0, *COUNTS], dtype=np.int32),
        "seq_lens": np.array(STARTS, np.int32) + np.array(COUNTS, np.int32),
    }


def test_rows_of_a_mixed_step(step: dict[str, Array]) -> None:
    """As models.llama.attend calls them: prompts from a row on, padding behind; then the rows before."""
    device, rows = HostDevice("greedy"), slice(None, NUM_DECODES)
    q, caches, table, lens = step["q"], (step["k_cache"], step["v_cache"]), step["block_table"], step["seq_lens"]
    ends = step["cu_seqlens_q"]
    out = np.full_like(q, 7.0)
    prompts = (table[NUM_DECODES:], ends[NUM_DECODES:], lens[NUM_DECODES:])
    given = attention_prefill(q, *caches, *prompts, SM_SCALE, None, out=out, device=device)
    assert given is out
    untouched = np.r_[0:NUM_DECODES, ends[-1] : len(q)]
    assert (out[untouched] == 7.0).all()
    attention_decode(q[rows], *caches, table[rows], lens[rows], SM_SCALE, None, out=out[rows], device=device)
    assert (out[ends[-1] :] == 7.0).all()
    wide = {name: array.astype(np.float64) if array.dtype.kind != "i" else array for name, array in step.items()}
    expected = attention.attention_prefill(**wide, sm_scale=SM_SCALE)[: ends[-1]]
    np.testing.assert_allclose(out[: ends[-1]].astype(np.float64), expected, rtol=0, atol=4 * 2**-8)


@pytest.mark.parametrize("wrong", ["shape", "dtype", "stride"])
def test_an_out_that_does_not_fit(step: dict[str, Array], wrong: str) -> None:
    q, lens = step["q"][:4], step["seq_lens"]
    out = {
        "shape": np.empty((5, N_HEADS, HEAD_DIM), q.dtype),
        "dtype": np.empty(q.shape, np.float16),
        "stride": np.empty((4, 2 * N_HEADS, HEAD_DIM), q.dtype)[:, :N_HEADS],
    }[wrong]
    arguments = (q, step["k_cache"], step["v_cache"], step["block_table"])
    with pytest.raises(KernelError, match="attention_decode: out "):
        attention_decode(*arguments, lens, SM_SCALE, None, out=out, device=HostDevice())
    with pytest.raises(KernelError, match="attention_prefill: out "):
        attention_prefill(*arguments, np.arange(5, dtype=np.int32), lens, SM_SCALE, None, out=out, device=HostDevice())
