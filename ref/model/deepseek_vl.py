"""DeepSeek-VL's language part: a Llama under other names. Pictures are not read; text alone needs none of them.

Source: Lu et al. 2024, "DeepSeek-VL". Both layouts of checkpoints are known: that of transformers
(DeepseekVLForConditionalGeneration, text_config) and the published one (MultiModalityCausalLM, language_config).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import ArrayLike, NDArray

from ref.model.cache import Cache
from ref.model.fields import Config
from ref.model.llama import LlamaConfig, llama, read_llama
from ref.model.llama import weight_shapes as llama_weight_shapes
from ref.model.run import Shapes, Trace, Weights, select_weights

Array = NDArray[Any]

LAYOUTS = {  # architecture: key of the language part's config; prefix of its model's and of its head's weights
    "DeepseekVLForConditionalGeneration": ("text_config", "model.language_model.", "lm_head."),
    "MultiModalityCausalLM": ("language_config", "language_model.model.", "language_model.lm_head."),
}

LLAMA_DEFAULTS = {  # of transformers' LlamaConfig, which published configs count on
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekVlConfig(LlamaConfig):
    """architecture is that of the whole; everything else is of the language part."""


def read_deepseek_vl(config: Config) -> DeepseekVlConfig:
    """DeepseekVLForConditionalGeneration or MultiModalityCausalLM.

    Raises ValueError: a key that is missing, of the wrong kind, or asks for what is not supported, by name.
    """
    architecture = config["architectures"][0]
    key = LAYOUTS[architecture][0]
    if not isinstance(config.get(key), dict):
        raise ValueError(f"config.json: {architecture} needs {key}, the config of its language part")
    language = read_llama({**LLAMA_DEFAULTS, **config[key], "architectures": ["LlamaForCausalLM"]})
    fields = {name: getattr(language, name) for name in language.__dataclass_fields__}
    return DeepseekVlConfig(**fields | {"architecture": architecture})


def weight_shapes(config: DeepseekVlConfig) -> Shapes:
    """Name and shape of every tensor that the model reads."""
    return {_stored(config, name): shape for name, shape in llama_weight_shapes(config).items()}


def _stored(config: DeepseekVlConfig, name: str) -> str:
    """Llama's name of a weight as the checkpoint has it."""
    _, model, head = LAYOUTS[config.architecture]
    return name.replace("model.", model, 1) if name.startswith("model.") else name.replace("lm_head.", head, 1)


def deepseek_vl(
    config: DeepseekVlConfig,
    weights: Weights,
    token_ids: ArrayLike,
    *,
    storage: str | None = None,
    trace: Trace | None = None,
    cache: Cache | None = None,
) -> Array:
    """Logits [num_tokens, vocab_size]; arguments, dtype, errors as in ref.model.llama.llama."""
    held = select_weights(weight_shapes(config), weights)
    renamed = {name: held[_stored(config, name)] for name in llama_weight_shapes(config)}
    return llama(config, renamed, token_ids, storage=storage, trace=trace, cache=cache)
