"""MiniCPM 1 and 2, dense and MoE: a Llama with scaled embeddings, pieces and logits. Defined by ref.model.minicpm."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from engine.batch import ForwardBatch
from engine.config import ModelConfig
from engine.kv_cache import KVCache
from engine.models import llama
from engine.models.model import Model, times
from engine.models.moe import MINICPM
from engine.ops import OpTable
from engine.weights import WeightMap, Weights

Array = Any


def weight_map(config: ModelConfig) -> WeightMap:
    """Every tensor of a checkpoint with this config."""
    return llama.weight_map(config, MINICPM)


def build(config: ModelConfig, weights: Weights, ops: OpTable) -> Model:
    """The model over an op table; weights are prepared for it already."""
    return scaled(llama.build(config, weights, ops))


def scaled(model: Model) -> Model:
    """The model with the three factors of its config: of embeddings, of what each piece adds, of logits."""
    config = model.config
    return replace(
        model,
        embed=lambda batch: times(model.embed(batch), config.embedding_scale),
        pieces=tuple(
            replace(piece, forward=_scaled_piece(piece.forward, config.residual_scale)) for piece in model.pieces
        ),
        logits=lambda hidden: times(model.logits(hidden), config.logit_scale),
    )


def _scaled_piece(
    forward: Callable[[Array, ForwardBatch, KVCache], Array], scale: float
) -> Callable[[Array, ForwardBatch, KVCache], Array]:
    return lambda hidden, batch, cache: times(forward(hidden, batch, cache), scale)
