"""From an EngineConfig to a running Engine: finds the model, plans the memory, loads the weights, joins the parts."""

from __future__ import annotations

import atexit
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from engine.about import about
from engine.admission import Limits
from engine.api import ModelInfo
from engine.backends.backend import Backend, Place
from engine.backends.choose import make_backend
from engine.blocks import BlockManager
from engine.checked_forward import CheckedForward
from engine.checkpoint.loader import load_model_config
from engine.checkpoint.source import ModelSource, resolve
from engine.choose_split import choose_split
from engine.comm.communicator import Communicator
from engine.comm.failure import Followed
from engine.comm.numbered import Numbered
from engine.comm.plan_channel import Publisher, Receiver, largest_message, open_channel
from engine.comm.ranks import Ranks, join_ranks
from engine.config import EngineConfig, ModelConfig, ParallelConfig, StepLimits
from engine.errors import ConfigError, GlintError
from engine.faults import Faults
from engine.follow import follow
from engine.forward import Forward
from engine.kv_cache import KVCache
from engine.loop import Engine
from engine.memory_plan import MemoryPlan
from engine.model_config.read import summary
from engine.models.model import Model
from engine.models.registry import ARCHITECTURES
from engine.rank_checks import check_room, check_same, share_layers
from engine.rope_table import RopeTable
from engine.runner import ModelRunner
from engine.sampler import Sampler
from engine.scheduler import Scheduler
from engine.split import rank_config, rank_weights
from engine.swap import swap_bytes

logger = logging.getLogger(__name__)

TOGETHER_S = 300.0  # for what all ranks do at the same time, before there are steps


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine ready to step, and what its front end must know."""

    engine: Engine
    info: ModelInfo
    source: ModelSource
    memory: MemoryPlan
    device: str  # what computes, in words
    close: Callable[[], None] = lambda: None  # lets the ranks that follow go, where there are any


@dataclass(frozen=True, slots=True)
class _Found:
    """What is known before any weight is read."""

    source: ModelSource
    model_config: ModelConfig  # of the whole model
    max_model_len: int
    parallel: ParallelConfig
    backend: Backend
    limits: StepLimits

    @property
    def num_positions(self) -> int:
        return len(self.model_config.soft_prompt_ids) + self.max_model_len


@dataclass(frozen=True, slots=True)
class _Part:
    """A rank's part of the model, in memory; with one rank, all of it."""

    model: Model
    comm: Communicator
    cache: KVCache
    rope: RopeTable
    forward: Forward
    memory: MemoryPlan


def build_engine(
    config: EngineConfig,
    faults: Faults | None = None,
    progress: bool = True,
    ranks: Ranks | None = None,
    problems: Sequence[str] = (),
) -> BuiltEngine:
    """Loads the model of a config. Of several ranks, rank 0 gets the engine; the others follow it until it is closed
    or its process ends, and their call does not return.

    Args:
        ranks: those of this job; by default what the MPI launcher has said.
        problems: what hinders this rank already; it is said with all else.

    Raises:
        ConfigError, CheckpointError: the model cannot be served; the message says why.
        Followed: this rank has followed rank 0 to the end. It ends the process where it is not caught.
    """
    ranks = join_ranks(os.environ) if ranks is None else ranks
    if ranks.watch is not None and ranks.watch.is_followed:
        raise ConfigError(
            "the other ranks follow the engine that there is already: with several ranks there is but one"
        )
    found = _find(config, ranks, problems)
    with ranks.guard():
        return _build(config, ranks, found, faults, progress)


