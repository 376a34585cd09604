"""A solution of each exercise in plain NumPy, written without ref, and faults to plant in them.

FAULTS holds (exercise, what is wrong, text, other text): the text stands exactly once in the solution.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def rmsnorm(x: Array, weight: Array, eps: float) -> Array:
    mean_square = (x * x).mean(axis=-1, keepdims=True)
    return x / np.sqrt(mean_square + eps) * weight


def bf16_bits(x: Array) -> Array:
    bits = x.view(np.uint32)
    upper, lower = bits >> 16, bits & 0xFFFF
    up = (lower > 0x8000) | ((lower == 0x8000) & (upper % 2 == 1))
    rounded = upper + up
    return np.where(np.isnan(x), upper & 0x8000 | 0x7FC0, rounded).astype(np.uint16)


def rope(x: Array, cos_sin: Array) -> Array:
    cos, sin = np.split(cos_sin[:, None, :], 2, axis=-1)
    half = cos.shape[-1]
    first, second, rest = x[..., :half], x[..., half : 2 * half], x[..., 2 * half :]
    return np.concatenate([first * cos - second * sin, second * cos + first * sin, rest], axis=-1)


def attention_dense(q: Array, k: Array, v: Array, sm_scale: float) -> Array:
    group = q.shape[1] // k.shape[1]
    keys, values = np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)
    scores = np.einsum("qhd,khd->hqk", q, keys) * sm_scale
    position = np.arange(len(q)) + len(k) - len(q)
    scores = np.where(np.arange(len(k)) > position[:, None], -np.inf, scores).astype(np.float32)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    weights = weights / weights.sum(axis=-1, keepdims=True)
    return np.einsum("hqk,khd->qhd", weights, values)


def attention_combine(partial_out: Array, partial_lse: Array) -> tuple[Array, Array]:
    largest = partial_lse.max(axis=0)
    largest = np.where(np.isinf(largest), 0, largest).astype(np.float32)
    shares = np.exp(partial_lse - largest)
    total = shares.sum(axis=0)
    out = (shares[..., None] * partial_out).sum(axis=0) / np.where(total == 0, 1, total)[..., None]
    return out.astype(np.float32), largest + np.log(total)


def attention_decode(
    q: Array, k_cache: Array, v_cache: Array, block_table: Array, seq_lens: Array, sm_scale: float
) -> Array:
    block_size = k_cache.shape[1]
    out = np.zeros_like(q)
    for s, seq_len in enumerate(seq_lens):
        blocks = block_table[s, : -(-seq_len // block_size)]
        k = k_cache[blocks].reshape(-1, *k_cache.shape[2:])[:seq_len]
        v = v_cache[blocks].reshape(-1, *v_cache.shape[2:])[:seq_len]
        group = q.shape[1] // k.shape[1]
        for head in range(q.shape[1]):
            kv_head = head // group
            scores = k[:, kv_head] @ q[s, head] * sm_scale
            weights = np.exp(scores - scores.max())
            out[s, head] = weights @ v[:, kv_head] / weights.sum()
    return out


def sample_top_p(logits: Array, temperature: Array, top_p: Array, uniforms: Array) -> Array:
    token_ids = []
    for row, heat, p, uniform in zip(logits, temperature, top_p, uniforms, strict=True):
        weights = np.exp((row - row.max()) / heat).astype(np.float64)
        order = np.argsort(-row, kind="stable")
        mass = np.cumsum(weights[order])
        before = mass - weights[order]
        kept = np.zeros_like(weights)
        inside = order[before < p * mass[-1]]
        kept[inside] = weights[inside]
        running = np.cumsum(kept)
        token_ids.append(np.argmax(running > uniform * running[-1]))
    return np.array(token_ids, np.int32)


def int8_linear(x: Array, wq: Array, w_scale: Array) -> Array:
    scale = np.abs(x).max(axis=1, keepdims=True) / np.float32(127)
    steps = x / np.where(scale == 0, 1, scale)
    xq = np.rint(steps)
    sums = xq.astype(np.int32) @ wq.astype(np.int32).T
    return (sums * scale * w_scale).astype(np.float32)


def gptq_dequantize(qweight: Array, qzeros: Array, scales: Array, g_idx: Array, bits: int) -> Array:
    shifts = np.arange(0, 32, bits)
    mask = 2**bits - 1
    q = (qweight[:, None, :] >> shifts[:, None] & mask).reshape(len(g_idx), -1)
    zeros = (qzeros[:, :, None] >> shifts & mask).reshape(len(scales), -1)
    zeros = (zeros + 1) & mask
    weight = (q - zeros[g_idx]) * scales[g_idx].astype(np.float32)
    return weight.T.astype(np.float32)


def tensor_parallel_mlp(x: Array, gate_up_proj: Array, down_proj: Array, world_size: int) -> Array:
    gate_proj, up_proj = np.split(gate_up_proj, 2)
    partial, start = [], 0
    for rank in range(world_size):
        each, more = divmod(down_proj.shape[1], world_size)
        end = start + each + (rank < more)
        gate, up = x @ gate_proj[start:end].T, x @ up_proj[start:end].T
        act = gate / (1 + np.exp(-gate)) * up
        partial.append(act @ down_proj[:, start:end].T)
        start = end
    return np.stack(partial)


def moe_route(
    router_logits: Array, bias: Array, top_k: int, n_group: int, topk_group: int, scaling_factor: float
) -> tuple[Array, Array]:
    scores = 1 / (1 + np.exp(-router_logits))
    choice = scores + bias
    ids, weights = [], []
    for s, c in zip(scores, choice, strict=True):
        groups = c.reshape(n_group, -1)
        group_scores = np.sort(groups, axis=1)[:, -2:].sum(axis=1)
        best = np.argsort(-group_scores, kind="stable")[:topk_group]
        masked = np.full_like(groups, -np.inf)
        masked[best] = groups[best]
        chosen = np.argsort(-masked.reshape(-1), kind="stable")[:top_k]
        ids.append(chosen)
        weights.append(s[chosen] / s[chosen].sum() * np.float32(scaling_factor))
    return np.stack(ids), np.stack(weights)


def mla_decode(q: Array, latent: Array, kv_b_proj: Array, sm_scale: float) -> Array:
    n_heads, rank = len(q), kv_b_proj.shape[1]
    nope = q.shape[1] - (latent.shape[1] - rank)
    by_head = kv_b_proj.reshape(n_heads, -1, rank)
    w_uk, w_uv = by_head[:, :nope], by_head[:, nope:]
    absorbed = np.einsum("hn,hnc->hc", q[:, :nope], w_uk)
    scores = (absorbed @ latent[:, :rank].T + q[:, nope:] @ latent[:, rank:].T) * sm_scale
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    summed = weights @ latent[:, :rank] / weights.sum(axis=-1, keepdims=True)
    return np.einsum("hc,hvc->hv", summed, w_uv).astype(np.float32)


FAULTS = (
    (1, "eps missing", "mean_square + eps", "mean_square"),
    (1, "eps outside the root", "np.sqrt(mean_square + eps)", "(np.sqrt(mean_square) + np.float32(eps))"),
    (1, "sum of squares", "(x * x).mean(", "(x * x).sum("),
    (1, "mean over the rows", "axis=-1", "axis=0"),
    (1, "weight is 1 + weight", "* weight", "* (1 + weight)"),
    (1, "wider than its input", "* weight", "* weight.astype(np.float64)"),
    (2, "cut off", "rounded = upper + up", "rounded = upper"),
    (2, "ties up", " & (upper % 2 == 1)", ""),
    (2, "ties down", "(lower == 0x8000)", "False"),
    (2, "NaN rounded", "np.where(np.isnan(x), upper & 0x8000 | 0x7FC0, rounded)", "rounded"),
    (2, "NaN without its sign", "upper & 0x8000 | 0x7FC0", "0x7FC0"),
    (3, "interleaved", "x[..., :half], x[..., half : 2 * half]", "x[..., 0 : 2 * half : 2], x[..., 1 : 2 * half : 2]"),
    (
        3,
        "turned back",
        "first * cos - second * sin, second * cos + first * sin",
        "first * cos + second * sin, second * cos - first * sin",
    ),
    (3, "rest lost", "second * cos + first * sin, rest]", "second * cos + first * sin, 0 * rest]"),
    (3, "angle of another token", "cos_sin[:, None, :]", "cos_sin[::-1, None, :]"),
    (4, "no mask", "np.arange(len(k)) > position[:, None]", "False"),
    (4, "sees one key of the future", "> position[:, None]", "> position[:, None] + 1"),
    (4, "positions from 0", "+ len(k) - len(q)", ""),
    (
        4,
        "heads in turn",
        "np.repeat(k, group, axis=1), np.repeat(v, group, axis=1)",
        "np.tile(k, (1, group, 1)), np.tile(v, (1, group, 1))",
    ),
    (4, "no scale", "* sm_scale", ""),
    (4, "overflow", " - scores.max(axis=-1, keepdims=True)", ""),
    (
        4,
        "rounded to half precision",
        "weights = weights / weights.sum(axis=-1, keepdims=True)",
        "weights = (weights / weights.sum(axis=-1, keepdims=True)).astype(np.float16).astype(np.float32)",
    ),
    (5, "mean of the parts", "shares = np.exp(partial_lse - largest)", "shares = np.ones_like(partial_lse)"),
    (5, "not divided", "/ np.where(total == 0, 1, total)[..., None]", ""),
    (5, "overflow", "np.where(np.isinf(largest), 0, largest)", "np.zeros_like(largest)"),
    (5, "nothing less nothing", "largest = np.where(np.isinf(largest), 0, largest).astype(np.float32)", ""),
    (5, "division by no share", "np.where(total == 0, 1, total)", "total"),
    (5, "largest not put back", "largest + np.log(total)", "np.log(total)"),
    (6, "no table", "block_table[s, : -(-seq_len // block_size)]", "np.arange(-(-seq_len // block_size))"),
    (
        6,
        "whole blocks",
        "v_cache.shape[2:])[:seq_len]",
        "v_cache.shape[2:])\n        k = k_cache[blocks].reshape(-1, *k_cache.shape[2:])",
    ),
    (6, "heads in turn", "head // group", "head % k.shape[1]"),
    (
        6,
        "newest key missed",
        "for s, seq_len in enumerate(seq_lens)",
        "for s, seq_len in enumerate(np.maximum(seq_lens - 1, 1))",
    ),
    (6, "overflow", " - scores.max()", ""),
    (7, "crossing token left out", "before < p * mass[-1]", "(mass < p * mass[-1]) | (before == 0)"),
    (7, "no temperature", "/ heat", ""),
    (7, "worst first", "np.argsort(-row", "np.argsort(row"),
    (7, "higher id first among equals", 'np.argsort(-row, kind="stable")', 'np.argsort(row, kind="stable")[::-1]'),
    (7, "uniform of all weight", "uniform * running[-1]", "uniform * mass[-1]"),
    (7, "a weight of 0 is drawn", "running > uniform", "running >= uniform"),
    (7, "overflow", "(row - row.max())", "row"),
    (7, "int64", "np.int32", "np.int64"),
    (8, "one scale", "np.abs(x).max(axis=1, keepdims=True)", "np.abs(x).max()"),
    (8, "cut off", "np.rint(steps)", "np.trunc(steps)"),
    (8, "not quantized", "np.rint(steps)", "steps * 1024 // 1"),
    (8, "sums in int8", "xq.astype(np.int32) @ wq.astype(np.int32).T", "xq.astype(np.int8) @ wq.T"),
    (8, "steps of 1/128", "np.float32(127)", "np.float32(128)"),
    (9, "no + 1", "(zeros + 1) & mask", "zeros"),
    (9, "no wrap", "(zeros + 1) & mask", "zeros + 1"),
    (9, "highest bits first", "np.arange(0, 32, bits)", "np.arange(0, 32, bits)[::-1]"),
    (9, "g_idx not read", "zeros[g_idx]) * scales[g_idx]", "zeros[np.sort(g_idx)]) * scales[np.sort(g_idx)]"),
    (9, "wider than asked for", "weight.T.astype(np.float32)", "weight.T"),
    (10, "rest to the last", "(rank < more)", "(more if rank == world_size - 1 else 0)"),
    (10, "gate and up swapped", "gate_proj, up_proj =", "up_proj, gate_proj ="),
    (10, "no activation", "gate / (1 + np.exp(-gate)) * up", "gate * up"),
    (10, "summed", "np.stack(partial)", "np.stack([sum(partial)] * world_size)"),
    (11, "bias weighs", "s[chosen] / s[chosen].sum()", "c[chosen] / c[chosen].sum()"),
    (11, "best of a group alone", "[:, -2:].sum(axis=1)", "[:, -1]"),
    (11, "masked by 0", "np.full_like(groups, -np.inf)", "np.zeros_like(groups)"),
    (11, "not renormalized", "/ s[chosen].sum()", ""),
    (11, "not scaled", "* np.float32(scaling_factor)", ""),
    (11, "no bias", "scores + bias", "scores"),
    (
        11,
        "higher id first among equals",
        'np.argsort(-masked.reshape(-1), kind="stable")',
        'np.argsort(masked.reshape(-1), kind="stable")[::-1]',
    ),
    (
        12,
        "keys of all heads first",
        "by_head[:, :nope], by_head[:, nope:]",
        "(part.reshape(n_heads, -1, rank) for part in np.split(kv_b_proj, [n_heads * nope]))",
    ),
    (12, "no positions", " + q[:, nope:] @ latent[:, rank:].T", ""),
    (12, "other scale", "* sm_scale", "* latent.shape[1] ** -0.5"),
    (
        12,
        "expanded",
        "absorbed @ latent[:, :rank].T",
        "np.einsum('hn,hkn->hk', q[:, :nope], np.einsum('kc,hnc->hkn', latent[:, :rank], w_uk))",
    ),
)
