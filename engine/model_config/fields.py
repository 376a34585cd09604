"""Typed access to the keys of a config file. Problems are collected, not raised: a user wants to see all of them."""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from typing import Any

from engine.api import SamplingParams
from engine.errors import RequestError
from ref.quant.scheme_config import QuantConfig, parse_quantization_config

LAYER_TYPES = ("full_attention", "sliding_attention")

# Largest value of each size: far above every model there is, and small enough that no start hangs on a wrong one.
LARGEST = {
    **dict.fromkeys(("num_hidden_layers", "max_window_layers"), 4096),
    **dict.fromkeys(("num_attention_heads", "num_key_value_heads", "head_dim"), 2**16),
    **dict.fromkeys(("hidden_size", "intermediate_size", "vocab_size"), 2**24),
    **dict.fromkeys(("max_position_embeddings", "original_max_position_embeddings"), 2**26),
    **dict.fromkeys(("model_max_length", "seq_length"), 2**26),
    **dict.fromkeys(("prompt_types", "prompt_length", "segment_types", "position_bias_num_buckets"), 2**12),
    **dict.fromkeys(("num_experts", "num_local_experts", "n_routed_experts", "num_experts_per_tok"), 1024),
    **dict.fromkeys(("n_shared_experts", "n_group", "topk_group"), 1024),
    **dict.fromkeys(("decoder_sparse_step", "moe_layer_freq", "first_k_dense_replace"), 4096),
    **dict.fromkeys(("qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim"), 2**16),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 2**24),
    "num_nextn_predict_layers": 4096,
    **dict.fromkeys(("moe_intermediate_size", "shared_expert_intermediate_size"), 2**24),
    "sliding_window": 2**31,
}
LARGEST_NUMBER = 1e30  # any real constant is far below; infinity, NaN and integers too large for a float are not
DTYPES = ("float32", "bfloat16", "float16")
SAMPLING_KEYS = ("temperature", "top_k", "top_p", "min_p", "repetition_penalty")  # the last one in greedy decoding too


