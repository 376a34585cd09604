"""What is looked at before any weight is read: that ranks have the same in hand, and that each part of a model fits."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace

from engine.backends.backend import Backend, Room
from engine.checkpoint.fingerprint import fingerprint
from engine.checkpoint.source import ModelSource
from engine.choose_split import HOW, choose_split
from engine.comm.ranks import Ranks
from engine.config import EngineConfig, ModelConfig, ParallelConfig
from engine.errors import ConfigError
from engine.models.registry import ARCHITECTURES
from engine.split import rank_weights
from engine.split_sizes import layers_by_room
from engine.system import versions

logger = logging.getLogger(__name__)

MAY_DIFFER = ("model", "api_key", "host", "port", "num_threads")  # from rank to rank: the same model elsewhere
MOST_RANKS = 64  # that are tried for a message
MB = 10**6
LAYERS = "layers."  # how their weights are called


def check_same(
    config: EngineConfig, ranks: Ranks, source: ModelSource, parallel: ParallelConfig, backend: Backend
) -> None:
    """Raises ConfigError where a rank has another model than rank 0, another machine or other programs, or was started
    with other flags. With --split memory machines may differ, but not those of a stage."""
    mine = {name: value for name, value in asdict(config).items() if name not in MAY_DIFFER}
    there = backend.kind, backend.numbers, versions()
    everyone = ranks.gather((mine, fingerprint(source), there), "comparing the models")
    flags, model, (_, _, programs) = everyone[0]
    problems = [
        f"--{name.replace('_', '-')} is {value}, and {flags[name]} on rank 0: start all ranks with the same flags"
        for name, value in mine.items()
        if value != flags[name]
    ]
    if fingerprint(source) != model:
        problems.append(f"{source.path} is another model than that of rank 0; give all ranks the same files")
    problems += _unlike([(kind, numbers) for _, _, (kind, numbers, _) in everyone], config, parallel)
    if there[2] != programs:
        problems.append(f"it runs {there[2]}, and rank 0 {programs}: install the same on all hosts")
    ranks.agree(problems, "comparing the models")


def _unlike(machines: Sequence[tuple[str, str]], config: EngineConfig, parallel: ParallelConfig) -> list[str]:
    """What is wrong with this rank's machine beside the others'; machines: (kind, numbers) of each rank."""
    tp, rank = parallel.tensor_parallel_size, parallel.rank
    kind, numbers = machines[rank]
    if numbers != machines[0][1]:
        return [
            f"it computes with {kind}, and rank 0 with {machines[0][0]}: what ranks send each other must be of one "
            "type; choose one --device and one --dtype for all"
        ]
    first = rank - rank % tp if config.split == "memory" else 0  # of those with which it must have the same bits
    if kind == machines[first][0]:
        return []
    kinds = [kind for kind, _ in machines]
    most = max(
        size
        for size in range(1, len(kinds) + 1)
        if len(kinds) % size == 0 and all(kinds[at] == kinds[at - at % size] for at in range(len(kinds)))
    )
    return [
        f"it computes with {kind}, and rank {first} with {kinds[first]}: sums of ranks must have the same bits; choose "
        f"GPUs of one kind (CUDA_VISIBLE_DEVICES), or let each kind have layers of its own: --split memory "
        f"--tensor-parallel-size {most} --pipeline-parallel-size {len(kinds) // most}"
    ]


def share_layers(ranks: Ranks, model_config: ModelConfig, parallel: ParallelConfig, backend: Backend) -> ParallelConfig:
    """With the layers shared out in proportion to what stages have free: of a stage, the rank that has least. What is
    no layer (embedding, head) counts as its bytes."""
    weight_map = ARCHITECTURES[model_config.architecture].weight_map(model_config)
    mine = rank_weights(weight_map, model_config, parallel)
    beside = replace(
        mine,
        linears=tuple(spec for spec in mine.linears if not spec.dest.startswith(LAYERS)),
        arrays=tuple(spec for spec in mine.arrays if not spec.dest.startswith(LAYERS)),
    )
    free = ranks.gather((parallel.stage, backend.free_beside(beside)), "sharing out the layers")
    room = [min(num_bytes for of, num_bytes in free if of == stage) for stage in range(parallel.pipeline_parallel_size)]
    counts = layers_by_room(model_config.n_layers, room)
    told = ", ".join(f"{count} ({num_bytes / MB:,.0f} MB)" for count, num_bytes in zip(counts, room, strict=True))
    logger.info("layers of stages, by what they have free for them: %s", told)
    return replace(parallel, layers_of_stages=counts)


def check_room(config: EngineConfig, model_config: ModelConfig, parallel: ParallelConfig, backend: Backend) -> None:
    """Logs how much of its machine the weights of a rank take.

    Raises:
        ConfigError: more than is free, so it is of no use to read them; says what would do.
    """
    weight_map = ARCHITECTURES[model_config.architecture].weight_map(model_config)

    def room(part: ParallelConfig) -> Room | None:
        return backend.room(rank_weights(weight_map, model_config, part))

    mine = room(parallel)
    if mine is None:
        return
    needed = f"the weights of {'this rank' if parallel.world_size > 1 else 'the model'} take {mine.needed / MB:,.0f} MB"
    logger.info("%s; %.0f MB of %s are free", needed, mine.free / MB, mine.where)
    if mine.needed <= mine.free:
        return
    advice = "end what else runs there, or choose other GPUs (CUDA_VISIBLE_DEVICES)"
    if mine.needed > mine.total:
        enough = _enough(config, model_config, parallel.world_size, mine.total, room)
        advice = "use a smaller model" if enough is None else f"use {enough} ranks: {HOW.format(enough)}"
    raise ConfigError(
        f"{needed}, and {mine.free / MB:,.0f} of the {mine.total / MB:,.0f} MB of {mine.where} are free; {advice}"
    )


def _enough(
    config: EngineConfig,
    model_config: ModelConfig,
    too_few: int,
    total: int,
    room: Callable[[ParallelConfig], Room | None],
) -> int | None:
    """The least number of ranks of which each has room for its weights; None: there is none."""
    free = replace(config, tensor_parallel_size=None, pipeline_parallel_size=None)
    for size in range(too_few + 1, MOST_RANKS + 1):
        try:
            tp, pp, _ = choose_split(free, model_config, size, size)
        except ConfigError:
            continue
        firsts = [room(ParallelConfig(stage * tp, tp, pp)) for stage in range(pp)]
        if all(found is not None and found.needed <= total for found in firsts):
            return size
    return None
