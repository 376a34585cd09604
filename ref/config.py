"""config.json of a Llama-type checkpoint, in the form of transformers 4 or 5, as one small record."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ARCHITECTURES = ("LlamaForCausalLM", "MistralForCausalLM")
ROPE_KINDS = ("default", "linear", "dynamic", "llama3")  # of these architectures; ref.rope knows more


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The leading arguments of ref.rope.rope_inv_freq, but for head_dim and seq_len."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0


@dataclass(frozen=True, slots=True)
class LlamaConfig:
    """Geometry and constants of a Llama or Mistral model."""

    architecture: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None  # number of keys a query sees, itself included
    dtype: str = "float32"  # of the stored weights
    eos_token_ids: tuple[int, ...] = ()


def read_config(path: str | Path) -> LlamaConfig:
    """Reads a config.json, or the one of a folder.

    Raises:
        FileNotFoundError: no such file.
        ValueError: names the key that is missing or cannot be honoured.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold a JSON object, found {type(config).__name__}")
    return parse_config(config)


def parse_config(config: Mapping[str, Any]) -> LlamaConfig:
    """A loaded config.json as LlamaConfig. Where a key is missing the default is that of transformers."""
    architecture = (config.get("architectures") or ["none"])[0]
    if architecture not in ARCHITECTURES:
        raise ValueError(f"architecture {architecture!r} is not supported; ref knows {', '.join(ARCHITECTURES)}")
    if config.get("hidden_act", "silu") != "silu":
        raise ValueError(f"hidden_act is {config['hidden_act']!r}; only 'silu' is supported")
    if config.get("quantization_config") is not None:
        raise ValueError("config.json has a quantization_config; ref reads floating-point weights only")
    is_mistral = architecture == "MistralForCausalLM"
    n_heads, hidden_size = _integer(config, "num_attention_heads"), _integer(config, "hidden_size")
    max_position_embeddings = _integer(config, "max_position_embeddings", 131072 if is_mistral else 2048)
    window = config.get("sliding_window", 4096) if is_mistral else None
    eos = config.get("eos_token_id")
    result = LlamaConfig(
        architecture=architecture,
        n_layers=_integer(config, "num_hidden_layers"),
        n_heads=n_heads,
        n_kv_heads=_integer(config, "num_key_value_heads", 8 if is_mistral else n_heads),
        head_dim=_integer(config, "head_dim", hidden_size // n_heads),
        hidden_size=hidden_size,
        intermediate_size=_integer(config, "intermediate_size"),
        vocab_size=_integer(config, "vocab_size"),
        max_position_embeddings=max_position_embeddings,
        rms_norm_eps=float(config.get("rms_norm_eps", 1e-6)),
        rope=_parse_rope(config, max_position_embeddings),
        tie_word_embeddings=bool(config.get("tie_word_embeddings", False)),
        attention_bias=bool(config.get("attention_bias", False)) and not is_mistral,
        mlp_bias=bool(config.get("mlp_bias", False)) and not is_mistral,
        sliding_window=None if window is None else int(window),
        dtype=str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        eos_token_ids=tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    )
    if result.n_heads % result.n_kv_heads:
        raise ValueError(f"num_attention_heads {n_heads} is no multiple of num_key_value_heads {result.n_kv_heads}")
    return result


def _integer(config: Mapping[str, Any], key: str, default: int | None = None) -> int:
    value = default if config.get(key) is None else config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {key} must be a positive integer, found {value!r}")
    return value


def _parse_rope(config: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
    """rope_theta and rope_scaling (4.x), or both in rope_parameters (5.x)."""
    rope = dict(config.get("rope_scaling") or {}) | dict(config.get("rope_parameters") or {})
    kind = rope.get("rope_type", rope.get("type", "default"))
    if kind not in ROPE_KINDS:
        raise ValueError(f"config.json: rope type {kind!r} is not supported; ref knows {', '.join(ROPE_KINDS)}")
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("config.json: partial_rotary_factor is not supported for this architecture")
    needed = {"linear": ["factor"], "dynamic": ["factor"], "llama3": ["factor", "low_freq_factor", "high_freq_factor"]}
    for key in needed.get(kind, []):
        if not isinstance(rope.get(key), int | float):
            raise ValueError(f"config.json: rope type {kind!r} needs a number {key}, found {rope.get(key)!r}")
    original = max_position_embeddings  # dynamic scales from here whatever else is said, as in transformers
    if kind == "llama3":
        original = int(rope.get("original_max_position_embeddings", max_position_embeddings))
    return RopeConfig(
        kind=kind,
        theta=float(rope.get("rope_theta", config.get("rope_theta", 10000.0))),
        factor=float(rope.get("factor", 1.0)),
        low_freq_factor=float(rope.get("low_freq_factor", 1.0)),
        high_freq_factor=float(rope.get("high_freq_factor", 4.0)),
        original_max_position_embeddings=original,
    )
