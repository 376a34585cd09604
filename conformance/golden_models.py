"""Tiny checkpoints made from a seed: the same bits on every machine, so that none of them has to be stored.

    rand_model(folder, seed=0)                        real attention, random weights
    chain_model(folder, {5: 6, 6: 7}, vocab_size=64)  greedy decoding prints a scripted chain of tokens

Both write a Hugging Face folder (config.json, model.safetensors) and return its path. Every key of config.json can
be set by its own name: rand_model(folder, num_hidden_layers=3, max_position_embeddings=8192).
"""

from __future__ import annotations

import json
import math
import zlib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from ref.numerics import bf16_bits

Tensors = dict[str, NDArray[np.float32]]
Config = dict[str, Any]

STORED_NAMES = {  # what a .safetensors header calls each type
    **{"float32": "F32", "float16": "F16", "bfloat16": "BF16", "uint8": "F8_E4M3"},
    **{"int8": "I8", "int32": "I32", "int64": "I64"},
}
CHAIN_LOGIT = 20.0  # of the scripted successor; every other logit is 0

GOLDEN_SEED = 1
GOLDEN_PROMPT_LENGTHS = (5, 21, 70)
_SMALL: Config = {"vocab_size": 160, "hidden_size": 64, "intermediate_size": 96, "max_position_embeddings": 256}
GOLDENS: dict[str, Config] = {  # models whose logits are stored in conformance/golden
    "llama2": {**_SMALL, "num_key_value_heads": 4, "num_hidden_layers": 3},
    "llama3": {
        **_SMALL,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 32,
        },
        "eos_token_id": [2, 3],
        "tie_word_embeddings": True,
    },
    "linear": {**_SMALL, "rope_scaling": {"type": "linear", "factor": 4.0}},
    "dynamic": {**_SMALL, "rope_scaling": {"type": "dynamic", "factor": 2.0}, "max_position_embeddings": 32},
    "mistral": {
        **_SMALL,
        "architectures": ["MistralForCausalLM"],
        "model_type": "mistral",
        "head_dim": 24,
        "rope_theta": 1000000.0,
        "sliding_window": 16,
    },
    "bias": {**_SMALL, "attention_bias": True, "mlp_bias": True},
}


def rand_model(
    folder: str | Path, seed: int = 0, *, dtype: str = "float32", num_shards: int = 1, **overrides: Any
) -> Path:
    """A random Llama-type checkpoint: hidden 128, 2 layers, 4 heads, 2 KV heads, vocabulary 1000.

    seed and config give all weights; two calls with the same arguments write the same bytes.
    dtype: "float32", "float16" or "bfloat16", of the stored tensors. num_shards > 1 writes several files and an index.
    """
    config = llama_config(torch_dtype=dtype, **overrides)
    return write_checkpoint(folder, config, llama_tensors(config, seed), num_shards=num_shards)


def chain_model(
    folder: str | Path,
    successor: Mapping[int, int],
    vocab_size: int = 256,
    eos_token_id: int = 2,
    otherwise: int | None = None,
    logit: float = CHAIN_LOGIT,
    *,
    dtype: str = "float32",
    **overrides: Any,
) -> Path:
    """A checkpoint in which successor[t] follows token t, whatever came before t.

    o_proj and down_proj are zero, so the last hidden state is the embedding of the last token alone, though the
    projections and the KV cache do real work. Each key of `successor` has an axis of the hidden state to itself;
    all other tokens share axis 0 and are followed by `otherwise` (None: by the end-of-sequence token). So the
    logits are exactly `logit` at the successor (to rounding) and 0 elsewhere.
    A chain may end in eos_token_id or loop; several tokens may have the same successor.
    """
    hidden_size = 16 * math.ceil((len(successor) + 1) / 16)
    settings: Config = {
        "vocab_size": vocab_size,
        "hidden_size": hidden_size,
        "intermediate_size": 32,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 8,
        "eos_token_id": eos_token_id,
        "torch_dtype": dtype,
    }
    config = llama_config(**{**settings, **overrides})
    tensors = llama_tensors(config, seed=0)
    embed = np.zeros((vocab_size, hidden_size), np.float32)
    lm_head = np.zeros((vocab_size, hidden_size), np.float32)
    embed[:, 0] = 1
    # the final norm turns a one-hot row into sqrt(hidden_size) at its axis
    weight = logit / math.sqrt(hidden_size)
    lm_head[eos_token_id if otherwise is None else otherwise, 0] = weight
    for axis, (token, follower) in enumerate(successor.items(), start=1):
        embed[token] = 0
        embed[token, axis] = 1
        lm_head[follower, axis] = weight
    tensors |= {"model.embed_tokens.weight": embed, "lm_head.weight": lm_head}
    for name, tensor in tensors.items():
        if name.endswith(("o_proj.weight", "down_proj.weight", "o_proj.bias", "down_proj.bias")):
            tensor[...] = 0
        if name == "model.norm.weight":
            tensor[...] = 1
    return write_checkpoint(folder, config, tensors)


