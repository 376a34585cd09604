"""A model as the runner sees it: an embedding, a list of pieces, a final norm and a head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from engine.batch import ForwardBatch
from engine.config import ModelConfig
from engine.kv_cache import CacheSpec, KVCache
from engine.weights import Norm

Array = Any


@dataclass(frozen=True, slots=True)
class Piece:
    """A part of a layer up to the point where ranks must add up.

    forward takes norm(residual) [num_tokens, hidden_size], the batch and the cache, and gives this rank's partial
    sum of what is added to the residual. A Llama layer has two pieces, a layer with a parallel block one.
    """

    name: str
    norm: Norm
    forward: Callable[[Array, ForwardBatch, KVCache], Array]
    is_by_token: bool = False  # a row of what it gives comes from that row alone, and it keeps nothing


@dataclass(frozen=True, slots=True)
class Model:
    """Built by a file of engine.models from a config, weights and an op table; holds no state of a request."""

    config: ModelConfig
    embed: Callable[[ForwardBatch], Array]  # → residual [num_tokens, hidden_size]
    pieces: tuple[Piece, ...]
    final_norm: Norm
    logits: Callable[[Array], Array]  # normed rows [num_logits, hidden_size] → [num_logits, vocab_size]
    cache_specs: tuple[CacheSpec, ...]


def times(x: Array, scale: float) -> Array:
    """x scaled in place; it must be the caller's own."""
    x *= scale
    return x
