"""The Llama family in GGUF: its keys become a ModelConfig, its tensors get their Hugging Face names.

llama.cpp stores the rows of q and k in another order (see stored_tensor) and may spell llama3 rope scaling as a
tensor of factors. Both are undone here, so that nothing later knows where a model came from.
"""

from __future__ import annotations

import math
import re
from dataclasses import replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.gguf_file import GgufFile
from engine.checkpoint.stored_tensor import StoredTensor, read_into
from engine.config import ModelConfig
from engine.errors import CheckpointError, ConfigError
from engine.model_config.read import model_config_from_hf

ARCHITECTURE = "llama"
ROPE_FACTORS = "rope_freqs.weight"
NAMES = {  # module in the file: module of Hugging Face
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
REQUIRED = {  # key under "llama.": key of config.json
    "block_count": "num_hidden_layers",
    "attention.head_count": "num_attention_heads",
    "embedding_length": "hidden_size",
    "feed_forward_length": "intermediate_size",
    "context_length": "max_position_embeddings",
    "attention.layer_norm_rms_epsilon": "rms_norm_eps",
}
END_OF_SEQUENCE = ("eos_token_id", "eot_token_id", "eom_token_id")  # of the text, a turn, a message
LLAMA3_LOW, LLAMA3_HIGH, LLAMA3_LENGTH = 1.0, 4.0, 8192  # of every llama3 checkpoint; converters know no others


def hf_tensors(file: GgufFile) -> dict[str, StoredTensor]:
    """The tensors by their Hugging Face names; an unknown one keeps its own name, so that the loader reports it.

    The rope factors are left out: they are part of the config.

    Raises:
        CheckpointError: the rows of q or k cannot be put back in order, for the heads do not divide them.
    """
    n_heads = file.metadata.get("llama.attention.head_count", 1)
    heads = {"attn_q": n_heads, "attn_k": file.metadata.get("llama.attention.head_count_kv", n_heads)}
    tensors: dict[str, StoredTensor] = {}
    for name, tensor in file.tensors.items():
        if name == ROPE_FACTORS:
            continue
        module, _, suffix = name.rpartition(".")
        layer = re.fullmatch(r"blk\.(\d+)\.(\w+)", module)
        if layer and layer[2] in LAYER_NAMES:
            hf_module = f"model.layers.{layer[1]}.{LAYER_NAMES[layer[2]]}"
            if layer[2] in heads:
                tensor = _interleaved(tensor, heads[layer[2]])
        else:
            hf_module = NAMES.get(module, module)
        hf_name = f"{hf_module}.{suffix}"
        tensors[hf_name] = replace(tensor, name=hf_name)
    return tensors


def _interleaved(tensor: StoredTensor, n_heads: Any) -> StoredTensor:
    rows = tensor.shape[0] if tensor.shape else 0
    if type(n_heads) is not int or n_heads < 1 or rows % (2 * n_heads):
        raise CheckpointError(
            f"{tensor.file}: {tensor.name} has {rows} rows, which {n_heads!r} even heads cannot share"
        )
    return replace(tensor, n_interleaved_heads=n_heads)


def hf_config(file: GgufFile) -> dict[str, Any]:
    """The metadata said in the words of config.json.

    vocab_size is that of the embedding, and the head is tied where the file has no output.weight.

    Raises:
        ConfigError: another architecture, or a missing key.
        CheckpointError: the file has no usable embedding or rope factors.
    """
    metadata, where = file.metadata, str(file.path)
    if (found := metadata.get("general.architecture")) != ARCHITECTURE:
        raise ConfigError(f"{where}: general.architecture is {found!r}; supported in GGUF files is {ARCHITECTURE!r}")
    embedding = file.tensors.get("token_embd.weight")
    if embedding is None or len(embedding.shape) != 2:
        raise CheckpointError(f"{where}: has no tensor token_embd.weight with two dimensions")
    values = _values(file)
    if missing := [f"llama.{key}" for key in REQUIRED if key not in values]:
        raise ConfigError(f"{where}: the metadata lacks {', '.join(missing)}")
    _check_supported(values, where)
    config: dict[str, Any] = {name: values[key] for key, name in REQUIRED.items()}
    return config | {
        "architectures": ["LlamaForCausalLM"],
        "num_key_value_heads": values.get("attention.head_count_kv"),
        "head_dim": values.get("attention.key_length"),
        "vocab_size": embedding.shape[0],
        "tie_word_embeddings": "output.weight" not in file.tensors,
        "attention_bias": "blk.0.attn_q.bias" in file.tensors,
        "mlp_bias": "blk.0.ffn_gate.bias" in file.tensors,
        "dtype": _dtype(embedding),
        "bos_token_id": metadata.get("tokenizer.ggml.bos_token_id"),
        "eos_token_id": [
            metadata[f"tokenizer.ggml.{key}"] for key in END_OF_SEQUENCE if f"tokenizer.ggml.{key}" in metadata
        ],
        "rope_parameters": _rope_parameters(file, values),
    }


def model_config_from_gguf(file: GgufFile) -> ModelConfig:
    """hf_config, checked by the code that reads config.json.

    Raises:
        ConfigError, CheckpointError: as hf_config; or whatever model_config_from_hf refuses.
    """
    where, values = str(file.path), _values(file)
    result = model_config_from_hf(hf_config(file), None, f"{where} (its metadata by the names of config.json)")
    if values.get("rope.dimension_count", result.head_dim) != result.head_dim:
        raise ConfigError(
            f"{where}: llama.rope.dimension_count is {values['rope.dimension_count']}, head_dim {result.head_dim}; "
            "heads that are turned in part are not supported"
        )
    if ROPE_FACTORS in file.tensors and file.tensors[ROPE_FACTORS].shape != (result.head_dim // 2,):
        raise CheckpointError(
            f"{where}: {ROPE_FACTORS} is {list(file.tensors[ROPE_FACTORS].shape)}, wanted [{result.head_dim // 2}]"
        )
    return result


def _values(file: GgufFile) -> dict[str, Any]:
    """The metadata under "llama."."""
    return {key.removeprefix("llama."): value for key, value in file.metadata.items() if key.startswith("llama.")}


def _check_supported(values: dict[str, Any], where: str) -> None:
    if values.get("expert_count"):
        raise ConfigError(f"{where}: llama.expert_count is {values['expert_count']}; experts are not supported yet")
    if values.get("attention.value_length") != values.get("attention.key_length"):
        raise ConfigError(f"{where}: llama.attention.key_length and llama.attention.value_length must be equal")


def _dtype(embedding: StoredTensor) -> str:
    """float32 for quantized weights too: they are dequantized without rounding."""
    return {"BF16": "bfloat16", "F16": "float16"}.get(embedding.dtype, "float32")


def _rope_parameters(file: GgufFile, values: dict[str, Any]) -> dict[str, Any]:
    theta = values.get("rope.freq_base", 10000.0)
    kind = values.get("rope.scaling.type", "none")
    if kind not in ("none", "linear"):  # those have settings of their own, in llama.cpp's words
        raise ConfigError(f"{file.path}: llama.rope.scaling.type {kind!r} is not supported; none and linear are")
    factor = values.get("rope.scaling.factor", values.get("rope.scale_linear"))
    if ROPE_FACTORS in file.tensors:
        if type(theta) is not float or theta <= 0:
            raise ConfigError(f"{file.path}: llama.rope.freq_base must be a number above 0, found {theta!r}")
        if kind != "none":
            raise ConfigError(f"{file.path}: has both {ROPE_FACTORS} and llama.rope.scaling.type {kind!r}")
        return {"rope_theta": theta, **_llama3(file, theta)}
    if "rope.scaling.type" not in values and factor is not None:
        kind = "linear"  # older files give the factor alone
    if kind == "none":
        return {"rope_theta": theta}
    return {"rope_theta": theta, "rope_type": kind, "factor": factor}


def _llama3(file: GgufFile, theta: float) -> dict[str, Any]:
    """The llama3 parameters behind a tensor of factors, by which each rotary frequency is divided.

    The factors run from 1 through a ramp to the whole factor. One entry on the ramp tells the original length; all
    entries are then computed anew, and a table that is not met is refused rather than approximated.
    """
    stored = file.tensors[ROPE_FACTORS]
    if stored.dtype != "F32" or len(stored.shape) != 1 or not stored.shape[0]:
        raise CheckpointError(f"{file.path}: {ROPE_FACTORS} must be a row of F32, found {stored.dtype} {stored.shape}")
    factors32 = np.empty(stored.shape, np.float32)
    read_into(stored, factors32)
    factors = factors32.astype(np.float64)
    factor = float(factors.max())
    if not np.isfinite(factors).all() or factors.min() < 1:
        raise ConfigError(f"{file.path}: {ROPE_FACTORS} must hold finite factors of at least 1")
    wavelengths = 2 * math.pi * theta ** (np.arange(len(factors)) / len(factors))
    on_ramp = np.flatnonzero((factors > 1) & (factors < factor))
    length = LLAMA3_LENGTH
    if len(on_ramp):
        entry = on_ramp[len(on_ramp) // 2]
        smooth = (1 / factors[entry] - 1 / factor) / (1 - 1 / factor)
        length = round(wavelengths[entry] * (LLAMA3_LOW + smooth * (LLAMA3_HIGH - LLAMA3_LOW)))
    if not np.allclose(_llama3_factors(wavelengths, factor, length), factors, rtol=1e-4, atol=0):
        raise ConfigError(f"{file.path}: {ROPE_FACTORS} is no table of llama3 scaling; others are not supported")
    return {
        "rope_type": "llama3",
        "factor": factor,
        "low_freq_factor": LLAMA3_LOW,
        "high_freq_factor": LLAMA3_HIGH,
        "original_max_position_embeddings": length,
    }


def _llama3_factors(wavelengths: NDArray[np.float64], factor: float, length: int) -> NDArray[np.float64]:
    """1 for short waves, factor for long ones, between them 1 / ((1 − s)/factor + s) with s linear in 1/wavelength."""
    smooth = np.clip((length / wavelengths - LLAMA3_LOW) / (LLAMA3_HIGH - LLAMA3_LOW), 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)