def _build(config: EngineConfig, ranks: Ranks, found: _Found, faults: Faults | None, progress: bool) -> BuiltEngine:
    part = _load(config, ranks, found, progress and ranks.rank == 0)
    num_stages = found.parallel.pipeline_parallel_size
    channel = open_channel(ranks, _largest_message(found, part.memory), num_stages)
    if isinstance(channel, Receiver):
        assert ranks.watch is not None, "there are ranks"
        follow(channel, part.model, part.forward, part.comm, found.backend.settle, ranks.watch.mine)
        raise Followed(0)
    if ranks.watch is not None:
        ranks.watch.is_followed = channel is not None
    engine = _assemble(config, found, part, channel, faults)
    source = found.source
    own_names = (source.name, "starter") if config.model == "starter" else (source.name,)
    info = ModelInfo(
        names=config.served_model_name or own_names,
        root=source.name,
        created=int(time.time()),
        vocab_size=found.model_config.vocab_size,
        max_model_len=found.max_model_len,
        has_tokenizer=False,  # the front end, which loads it, knows
        has_chat_template=False,
        max_logprobs=config.max_logprobs,
        default_sampling=found.model_config.default_sampling,
        about=about(config, found.parallel, found.backend.description),
    )

    def close() -> None:
        if channel is not None and ranks.watch is not None:
            channel.stop()
            part.comm.close()
            ranks.watch.is_followed = False

    if channel is not None:
        atexit.register(close)
    return BuiltEngine(engine, info, source, part.memory, found.backend.description, close)


def _find(config: EngineConfig, ranks: Ranks, problems: Sequence[str]) -> _Found:
    """Raises ConfigError, CheckpointError where a rank has a reason, with those of all."""
    found = None
    with ranks.guard():
        try:
            found = _find_alone(config, ranks)
        except GlintError as error:
            if ranks.size == 1:
                raise
            problems = (*problems, str(error))
    ranks.agree(problems, "looking at the model")
    assert found is not None, "or there was a problem"
    if ranks.size == 1:
        return found
    check_same(config, ranks, found.source, found.parallel, found.backend)
    return found if config.split == "even" else _by_memory(config, ranks, found)


def _by_memory(config: EngineConfig, ranks: Ranks, found: _Found) -> _Found:
    """With other layers; backends are the same for any. Raises ConfigError where a rank has no room for its own."""
    parallel = share_layers(ranks, found.model_config, found.parallel, found.backend)
    problems = []
    try:
        check_room(config, found.model_config, parallel, found.backend)
    except ConfigError as error:
        problems.append(str(error))
    ranks.agree(problems, "looking for room")
    return replace(found, parallel=parallel)


def _find_alone(config: EngineConfig, ranks: Ranks) -> _Found:
    source = resolve(config.model)
    model_config = load_model_config(source)
    logger.info("%s: %s", source.name, summary(model_config))
    _check_kv_cache_dtype(config, model_config)
    swap_bytes(config, ranks.size)
    max_model_len = _max_model_len(config, model_config)
    tp, pp, why = choose_split(config, model_config, ranks.size, ranks.least_per_host)
    parallel = ParallelConfig(ranks.rank, tp, pp)
    if ranks.size > 1:
        logger.info("%d ranks: tensor parallel %d, pipeline parallel %d: %s", ranks.size, tp, pp, why)
    place = Place(ranks.host_rank, len(ranks.host_ranks))
    backend = make_backend(config, rank_config(model_config, parallel), place)
    logger.info("%s", backend.description)
    if config.split == "even" or ranks.size == 1:
        check_room(config, model_config, parallel, backend)
    return _Found(source, model_config, max_model_len, parallel, backend, config.step_limits(backend.limits))


def _load(config: EngineConfig, ranks: Ranks, found: _Found, progress: bool) -> _Part:
    backend, whole, parallel = found.backend, found.model_config, found.parallel
    comm, problems = None, []
    try:
        with ranks.within(TOGETHER_S, "joining the ranks"):
            comm = backend.make_comm(ranks.world, parallel, whole, config)
    except ConfigError as error:
        problems.append(str(error))
    ranks.agree(problems, "joining the ranks")
    assert comm is not None, "or there was a problem"
    if ranks.watch is not None:
        comm = Numbered(comm, ranks.watch.mine)
        ranks.watch.alarms = comm.alarms
    architecture = ARCHITECTURES[whole.architecture]
    weight_map = rank_weights(architecture.weight_map(whole), whole, parallel)
    weights = backend.load(found.source, weight_map, config, progress)
    model = architecture.build(rank_config(whole, parallel), weights, backend.ops)
    ranks.gather(None, "loading the weights")  # what is free is known once all have theirs
    with ranks.within(TOGETHER_S, "trying the largest step"):
        memory = backend.plan_memory(config, found.limits, model, weights, found.num_positions)
    memory = memory.with_blocks(ranks.minimum(memory.num_blocks, "planning the memory"))
    memory = memory.with_swap_space(swap_bytes(config, ranks.size))
    logger.info("memory:\n%s", memory.table())
    cache = backend.make_cache(model, memory)
    rope = RopeTable(model.config.rope, model.config.rotary_dim, found.num_positions)
    with ranks.within(TOGETHER_S, "trying steps of all sizes"):
        forward = backend.make_forward(found.limits, model, comm, cache, rope, found.num_positions)
    if config.check_ranks and ranks.size > 1:
        forward = CheckedForward(forward, ranks, parallel, backend.ops.sampling)
    return _Part(model, comm, cache, rope, forward, memory)


