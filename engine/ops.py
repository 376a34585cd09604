"""The op table: the one set of functions that models are written against.

On a GPU its entries are kernel wrappers, on a CPU functions of engine.cpu and ref; both have the name and the
leading parameters of the ref function that defines them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.cpu import activation, attention, linear, rmsnorm, rope, sampling
from engine.cpu.team import Team
from engine.weights import LinearWeight
from ref import embedding

Array = Any


@dataclass(frozen=True, slots=True)
class OpTable:
    """Functions on arrays of one target. Shapes are in the ref function of the same name."""

    embedding: Callable[[Array, Array], Array]  # (token_ids, table)
    linear: Callable[[Array, LinearWeight], Array]  # (x, weight)
    rmsnorm: Callable[[Array, Array, float], Array]  # (x, weight, eps)
    add_rmsnorm: Callable[[Array, Array, Array, float], tuple[Array, Array]]  # (x, residual, weight, eps)
    rope_kv_write: Callable[..., Array]  # (q, k, v, cos_sin, slot_mapping, k_cache, v_cache)
    attention_decode: Callable[..., Array]  # (q, k_cache, v_cache, block_table, seq_lens, sm_scale, window)
    attention_prefill: Callable[..., Array]  # (…, block_table, cu_seqlens_q, seq_lens, sm_scale, window)
    gate_up_act: Callable[[Array], Array]  # (gate_up)
    prepare: Callable[[LinearWeight], LinearWeight]  # a loaded weight → the layout that linear wants
    sampling: Any  # see engine.sampler.SamplingOps


def cpu_ops(num_threads: int = 1) -> OpTable:
    """The op table of a machine without a GPU, float32; num_threads share the matrix products."""
    return OpTable(
        embedding=embedding.embedding,
        linear=partial(linear.linear, team=Team(num_threads)),
        rmsnorm=rmsnorm.rmsnorm,
        add_rmsnorm=rmsnorm.add_rmsnorm,
        rope_kv_write=rope.rope_kv_write,
        attention_decode=attention.attention_decode,
        attention_prefill=attention.attention_prefill,
        gate_up_act=activation.gate_up_act,
        prepare=linear.prepare_dense,
        sampling=sampling,
    )
