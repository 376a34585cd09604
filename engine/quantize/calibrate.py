"""What goes into each layer of a model when it reads a text, found layer by layer.

The model is the engine's own, over an op table whose linear layers are handed to whoever walks through it. All windows
of the text go through a layer together, so each weight is read once, and memory holds one weight and the activations of
one layer.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.batch import ForwardBatch, StepPlan, build_batch, token_positions, token_sequences
from engine.checkpoint.text import load_text
from engine.comm.communicator import ALONE, OneRank
from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.kv_cache import CacheSpec, KVCache, make_kv_cache
from engine.models.model import Model, Piece
from engine.models.registry import ARCHITECTURES
from engine.ops import OpTable, cpu_ops
from engine.quantize.methods import METHODS
from engine.quantize.source_model import SourceModel
from engine.rope_table import RopeTable
from engine.weights import EMBEDDING, HEAD, LinearSpec, LinearWeight, WeightMap, Weights

Array = Any
Float32 = NDArray[np.float32]
Windows = NDArray[np.int32]  # [num_windows, tokens]
Multiply = Callable[[LinearSpec, Float32], Float32]  # (layer, x [num_tokens, in]) → x Wᵀ [num_tokens, out]


def read_windows(model: SourceModel, path: Path, num_tokens: int, length: int) -> Windows:
    """The first num_tokens of a text, in windows of `length` tokens; what is left over at the end is not used.

    Raises:
        ConfigError: the file cannot be read, the model has no tokenizer, or the text is too short.
    """
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--calibration {path}: cannot be read as UTF-8 text: {error}") from error
    tokenizer, _ = load_text(model.source, model.config.vocab_size)
    if tokenizer is None:
        raise ConfigError(f"--calibration {path}: {model.source.path} has no tokenizer.json to read it with")
    return cut_windows(tokenizer.encode(text, add_special_tokens=False), num_tokens, length, f"--calibration {path}")


def cut_windows(token_ids: list[int], num_tokens: int, length: int, what: str) -> Windows:
    """[num_windows, length]; what: names the text in errors. Raises ConfigError where there is not one window."""
    count = min(len(token_ids), num_tokens) // length
    if count < 1:
        limit = f", but only {num_tokens} may be read; let it be more, or --window less" if num_tokens < length else ""
        raise ConfigError(
            f"{what}: has {len(token_ids)} tokens; at least {length} are wanted, a window, and better thousands{limit}"
        )
    return np.array(token_ids[: count * length], np.int32).reshape(count, length)


def check_can_walk(config: ModelConfig, what: str) -> None:
    """Raises ConfigError for families whose layers are not walked here; what: begins the message."""
    lacks = {
        "experts": config.moe is not None,
        "latent attention": config.mla is not None,
        "prompts that are read both ways": config.prefix_lm is not None,
    }
    if found := [name for name, has in lacks.items() if has]:
        others = ", ".join(name for name, method in METHODS.items() if method.calibration is None)
        raise ConfigError(
            f"{what}: a model with {found[0]} cannot be run layer by layer yet; methods without a text are {others}"
        )


@dataclass(frozen=True, slots=True)
class _Table:
    """The embedding, of which only the rows that are asked for are read."""

    model: SourceModel
    name: str

    def rows(self, token_ids: NDArray[np.int32]) -> Float32:
        used, places = np.unique(token_ids, return_inverse=True)
        return self.model.rows(self.name, used)[places]


class _Linears(Mapping[str, LinearWeight]):
    """Layers by dest name, of which each holds only its spec."""

    def __init__(self, weight_map: WeightMap) -> None:
        self._specs = {spec.dest: spec for spec in weight_map.linears}
        if weight_map.tied:
            table = next(array for array in weight_map.arrays if array.dest == EMBEDDING)
            vocab_size, hidden_size = table.shape
            self._specs[HEAD] = LinearSpec(HEAD, ((table.name.removesuffix(".weight"), vocab_size),), hidden_size)

    def __getitem__(self, dest: str) -> LinearWeight:
        spec = self._specs[dest]
        return LinearWeight("handed over", spec.out_features, spec.in_features, {"spec": spec})

    def __iter__(self) -> Iterator[str]:
        return iter(self._specs)

    def __len__(self) -> int:
        return len(self._specs)


def build_layers(model: SourceModel, multiply: Multiply) -> tuple[Model, dict[int, str]]:
    """The engine's model, whose linear layers, the head too, are what multiply makes of them.

    Returns:
        The model, and the name in the checkpoint of each array, by id: of norms, for example.
    """
    arrays: dict[str, Array] = {
        spec.dest: _Table(model, spec.name) if spec.dest == EMBEDDING else model.array(spec.name)
        for spec in model.weight_map.arrays
    }
    weights = Weights(_Linears(model.weight_map), arrays)
    names = {id(arrays[spec.dest]): spec.name for spec in model.weight_map.arrays}
    return ARCHITECTURES[model.config.architecture].build(model.config, weights, _ops(model, multiply)), names


def walk(model: SourceModel, layers: Model, windows: Windows) -> Iterator[tuple[Piece | None, Float32]]:
    """Runs all windows through the pieces of a model, one after another.

    Yields:
        Each piece once it has run, and the normed activations [num_tokens, hidden_size] that went into it; at last
        None, and what goes into the head.
    """
    comm, batch = OneRank(cpu_ops()), _batch(model.config, windows)
    cache = _shared_cache(layers.cache_specs, windows)
    norms = [piece.norm for piece in layers.pieces] + [layers.final_norm]
    residual = layers.embed(batch)
    hidden = comm.norm(residual, norms[0])
    for piece, norm in zip(layers.pieces, norms[1:], strict=True):
        partial = piece.forward(hidden, batch, cache)
        yield piece, hidden
        hidden, residual = comm.reduce_add_norm(partial, residual, norm, ALONE)
    yield None, hidden


def _ops(model: SourceModel, multiply: Multiply) -> OpTable:
    """Those of the CPU, but for what reads weights."""
    ops = cpu_ops()

    def linear(x: Float32, weight: LinearWeight) -> Float32:
        spec: LinearSpec = weight.tensors["spec"]
        y = multiply(spec, x)
        bias = model.bias(spec)
        return y if bias is None else y + bias

    def linear_gate_up_act(x: Float32, weight: LinearWeight, activation: str = "silu") -> Float32:
        gated: Float32 = ops.gate_up_act(linear(x, weight), activation)
        return gated

    def position_embedding(
        token_ids: Array, positions: Array, table: _Table, position_table: Float32, first: int | None = None
    ) -> Float32:
        rows: Float32 = ops.position_embedding(
            np.arange(len(token_ids)), positions, table.rows(token_ids), position_table
        )
        return rows

    return replace(
        ops,
        linear=linear,
        logits=linear,
        linear_gate_up_act=linear_gate_up_act,
        embedding=lambda token_ids, table, first=None: table.rows(token_ids),
        position_embedding=position_embedding,
    )


def _batch(config: ModelConfig, windows: Windows) -> ForwardBatch:
    """All windows as prompts of one step, a block of the cache each."""
    count, length = windows.shape
    rope = RopeTable(config.rope, config.rotary_dim, length)
    plan = StepPlan(
        step=0,
        slots=np.arange(count, dtype=np.int32),
        starts=np.zeros(count, np.int32),
        cu_seqlens_q=np.arange(count + 1, dtype=np.int32) * np.int32(length),
        token_ids=windows.reshape(-1),
        block_table=np.arange(count, dtype=np.int32)[:, None],
        num_logits=np.zeros(count, np.int32),
        samples=np.zeros(count, np.bool_),
        rope_lens=np.full(count, rope.rope_len(length), np.int32),
        two_way_lens=np.zeros(count, np.int32),
        num_decodes=0,
    )
    return build_batch(plan, length, rope.rows(token_positions(plan), plan.rope_lens[token_sequences(plan)]))


def _shared_cache(specs: tuple[CacheSpec, ...], windows: Windows) -> KVCache:
    """One layer's arrays, which all layers use in turn."""
    (spec,) = specs
    one = make_kv_cache((replace(spec, layers=spec.layers[:1]),), *windows.shape)
    k, v = one.k_cache[spec.layers[0]], one.v_cache[spec.layers[0]]
    return KVCache(dict.fromkeys(spec.layers, k), dict.fromkeys(spec.layers, v), {}, windows.shape[1])
