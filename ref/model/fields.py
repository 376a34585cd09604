"""What the config.json of every family says alike, and how its keys are read: in the form of transformers 4 or 5.

Source: the config classes of transformers, whose keys, meanings and defaults these are.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ref.rope import ROPE_KINDS
from ref.rope_scaling import longrope_attention_factor, yarn_attention_factor

Config = Mapping[str, Any]  # a loaded config.json

ROPE_NEEDS = {  # keys without which a kind of rope means nothing
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
}
WITHOUT_KIND = ("rope_theta", "partial_rotary_factor", "finetuned")  # mean something where no kind is named
MAX_LAYERS = 4096  # far above every model there is; a slip of the pen must not fill the memory with names of weights


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """The leading arguments of ref.rope.rope_inv_freq, but for head_dim and seq_len; and two factors of scores."""

    kind: str = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()
    attention_factor: float = 1.0  # multiplies cos and sin
    mscale_all_dim: float = 0.0  # read by latent attention only, see ref.mla


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelConfig:
    """Geometry of a decoder; each family adds what it has besides."""

    architecture: str
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool = False
    dtype: str = "float32"  # of the stored weights
    eos_token_ids: tuple[int, ...] = ()
    # 1 but in MiniCPM, and in Command-R, which scales logits
    embedding_scale: float = 1.0
    residual_scale: float = 1.0
    logit_scale: float = 1.0


def common_fields(config: Config, **defaults: Any) -> dict[str, Any]:
    """The fields of ModelConfig by name; where a key is missing `defaults` speak, by the keys of config.json.

    Raises:
        ValueError: names the key that is missing or cannot be honoured.
    """
    if "num_key_value_heads" in config:  # null says as many as heads, whatever the default is
        defaults = {key: value for key, value in defaults.items() if key != "num_key_value_heads"}
    default_theta = defaults.pop("rope_theta", 10000.0)
    config = {**defaults, **{key: value for key, value in config.items() if value is not None}}
    n_heads, hidden_size = integer(config, "num_attention_heads"), integer(config, "hidden_size")
    if integer(config, "num_hidden_layers") > MAX_LAYERS:
        found = config["num_hidden_layers"]
        raise ValueError(f"config.json: num_hidden_layers must be at most {MAX_LAYERS}, found {found}")
    n_kv_heads = integer(config, "num_key_value_heads", n_heads)
    if n_heads % n_kv_heads:
        raise ValueError(f"num_attention_heads {n_heads} is no multiple of num_key_value_heads {n_kv_heads}")
    if "head_dim" not in config and hidden_size % n_heads:
        raise ValueError(f"hidden_size {hidden_size} is no multiple of num_attention_heads {n_heads}; give head_dim")
    max_position_embeddings = integer(config, "max_position_embeddings", 2048)
    eos = config.get("eos_token_id")
    return {
        "n_layers": integer(config, "num_hidden_layers"),
        "n_heads": n_heads,
        "n_kv_heads": n_kv_heads,
        "head_dim": integer(config, "head_dim", hidden_size // n_heads),
        "hidden_size": hidden_size,
        "intermediate_size": integer(config, "intermediate_size"),
        "vocab_size": integer(config, "vocab_size"),
        "max_position_embeddings": max_position_embeddings,
        "norm_eps": number(config, "rms_norm_eps", 1e-6),
        "rope": parse_rope(config, max_position_embeddings, default_theta),
        "tie_word_embeddings": flag(config, "tie_word_embeddings", False),
        "dtype": str(config.get("dtype") or config.get("torch_dtype") or "float32"),
        "eos_token_ids": tuple(eos) if isinstance(eos, list) else () if eos is None else (eos,),
    }


def integer(config: Config, key: str, default: int | None = None) -> int:
    """A positive integer. Raises ValueError, with what was found, for anything else."""
    value = default if config.get(key) is None else config[key]
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise ValueError(f"config.json: {key} must be a positive integer, found {value!r}")
    return value


def count(config: Config, key: str) -> int:
    """0, which is the default, or a positive integer. Raises ValueError, see integer."""
    value = 0 if config.get(key) is None else config[key]
    return 0 if type(value) is int and value == 0 else integer(config, key)


def number(config: Config, key: str, default: float | None = None) -> float:
    """A finite number above 0. Raises ValueError, with what was found, for anything else."""
    value: Any = default if config.get(key) is None else config[key]
    if isinstance(value, bool) or not isinstance(value, int | float) or not 0 < value < math.inf:
        raise ValueError(f"config.json: {key} must be a number, finite and above 0, found {value!r}")
    return float(value)


def flag(config: Config, key: str, default: bool) -> bool:
    """True or false; null is false. Raises ValueError, with what was found, for anything else."""
    value = config.get(key, default)
    if not isinstance(value, bool | None):
        raise ValueError(f"config.json: {key} must be true or false, found {value!r}")
    return value is True


def one_of(config: Config, key: str, known: Sequence[str], default: str) -> str:
    """A name out of those that ref knows. Raises ValueError, with their list, for another."""
    value = default if config.get(key) is None else config[key]
    if value not in known:
        supported = ", ".join(map(repr, known))
        raise ValueError(f"config.json: {key} is {value!r}; supported here: {supported}")
    return str(value)


def parse_rope(config: Config, max_position_embeddings: int, default_theta: float = 10000.0) -> RopeConfig:
    """rope_theta and rope_scaling (4.x), or both in rope_parameters (5.x).

    Raises:
        ValueError: a kind of rope that is not known, by name, or one without a number that it needs; numbers without
            a kind; a key with two values.
    """
    rope = _rope_table(config)
    kind = _rope_kind(rope)
    if rope.get("partial_rotary_factor", config.get("partial_rotary_factor", 1.0)) != 1.0:
        raise ValueError("config.json: partial_rotary_factor is not supported for this architecture")
    for key in ROPE_NEEDS.get(kind, ()):
        if not isinstance(rope.get(key), int | float):
            raise ValueError(f"config.json: rope type {kind!r} needs a number {key}, found {rope.get(key)!r}")
    if kind == "llama3" and (low := rope["low_freq_factor"]) >= (high := rope["high_freq_factor"]):
        raise ValueError(f"config.json: low_freq_factor {low!r} must be below high_freq_factor {high!r}")
    original = max_position_embeddings  # dynamic scales from here whatever else is said, as in transformers
    if kind in ("llama3", "yarn", "longrope"):
        original = integer(rope, "original_max_position_embeddings", max_position_embeddings)
    return RopeConfig(
        kind=kind,
        theta=number(rope, "rope_theta", default_theta),
        factor=number(rope, "factor", 1.0),
        low_freq_factor=number(rope, "low_freq_factor", 1.0),
        high_freq_factor=number(rope, "high_freq_factor", 4.0),
        original_max_position_embeddings=original,
        beta_fast=number(rope, "beta_fast", 32.0),
        beta_slow=number(rope, "beta_slow", 1.0),
        truncate=flag(rope, "truncate", True),
        short_factor=tuple(map(float, rope.get("short_factor", ()))),
        long_factor=tuple(map(float, rope.get("long_factor", ()))),
        attention_factor=_attention_factor(kind, rope, max_position_embeddings, original),
        mscale_all_dim=float(rope.get("mscale_all_dim") or 0.0),
    )


def _rope_table(config: Config) -> dict[str, Any]:
    """rope_theta, rope_scaling and rope_parameters as one table.

    Raises:
        ValueError: one of them is no object, or two of them contradict each other.
    """
    table = {} if config.get("rope_theta") is None else {"rope_theta": config["rope_theta"]}
    for group in ("rope_scaling", "rope_parameters"):
        values = config.get(group) or {}
        if not isinstance(values, Mapping):
            raise ValueError(f"config.json: {group} must be an object, found {values!r}")
        for key, value in values.items():
            if table.get(key) not in (None, value):
                raise ValueError(f"config.json: {key} is {table[key]!r} in one place and {value!r} in {group}")
            table[key] = table.get(key) if value is None else value
    return table


def _rope_kind(rope: Config) -> str:
    """rope_type, which older configs call type.

    Raises:
        ValueError: a kind that is not known, by name; mrope under whatever name; a table for each type of layer;
            settings without a kind.
    """
    kinds = [rope[key] for key in ("rope_type", "type") if rope.get(key) is not None]
    if rope.get("mrope_section") is not None:  # transformers calls it "default" once it has read it
        kinds.append("mrope")
    for kind in kinds:
        if kind not in ROPE_KINDS:
            raise ValueError(f"config.json: rope type {kind!r} is not supported; ref knows {', '.join(ROPE_KINDS)}")
    if len(set(kinds)) > 1:
        raise ValueError(f"config.json: rope_type is {kinds[0]!r}, but type is {kinds[1]!r}; give one of them")
    nested = [key for key, value in rope.items() if isinstance(value, Mapping)]
    if nested:
        raise ValueError(
            f"config.json: rope of its own for {', '.join(nested)} is not supported; give one for all layers"
        )
    settings = [key for key, value in rope.items() if value is not None and key not in WITHOUT_KIND]
    if not kinds and settings:
        raise ValueError(f"config.json: rope_type is missing beside {', '.join(settings)}")
    return str(kinds[0]) if kinds else "default"


def _attention_factor(kind: str, rope: Config, max_position_embeddings: int, original: int) -> float:
    if kind not in ("yarn", "longrope"):
        return 1.0
    if rope.get("attention_factor") is not None:
        return number(rope, "attention_factor")
    if kind == "longrope":
        stretched = number(rope, "factor", max_position_embeddings / original) * original
        return longrope_attention_factor(round(stretched), original)
    if rope.get("mscale") and rope.get("mscale_all_dim"):
        return yarn_attention_factor(number(rope, "factor"), rope["mscale"], rope["mscale_all_dim"])
    return yarn_attention_factor(number(rope, "factor"))  # one key of the two alone is ignored, as in transformers
