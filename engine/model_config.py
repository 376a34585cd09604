"""config.json and generation_config.json become a ModelConfig, in the Hugging Face 4.x and 5.x forms.

4.x: rope_theta, rope_scaling (its kind under `type` or `rope_type`), torch_dtype. 5.x: rope_parameters, dtype.
Nothing that changes the arithmetic is guessed: what is missing, unknown or said twice in two ways is refused, and
all problems of a file are reported together.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from typing import Any

from engine.api import SamplingParams
from engine.config import ModelConfig, RopeConfig
from engine.errors import ConfigError, RequestError

# A row a family: its optional keys and what transformers takes for each where config.json is silent. A key that is
# not in the row is not read. num_key_value_heads None: as many as num_attention_heads.
QWEN_WINDOW = {"use_sliding_window": False, "sliding_window": 4096, "max_window_layers": 28, "layer_types": None}
FAMILIES: dict[str, dict[str, Any]] = {
    "LlamaForCausalLM": {"num_key_value_heads": None, "attention_bias": False, "mlp_bias": False},
    "MistralForCausalLM": {"num_key_value_heads": 8, "sliding_window": 4096},
    "Qwen2ForCausalLM": {"num_key_value_heads": 32, **QWEN_WINDOW},
    "Qwen3ForCausalLM": {"num_key_value_heads": 32, "head_dim": 128, "attention_bias": False, **QWEN_WINDOW},
}

ALWAYS_QKV_BIAS = ("Qwen2ForCausalLM",)  # and never one on o_proj
WITH_QK_NORM = ("Qwen3ForCausalLM",)
LAYER_TYPES = ("full_attention", "sliding_attention")

# Largest value of each size: far above every model there is, and small enough that no start hangs on a wrong one.
LARGEST = {
    **dict.fromkeys(("num_hidden_layers", "max_window_layers"), 4096),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 2**16),
    **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 2**24),
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), 2**26),
    "sliding_window": 2**31,
}
LARGEST_NUMBER = 1e30  # any real constant is far below; infinity, NaN and integers too large for a float are not
DTYPES = ("float32", "bfloat16", "float16")
ROPE_NUMBERS: dict[str, tuple[str, ...]] = {  # what each kind must have besides its base
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
ROPE_LENGTH = "original_max_position_embeddings"  # llama3 must have it; beside another kind it has no effect
SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # the last one in greedy decoding too


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
    fields = _Fields(config, FAMILIES[architecture])
    geometry = fields.geometry()
    rope = _rope(fields, geometry["max_position_embeddings"])
    eos_token_ids = fields.token_ids("eos_token_id", geometry["vocab_size"])
    bos_token_ids = fields.token_ids("bos_token_id", geometry["vocab_size"])
    default_sampling: dict[str, Any] = {}
    if generation_config is not None:
        generation = _Fields(generation_config, {}, prefix="generation_config.json: ")
        eos_token_ids += generation.token_ids("eos_token_id", geometry["vocab_size"])
        default_sampling = generation.sampling()
        fields.problems += generation.problems
    fields.check_supported()
    result = ModelConfig(
        architecture=architecture,
        **geometry,
        rms_norm_eps=fields.number("rms_norm_eps"),
        rope=rope,
        hidden_act="silu",
        tie_word_embeddings=fields.flag("tie_word_embeddings"),
        qkv_bias=architecture in ALWAYS_QKV_BIAS or fields.flag("attention_bias"),
        o_bias=fields.flag("attention_bias"),
        qk_norm=architecture in WITH_QK_NORM,
        mlp_bias=fields.flag("mlp_bias"),
        windows=fields.windows(geometry["n_layers"]),
        dtype=fields.dtype(),
        bos_token_id=bos_token_ids[0] if bos_token_ids else None,
        eos_token_ids=tuple(dict.fromkeys(eos_token_ids)),
        default_sampling=default_sampling,
    )
    if fields.problems:
        raise ConfigError(f"{source} cannot be served:\n" + "\n".join(f"  - {text}" for text in fields.problems))
    return result


def summary(config: ModelConfig) -> str:
    """One line for the log at start: what the model is and which rotary embedding it got."""
    rope = config.rope
    text = (
        f"{config.architecture}: {config.n_layers} layers, hidden {config.hidden_size}, {config.n_heads} heads of "
        f"{config.head_dim}, {config.n_kv_heads} KV heads, vocabulary {config.vocab_size}; "
        f"rope {rope.kind}, base {rope.theta:g}"
    )
    if rope.kind != "default":
        text += f", factor {rope.factor:g}"
    if rope.original_max_position_embeddings:
        text += f", original length {rope.original_max_position_embeddings}"
    return text + f", limit {config.max_position_embeddings}"


def _architecture(config: dict[str, Any], source: str) -> str:
    known = ", ".join(FAMILIES)
    names = config.get("architectures")
    if not isinstance(names, list) or len(names) != 1 or not isinstance(names[0], str):
        raise ConfigError(f"{source}: architectures is {names!r}; it must be a list with one of {known}")
    if names[0] not in FAMILIES:
        raise ConfigError(f"{source}: the architecture {names[0]} is not supported; supported are {known}")
    return names[0]


class _Fields:
    """Typed access to the keys of a config file; collects problems instead of stopping at the first."""

    def __init__(self, values: Mapping[str, Any], defaults: Mapping[str, Any], prefix: str = "") -> None:
        self.values = values
        self.defaults = defaults
        self.prefix = prefix
        self.problems: list[str] = []

    def problem(self, text: str) -> None:
        self.problems.append(self.prefix + text)

    def optional(self, key: str) -> Any:
        """The value of a key of the family's row; None for a key that the family does not have."""
        return self.values.get(key, self.defaults[key]) if key in self.defaults else None

    def integer(self, key: str, value: Any, low: int = 1) -> int:
        """value, if it is an integer from low to LARGEST; otherwise 0, with a problem noted."""
        if value is None:
            self.problem(f"{key} is missing")
        elif not _is_int(value) or value < low:
            self.problem(f"{key} must be an integer of at least {low}, found {reprlib.repr(value)}")
        elif value > LARGEST[key]:
            self.problem(f"{key} must be at most {LARGEST[key]}, found {reprlib.repr(value)}")
        else:
            return int(value)
        return 0

    def number(self, key: str, within: Mapping[str, Any] | None = None, name: str | None = None) -> float:
        """A finite number above 0; 1 with a problem noted if it is not."""
        value, name = (self.values if within is None else within).get(key), name or key
        if value is None:
            self.problem(f"{name} is missing")
        elif isinstance(value, bool) or not isinstance(value, int | float):
            self.problem(f"{name} must be a number, found {value!r}")
        elif not 0 < value <= LARGEST_NUMBER:
            self.problem(f"{name} must be finite and above 0, found {value!r}")
        else:
            return float(value)
        return 1.0

    def flag(self, key: str) -> bool:
        value = self.values.get(key, False) if key == "tie_word_embeddings" else self.optional(key)
        if value is not None and not isinstance(value, bool):
            self.problem(f"{key} must be true or false, found {value!r}")
        return value is True

    def geometry(self) -> dict[str, int]:
        """All sizes by their ModelConfig names; a size with a problem is 0."""
        sizes = {
            name: self.integer(key, self.values.get(key))
            for name, key in {
                "n_layers": "num_hidden_layers",
                "n_heads": "num_attention_heads",
                "hidden_size": "hidden_size",
                "intermediate_size": "intermediate_size",
                "vocab_size": "vocab_size",
                "max_position_embeddings": "max_position_embeddings",
            }.items()
        }
        hidden_size, n_heads = sizes["hidden_size"], sizes["n_heads"]
        n_kv_heads = self.optional("num_key_value_heads")
        sizes["n_kv_heads"] = n_heads if n_kv_heads is None else self.integer("num_key_value_heads", n_kv_heads)
        if n_heads and sizes["n_kv_heads"] and n_heads % sizes["n_kv_heads"]:
            self.problem(
                f"num_attention_heads ({n_heads}) must be a multiple of num_key_value_heads ({sizes['n_kv_heads']})"
            )
        head_dim = self.values.get("head_dim", self.defaults.get("head_dim"))
        if head_dim is not None:
            sizes["head_dim"] = self.integer("head_dim", head_dim)
        else:
            sizes["head_dim"] = hidden_size // n_heads if n_heads else 0
            if n_heads and hidden_size % n_heads:
                self.problem(
                    f"hidden_size ({hidden_size}) must be a multiple of num_attention_heads ({n_heads}) "
                    "where head_dim is not given"
                )
        if sizes["head_dim"] % 2:
            self.problem(f"head_dim is {sizes['head_dim']}; rotary position embedding needs an even one")
        return sizes

    def token_ids(self, key: str, vocab_size: int) -> list[int]:
        """An id, a list of ids or null; all inside the vocabulary."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(_is_int(token_id) for token_id in ids):
            self.problem(f"{key} must be an id or a list of ids, found {value!r}")
            return []
        outside = [token_id for token_id in ids if token_id < 0 or (vocab_size and token_id >= vocab_size)]
        if outside:
            self.problem(f"{key} {outside[0]} is outside the vocabulary of {vocab_size} ids (0 to {vocab_size - 1})")
        return ids

    def windows(self, n_layers: int) -> tuple[int | None, ...]:
        """The window of each layer.

        Mistral's is the same everywhere. Qwen's is off unless use_sliding_window is set, and then is that of the
        layers that layer_types names (5.x form), or of those from max_window_layers on (4.x form).
        """
        value = self.optional("sliding_window")
        is_off = "use_sliding_window" in self.defaults and not self.flag("use_sliding_window")
        if value is None or is_off:
            return (None,) * n_layers
        window = self.integer("sliding_window", value)
        layer_types = self.optional("layer_types")
        if layer_types is None:
            first = self.integer("max_window_layers", self.optional("max_window_layers") or 0, low=0)
            return tuple(window if layer >= first else None for layer in range(n_layers))
        known = isinstance(layer_types, list) and all(kind in LAYER_TYPES for kind in layer_types)
        if not known or len(layer_types) != n_layers:
            self.problem(f"layer_types must name one of {', '.join(LAYER_TYPES)} for each of {n_layers} layers")
            return (None,) * n_layers
        return tuple(window if kind == LAYER_TYPES[1] else None for kind in layer_types)

    def dtype(self) -> str:
        given = {str(self.values[key]) for key in ("torch_dtype", "dtype") if self.values.get(key) is not None}
        if len(given) > 1:
            self.problem(f"torch_dtype is {self.values['torch_dtype']!r} but dtype is {self.values['dtype']!r}")
        name = min(given, default="float32").removeprefix("torch.")
        if name not in DTYPES:
            self.problem(f"the dtype {name!r} is not supported; supported are {', '.join(DTYPES)}")
        return name

    def check_supported(self) -> None:
        """What is in the file and would change the arithmetic, but that no code here follows."""
        act = self.values.get("hidden_act", "silu")
        if act != "silu":
            self.problem(f"hidden_act {act!r} is not supported; supported is 'silu'")
        quantization = self.values.get("quantization_config")
        if quantization is not None:
            method = quantization.get("quant_method") if isinstance(quantization, Mapping) else quantization
            self.problem(f"quantized weights (quant_method {method!r}) are not supported yet; use an unquantized model")

    def sampling(self) -> dict[str, Any]:
        """Sampling defaults that a client's request may override."""
        keys = SAMPLING_KEYS if self.values.get("do_sample", True) else SAMPLING_KEYS[-1:]
        found = {key: self.values[key] for key in keys if self.values.get(key) is not None}
        for key, value in found.items():
            try:
                SamplingParams(**{key: value}).validate(vocab_size=1)
            except RequestError as error:
                self.problem(str(error))
        return found


