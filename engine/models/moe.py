"""The feed-forward half of a layer in families of which some layers have experts. Defined by ref.model.experts.

An architecture asks for the weights of each layer (feed_forward_linears, feed_forward_arrays) and for what to do with
them (feed_forward); they look at the config and give the dense MLP where a layer has no experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

from engine.batch import ForwardBatch
from engine.config import ModelConfig, MoeConfig
from engine.kv_cache import KVCache
from engine.models.mlp import GATE_UP_DOWN, mlp, mlp_linears
from engine.ops import OpTable
from engine.weights import ArraySpec, LinearSpec, Weights

Array = Any


@dataclass(frozen=True, slots=True)
class MoeNames:
    """What the checkpoints of a family call the parts of a layer with experts; unless told otherwise as DeepSeek's."""

    block: str = "mlp"
    experts: tuple[str, str, str] = GATE_UP_DOWN  # of each expert: gate, up, down
    shared: str = "shared_experts"


W1_W3_W2 = ("w1", "w3", "w2")
MIXTRAL = MoeNames(block="block_sparse_moe", experts=W1_W3_W2)
MINICPM = MoeNames(experts=W1_W3_W2)
QWEN = MoeNames(shared="shared_expert")
MOE_NAMES = MoeNames()


def has_experts(config: ModelConfig, layer: int) -> bool:
    return config.moe is not None and config.moe.layers[layer]


def feed_forward_linears(config: ModelConfig, layer: int, source: str, names: MoeNames) -> list[LinearSpec]:
    """Of the MLP or the experts of a layer; source is the layer's name in the checkpoint, model.layers.0."""
    if has_experts(config, layer):
        return moe_linears(config, layer, source, names)
    dest, sizes = f"layers.{layer}", (config.hidden_size, config.intermediate_size)
    norm = f"{dest}.post_attention_layernorm"
    return mlp_linears(dest, f"{source}.mlp", *sizes, bias=config.mlp_bias, norm=norm)


def feed_forward_arrays(config: ModelConfig, layer: int, source: str, names: MoeNames) -> list[ArraySpec]:
    """The bias that chooses experts, where there is one."""
    if not has_experts(config, layer) or not _moe(config).selection_bias:
        return []
    name = f"{source}.{names.block}.gate.e_score_correction_bias"
    return [ArraySpec(f"layers.{layer}.selection_bias", name, (_moe(config).n_experts,))]


def moe_linears(config: ModelConfig, layer: int, source: str, names: MoeNames) -> list[LinearSpec]:
    """The router, all experts stacked, and the expert that all tokens use with its gate, where there are such."""
    moe, hidden = _moe(config), config.hidden_size
    dest, block = f"layers.{layer}", f"{source}.{names.block}"
    one, sizes = f"{block}.experts.{{expert}}", (hidden, moe.intermediate_size)
    linears = [
        LinearSpec(f"{dest}.router", ((f"{block}.gate", moe.n_experts),), hidden),
        *mlp_linears(f"{dest}.experts", one, *sizes, names=names.experts, n_experts=moe.n_experts),
    ]
    if moe.shared_intermediate_size:
        shared = f"{block}.{names.shared}"
        linears += mlp_linears(f"{dest}.shared_expert", shared, hidden, moe.shared_intermediate_size, gated=False)
    if moe.shared_gate:
        linears.append(LinearSpec(f"{dest}.shared_expert_gate", ((f"{block}.shared_expert_gate", 1),), hidden))
    return linears


def feed_forward(
    config: ModelConfig, weights: Weights, ops: OpTable, layer: int
) -> Callable[[Array, ForwardBatch, KVCache], Array]:
    """The forward of a Piece: [num_tokens, hidden_size] → the same."""
    if has_experts(config, layer):
        return partial(moe_mlp, config=config, weights=weights, ops=ops, layer=layer)
    return lambda hidden, batch, cache: mlp(hidden, f"layers.{layer}", weights, ops)


def moe_mlp(
    hidden: Array,
    batch: ForwardBatch,
    cache: KVCache,
    config: ModelConfig,
    weights: Weights,
    ops: OpTable,
    layer: int,
) -> Array:
    """[num_tokens, hidden_size] → the same: the chosen experts, weighted, and the one that all tokens use."""
    moe, dest, linears = _moe(config), f"layers.{layer}", weights.linears
    expert_ids, expert_weights = ops.moe_route(
        ops.linear(hidden, linears[f"{dest}.router"]),
        moe.n_experts_per_tok,
        scoring=moe.scoring,
        bias=weights.arrays[f"{dest}.selection_bias"] if moe.selection_bias else None,
        n_group=moe.n_group,
        topk_group=moe.topk_group,
        group_best=moe.group_best,
        renormalize=moe.renormalize,
        scaling_factor=moe.scaling_factor,
    )
    experts = linears[f"{dest}.experts.gate_up_proj"], linears[f"{dest}.experts.down_proj"]
    out = ops.moe_mlp(hidden, expert_ids, expert_weights, *experts)
    if moe.shared_intermediate_size:
        shared = linears[f"{dest}.shared_expert.gate_up_proj"], linears[f"{dest}.shared_expert.down_proj"]
        gate = linears[f"{dest}.shared_expert_gate"] if moe.shared_gate else None
        out += ops.moe_shared_expert(hidden, *shared, shared_expert_gate=gate)
    return out


def _moe(config: ModelConfig) -> MoeConfig:
    assert config.moe is not None, "only layers with experts ask"
    return config.moe
