"""The op table whose functions are kernels."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from engine.errors import KernelError
from engine.kernels import (
    activation,
    attention,
    attention_logn,
    embedding,
    kv_cache,
    layernorm,
    linear,
    quantize,
    rmsnorm,
    rope,
)
from engine.kernels.device import Device
from engine.ops import OpTable, SamplingOps
from engine.weights import LinearWeight

Array = Any


def _missing(what: str) -> Callable[..., Any]:
    def refuse(*args: Any, **kwargs: Any) -> Any:
        raise KernelError(f"there are no GPU kernels for {what} yet; use --device cpu")

    return refuse


def _as_stored(weight: LinearWeight) -> LinearWeight:
    """A dense weight is multiplied by in the layout in which it is stored."""
    return weight


def kernel_ops(device: Device, sampling: SamplingOps) -> OpTable:
    """The op table of a device."""
    return OpTable(
        embedding=partial(embedding.embedding, device=device),
        position_embedding=partial(embedding.position_embedding, device=device),
        linear=partial(linear.linear, device=device),
        linear_gate_up_act=partial(linear.linear_gate_up_act, device=device),
        logits=partial(linear.logits, device=device),
        rmsnorm=partial(rmsnorm.rmsnorm, device=device),
        add_rmsnorm=partial(rmsnorm.add_rmsnorm, device=device),
        rmsnorm_ordered=partial(rmsnorm.rmsnorm_ordered, device=device),
        add_rmsnorm_ordered=partial(rmsnorm.add_rmsnorm_ordered, device=device),
        quantize_activations=partial(quantize.quantize_activations, device=device),
        norm_quant=partial(quantize.norm_quant, device=device),
        add_norm_quant=partial(quantize.add_norm_quant, device=device),
        layernorm=partial(layernorm.layernorm, device=device),
        add_layernorm=partial(layernorm.add_layernorm, device=device),
        kv_cache_write=partial(rope.kv_cache_write, device=device),
        kv_cache_copy=partial(kv_cache.kv_cache_copy, device=device),
        kv_cache_swap=partial(kv_cache.kv_cache_swap, device=device),
        rope_kv_write=partial(rope.rope_kv_write, device=device),
        qk_norm_rope_kv_write=partial(rope.qk_norm_rope_kv_write, device=device),
        attention_decode=partial(attention.attention_decode, device=device),
        attention_prefill=partial(attention.attention_prefill, device=device),
        mla_rope_latent_write=_missing("latent attention"),
        mla_decode=_missing("latent attention"),
        mla_prefill=_missing("latent attention"),
        mla_split_kv_b=_missing("latent attention"),
        attention_biased=_missing("attention with a bias"),
        logn_query=partial(attention_logn.logn_query, device=device),
        act=partial(activation.act, device=device),
        gate_up_act=partial(activation.gate_up_act, device=device),
        moe_route=_missing("mixture of experts"),
        moe_mlp=_missing("mixture of experts"),
        moe_shared_expert=_missing("mixture of experts"),
        prepare=_as_stored,
        sampling=sampling,
    )
