"""config.json and generation_config.json become a ModelConfig, in the Hugging Face 4.x and 5.x forms.

4.x: rope_theta, rope_scaling (its kind under `type` or `rope_type`), torch_dtype. 5.x: rope_parameters, dtype.
Nothing that changes the arithmetic is guessed: what is missing, unknown or said twice in two ways is refused, and
all problems of a file are reported together.
"""

from __future__ import annotations

from typing import Any

from engine.config import ModelConfig, RopeConfig
from engine.errors import ConfigError
from engine.model_config.families import FAMILIES
from engine.model_config.fields import Fields
from engine.model_config.rope import read_rope

OF_THE_WHOLE = ("quantization_config", "bos_token_id", "eos_token_id")  # keys that stand beside a language part too


def model_config_from_hf(config: dict[str, Any], generation_config: dict[str, Any] | None, source: str) -> ModelConfig:
    """The geometry and constants of a checkpoint.

    End-of-sequence ids of both files are united. The sampling defaults of generation_config are kept, save that with
    "do_sample": false only repetition_penalty is: transformers' generate then decodes greedily and ignores the rest,
    and a server whose clients choose the temperature has no use for them.

    Args:
        config: the content of config.json.
        generation_config: the content of generation_config.json, None if there is none.
        source: name of the config file for messages.

    Raises:
        ConfigError: lists everything that is missing, out of range, contradictory or not supported.
    """
    architecture = _architecture(config, source)
    family = FAMILIES[architecture]
    fields = _fields(config, architecture, source)
    geometry: dict[str, Any] = fields.geometry()
    rope = RopeConfig("none")
    if family.rotates:
        rope = read_rope(fields, geometry["max_position_embeddings"], geometry["head_dim"])
    if family.rotates and geometry["head_dim"] % 2:
        name = fields.name("head_dim")
        fields.problem(f"{name} is {geometry['head_dim']}; rotary position embedding needs an even one")
    eos_token_ids = fields.token_ids("eos_token_id", geometry["vocab_size"])
    bos_token_ids = fields.token_ids("bos_token_id", geometry["vocab_size"])
    default_sampling: dict[str, Any] = {}
    if generation_config is not None:
        generation = Fields(generation_config, {}, prefix="generation_config.json: ")
        eos_token_ids += generation.token_ids("eos_token_id", geometry["vocab_size"])
        default_sampling = generation.sampling()
        fields.problems += generation.problems
    common: dict[str, Any] = {
        **geometry,
        "norm_eps": fields.number("rms_norm_eps"),
        "rope": rope,
        "hidden_act": fields.activation(family.activations),
        "tie_word_embeddings": fields.flag("tie_word_embeddings"),
        "windows": fields.windows(geometry["n_layers"], family.slides),
        "dtype": fields.dtype(),
        "quantization": fields.quantization(),
        "bos_token_id": bos_token_ids[0] if bos_token_ids else None,
        "eos_token_ids": tuple(dict.fromkeys(eos_token_ids)),
        "default_sampling": default_sampling,
    }
    result = ModelConfig(architecture=architecture, **common | family.extra(fields))
    if fields.problems:
        raise ConfigError(f"{source} cannot be served:\n" + "\n".join(f"  - {text}" for text in fields.problems))
    return result


def _fields(config: dict[str, Any], architecture: str, source: str) -> Fields:
    """The config of the language model: the file itself, or a part of it where the model is more than that."""
    family = FAMILIES[architecture]
    if family.part is None:
        return Fields(config, family.optional, family.names)
    part = config.get(family.part)
    if not isinstance(part, dict):
        raise ConfigError(f"{source}: {architecture} needs {family.part}, its language part's config, found {part!r}")
    whole = {key: config[key] for key in OF_THE_WHOLE if key in config}
    return Fields(whole | part, family.optional, family.names, prefix=f"{family.part}: ")


def summary(config: ModelConfig) -> str:
    """One line for the log at start: what the model is and which rotary embedding it got."""
    rope = config.rope
    text = (
        f"{config.architecture}: {config.n_layers} layers, hidden {config.hidden_size}, {config.n_heads} heads of "
        f"{config.head_dim}, {_cached(config)}, vocabulary {config.vocab_size}; "
    )
    if moe := config.moe:
        place = f"in {sum(moe.layers)} of {config.n_layers} layers"
        text += f"{moe.n_experts} experts {place}, {moe.n_experts_per_tok} a token; "
    text += "no rope" if rope.kind == "none" else f"rope {rope.kind}, base {rope.theta:g}"
    if rope.kind not in ("none", "default", "ntk_alpha", "longrope"):
        text += f", factor {rope.factor:g}"
    if rope.original_max_position_embeddings:
        text += f", original length {rope.original_max_position_embeddings}"
    if rope.kind == "longrope":
        text += " (prompts up to it use the short factors, longer ones the long factors)"
    return text + f", limit {config.max_position_embeddings}"


def _cached(config: ModelConfig) -> str:
    if config.mla is None:
        return f"{config.n_kv_heads} KV heads"
    return f"latents of {config.mla.kv_lora_rank + config.mla.qk_rope_head_dim}"


def _architecture(config: dict[str, Any], source: str) -> str:
    known = ", ".join(FAMILIES)
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ConfigError(f"{source}: architectures is {names!r}; it must be a list with one of {known}")
    if names[0] not in FAMILIES:
        raise ConfigError(f"{source}: the architecture {names[0]} is not supported; supported are {known}")
    return names[0]
