"""One pass through a model: where weights come from, where values are rounded and shown, where keys are kept.

The files of the families say what is computed; this one is what they say it with. Source: its own definitions.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ref.attention import attention_dense
from ref.mla import mla_dense
from ref.model.cache import Cache
from ref.model.fields import RopeConfig
from ref.numerics import round_to
from ref.quant.stored import Weight, arithmetic_dtype, decoded, weight_embedding, weight_linear
from ref.rmsnorm import rmsnorm
from ref.rope import rope_cos_sin, rope_inv_freq

Array = NDArray[Any]
Weights = Mapping[str, Weight]
Shapes = dict[str, tuple[int, ...]]
Trace = Callable[[str, Array], None]


class Decoded(Mapping[str, Array]):
    """Weights by checkpoint name, each decoded to dtype when it is asked for, and not kept."""

    def __init__(self, held: Weights, dtype: np.dtype[Any]) -> None:
        self.held, self.dtype = held, dtype

    def __getitem__(self, name: str) -> Array:
        return decoded(self.held[name], self.dtype)

    def __iter__(self) -> Iterator[str]:
        return iter(self.held)

    def __len__(self) -> int:
        return len(self.held)


class Run:
    """The tokens of one pass and the weights that it may read.

    weights: by checkpoint name, arrays of one dtype, in which everything is computed, or quantized or stored weights
        (ref/quant/coded.py, ref/quant/stored.py). `held` has them as given, `weights` decoded.
    token_ids: [num_tokens]. positions: [num_tokens], from 0, or from where the cache ends.
    storage: None, or the type to which each op's output is rounded ("bfloat16"), as a kernel that stores it would;
        the weights are the caller's to round.
    trace: called with the name and value of every intermediate, in order.
    """

    def __init__(
        self,
        shapes: Shapes,
        weights: Weights,
        token_ids: ArrayLike,
        storage: str | None = None,
        trace: Trace | None = None,
        cache: Cache | None = None,
    ) -> None:
        self.held = select_weights(shapes, weights)
        self.weights = Decoded(self.held, arithmetic_dtype(self.held.values()))
        self.storage, self.trace, self.cache = storage, trace, cache
        self.token_ids = np.asarray(token_ids, np.int64)
        self.positions = np.arange(len(self.token_ids)) + (0 if cache is None else cache.num_cached)

    def step(self, name: str, value: Array) -> Array:
        """Rounds an intermediate, shows it, and returns it."""
        value = round_to(value, self.storage)
        self.show(name, value)
        return value

    def show(self, name: str, value: Array) -> None:
        """Shows a value that is not rounded: numbers of experts, and what stays in wide arithmetic."""
        if self.trace is not None:
            self.trace(name.removeprefix("model."), value)

    def embed(self, key: str, scale: float = 1.0) -> Array:
        """[num_tokens, hidden_size]: the row of each token, times scale."""
        rows = weight_embedding(self.token_ids, self.held[f"{key}.weight"], self.weights.dtype)
        return self.step(key, rows if scale == 1 else rows * rows.dtype.type(scale))

    def linear(self, key: str, x: Array) -> Array:
        """[num_tokens, in_features] → [num_tokens, out_features]; with the bias, if the model has one of this name."""
        return self.step(key, self.product(key, x))

    def product(self, key: str, x: Array) -> Array:
        """linear, not rounded and not shown."""
        weight, bias = self.held[f"{key}.weight"], self.weights.get(f"{key}.bias")
        return weight_linear(x, weight, bias, storage=self.storage)

    def rmsnorm(self, key: str, x: Array, eps: float) -> Array:
        """Shape as x."""
        return self.step(key, rmsnorm(x, self.weights[f"{key}.weight"], eps))

    def cos_sin(self, config: RopeConfig, rotary_dim: int) -> Array:
        """[num_tokens, rotary_dim] float64: the rotation of each token, see ref.rope.rope_cos_sin."""
        table = asdict(config)
        attention_factor = table.pop("attention_factor")
        del table["mscale_all_dim"]
        seq_len = len(self.token_ids) if self.cache is None else self.cache.table_tokens
        inv_freq = rope_inv_freq(**table, head_dim=rotary_dim, seq_len=seq_len)
        return rope_cos_sin(inv_freq, self.positions, attention_factor)

    def attend(self, layer: int, q: Array, k: Array, v: Array, sm_scale: float, window: int | None = None) -> Array:
        """Causal attention over these tokens, and those in the cache if there is one; [num_tokens, n_heads, head_dim].

        Args:
            q: [num_tokens, n_heads, head_dim].
            k, v: [num_tokens, n_kv_heads, head_dim].
            window: keys a query sees, itself included; None: all.
        """
        self.show(f"layers.{layer}.k_cached", k)
        self.show(f"layers.{layer}.v_cached", v)
        if self.cache is not None:
            return self.cache.attend(layer, q, k, v, sm_scale, window)
        return attention_dense(q, k, v, sm_scale, window, storage=self.storage)

    def attend_latent(self, layer: int, q: Array, latent: Array, kv_b_proj: Array, sm_scale: float) -> Array:
        """The same over latents, see ref.mla: [num_tokens, n_heads, v_head_dim].

        Args:
            q: [num_tokens, n_heads, qk_head_dim], rotated.
            latent: [num_tokens, kv_lora_rank + qk_rope_head_dim].
        """
        self.show(f"layers.{layer}.latent_cached", latent)
        if self.cache is not None:
            return self.cache.attend_latent(layer, q, latent, kv_b_proj, sm_scale)
        return mla_dense(q, latent, kv_b_proj, sm_scale, storage=self.storage)


def select_weights(shapes: Shapes, weights: Weights) -> dict[str, Weight]:
    """The tensors that the model reads, and no other.

    Raises:
        ValueError: names the first weight that is missing or has another shape than config.json says.
    """
    for name, shape in shapes.items():
        if name not in weights:
            raise ValueError(f"the checkpoint has no tensor {name}; config.json asks for one of shape {list(shape)}")
        if weights[name].shape != shape:
            found = list(weights[name].shape)
            raise ValueError(f"tensor {name} has shape {found}, but config.json asks for {list(shape)}")
    return {name: weights[name] for name in shapes}
