"""From an EngineConfig to a running Engine: finds the model, plans the memory, loads the weights, joins the parts."""

from __future__ import annotations

import importlib
import importlib.util
import logging
import time
from dataclasses import dataclass

from engine.admission import Limits
from engine.api import ModelInfo
from engine.backends.backend import Backend
from engine.blocks import BlockManager
from engine.checkpoint.loader import load_model_config
from engine.checkpoint.source import ModelSource, resolve
from engine.comm.communicator import OneRank
from engine.config import EngineConfig, ModelConfig, StepLimits
from engine.errors import ConfigError, KernelError
from engine.faults import Faults
from engine.loop import Engine
from engine.memory_plan import MemoryPlan
from engine.model_config.read import summary
from engine.models.model import Model
from engine.models.registry import ARCHITECTURES
from engine.rope_table import RopeTable
from engine.runner import ModelRunner
from engine.sampler import Sampler
from engine.scheduler import Scheduler
from engine.system import has_nvidia_driver

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class BuiltEngine:
    """An engine ready to step, and what its front end must know."""

    engine: Engine
    info: ModelInfo
    source: ModelSource
    memory: MemoryPlan
    device: str  # what computes, in words


def build_engine(config: EngineConfig, faults: Faults | None = None, progress: bool = True) -> BuiltEngine:
    """Loads the model of a config.

    Raises:
        ConfigError, CheckpointError: the model cannot be served; the message says why.
    """
    for name in ("tensor_parallel_size", "pipeline_parallel_size"):
        if (getattr(config, name) or 1) > 1:
            raise ConfigError(f"--{name.replace('_', '-')}: a model runs on one rank for now")
    source = resolve(config.model)
    model_config = load_model_config(source)
    logger.info("%s: %s", source.name, summary(model_config))
    _check_kv_cache_dtype(config, model_config)
    max_model_len = _max_model_len(config, model_config)
    backend = make_backend(config, model_config)
    logger.info("%s", backend.description)
    limits = config.step_limits(backend.limits)
    architecture = ARCHITECTURES[model_config.architecture]
    weights = backend.load(source, architecture.weight_map(model_config), config, progress)
    model = architecture.build(model_config, weights, backend.ops)
    num_positions = len(model_config.soft_prompt_ids) + max_model_len
    memory = backend.plan_memory(config, limits, model, weights, num_positions)
    logger.info("memory:\n%s", memory.table())
    engine = _assemble(config, limits, model, backend, memory, max_model_len, faults)
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
    return BuiltEngine(engine, info, source, memory, backend.description)


def _check_kv_cache_dtype(config: EngineConfig, model_config: ModelConfig) -> None:
    """Raises ConfigError for a model whose attention does not read codes."""
    lacks = {"latent attention": model_config.mla, "prompts read both ways": model_config.prefix_lm}
    for name, has in lacks.items():
        if config.kv_codes is not None and has is not None:
            raise ConfigError(
                f"--kv-cache-dtype {config.kv_cache_dtype}: the cache of a model with {name} has the type of "
                "activations; leave it out or use auto"
            )


def make_backend(config: EngineConfig, model_config: ModelConfig) -> Backend:
    """The machine that is asked for; a GPU, if there is one that can run the model, where nothing is said.

    Raises:
        ConfigError: that machine is not here, or cannot run the model.
    """
    name, why = config.device, ""
    if name == "auto":
        name = "cuda" if has_nvidia_driver() and config.dtype != "float32" else "cpu"
        why = _no_gpu(model_config) if name == "cuda" else ""
        if why:
            logger.warning("there is an NVIDIA GPU here, but this model runs on the CPU: %s", why)
            name = "cpu"
    elif name == "cuda":
        why = _no_gpu(model_config) if has_nvidia_driver() else "no NVIDIA driver is loaded on this machine"
        if why:
            raise ConfigError(f"--device cuda: {why}; use --device cpu, or auto")
    try:
        return _named_backend(name, config, model_config)
    except (ImportError, KernelError) as error:  # a library that is not there, a GPU that is too old
        if config.device != "auto" or name == "cpu":
            raise ConfigError(f"--device {name}: {error}; use --device cpu") from error
        logger.warning("there is an NVIDIA GPU here, but this model runs on the CPU: %s", error)
        return _named_backend("cpu", config, model_config)


def _named_backend(name: str, config: EngineConfig, model_config: ModelConfig) -> Backend:
    """By name, so that a machine without a GPU never imports what needs one."""
    backend: Backend = importlib.import_module(f"engine.backends.{name}").make_backend(config, model_config)
    return backend


def _no_gpu(model_config: ModelConfig) -> str:
    """Why a GPU cannot run the model, or "" if it can."""
    if importlib.util.find_spec("cupy") is None or importlib.util.find_spec("cuda") is None:
        return "the packages for it are not installed (pip install 'glint-llm[cuda13]', or cuda12)"
    lacks = {
        "latent attention": model_config.mla is not None,
        "mixture of experts": model_config.moe is not None,
        "prompts read both ways": model_config.prefix_lm is not None,
    }
    return ", ".join(f"there are no kernels for {name} yet" for name, has in lacks.items() if has)


def _assemble(
    config: EngineConfig,
    limits: StepLimits,
    model: Model,
    backend: Backend,
    memory: MemoryPlan,
    max_model_len: int,
    faults: Faults | None,
) -> Engine:
    soft_prompt_ids = model.config.soft_prompt_ids
    num_rows = len(soft_prompt_ids) + max_model_len
    cache = backend.make_cache(model, memory)
    rope = RopeTable(model.config.rope, model.config.rotary_dim, num_rows)
    comm = OneRank(backend.ops)
    forward = backend.make_forward(limits, model, comm, cache, rope, num_rows)
    sampling = backend.ops.sampling
    sampler = Sampler(model.config.vocab_size, limits.max_num_seqs, sampling)
    runner = ModelRunner(model, forward, comm, cache, rope, sampler, sampling)
    backend.warm_up(runner)
    shares = config.enable_prefix_caching and not soft_prompt_ids  # read both ways, a prompt's keys depend on its end
    blocks = BlockManager(memory.num_blocks, config.block_size, shares)
    scheduler = Scheduler(blocks, limits.max_num_seqs, limits.max_num_batched_tokens, num_rows)
    request_limits = Limits(
        vocab_size=model.config.vocab_size,
        max_model_len=max_model_len,
        max_logprobs=config.max_logprobs,
        max_waiting=config.max_waiting,
        eos_token_ids=model.config.eos_token_ids,
        soft_prompt_ids=soft_prompt_ids,
    )
    late_allocations = backend.num_late_allocations
    return Engine(scheduler, runner, request_limits, config.seed, faults, backend.overlaps, late_allocations)


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
