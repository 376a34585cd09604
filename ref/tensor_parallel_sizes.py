"""Which numbers of ranks a model may run on, known before a byte is loaded; and for the others, what hinders them.

A cut must not fall inside a head, a block that shares a scale, or a packed word. All of these are a `unit`: a run of
heads or elements that stays together. Shares need not be equal; `even=True` asks for kernels that want them so.

Source: follows from tensor_parallel.py and from the words and groups of the formats in ref/quant.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field

from ref.tensor_parallel import split_heads


@dataclass(frozen=True, slots=True)
class WeightFormat:
    """What must stay together in a [out, in] weight: along out, and along in."""

    name: str
    block: tuple[int, int] = (1, 1)  # outputs and inputs that share a scale; 0 = all, its scale is copied
    pack: tuple[int, int] = (1, 1)  # values in a word along each axis

    @property
    def units(self) -> tuple[int, int]:
        out, in_ = (math.lcm(block or 1, pack) for block, pack in zip(self.block, self.pack, strict=True))
        return out, in_


FLOAT = WeightFormat("floating point")
INT8 = WeightFormat("int8, a scale an output", (1, 0))
FP8_BLOCK = WeightFormat("fp8 in tiles of 128 × 128", (128, 128))


def gptq_format(group_size: int, bits: int = 4, act_order: bool = False) -> WeightFormat:
    """Words along in; the zeros' words along out. With act_order all scales are on all ranks; so with group_size −1."""
    per_word = 32 // bits
    group = 1 if act_order else max(group_size, 0)
    return WeightFormat(f"GPTQ, groups of {group_size}", (1, group), (per_word, per_word))


def awq_format(group_size: int) -> WeightFormat:
    """4 bits; words along out, of weights and zeros."""
    return WeightFormat(f"AWQ, groups of {group_size}", (1, max(group_size, 0)), (8, 1))


@dataclass(frozen=True, slots=True, kw_only=True)
class Geometry:
    """What of a model is cut."""

    n_heads: int
    n_kv_heads: int
    q_head_dim: int  # outputs a head of q (MLA: q_b, qk_nope_head_dim + qk_rope_head_dim)
    kv_head_dim: int  # outputs a head of k and of v (MLA: kv_b, qk_nope_head_dim + v_head_dim)
    o_head_dim: int  # inputs a head of o (MLA: v_head_dim)
    intermediate_sizes: Mapping[str, int] = field(default_factory=dict)  # by name: of MLP, expert, shared expert
    n_experts: int = 0  # of which each rank has whole ones (expert parallelism); 0 = cut inside, or none


def head_units(geometry: Geometry, weight_format: WeightFormat) -> tuple[int, int]:
    """How many query heads, and how many KV heads, stay together: the arguments `unit` and `kv_unit` of split_heads.

    Heads of 64 in groups of 128 stay together by two, because o_proj has both in one group.
    """
    out_unit, in_unit = weight_format.units
    of_q = math.lcm(geometry.q_head_dim, out_unit) // geometry.q_head_dim
    of_o = math.lcm(geometry.o_head_dim, in_unit) // geometry.o_head_dim
    return math.lcm(of_q, of_o), math.lcm(geometry.kv_head_dim, out_unit) // geometry.kv_head_dim


def legal_world_sizes(
    geometry: Geometry, weight_format: WeightFormat = FLOAT, *, max_world_size: int = 16, even: bool = False
) -> dict[int, list[str]]:
    """For each number of ranks from 1 to max_world_size what hinders it; an empty list means that it is allowed.

    Args:
        even: whether shares of different size are a hindrance too.
    """
    return {size: _hindrances(geometry, weight_format, size, even) for size in range(1, max_world_size + 1)}


def check_world_size(geometry: Geometry, weight_format: WeightFormat, world_size: int, *, even: bool = False) -> None:
    """Raises ValueError unless world_size is allowed: all that hinders it, and the sizes that would do."""
    legal = legal_world_sizes(geometry, weight_format, max_world_size=max(16, world_size), even=even)
    if legal[world_size]:
        allowed = ", ".join(str(size) for size, hindrances in legal.items() if not hindrances)
        raise ValueError(
            f"weights in {weight_format.name} cannot be cut for {world_size} ranks: {'; '.join(legal[world_size])}; "
            f"allowed are {allowed} ranks"
        )


def _hindrances(geometry: Geometry, weight_format: WeightFormat, world_size: int, even: bool) -> list[str]:
    found = []
    try:
        splits = split_heads(geometry.n_heads, geometry.n_kv_heads, world_size, *head_units(geometry, weight_format))
    except ValueError as error:
        found.append(str(error))
    else:
        if even and len({len(split.heads) for split in splits}) > 1:
            found.append(f"{geometry.n_heads} query heads give shares of {[len(split.heads) for split in splits]}")
    unit = math.lcm(*weight_format.units)  # out of gate and up, in of down: cut at the same places
    for name, size in geometry.intermediate_sizes.items():
        num_units = -(-size // unit)
        if world_size > num_units:
            found.append(f"{name} {size} has {num_units} units of {unit}, fewer than {world_size} ranks")
        elif even and size % (world_size * unit):
            share = f"{size} / {world_size} = {size / world_size:g}"
            found.append(f"{name} {share} is no multiple of {unit}")
    if geometry.n_experts and world_size > geometry.n_experts:
        found.append(f"{geometry.n_experts} experts are fewer than {world_size} ranks")
    elif even and geometry.n_experts % world_size:
        found.append(f"{geometry.n_experts} experts do not divide by {world_size}")
    return found
