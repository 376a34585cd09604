"""The engine and ref layer by layer on one checkpoint, and the first place where they part.

The engine prefills all but the last tokens of a prompt and decodes those one by one, so that both kinds of step are
seen, unless the model reads a prompt both ways; ref makes one pass without a cache. What is compared, in the order in
which it is computed: what goes into the cache, which experts are chosen, what a piece adds to the residual, the
residual after it, the logits. The limit of each is the rule of conformance.tolerance, made from the error of ref in
float32 at the same place.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.compare import compare
from conformance.engine_run import make_runner, run_step, shuffled_blocks
from conformance.tolerance import RULE
from engine.checkpoint.loader import load_model_config
from engine.checkpoint.source import resolve
from engine.comm.communicator import OneRank, StepSum
from engine.kv_cache import KVCache
from engine.ops import OpTable
from engine.weights import Norm
from ref.arguments import check_checkpoint, parse_ids
from ref.config import read_config
from ref.model.registry import forward
from ref.quant.scheme import read_weights

Array = NDArray[Any]
Arrays = dict[str, Array]

NUM_DECODED = 3  # tokens at the end of the prompt that are computed one by one
NUM_TOKENS = 24  # of a prompt that nobody has given


@dataclass(frozen=True, slots=True)
class Place:
    """One compared array: the engine's error, its limit, and what is wrong ("" = nothing)."""

    name: str
    error: float
    limit: float
    problem: str


def compare_layers(folder: Path, ops: OpTable, token_ids: Sequence[int]) -> list[Place]:
    """Every place of every layer, in the order of the computation.

    Raises:
        ValueError, GlintError: the checkpoint cannot be read by ref, or by the engine.
    """
    candidate = engine_layers(folder, ops, token_ids)
    truth, yardstick = (ref_layers(folder, token_ids, dtype) for dtype in ("float64", "float32"))
    places = []
    for name, right in truth.items():
        if name not in candidate:
            places.append(Place(name, np.inf, 0.0, "is missing in the engine"))
            continue
        found = compare(candidate[name], right, yardstick[name], RULE, "float32")
        places.append(Place(name, found.error, found.limit, found.problem))
    return places


def prompt_for(folder: Path, seed: int, ids: str | None = None) -> list[int]:
    """The ids that are given, "1,2,3", else NUM_TOKENS random ones of the model's vocabulary; 0 is padding in some.

    Raises:
        ValueError: no checkpoint in the folder, or ids that are none of its vocabulary.
    """
    check_checkpoint("the checkpoint", folder)
    vocab_size = read_config(folder).vocab_size
    if ids is not None:
        return parse_ids(ids, vocab_size)
    return np.random.default_rng(seed).integers(1, vocab_size, NUM_TOKENS).tolist()


def ref_layers(folder: Path, token_ids: Sequence[int], dtype: str) -> Arrays:
    """By name, [num_tokens, …], in the order of the computation."""
    config, seen = read_config(folder), dict[str, Array]()
    logits = forward(config, read_weights(folder, dtype), token_ids, trace=seen.__setitem__)
    found: Arrays = {}
    for layer in range(config.n_layers):
        key = f"layers.{layer}"
        cached = (f"{key}.{name}" for name in ("k_cached", "v_cached", "latent_cached"))
        found |= {name: seen[name] for name in cached if name in seen}
        scale = seen[f"{key}.residual"].dtype.type(config.residual_scale)
        attended, fed = seen[f"{key}.attn_out"] * scale, seen[f"{key}.mlp_out"] * scale
        if f"{key}.attn_residual" in seen:
            found |= {f"{key}.attn_out": attended, f"{key}.attn_residual": seen[f"{key}.attn_residual"]}
        else:  # both blocks read the same norm
            fed = attended + fed
        experts = [name for name in seen if name.startswith(f"{key}.") and name.endswith(".expert_ids")]
        found |= {f"{key}.expert_ids": np.sort(seen[name], axis=-1) for name in experts}
        found |= {f"{key}.mlp_out": fed, f"{key}.residual": seen[f"{key}.residual"]}
    return found | {"logits": logits}


def engine_layers(folder: Path, ops: OpTable, token_ids: Sequence[int]) -> Arrays:
    """The same from the engine."""
    recorder = Recorder()
    soft_prompt_ids = load_model_config(resolve(str(folder))).soft_prompt_ids
    num_tokens, token_ids = len(token_ids), [*soft_prompt_ids, *token_ids]
    runner = make_runner(folder, recorder.listen(ops), [token_ids], partial(HeardRank, recorder=recorder))
    recorder.pieces = [piece.name for piece in runner.model.pieces]
    num_prefilled = len(token_ids) if soft_prompt_ids else max(1, len(token_ids) - NUM_DECODED)
    steps = [(0, num_prefilled), *((done, 1) for done in range(num_prefilled, len(token_ids)))]
    for done, count in steps:
        hidden = run_step(runner, [0], [token_ids], [done], [count])
        recorder.keep("logits", runner.model.logits(hidden[-num_tokens:]))
    found = {name: np.concatenate(parts) for name, parts in recorder.parts.items()}
    return found | dict(_cached(runner.cache, shuffled_blocks([token_ids])[0], len(token_ids)))


class Recorder:
    """Keeps what every piece adds and chooses, step by step, each under ref's name for it."""

    def __init__(self) -> None:
        self.pieces: list[str] = []
        self.num_done = 0  # pieces, over all steps
        self.parts: dict[str, list[Array]] = {}

    def keep(self, name: str, value: Array) -> None:
        self.parts.setdefault(name, []).append(np.array(value))

    @property
    def piece(self) -> str:
        """The piece that is being computed: layers.3.attention."""
        return self.pieces[self.num_done % len(self.pieces)]

    @property
    def layer(self) -> str:
        """layers.3"""
        return ".".join(self.piece.split(".")[:2])

    def listen(self, ops: OpTable) -> OpTable:
        """The op table, heard."""

        def moe_route(*args: Any, **kwargs: Any) -> tuple[Array, Array]:
            expert_ids, weights = ops.moe_route(*args, **kwargs)
            self.keep(f"{self.layer}.expert_ids", np.sort(expert_ids, axis=-1))
            return expert_ids, weights

        return replace(ops, moe_route=moe_route)


class HeardRank(OneRank):
    """A communicator that tells the recorder what it is given and what it makes of it."""

    def __init__(self, ops: OpTable, recorder: Recorder) -> None:
        super().__init__(ops)
        self._recorder = recorder

    def reduce_add_norm(self, partial: Array, residual: Array, norm: Norm, which: StepSum) -> tuple[Array, Array]:
        layer, kind = self._recorder.layer, self._recorder.piece.rpartition(".")[2]
        added, total = ("attn_out", "attn_residual") if kind == "attention" else ("mlp_out", "residual")
        self._recorder.keep(f"{layer}.{added}", partial)
        hidden, residual = super().reduce_add_norm(partial, residual, norm, which)
        self._recorder.keep(f"{layer}.{total}", residual)
        self._recorder.num_done += 1
        return hidden, residual


def _cached(cache: KVCache, blocks: Array, num_tokens: int) -> Iterator[tuple[str, Array]]:
    """The rows of the tokens, by layer, out of pages."""
    groups = {"k_cached": cache.k_cache, "v_cached": cache.v_cache, "latent_cached": cache.latent_cache}
    for name, pages_by_layer in groups.items():
        for layer, pages in pages_by_layer.items():
            rows = pages[blocks[blocks >= 0]]
            yield f"layers.{layer}.{name}", rows.reshape(-1, *rows.shape[2:])[:num_tokens]
