"""The op table: the one set of functions that models are written against.

On a GPU its entries are kernel wrappers, on a CPU functions of engine.cpu and ref; both have the name and the
leading parameters of the ref function that defines them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

from numpy.typing import NDArray

from engine.cpu import activation, attention, kv_cache, layernorm, linear, mla, moe, rmsnorm, rope, sampling
from engine.cpu.team import Team
from engine.logit_edits import LogitEdits
from engine.weights import LinearWeight
from ref import embedding, moe_routing
from ref.activation import act
from ref.attention import logn_query
from ref.attention_biased import attention_biased
from ref.quant import fused

Array = Any
Numbers = NDArray[Any]  # of the host


class SamplingOps(Protocol):
    """The part of the op table that the sampler uses, on logits [num_rows, vocab] float32 of the target.

    All other arguments, and what token_logprobs returns, are NumPy arrays. engine.cpu.sampling says what
    each function takes and gives.
    """

    def edit_logits(self, logits: Array, edits: LogitEdits) -> tuple[Array, Array]: ...

    def sample_rows(
        self,
        logits: Array,
        temperature: Numbers,
        top_k: Numbers,
        top_p: Numbers,
        min_p: Numbers,
        seed: Numbers,
        position: Numbers,
        stream: Numbers,
        reasons: Array | None = None,
    ) -> Array: ...

    def token_logprobs(
        self, logits: Array, token_ids: Numbers, k: int, rows: Numbers | None = None, raw: Array | None = None
    ) -> tuple[Numbers, Numbers, Numbers]: ...

    def start_copy(self, array: Array) -> Callable[[], NDArray[Any]]: ...


@dataclass(frozen=True, slots=True)
class OpTable:
    """Functions on arrays of one target. Shapes are in the ref function of the same name."""

    embedding: Callable[..., Array]  # (token_ids, table, first=…)
    position_embedding: Callable[..., Array]  # (token_ids, positions, table, position_table, first=…)
    linear: Callable[[Array, LinearWeight], Array]  # (x, weight)
    linear_gate_up_act: Callable[..., Array]  # (x, weight, activation): gate_up_act of linear
    logits: Callable[[Array, LinearWeight], Array]  # linear, in float32 whatever the type of x
    rmsnorm: Callable[[Array, Array, float], Array]  # (x, weight, eps)
    add_rmsnorm: Callable[[Array, Array, Array, float], tuple[Array, Array]]  # (x, residual, weight, eps)
    rmsnorm_ordered: Callable[[Array, Array, float, Array], Array]  # (x, weight, eps, order)
    add_rmsnorm_ordered: Callable[..., tuple[Array, Array]]  # (x, residual, weight, eps, order)
    quantize_activations: Callable[..., tuple[Array, Array]]  # (x, kind)
    norm_quant: Callable[..., Array]  # (x, weight, eps, into): rmsnorm in codes, if the layer that it goes into has any
    add_norm_quant: Callable[..., tuple[Array, Array]]  # (x, residual, weight, eps, into)
    layernorm: Callable[[Array, Array, Array | None, float], Array]  # (x, weight, bias, eps)
    add_layernorm: Callable[..., tuple[Array, Array]]  # (x, residual, weight, bias, eps)
    kv_cache_write: Callable[[Array, Array, Array, Array, Array], None]  # (k, v, slot_mapping, k_cache, v_cache)
    # No step calls this: blocks are shared only when full, and are never written again. It is the form of the kernel in
    # which both caches are one, which conformance checks, also of a kernel of the user's own.
    kv_cache_copy: Callable[[Array, Array, Array, Array], None]  # (k_cache, v_cache, src_blocks, dst_blocks)
    kv_cache_swap: Callable[..., None]  # (k_cache, v_cache, k_other, v_other, src_blocks, dst_blocks)
    rope_kv_write: Callable[..., Array]  # (q, k, v, cos_sin, slot_mapping, k_cache, v_cache, interleaved=…)
    qk_norm_rope_kv_write: Callable[..., Array]  # (q, k, v, q_weight, k_weight, eps, cos_sin, …)
    attention_decode: Callable[..., Array]  # (q, k_cache, v_cache, block_table, seq_lens, sm_scale, window)
    attention_prefill: Callable[..., Array]  # (…, block_table, cu_seqlens_q, seq_lens, sm_scale, window)
    mla_rope_latent_write: Callable[
        ..., Array
    ]  # (q, kv_a, kv_a_layernorm, eps, cos_sin, slot_mapping, latent_cache, …)
    mla_decode: Callable[..., Array]  # (q, latent_cache, kv_b_proj, block_table, seq_lens, sm_scale)
    mla_prefill: Callable[..., Array]  # (…, block_table, cu_seqlens_q, seq_lens, sm_scale)
    mla_split_kv_b: Callable[[LinearWeight, int, int], LinearWeight]  # (kv_b_proj, n_heads, qk_nope_head_dim)
    attention_biased: Callable[..., Array]  # (…, seq_lens, prefix_lens, sm_scale, bias_table, num_soft, max_distance)
    logn_query: Callable[[Array, Array, int], Array]  # (q, positions, length)
    act: Callable[[Array, str], Array]  # (x, activation)
    gate_up_act: Callable[..., Array]  # (gate_up, activation)
    moe_route: Callable[..., tuple[Array, Array]]  # (router_logits, top_k, scoring=…, bias=…, …)
    moe_mlp: Callable[..., Array]  # (x, expert_ids, weights, gate_up_proj, down_proj)
    moe_shared_expert: Callable[..., Array]  # (x, gate_up_proj, down_proj, shared_expert_gate)
    prepare: Callable[[LinearWeight], LinearWeight]  # a loaded weight → the layout that linear wants
    sampling: SamplingOps


def cpu_ops(num_threads: int = 1) -> OpTable:
    """The op table of a machine without a GPU, float32; num_threads share the matrix products."""
    team = Team(num_threads)
    return OpTable(
        embedding=embedding.embedding,
        position_embedding=embedding.position_embedding,
        linear=partial(linear.linear, team=team),
        linear_gate_up_act=partial(linear.linear_gate_up_act, team=team),
        logits=partial(linear.logits, team=team),
        rmsnorm=rmsnorm.rmsnorm,
        add_rmsnorm=rmsnorm.add_rmsnorm,
        rmsnorm_ordered=rmsnorm.rmsnorm_ordered,
        add_rmsnorm_ordered=rmsnorm.add_rmsnorm_ordered,
        quantize_activations=fused.quantize_activations,
        norm_quant=rmsnorm.norm_quant,
        add_norm_quant=rmsnorm.add_norm_quant,
        layernorm=layernorm.layernorm,
        add_layernorm=layernorm.add_layernorm,
        kv_cache_write=kv_cache.kv_cache_write,
        kv_cache_copy=kv_cache.kv_cache_copy,
        kv_cache_swap=kv_cache.kv_cache_swap,
        rope_kv_write=rope.rope_kv_write,
        qk_norm_rope_kv_write=rope.qk_norm_rope_kv_write,
        attention_decode=attention.attention_decode,
        attention_prefill=attention.attention_prefill,
        mla_rope_latent_write=mla.mla_rope_latent_write,
        mla_decode=mla.mla_decode,
        mla_prefill=partial(mla.mla_prefill, team=team),
        mla_split_kv_b=mla.mla_split_kv_b,
        attention_biased=attention_biased,
        logn_query=logn_query,
        act=act,
        gate_up_act=activation.gate_up_act,
        moe_route=moe_routing.moe_route,
        moe_mlp=partial(moe.moe_mlp, team=team),
        moe_shared_expert=partial(moe.moe_shared_expert, team=team),
        prepare=linear.prepare_dense,
        sampling=sampling,
    )
