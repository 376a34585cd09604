"""MiniCPM3: the latent attention of DeepSeek, dense layers, and the scales of MiniCPM. Defined by ref.model.minicpm."""

from __future__ import annotations

from engine.config import ModelConfig
from engine.models import deepseek
from engine.models.minicpm import scaled
from engine.models.model import Model
from engine.ops import OpTable
from engine.weights import WeightMap, Weights


def weight_map(config: ModelConfig) -> WeightMap:
    """Every tensor of a checkpoint with this config."""
    return deepseek.weight_map(config)


def build(config: ModelConfig, weights: Weights, ops: OpTable) -> Model:
    """The model over an op table; weights are prepared for it already."""
    return scaled(deepseek.build(config, weights, ops))