def _largest_message(found: _Found, memory: MemoryPlan) -> int:
    width = min(-(-found.num_positions // memory.block_size), memory.num_blocks)
    return largest_message(found.limits.max_num_seqs, found.limits.max_num_batched_tokens, width)


def _check_kv_cache_dtype(config: EngineConfig, model_config: ModelConfig) -> None:
    """Raises ConfigError for a model whose attention does not read codes."""
    lacks = {"latent attention": model_config.mla, "prompts read both ways": model_config.prefix_lm}
    for name, has in lacks.items():
        if config.kv_codes is not None and has is not None:
            raise ConfigError(
                f"--kv-cache-dtype {config.kv_cache_dtype}: the cache of a model with {name} has the type of "
                "activations; leave it out or use auto"
            )


def _assemble(
    config: EngineConfig, found: _Found, part: _Part, channel: Publisher | None, faults: Faults | None
) -> Engine:
    backend, limits, geometry = found.backend, found.limits, found.model_config
    sampling = backend.ops.sampling
    sampler = Sampler(geometry.vocab_size, limits.max_num_seqs, sampling)
    publish = (lambda plan: None) if channel is None else channel.publish
    num_stages = found.parallel.pipeline_parallel_size
    parts = part.model, part.forward, part.comm, part.cache, part.rope
    runner = ModelRunner(*parts, sampler, sampling, publish, defers=num_stages > 1 and not backend.overlaps)
    if part.memory.num_swap_places:
        runner.swap = backend.make_swap(part.model, part.cache, part.memory)
    backend.warm_up(runner)
    if channel is not None:
        channel.warm()
    backend.settle()
    shares = config.enable_prefix_caching and not geometry.soft_prompt_ids  # these are read both ways: keys depend on
    blocks = BlockManager(part.memory.num_blocks, config.block_size, shares)  # a prompt's end
    sizes = limits.max_num_seqs, limits.max_num_batched_tokens, found.num_positions
    scheduler = Scheduler(blocks, *sizes, num_stages, part.memory.num_swap_places)
    request_limits = Limits(
        vocab_size=geometry.vocab_size,
        max_model_len=found.max_model_len,
        max_logprobs=config.max_logprobs,
        max_waiting=config.max_waiting,
        eos_token_ids=geometry.eos_token_ids,
        soft_prompt_ids=geometry.soft_prompt_ids,
    )
    late_allocations = backend.num_late_allocations
    ranks = num_stages, found.parallel.world_size
    return Engine(scheduler, runner, request_limits, config.seed, faults, backend.overlaps, late_allocations, *ranks)


def _max_model_len(config: EngineConfig, model_config: ModelConfig) -> int:
    """The context limit: what is asked for, if the checkpoint's positions reach that far.

    max_position_embeddings is the length before stretching with linear and dynamic, and that after it with llama3 and
    longrope. With yarn both are met (Qwen: before, DeepSeek: after), so its own two numbers speak, as in vLLM.
    """
    rope = model_config.rope
    limit = model_config.max_position_embeddings
    if rope.kind in ("linear", "dynamic"):
        limit = int(limit * rope.factor)
    elif rope.kind == "yarn":
        limit = int(rope.original_max_position_embeddings * rope.factor)
    asked = config.max_model_len
    if asked is None:
        return limit
    if asked > limit and rope.kind != "dynamic":  # a dynamic table is made for any length
        raise ConfigError(
            f"--max-model-len {asked}: the checkpoint's positions end at {limit} "
            f"(max_position_embeddings {model_config.max_position_embeddings}, rope {rope.kind}); use at most that"
        )
    return asked
