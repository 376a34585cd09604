"""PyTorch's kernels as functions of our op table, for --impl conformance.peers.torch_ops:NAME.

Arrays come as NumPy's or CuPy's and go back as they came; nothing is copied. Sixteen bits cross as integers, since not
every library has bfloat16 in its DLPack.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import ml_dtypes
import numpy as np
import torch
from torch.nn import functional

Array = Any

BF16 = np.dtype(ml_dtypes.bfloat16)
ACTIVATIONS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": functional.silu,
    "gelu": functional.gelu,
    "gelu_new": lambda x: functional.gelu(x, approximate="tanh"),
    "relu": functional.relu,
}


def tensor(array: Array) -> torch.Tensor:
    """The same memory."""
    if array.dtype == BF16:
        return torch.from_dlpack(array.view(np.int16)).view(torch.bfloat16)
    return torch.from_dlpack(array)


def array_like(found: torch.Tensor, like: Array) -> Array:
    """The same memory, as NumPy or CuPy has it."""
    namespace = sys.modules[type(like).__module__.partition(".")[0]]
    if found.dtype == torch.bfloat16:
        return namespace.from_dlpack(found.view(torch.int16)).view(BF16)
    return namespace.from_dlpack(found)


def rmsnorm(x: Array, weight: Array, eps: float) -> Array:
    return array_like(functional.rms_norm(tensor(x), (x.shape[-1],), tensor(weight), eps), x)


def layernorm(x: Array, weight: Array, bias: Array | None, eps: float) -> Array:
    """Weights of one row; of a row a head the norm is scaled afterwards."""
    if weight.ndim == 1:
        shift = None if bias is None else tensor(bias)
        return array_like(functional.layer_norm(tensor(x), (x.shape[-1],), tensor(weight), shift, eps), x)
    normed = functional.layer_norm(tensor(x), (x.shape[-1],), eps=eps) * tensor(weight)
    return array_like(normed if bias is None else normed + tensor(bias), x)


def gate_up_act(gate_up: Array, activation: str = "silu") -> Array:
    gate, up = tensor(gate_up).chunk(2, dim=-1)
    return array_like(ACTIVATIONS[activation](gate) * up, gate_up)


def act(x: Array, activation: str) -> Array:
    return array_like(ACTIVATIONS[activation](tensor(x)), x)


def embedding(token_ids: Array, table: Array, first: int | None = None) -> Array:
    if first is None:
        return array_like(functional.embedding(tensor(token_ids), tensor(table)), table)
    own = tensor(token_ids) - first
    is_own = (own >= 0) & (own < len(table))
    rows = functional.embedding(torch.where(is_own, own, 0), tensor(table))
    return array_like(torch.where(is_own[:, None], rows, 0), table)


def linear(x: Array, weight: Array, bias: Array | None) -> Array:
    return array_like(functional.linear(tensor(x), tensor(weight), None if bias is None else tensor(bias)), x)


def attention_prefill(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    cu_seqlens_q: Array,
    seq_lens: Array,
    sm_scale: float,
    window: int | None = None,
) -> Array:
    """Keys and values of each sequence gathered side by side, then scaled_dot_product_attention with a mask."""
    queries, out = tensor(q), torch.zeros(q.shape, dtype=tensor(q).dtype, device=tensor(q).device)
    bounds, block_size = cu_seqlens_q.tolist(), k_cache.shape[1]
    for row, seq_len in enumerate(seq_lens.tolist()):
        first, end = bounds[row : row + 2]
        if not seq_len:
            continue
        blocks = tensor(block_table)[row, : -(-seq_len // block_size)].long()
        keys, values = (tensor(cache)[blocks].flatten(0, 1)[:seq_len].transpose(0, 1) for cache in (k_cache, v_cache))
        positions = torch.arange(seq_len, device=out.device)
        mine = positions[seq_len - (end - first) :, None]
        mask = (positions <= mine) & (positions > mine - (window or seq_len + 1))
        part = queries[first:end].transpose(0, 1)
        found = functional.scaled_dot_product_attention(
            part, keys, values, attn_mask=mask, scale=sm_scale, enable_gqa=True
        )
        out[first:end] = found.transpose(0, 1)
    return array_like(out, q)


def attention_decode(
    q: Array,
    k_cache: Array,
    v_cache: Array,
    block_table: Array,
    seq_lens: Array,
    sm_scale: float,
    window: int | None = None,
) -> Array:
    namespace = sys.modules[type(q).__module__.partition(".")[0]]
    bounds = namespace.arange(len(q) + 1, dtype=np.int32)
    return attention_prefill(q, k_cache, v_cache, block_table, bounds, seq_lens, sm_scale, window)