class Fields:
    """Typed access to the keys of a config file; collects problems instead of stopping at the first.

    A common key is asked for by the name that most families give it; names says what this family calls it, and so do
    messages. defaults are by the family's own names.
    """

    def __init__(
        self,
        values: Mapping[str, Any],
        defaults: Mapping[str, Any],
        names: Mapping[str, str] | None = None,
        prefix: str = "",
    ) -> None:
        self.values = values
        self.defaults = defaults
        self.names = names or {}
        self.prefix = prefix
        self.problems: list[str] = []

    def problem(self, text: str) -> None:
        """Notes a problem, once however often it is met."""
        if self.prefix + text not in self.problems:
            self.problems.append(self.prefix + text)

    def name(self, key: str) -> str:
        """What the family calls a common key."""
        return self.names.get(key, key)

    def value(self, key: str) -> Any:
        """The value of a common key, or the family's default; None if there is neither."""
        name = self.name(key)
        return self.values.get(name, self.defaults.get(name))

    def optional(self, key: str) -> Any:
        """The value of a key of the family's row; None for a key that the family does not have."""
        return self.values.get(key, self.defaults[key]) if key in self.defaults else None

    def integer(self, key: str, value: Any, low: int = 1) -> int:
        """value, if it is an integer from low to LARGEST; otherwise 0, with a problem noted."""
        name = self.name(key)
        if value is None:
            self.problem(f"{name} is missing")
        elif not is_int(value) or value < low:
            self.problem(f"{name} must be an integer of at least {low}, found {reprlib.repr(value)}")
        elif value > LARGEST[key]:
            self.problem(f"{name} must be at most {LARGEST[key]}, found {reprlib.repr(value)}")
        else:
            return int(value)
        return 0

    def number(self, key: str, within: Mapping[str, Any] | None = None, name: str | None = None) -> float:
        """A finite number above 0; 1 with a problem noted if it is not."""
        value, name = self.value(key) if within is None else within.get(key), name or self.name(key)
        if value is None:
            self.problem(f"{name} is missing")
        elif not is_number(value):
            self.problem(f"{name} must be a number, found {value!r}")
        elif not 0 < value <= LARGEST_NUMBER:
            self.problem(f"{name} must be finite and above 0, found {value!r}")
        else:
            return float(value)
        return 1.0

    def flag(self, key: str) -> bool:
        value = self.value(key) if key == "tie_word_embeddings" else self.optional(key)
        if value is not None and not isinstance(value, bool):
            self.problem(f"{key} must be true or false, found {value!r}")
        return value is True

    def geometry(self) -> dict[str, int]:
        """All sizes by their ModelConfig names. A size with a problem is 0, and so is one that is not given where the
        family's default is None: then it follows from others, and the family's `extra` says how."""
        sizes = {
            name: 0 if self._follows(key) else self.integer(key, self.value(key))
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
                f"{self.name('num_attention_heads')} ({n_heads}) must be a multiple of "
                f"num_key_value_heads ({sizes['n_kv_heads']})"
            )
        head_dim = self.value("head_dim")
        if head_dim is not None:
            sizes["head_dim"] = self.integer("head_dim", head_dim)
        else:
            sizes["head_dim"] = hidden_size // n_heads if n_heads else 0
            if n_heads and hidden_size % n_heads:
                self.problem(
                    f"{self.name('hidden_size')} ({hidden_size}) must be a multiple of "
                    f"{self.name('num_attention_heads')} ({n_heads}) where head_dim is not given"
                )
        return sizes

    def _follows(self, key: str) -> bool:
        """Whether the file gives no such size, and the family's row says that it need not."""
        name = self.name(key)
        return self.value(key) is None and name in self.defaults and self.defaults[name] is None

    def token_ids(self, key: str, vocab_size: int) -> list[int]:
        """An id, a list of ids or null; all inside the vocabulary."""
        value = self.values.get(key)
        ids = value if isinstance(value, list) else [] if value is None else [value]
        if not all(is_int(token_id) for token_id in ids):
            self.problem(f"{key} must be an id or a list of ids, found {value!r}")
            return []
        outside = [token_id for token_id in ids if token_id < 0 or (vocab_size and token_id >= vocab_size)]
        if outside:
            self.problem(f"{key} {outside[0]} is outside the vocabulary of {vocab_size} ids (0 to {vocab_size - 1})")
        return ids

    def windows(self, n_layers: int, slides: Callable[[int, int], bool]) -> tuple[int | None, ...]:
        """The window of each layer.

        Mistral's is the same everywhere. Qwen's is off unless use_sliding_window is set, and then is that of the
        layers that layer_types names (5.x form), or of those for which slides(layer, max_window_layers) (4.x form).
        """
        value = self.optional("sliding_window")
        is_off = "use_sliding_window" in self.defaults and not self.flag("use_sliding_window")
        if value is None or is_off:
            return (None,) * n_layers
        window = self.integer("sliding_window", value)
        layer_types = self.optional("layer_types")
        if layer_types is None:
            first = self.integer("max_window_layers", self.optional("max_window_layers") or 0, low=0)
            return tuple(window if slides(layer, first) else None for layer in range(n_layers))
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

    def activation(self, known: tuple[str, ...]) -> str:
        """The activation function, one of those that the family's code has."""
        name = self.name("hidden_act")
        act = self.values.get(name, self.defaults.get(name, "silu"))
        if act not in known:
            verb = "are" if len(known) > 1 else "is"
            self.problem(f"{name} {act!r} is not supported; supported {verb} {', '.join(map(repr, known))}")
        return str(act)

    def quantization(self) -> QuantConfig | None:
        """How the weights are stored, if not in floating point."""
        if self.values.get("quantization_config") is None:
            return None
        try:
            return parse_quantization_config(self.values["quantization_config"])
        except ValueError as error:
            self.problem(str(error))
            return None

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


def is_int(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


def is_number(value: object) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)