def _is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def _rope(fields: _Fields, max_position_embeddings: int) -> RopeConfig:
    """One meaning for all spellings; a problem noted for whatever has none.

    Dynamic NTK starts to stretch at max_position_embeddings, as transformers does; for it that is the original length.
    """
    values = _rope_values(fields)
    if (rotated := values.pop("partial_rotary_factor")) not in (None, 1):
        fields.problem(f"partial_rotary_factor {rotated!r} is not supported; only 1 is")
    kinds = {str(values[key]) for key in ("type", "rope_type") if values.get(key) is not None}
    if len(kinds) > 1:
        fields.problem(f"rope type is {values['type']!r} but rope_type is {values['rope_type']!r}")
        return RopeConfig()
    settings = {key for key, value in values.items() if value is not None} - {"type", "rope_type", "rope_theta"}
    if not kinds and settings:
        fields.problem(f"rope_type is missing beside {', '.join(sorted(settings))}")
        return RopeConfig()
    kind = min(kinds, default="default")
    if kind not in ROPE_NUMBERS:
        fields.problem(f"rope_type {kind!r} is not supported; supported are {', '.join(ROPE_NUMBERS)}")
        return RopeConfig()
    if unknown := settings - set(ROPE_NUMBERS[kind]) - {"finetuned", ROPE_LENGTH}:
        fields.problem(f"rope_type {kind!r} does not take {', '.join(sorted(unknown))}")
    # Llama 1 and 2 have no rope_theta at all; the base of their paper is everybody's default
    theta = 10000.0 if values.get("rope_theta") is None else fields.number("rope_theta", values)
    numbers = {key: fields.number(key, values, f"{key} of rope_type {kind!r}") for key in ROPE_NUMBERS[kind]}
    original = max_position_embeddings if kind == "dynamic" else 0
    if kind == "llama3":
        original = fields.integer(ROPE_LENGTH, values.get(ROPE_LENGTH))
    if numbers.get("factor", 1.0) < 1:
        fields.problem(f"factor of rope_type {kind!r} must be at least 1, found {numbers['factor']:g}")
    if kind == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        fields.problem("low_freq_factor must be below high_freq_factor")
    return RopeConfig(kind, theta, original_max_position_embeddings=original, **numbers)  # type: ignore[arg-type]


def _rope_values(fields: _Fields) -> dict[str, Any]:
    """rope_theta, rope_scaling (4.x) and rope_parameters (5.x) as one table; they must not contradict each other."""
    merged = {key: fields.values.get(key) for key in ("rope_theta", "partial_rotary_factor")}
    for group in ("rope_scaling", "rope_parameters"):
        values = fields.values.get(group) or {}
        if not isinstance(values, Mapping):
            fields.problem(f"{group} must be an object, found {values!r}")
            continue
        if nested := [key for key, value in values.items() if isinstance(value, Mapping)]:
            fields.problem(f"{group} has a table for each layer type ({', '.join(nested)}), which is not supported")
            continue
        for key, value in values.items():
            if merged.get(key) not in (None, value):
                fields.problem(f"{key} is {merged[key]!r} in one place and {value!r} in {group}")
            merged[key] = value if value is not None else merged.get(key)
    return merged