def golden_model(folder: str | Path, name: str) -> Path:
    """The checkpoint behind conformance/golden/<name>.npz."""
    return rand_model(folder, GOLDEN_SEED, **GOLDENS[name])


def golden_prompts(name: str) -> list[list[int]]:
    """Three prompts of 5, 21 and 70 ids; ids 0 to 3 (begin and end of text) are left out."""
    return random_ids(GOLDENS[name]["vocab_size"], GOLDEN_PROMPT_LENGTHS)


def random_ids(vocab_size: int, lengths: Sequence[int]) -> list[list[int]]:
    """A list of token ids from 4 on for each length."""
    words = np.random.PCG64([GOLDEN_SEED, zlib.crc32(b"prompts")]).random_raw(sum(lengths))
    ids = (4 + (np.atleast_1d(words) >> np.uint64(11)) % np.uint64(vocab_size - 4)).astype(np.int64)
    return [part.tolist() for part in np.split(ids, np.cumsum(lengths)[:-1])]


def llama_config(**overrides: Any) -> Config:
    """config.json of a small Llama in the 4.x form, with `overrides` by the file's own key names."""
    config: Config = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "vocab_size": 1000,
        "hidden_size": 128,
        "intermediate_size": 256,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 2048,
        "hidden_act": "silu",
        "rms_norm_eps": 1e-5,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "float32",
        "rope_theta": 10000.0,
        "rope_scaling": None,
        "attention_bias": False,
        "mlp_bias": False,
        "tie_word_embeddings": False,
        "use_cache": True,
    }
    return config | overrides


def config_v5(config: Config) -> Config:
    """The same config.json in the 5.x form: rope_parameters instead of rope_theta and rope_scaling, and dtype."""
    renamed = {key: value for key, value in config.items() if key not in ("rope_theta", "rope_scaling", "torch_dtype")}
    scaling = dict(config["rope_scaling"] or {"rope_type": "default"})
    scaling.setdefault("rope_type", scaling.pop("type", "default"))
    rope_parameters = {"rope_theta": config["rope_theta"], **scaling}
    return renamed | {"dtype": config["torch_dtype"], "rope_parameters": rope_parameters}


def llama_tensors(config: Config, seed: int) -> Tensors:
    """All tensors of a Llama checkpoint by their Hugging Face names, float32; norms and biases are random too."""
    hidden, intermediate = config["hidden_size"], config["intermediate_size"]
    head_dim = config.get("head_dim") or hidden // config["num_attention_heads"]
    q_size, kv_size = config["num_attention_heads"] * head_dim, config["num_key_value_heads"] * head_dim
    tensors: Tensors = {}

    def linear(name: str, out_features: int, in_features: int, bias: bool, gain: float = 1.0) -> None:
        weight = f"{name}.weight"
        tensors[weight] = uniform_tensor(seed, weight, (out_features, in_features), gain / math.sqrt(in_features))
        if bias:
            tensors[f"{name}.bias"] = uniform_tensor(seed, f"{name}.bias", (out_features,), 0.3)

    def norm(name: str) -> None:
        tensors[f"{name}.weight"] = 1 + uniform_tensor(seed, name, (hidden,), 0.2)

    linear("model.embed_tokens", config["vocab_size"], hidden, False, gain=2.0)
    for layer in range(config["num_hidden_layers"]):
        attn, mlp = f"model.layers.{layer}.self_attn", f"model.layers.{layer}.mlp"
        norm(f"model.layers.{layer}.input_layernorm")
        linear(f"{attn}.q_proj", q_size, hidden, config["attention_bias"], gain=2.0)
        linear(f"{attn}.k_proj", kv_size, hidden, config["attention_bias"], gain=2.0)
        linear(f"{attn}.v_proj", kv_size, hidden, config["attention_bias"])
        linear(f"{attn}.o_proj", hidden, q_size, config["attention_bias"])
        norm(f"model.layers.{layer}.post_attention_layernorm")
        linear(f"{mlp}.gate_proj", intermediate, hidden, config["mlp_bias"])
        linear(f"{mlp}.up_proj", intermediate, hidden, config["mlp_bias"])
        linear(f"{mlp}.down_proj", hidden, intermediate, config["mlp_bias"])
    norm("model.norm")
    if not config["tie_word_embeddings"]:
        linear("lm_head", config["vocab_size"], hidden, False, gain=2.0)
    return tensors


