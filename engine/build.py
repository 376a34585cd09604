"""From an EngineConfig to a running Engine: finds the model, plans the memory, loads the weights, joins the parts."""

from __future__ import annotations

import logging
import time
from dataclasses import dataclass

from threadpoolctl import threadpool_limits

from engine.api import ModelInfo
from engine.blocks import BlockManager
from engine.checkpoint.loader import load_model_config, load_weights
from engine.checkpoint.prepare import prepare_weights
from engine.checkpoint.source import ModelSource, resolve
from engine.comm.communicator import OneRank
from engine.config import EngineConfig, ModelConfig
from engine.errors import ConfigError
from engine.faults import Faults
from engine.kv_cache import make_kv_cache
from engine.loop import Engine, Limits
from engine.memory import MemoryPlan, plan_memory
from engine.model_config.read import summary
from engine.models.model import Model
from engine.models.registry import ARCHITECTURES
from engine.ops import OpTable, cpu_ops
from engine.rope_table import RopeTable
from engine.runner import ModelRunner
from engine.sampler import Sampler
from engine.scheduler import Scheduler
from engine.system import has_nvidia_driver, usable_cores

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine ready to step, and what its front end must know."""

    engine: Engine
    info: ModelInfo
    source: ModelSource
    memory: MemoryPlan


def build_engine(config: EngineConfig, faults: Faults | None = None, progress: bool = True) -> BuiltEngine:
    """Loads the model of a config.

    Raises:
        ConfigError, CheckpointError: the model cannot be served; the message says why.
    """
    if config.device == "cuda":
        raise ConfigError("--device cuda: the GPU kernels are not there yet; use --device cpu")
    if has_nvidia_driver():
        logger.warning("there is an NVIDIA GPU here, but the GPU kernels are not there yet: this model runs on the CPU")
    num_threads = config.num_threads or usable_cores()
    logger.info("device cpu, float32, %d threads", num_threads)
    source = resolve(config.model)
    model_config = load_model_config(source)
    logger.info("%s: %s", source.name, summary(model_config))
    max_model_len = _max_model_len(config, model_config)
    architecture = ARCHITECTURES[model_config.architecture]
    threadpool_limits(1, user_api="blas")  # the threads are those of engine.cpu.team
    ops = cpu_ops(num_threads)
    weight_map = architecture.weight_map(model_config)
    weights = prepare_weights(
        load_weights(source, weight_map, seed=config.seed, progress=progress, load_format=config.load_format),
        weight_map,
        ops,
    )
    model = architecture.build(model_config, weights, ops)
    memory = plan_memory(config, model, weights.num_bytes, len(model_config.soft_prompt_ids) + max_model_len)
    logger.info("memory:\n%s", memory.table())
    engine = _assemble(config, model, ops, memory, max_model_len, faults)
    own_names = (source.name, "starter") if config.model == "starter" else (source.name,)
    info = ModelInfo(
        names=config.served_model_name or own_names,
        root=source.name,
        created=int(time.time()),
        vocab_size=model_config.vocab_size,
        max_model_len=max_model_len,
        has_tokenizer=False,  # the front end, which loads it, knows
        has_chat_template=False,
        max_logprobs=config.max_logprobs,
        default_sampling=model_config.default_sampling,
    )
    return BuiltEngine(engine, info, source, memory)


def _assemble(
    config: EngineConfig, model: Model, ops: OpTable, memory: MemoryPlan, max_model_len: int, faults: Faults | None
) -> Engine:
    cache = make_kv_cache(model.cache_specs, memory.num_blocks, config.block_size)
    soft_prompt_ids = model.config.soft_prompt_ids
    num_rows = len(soft_prompt_ids) + max_model_len
    rope = RopeTable(model.config.rope, model.config.rotary_dim, num_rows)
    sampler = Sampler(model.config.vocab_size, config.max_num_seqs, ops.sampling)
    runner = ModelRunner(model, ops, OneRank(ops), cache, rope, sampler)
    shares = config.enable_prefix_caching and not soft_prompt_ids  # read both ways, a prompt's keys depend on its end
    blocks = BlockManager(memory.num_blocks, config.block_size, shares)
    scheduler = Scheduler(blocks, config.max_num_seqs, config.max_num_batched_tokens, num_rows)
    limits = Limits(
        vocab_size=model.config.vocab_size,
        max_model_len=max_model_len,
        max_logprobs=config.max_logprobs,
        max_waiting=config.max_waiting,
        eos_token_ids=model.config.eos_token_ids,
        soft_prompt_ids=soft_prompt_ids,
    )
    return Engine(scheduler, runner, limits, config.seed, faults)


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
