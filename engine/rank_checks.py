"""What is looked at before any weight is read: that ranks have the same in hand, and that each part of a model fits."""

from __future__ import annotations

import logging
from collections.abc import Callable
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
from engine.system import versions

logger = logging.getLogger(__name__)

MAY_DIFFER = ("model", "api_key", "host", "port", "num_threads")  # from rank to rank: the same model elsewhere
MOST_RANKS = 64  # that are tried for a message
MB = 10**6


def check_same(config: EngineConfig, ranks: Ranks, source: ModelSource, backend: Backend) -> None:
    """Raises ConfigError where a rank has another model than rank 0, another machine or other programs, or was started
    with other flags."""
    mine = {name: value for name, value in asdict(config).items() if name not in MAY_DIFFER}
    there = backend.kind, versions()
    flags, model, (kind, programs) = ranks.gather((mine, fingerprint(source), there), "comparing the models")[0]
    problems = [
        f"--{name.replace('_', '-')} is {value}, and {flags[name]} on rank 0: start all ranks with the same flags"
        for name, value in mine.items()
        if value != flags[name]
    ]
    if fingerprint(source) != model:
        problems.append(f"{source.path} is another model than that of rank 0; give all ranks the same files")
    if backend.kind != kind:
        problems.append(
            f"it computes with {backend.kind}, and rank 0 with {kind}: sums of ranks must have the same bits; choose "
            "GPUs of one kind (CUDA_VISIBLE_DEVICES) and one --dtype"
        )
    if there[1] != programs:
        problems.append(f"it runs {there[1]}, and rank 0 {programs}: install the same on all hosts")
    ranks.agree(problems, "comparing the models")


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