def uniform_tensor(seed: int, name: str, shape: tuple[int, ...], std: float) -> NDArray[np.float32]:
    """Zero mean, the given standard deviation. Raw PCG64 words are the one stream that NumPy promises to keep."""
    words = np.random.PCG64([seed, zlib.crc32(name.encode())]).random_raw(math.prod(shape))
    signed = (np.atleast_1d(words) >> np.uint64(40)).astype(np.float32) / np.float32(2**23) - 1
    return (signed * np.float32(std * math.sqrt(3))).reshape(shape)


def write_checkpoint(folder: str | Path, config: Config, tensors: Tensors, *, num_shards: int = 1) -> Path:
    """Writes config.json and the tensors, stored as config["torch_dtype"] says; returns the folder."""
    folder = Path(folder)
    folder.mkdir(parents=True, exist_ok=True)
    for stale in folder.glob("model*.safetensors*"):
        stale.unlink()
    (folder / "config.json").write_text(json.dumps(config, indent=1), encoding="utf-8")
    dtype = config["torch_dtype"]
    if num_shards == 1:
        write_safetensors(folder / "model.safetensors", tensors, dtype)
        return folder
    names = list(tensors)
    weight_map: dict[str, str] = {}
    for shard in range(num_shards):
        file = f"model-{shard + 1:05d}-of-{num_shards:05d}.safetensors"
        held = {name: tensors[name] for name in names[shard::num_shards]}
        write_safetensors(folder / file, held, dtype)
        weight_map |= dict.fromkeys(held, file)
    total_size = sum(tensor.size for tensor in tensors.values()) * (4 if dtype == "float32" else 2)
    index = {"metadata": {"total_size": total_size}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=1), encoding="utf-8")
    return folder


def write_safetensors(path: str | Path, tensors: Mapping[str, NDArray[Any]], dtype: str = "float32") -> None:
    """Floating tensors as one .safetensors file, each stored as dtype.

    dtype: "float32", "float16" or "bfloat16" (rounded to nearest, ties to even).
    """
    write_stored(path, {name: as_stored(tensor, dtype) for name, tensor in tensors.items()})


def as_stored(tensor: NDArray[Any], dtype: str) -> NDArray[Any]:
    """tensor rounded to "float32", "float16" or "bfloat16", in an array of that type."""
    if dtype == "bfloat16":
        return bf16_bits(tensor).view(ml_dtypes.bfloat16)
    return tensor.astype({"float32": np.float32, "float16": np.float16}[dtype])


def write_stored(path: str | Path, tensors: Mapping[str, NDArray[Any]]) -> None:
    """One .safetensors file: header length as 8 bytes, a JSON header, then the tensors' bytes.

    Each tensor is stored in its own type; uint8 are codes of e4m3.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    stored: list[bytes] = []
    offset = 0
    for name, tensor in tensors.items():
        data = tensor.tobytes()
        place = [offset, offset + len(data)]
        header[name] = {"dtype": STORED_NAMES[tensor.dtype.name], "shape": list(tensor.shape), "data_offsets": place}
        stored.append(data)
        offset += len(data)
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)  # so that the data starts aligned
    with open(path, "wb") as file:
        file.write(len(text).to_bytes(8, "little"))
        file.write(text)
        file.writelines(stored)
