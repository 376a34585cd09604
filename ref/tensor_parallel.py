"""Tensor parallelism: each rank holds a part of every weight and computes a part of every layer.

Two cuts are enough. A layer ends in y = A₂ f(A₁ x), where f works on each head or
each intermediate element by itself. Cut the outputs of A₁ ("column split": q, k, v, gate, up) and the inputs of A₂
("row split": o, down) at the same places, and y is the sum of what the ranks get: one all_reduce a layer, two a block.

    rank r:  y_r = A₂[:, part_r] f(A₁[part_r] x)          y = Σ_r y_r

A rank is then a smaller model: fewer heads, a narrower MLP. What is not cut (norms, routers, MLA's q_a and kv_a) is on
every rank. Parts need not be equal: heads are never cut, so 14 heads on 4 ranks are 4, 3, 4 and 3.

Attention. Query heads that read one KV head are a group. With no more ranks than KV heads a rank has whole groups.
With more, a KV head has several ranks, each with a copy of it and a part of its group. A rank never has parts of two
groups: then query head h reads KV head h // (n_heads / n_kv_heads) on every rank too, and no kernel needs a map.

The bias of a row split is to be added once: rank 0 keeps it, the others have zeros.

Source: Shoeybi et al. 2019, "Megatron-LM".
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

from ref.collectives import split_ranges, split_sizes

Array = NDArray[Any]
Cuts = Mapping[str, tuple[Literal["out", "in"], range]]  # pattern of module names → the axis that is cut, what is kept


@dataclass(frozen=True, slots=True)
class HeadSplit:
    """What one rank has of an attention layer."""

    heads: range  # query heads
    kv_heads: range  # the KV heads that they read; another rank may have a copy of the same


def split_heads(n_heads: int, n_kv_heads: int, world_size: int, unit: int = 1, kv_unit: int = 1) -> list[HeadSplit]:
    """Which heads each rank has.

    Args:
        unit, kv_unit: runs of query and KV heads, counted from head 0, that must stay together because a block of a
            quantized weight covers them (see ref.tensor_parallel_sizes).
    Returns:
        One HeadSplit a rank, in the order of heads. A rank has len(kv_heads) KV heads in its cache.
    Raises:
        ValueError: a rank would have no head; says which sizes would do. n_heads no multiple of n_kv_heads.
    """
    if n_kv_heads < 1 or n_heads % n_kv_heads:
        raise ValueError(f"{n_heads} query heads are no multiple of {n_kv_heads} KV heads")
    splits = _deal_heads(n_heads, n_kv_heads, world_size, unit, kv_unit)
    if splits is None:
        possible = [size for size in range(1, n_heads + 1) if _deal_heads(n_heads, n_kv_heads, size, unit, kv_unit)]
        together = f" in runs of {unit} and {kv_unit}" if max(unit, kv_unit) > 1 else ""
        raise ValueError(
            f"{n_heads} query heads and {n_kv_heads} KV heads{together} cannot be dealt out to {world_size} ranks so "
            f"that each has one; possible are {', '.join(map(str, possible)) or 'no'} ranks"
        )
    return splits


def _deal_heads(n_heads: int, n_kv_heads: int, world_size: int, unit: int, kv_unit: int) -> list[HeadSplit] | None:
    group = n_heads // n_kv_heads
    splits = []
    if world_size <= n_kv_heads:
        together = math.lcm(kv_unit, unit // math.gcd(unit, group))
        for kv_heads in split_ranges(n_kv_heads, world_size, together):
            splits.append(HeadSplit(range(kv_heads.start * group, kv_heads.stop * group), kv_heads))
    elif n_kv_heads == 1 or (kv_unit == 1 and group % unit == 0):
        for kv_head, num_ranks in enumerate(split_sizes(world_size, n_kv_heads)):
            first = kv_head * group
            for part in split_ranges(group, num_ranks, unit):
                splits.append(HeadSplit(range(first + part.start, first + part.stop), range(kv_head, kv_head + 1)))
    return splits if splits and all(split.heads for split in splits) else None


def scaled_range(part: range, size: int) -> range:
    """The elements of these heads when each has `size` of them: heads 2 and 3 of size 64 are elements 128 to 255."""
    return range(part.start * size, part.stop * size)


def attention_cuts(split: HeadSplit, head_dim: int) -> Cuts:
    """Grouped-query attention: q, k and v by heads, o by its inputs. Norms of q and k, [head_dim] each, stay whole."""
    q, kv = scaled_range(split.heads, head_dim), scaled_range(split.kv_heads, head_dim)
    return {"*.q_proj": ("out", q), "*.k_proj": ("out", kv), "*.v_proj": ("out", kv), "*.o_proj": ("in", q)}


def mla_cuts(heads: range, qk_head_dim: int, kv_b_head_dim: int, v_head_dim: int) -> Cuts:
    """Latent attention (DeepSeek): what makes the latent (q_a, kv_a) is on every rank, what reads it is cut by heads.

    The latent cache is therefore on every rank in full: tensor parallelism saves no cache here.

    Args:
        heads: of this rank; every head has its own keys and values.
        qk_head_dim: qk_nope_head_dim + qk_rope_head_dim. kv_b_head_dim: qk_nope_head_dim + v_head_dim.
    """
    q, kv = scaled_range(heads, qk_head_dim), scaled_range(heads, kv_b_head_dim)
    o = scaled_range(heads, v_head_dim)
    return {"*.q_proj": ("out", q), "*.q_b_proj": ("out", q), "*.kv_b_proj": ("out", kv), "*.o_proj": ("in", o)}


def mlp_cuts(part: range, prefix: str = "*.") -> Cuts:
    """A gated MLP by intermediate elements, or every expert of a MoE layer: prefix "*.experts.*." names those alone."""
    return {
        f"{prefix}gate_proj": ("out", part),
        f"{prefix}up_proj": ("out", part),
        f"{prefix}down_proj": ("in", part),
    }


def shard_weights(weights: Mapping[str, Array], cuts: Cuts, rank: int) -> dict[str, Array]:
    """One rank's part of dense weights; see ref.tensor_parallel_quant for the quantized.

    Args:
        weights: by name, MODULE.weight [out, in] or MODULE.bias [out], MODULE with a dot in it.
        cuts: the first pattern that fits MODULE counts; a module that none fits is kept whole.
    """
    shards = {}
    for name, tensor in weights.items():
        module, _, kind = name.rpartition(".")
        axis, part = next((cut for pattern, cut in cuts.items() if fnmatchcase(module, pattern)), ("out", None))
        if part is None:
            shards[name] = tensor
        elif axis == "out":
            shards[name] = tensor[part.start : part.stop]
        elif kind == "bias":
            shards[name] = tensor if rank == 0 else np.zeros_like(tensor)
        else:
            shards[name] = tensor[:, part.start : part.stop]
    return shards


def shard_qkv(fused: Array, n_heads: int, n_kv_heads: int, head_dim: int, split: HeadSplit) -> Array:
    """One rank's rows of a fused projection, in which all of q is followed by all of k and all of v.

    An equal cut of the fused rows would give rank 0 nothing but queries.

    Args:
        fused: [(n_heads + 2 n_kv_heads) head_dim, ...], weight or bias.
    Returns:
        [(len(heads) + 2 len(kv_heads)) head_dim, ...], in the same order, dtype of fused.
    Raises:
        ValueError: fused has another number of rows.
    """
    sizes = [n_heads * head_dim, n_kv_heads * head_dim, n_kv_heads * head_dim]
    if len(fused) != sum(sizes):
        raise ValueError(f"a fused qkv has {len(fused)} rows; {n_heads} + 2 × {n_kv_heads} heads make {sum(sizes)}")
    parts = [scaled_range(heads, head_dim) for heads in (split.heads, split.kv_heads, split.kv_heads)]
    blocks = np.split(fused, np.cumsum(sizes)[:-1])
    return np.concatenate([block[part.start : part.stop] for block, part in zip(blocks, parts, strict=True)])


def shard_gate_up(fused: Array, part: range) -> Array:
    """One rank's rows of gate and up: fused [2 intermediate_size, ...] → [2 len(part), ...], same dtype."""
    gate, up = np.split(fused, 2)
    return np.concatenate([gate[part.start : part.stop], up[part.start : part.stop]])


def split_experts(n_experts: int, world_size: int) -> list[range]:
    """Expert parallelism: which whole experts each rank has. Their weights are not cut, nor are their blocks.

    Every rank sees all tokens, computes what its experts add, and an all_reduce sums; or tokens travel (all_to_all).

    Raises:
        ValueError: more ranks than experts.
    """
    if world_size > n_experts:
        raise ValueError(f"{n_experts} experts on {world_size} ranks leave one without; at most {n_experts} ranks")
    return split_ranges(n_experts, world_size)
