"""DeepSeek V2, V2-Lite, V3 and R1: latent attention, and experts behind a few dense layers.

Defined by ref.model.deepseek. The layers for multi-token prediction that V3 has behind its last are not read.
"""

from __future__ import annotations

from engine.config import ModelConfig
from engine.models import mla
from engine.models.decoder import decoder, decoder_weights
from engine.models.model import Model
from engine.models.moe import MOE_NAMES
from engine.ops import OpTable
from engine.weights import WeightMap, Weights


def weight_map(config: ModelConfig) -> WeightMap:
    """Every tensor of a checkpoint with this config."""
    last = config.n_layers + config.n_mtp_layers
    mtp = tuple(rf"model\.layers\.{layer}\..*" for layer in range(config.n_layers, last))
    buffers = r"model\.layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
    return decoder_weights(config, MOE_NAMES, mla.attention_weights, (buffers, *mtp))


def build(config: ModelConfig, weights: Weights, ops: OpTable) -> Model:
    """The model over an op table; weights are prepared for it already."""
    return decoder(config, weights, ops, mla.attention, mla.cache_spec(config))
