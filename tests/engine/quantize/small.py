"""Small models, and quantizing them."""

from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.golden_models import llama_config, llama_tensors, rand_model, write_checkpoint
from engine.quantize.methods import METHODS, Settings
from engine.quantize.run import quantize
from engine.quantize.source_model import open_model

VOCAB = 96
SIZES: dict[str, Any] = {
    "vocab_size": VOCAB,
    "hidden_size": 64,
    "intermediate_size": 160,
    "max_position_embeddings": 64,
}
OUTLIERS = slice(5, None, 20)


def windows(count: int = 4, length: int = 16, seed: int = 0) -> NDArray[np.int32]:
    """Token ids of a text."""
    return np.random.default_rng(seed).integers(4, VOCAB, (count, length)).astype(np.int32)


def small_model(folder: Path, dtype: str = "bfloat16", **overrides: Any) -> Path:
    return rand_model(folder, seed=7, dtype=dtype, **{**SIZES, **overrides})


def model_with_outliers(folder: Path, dtype: str = "bfloat16") -> Path:
    """Norms before attention and MLP put out a few channels that are 30 times as large as the rest."""
    config = llama_config(torch_dtype=dtype, **SIZES)
    tensors = llama_tensors(config, 7)
    for name, tensor in tensors.items():
        if name.endswith("layernorm.weight"):
            tensor[OUTLIERS] *= 30
    return write_checkpoint(folder, config, tensors)


def settings_for(method: str, **changed: Any) -> Settings:
    """Of a method, with groups of 32 where it has groups."""
    groups = {"group_size": 32} if METHODS[method].has_groups else {}
    zeros = {"symmetric": False} if METHODS[method].packing == "awq" else {}
    return Settings(method, **{**groups, **zeros, **changed})


def make(model: Path, out: Path, method: str, settings: dict[str, Any] | None = None, **options: Any) -> Path:
    """A quantized folder."""
    options = {"windows": windows()} | options
    assert quantize(open_model(str(model)), out, settings_for(method, **(settings or {})), progress=False, **options)
    return out


def content(folder: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}
