"""A rank as a smaller model: which layers, heads, intermediate elements and rows of the vocabulary it has.

Whole layers go to stages (pipeline parallel). Within a stage each layer is cut (tensor parallel): q, k, v, gate and up
by their outputs, o and down by their inputs, at the same places, so that each rank gives a partial sum. A rank has
heads that read the same KV head, or all that read some; where ranks outnumber KV heads, several have copies of one.
What is not cut (norms, routers, q_a and kv_a of latent attention) is on every rank. The bias of a row split and learned
positions are added by tp_rank 0 alone. Defined by ref.tensor_parallel and its kin.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from itertools import accumulate, pairwise

from engine.config import ModelConfig, ParallelConfig
from engine.errors import ConfigError
from engine.models.registry import ARCHITECTURES
from engine.split_sizes import Units, split_units, units_of
from engine.weights import EMBEDDING, HEAD, ArraySpec, Cut, LinearSpec, WeightMap
from ref.collectives import split_ranges
from ref.tensor_parallel import HeadSplit, scaled_range, split_heads
from ref.tensor_parallel_vocab import padded_vocab_size

MAX_LISTED = 16  # numbers of ranks that are tried for a message
ROW_SPLITS = (".o_proj", ".down_proj")
ONCE = ("embed_positions", "embed_segments")  # added to the embedding by one rank alone


@dataclass(frozen=True, slots=True)
class Shares:
    """What a rank has of each kind of axis; None: it has all, or there is no such axis."""

    heads: HeadSplit
    vocab_unit: int
    inner: range | None
    expert: range | None
    shared: range | None


def rank_config(config: ModelConfig, parallel: ParallelConfig) -> ModelConfig:
    """The config of the smaller model that a rank is; layers keep their numbers, vocab_size is that of the whole.

    Raises:
        ConfigError: the model cannot be cut so; lists all that hinders it, and the sizes that would do.
    """
    if parallel.world_size == 1:
        return config
    check_parallel(config, parallel)
    tp = parallel.tensor_parallel_size
    config = replace(config, stage_layers=_stages(config.n_layers, parallel)[parallel.stage])
    if tp == 1:
        return config
    shares = _shares(config, _units(config), parallel)
    moe = config.moe
    if moe is not None:
        moe = replace(
            moe,
            intermediate_size=_size(shares.expert, moe.intermediate_size),
            shared_intermediate_size=_size(shares.shared, moe.shared_intermediate_size),
        )
    num_embeddings = config.vocab_size if config.prefix_lm is None else config.prefix_lm.num_embeddings
    return replace(
        config,
        n_heads=len(shares.heads.heads),
        n_kv_heads=len(shares.heads.kv_heads),
        intermediate_size=_size(shares.inner, config.intermediate_size),
        moe=moe,
        vocab_first=parallel.tp_rank * _vocab_rows(num_embeddings, tp, shares.vocab_unit),
    )


def _stages(num_layers: int, parallel: ParallelConfig) -> list[range]:
    """The layers of each stage."""
    if not parallel.layers_of_stages:
        return split_ranges(num_layers, parallel.pipeline_parallel_size)
    assert sum(parallel.layers_of_stages) == num_layers, "each layer is on one stage"
    bounds = [0, *accumulate(parallel.layers_of_stages)]
    return [range(*pair) for pair in pairwise(bounds)]


def rank_weights(weight_map: WeightMap, config: ModelConfig, parallel: ParallelConfig) -> WeightMap:
    """The weights of a rank: those of its stage, each with the cuts that its config is the geometry of.

    Args:
        weight_map, config: of the whole model.
    """
    if parallel.world_size == 1:
        return weight_map
    part = rank_config(config, parallel)
    has_head = part.is_last_stage

    def is_here(dest: str) -> bool:
        if dest.startswith("layers."):
            return int(dest.split(".")[1]) in part.layers
        if dest == EMBEDDING:
            return part.is_first_stage or (has_head and weight_map.tied)
        if dest in ONCE:
            return part.is_first_stage and parallel.tp_rank == 0
        return has_head or dest != HEAD

    linears = tuple(spec for spec in weight_map.linears if is_here(spec.dest))
    arrays = tuple(spec for spec in weight_map.arrays if is_here(spec.dest))
    if parallel.tensor_parallel_size > 1:
        cutter = _Cutter(config, parallel)
        linears, arrays = tuple(map(cutter.linear, linears)), tuple(map(cutter.array, arrays))
    tied = weight_map.tied and has_head
    return replace(weight_map, linears=linears, arrays=arrays, tied=tied, whole=weight_map.whole or weight_map)


def with_row_splits(weight_map: WeightMap) -> WeightMap:
    """The map that a rank's config alone gives, with its row splits marked as such: layers then keep the formats that
    they keep with rank_weights."""
    linears = (
        replace(spec, column_cut=Cut(0, spec.in_features)) if spec.dest.endswith(ROW_SPLITS) else spec
        for spec in weight_map.linears
    )
    return replace(weight_map, linears=tuple(linears))


def check_parallel(config: ModelConfig, parallel: ParallelConfig) -> None:
    """Raises ConfigError with all that hinders the model from being cut so, and the sizes that would do."""
    tp, num_stages = parallel.tensor_parallel_size, parallel.pipeline_parallel_size
    units = _units(config)
    problems = [f"--tensor-parallel-size {tp}: {problem}" for problem in _hindrances(config, units, tp)]
    if problems:
        possible = [size for size in range(1, max(MAX_LISTED, tp) + 1) if not _hindrances(config, units, size)]
        problems.append(f"this model can have --tensor-parallel-size {', '.join(map(str, possible))}")
    if num_stages > config.n_layers:
        problems.append(
            f"--pipeline-parallel-size {num_stages}: {config.n_layers} layers leave a stage without one; possible are "
            f"1 to {config.n_layers}"
        )
    if not 0 <= parallel.rank < parallel.world_size:
        problems.append(f"rank {parallel.rank} is none of the {parallel.world_size} that {tp} × {num_stages} make")
    if problems:
        raise ConfigError(f"{config.architecture} cannot be split so:\n  " + "\n  ".join(problems))


def _hindrances(config: ModelConfig, units: Units, tp: int) -> list[str]:
    found = []
    try:
        _split_heads(config, units, tp)
    except ValueError as error:
        found.append(str(error))
    for name, size in units.sizes.items():
        unit = units.inner[name]
        num_runs = -(-size // unit)
        if tp > num_runs and unit > 1:
            found.append(f"{name} {size} has {num_runs} runs of {unit} that stay together, fewer than {tp} ranks")
        elif tp > num_runs:
            found.append(f"{name} {size} is fewer than {tp}")
    return found


def _units(config: ModelConfig) -> Units:
    return units_of(config, ARCHITECTURES[config.architecture].weight_map(config))


def _split_heads(config: ModelConfig, units: Units, tp: int) -> list[HeadSplit]:
    n_kv_heads = config.n_kv_heads if config.mla is None else config.n_heads  # each head has keys of its own
    try:
        return split_heads(config.n_heads, n_kv_heads, tp, units.heads, units.kv_heads)
    except ValueError:  # between groups of o_proj there is no way
        return split_heads(config.n_heads, n_kv_heads, tp, units.fewer_heads, units.kv_heads)


def _shares(config: ModelConfig, units: Units, parallel: ParallelConfig) -> Shares:
    tp, rank = parallel.tensor_parallel_size, parallel.tp_rank

    def inner(name: str) -> range | None:
        return split_units(units.sizes[name], tp, units.inner[name])[rank] if name in units.sizes else None

    return Shares(
        heads=_split_heads(config, units, tp)[rank],
        vocab_unit=units.vocab,
        inner=inner("intermediate_size"),
        expert=inner("moe_intermediate_size"),
        shared=inner("shared_intermediate_size"),
    )


def _size(share: range | None, whole: int) -> int:
    return whole if share is None else len(share)


def _vocab_rows(vocab_size: int, tp: int, unit: int) -> int:
    """That each rank has, padding included."""
    return padded_vocab_size(vocab_size, tp, tp * unit) // tp


class _Cutter:
    """Cuts the specs of a whole model for one rank, by what the last word of their dest says."""

    def __init__(self, config: ModelConfig, parallel: ParallelConfig) -> None:
        self._config, self._parallel = config, parallel
        self._shares = _shares(config, _units(config), parallel)
        self._rules: dict[str, Callable[[LinearSpec], LinearSpec]] = {
            "qkv_proj": self._qkv,
            "q_proj": lambda spec: self._by_heads(spec, config.head_dim),
            "q_b_proj": lambda spec: self._by_heads(spec, config.head_dim),
            "kv_b_proj": self._kv_b,
            "o_proj": self._o,
            "gate_up_proj": lambda spec: self._rows(spec, [self._inner(spec)] * len(spec.parts)),
            "up_proj": lambda spec: self._rows(spec, [self._inner(spec)]),
            "down_proj": lambda spec: self._columns(spec, self._inner(spec)),
            "lm_head": self._head,
            **dict.fromkeys(("kv_a_proj", "qkv_a_proj", "router", "shared_expert_gate"), lambda spec: spec),
        }

    def linear(self, spec: LinearSpec) -> LinearSpec:
        return self._rules[spec.dest.rpartition(".")[2]](spec)

    def array(self, spec: ArraySpec) -> ArraySpec:
        name, heads = spec.dest.rpartition(".")[2], self._shares.heads
        if spec.dest == EMBEDDING:
            rows = _vocab_rows(spec.shape[0], self._parallel.tensor_parallel_size, self._shares.vocab_unit)
            return self._part(spec, 0, range(self._parallel.tp_rank * rows, (self._parallel.tp_rank + 1) * rows))
        if name == "position_bias":
            return self._part(spec, 1, heads.heads)
        if name in ("q_norm", "k_norm") and len(spec.shape) == 2:  # each head has its own
            return self._part(spec, 0, heads.heads if name == "q_norm" else heads.kv_heads)
        return spec

    def _part(self, spec: ArraySpec, axis: int, part: range) -> ArraySpec:
        shape = tuple(len(part) if number == axis else size for number, size in enumerate(spec.shape))
        return replace(spec, shape=shape, axis=axis, cut=Cut(part.start, spec.shape[axis]))

    def _rows(self, spec: LinearSpec, parts: list[range]) -> LinearSpec:
        """These rows of each part."""
        cuts = tuple(Cut(part.start, size) for part, (_, size) in zip(parts, spec.parts, strict=True))
        sizes = tuple((name, len(part)) for part, (name, _) in zip(parts, spec.parts, strict=True))
        return replace(spec, parts=sizes, row_cuts=cuts)

    def _columns(self, spec: LinearSpec, part: range) -> LinearSpec:
        bias = spec.bias and self._parallel.tp_rank == 0
        return replace(spec, in_features=len(part), column_cut=Cut(part.start, spec.in_features), bias=bias)

    def _qkv(self, spec: LinearSpec) -> LinearSpec:
        config, heads = self._config, self._shares.heads
        q, kv = scaled_range(heads.heads, config.head_dim), scaled_range(heads.kv_heads, config.head_dim)
        if len(spec.parts) == 3:
            return self._rows(spec, [q, kv, kv])
        ((module, whole),) = spec.parts  # all of q, then all of k, then all of v
        q_end = config.n_heads * config.head_dim
        kv_size = config.n_kv_heads * config.head_dim
        firsts = q.start, q_end + kv.start, q_end + kv_size + kv.start
        sizes = len(q), len(kv), len(kv)
        return replace(
            spec,
            parts=tuple((module, size) for size in sizes),
            row_cuts=tuple(Cut(first, whole) for first in firsts),
        )

    def _by_heads(self, spec: LinearSpec, head_dim: int) -> LinearSpec:
        return self._rows(spec, [scaled_range(self._shares.heads.heads, head_dim)])

    def _kv_b(self, spec: LinearSpec) -> LinearSpec:
        assert spec.latent is not None
        n_heads, nope = spec.latent
        cut = self._by_heads(spec, spec.out_features // n_heads)
        return replace(cut, latent=(len(self._shares.heads.heads), nope))

    def _o(self, spec: LinearSpec) -> LinearSpec:
        head_dim = spec.in_features // self._config.n_heads
        return self._columns(spec, scaled_range(self._shares.heads.heads, head_dim))

    def _inner(self, spec: LinearSpec) -> range:
        shares = self._shares
        kind = spec.dest.split(".")[2]
        part = {"experts": shares.expert, "shared_expert": shares.shared}.get(kind, shares.inner)
        assert part is not None, "its size is among those that are cut"
        return part

    def _head(self, spec: LinearSpec) -> LinearSpec:
        ((_, whole),) = spec.parts
        rows = _vocab_rows(whole, self._parallel.tensor_parallel_size, self._shares.vocab_unit)
        first = self._parallel.tp_rank * rows
        return self._rows(spec, [range(first, first + rows)])
