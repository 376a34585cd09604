"""Whole models: the engine over an op table against the plain models of ref, on the golden checkpoints.

forward  all logits of three sequences that are computed together, each cut into chunks of its own size, so that
         prefilling and decoding rows meet in a step; every block of the cache is NaN before it is written.
generate requests through the engine's loop with a pool of blocks too small for all at once, so that sequences are
         preempted and resumed: greedy ids and their logprobs.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import Case, Inputs, Outputs
from conformance.engine_run import BLOCK_SIZE, make_runner, run_chunks
from conformance.golden import model_inputs
from conformance.golden_families import FAMILY_GOLDENS, PROMPT_LENGTHS, family_tensors
from conformance.golden_models import (
    GOLDEN_SEED,
    GOLDENS,
    Config,
    golden_model,
    golden_prompts,
    random_ids,
    write_checkpoint,
)
from engine.api import GenerationRequest, SamplingParams
from engine.build import build_engine
from engine.config import EngineConfig
from engine.loop import drain
from engine.ops import OpTable
from ref.config import parse_config
from ref.generate import forward_chunk, generate
from ref.model.cache import Cache
from ref.model.fields import ModelConfig
from ref.model.registry import forward
from ref.sampling import log_softmax

Array = NDArray[Any]

FAMILIES = (
    "qwen2",
    "qwen2_yarn",
    "qwen2_window",
    "qwen3",
    "qwen3_bias",
    "mixtral",
    "qwen2_moe",
    "qwen3_moe",
    "deepseek_moe",
    "deepseek_v2_lite",
    "deepseek_v2",
    "deepseek_v3",
    "minicpm3",
    "command_r",
    "command_r_plus",
    "minicpm",
    "minicpm_moe",
    "qwen1",
    "cpm1",
)  # of golden_families, those that the engine serves
_LANGUAGE = {key: value for key, value in FAMILY_GOLDENS["qwen2"].items() if key not in ("architectures", "model_type")}
VARIANTS: dict[str, Config] = {  # models without stored goldens: ref alone speaks for them
    "qwen1_long": {**FAMILY_GOLDENS["qwen1"], "seq_length": 8, "no_bias": False},
    "deepseek_v2_lite_bias": {**FAMILY_GOLDENS["deepseek_v2_lite"], "attention_bias": True},
    "deepseek_v3_bias": {**FAMILY_GOLDENS["deepseek_v3"], "attention_bias": True, "rope_interleave": False},
    "minicpm3_crossing": {  # the shorter prompt ends past the original length, and keeps the table of short ones
        **FAMILY_GOLDENS["minicpm3"],
        "mlp_bias": True,
        "rope_scaling": {**FAMILY_GOLDENS["minicpm3"]["rope_scaling"], "original_max_position_embeddings": 8},
    },
    "cpm_ant_wide": {  # generates no padding
        **FAMILY_GOLDENS["cpm_ant"],
        **{"dim_ff": 80, "position_bias_max_distance": 64},
    },
    "deepseek_vl": {
        "architectures": ["DeepseekVLForConditionalGeneration"],
        "torch_dtype": "float32",
        "text_config": _LANGUAGE,
    },
    "deepseek_vl_published": {
        "architectures": ["MultiModalityCausalLM"],
        "torch_dtype": "float32",
        "language_config": {**_LANGUAGE, "tie_word_embeddings": False},
    },
}
GENERATED = (
    *("llama3", "dynamic", "mistral", "qwen2_moe", "command_r_plus", "minicpm", "qwen1_long", "cpm1", "cpm_ant_wide"),
    *("qwen2_yarn", "deepseek_v2_lite", "deepseek_v2", "deepseek_v3", "minicpm3", "minicpm3_crossing"),
)
LASTING = (  # the prompt decides for all that follows: on the rope table, or on what sees what
    *("dynamic", "qwen1_long", "minicpm3_crossing", "cpm_ant_wide"),
)
SOFT_PROMPT = (134, 135, 136)  # of cpm_ant: three vectors of type 2 behind 128 tokens
MAX_TOKENS = 8
_CONFIGS = FAMILY_GOLDENS | VARIANTS
CHUNKS = {"whole": (1000, 1000, 1000), "chunks": (1, 8, 33), "decode": (1, 1, 1)}  # tokens a step of each sequence


def cases() -> list[Case]:
    found = [_forward(name, "chunks") for name in GOLDENS]
    found += [_forward("mistral", "whole"), _forward("llama3", "decode")]
    found += [_forward(name, "chunks") for name in (*FAMILIES, *VARIANTS) if name != "cpm_ant_wide"]
    found.append(_forward_prefix("cpm_ant"))
    return found + [_generate(name) for name in GENERATED]


def _inputs(name: str) -> Inputs:
    """config and weights as ref has them, and prompts, of either kind of golden model."""
    prompts = {"prompts": model_prompts(name)}
    if name in GOLDENS:
        return model_inputs(name) | prompts
    config = _CONFIGS[name]
    return {"config": parse_config(config), "weights": family_tensors(config, GOLDEN_SEED)} | prompts


def model_prompts(name: str) -> list[list[int]]:
    """Of a golden model, or of one of VARIANTS."""
    if name in GOLDENS:
        return golden_prompts(name)
    return random_ids(parse_config(_CONFIGS[name]).vocab_size, PROMPT_LENGTHS)


def make_model(folder: str, name: str) -> Path:
    """The checkpoint of a golden model, or of one of VARIANTS."""
    if name in GOLDENS:
        return golden_model(folder, name)
    return write_checkpoint(folder, _CONFIGS[name], family_tensors(_CONFIGS[name], GOLDEN_SEED))


def _forward(name: str, chunking: str) -> Case:
    return Case(
        stem="llama",
        name=f"forward-{name}-{chunking}",
        axes={"golden": name, "chunks": CHUNKS[chunking]},
        make_inputs=lambda seed: _inputs(name),
        reference=_forward_reference,
        candidate=lambda ops, **inputs: _forward_candidate(ops, name, inputs["prompts"], CHUNKS[chunking]),
    )


def _forward_reference(config: ModelConfig, weights: Inputs, prompts: list[list[int]]) -> Outputs:
    return {f"logits{i}": forward(config, weights, prompt) for i, prompt in enumerate(prompts)}


def _forward_candidate(ops: OpTable, name: str, prompts: Sequence[Sequence[int]], chunks: Sequence[int]) -> Outputs:
    with tempfile.TemporaryDirectory() as folder:
        runner = make_runner(make_model(folder, name), ops, prompts)
    logits = run_chunks(runner, prompts, chunks)
    return {f"logits{i}": rows for i, rows in enumerate(logits)}


def _forward_prefix(name: str) -> Case:
    """All tokens of a prompt but two in one step, as a model must that reads it both ways; then these two."""
    return Case(
        stem="llama",
        name=f"forward-{name}",
        axes={"golden": name},
        make_inputs=lambda seed: _inputs(name),
        reference=_prefix_reference,
        candidate=lambda ops, **inputs: _prefix_candidate(ops, name, inputs["prompts"]),
    )


def _prefix_reference(config: ModelConfig, weights: Inputs, prompts: list[list[int]]) -> Outputs:
    outputs: Outputs = {}
    for i, prompt in enumerate(prompts):
        cache = Cache(len(prompt), BLOCK_SIZE, table_tokens=len(prompt) - 2)
        chunks = (prompt[:-2], prompt[-2:])
        outputs[f"logits{i}"] = np.concatenate([forward_chunk(config, weights, chunk, cache) for chunk in chunks])
    return outputs


def _prefix_candidate(ops: OpTable, name: str, prompts: Sequence[Sequence[int]]) -> Outputs:
    whole = [[*SOFT_PROMPT, *prompt] for prompt in prompts]
    with tempfile.TemporaryDirectory() as folder:
        runner = make_runner(make_model(folder, name), ops, whole)
    logits = run_chunks(runner, whole, [len(ids) - 2 for ids in whole])
    return {f"logits{i}": rows[len(SOFT_PROMPT) :] for i, rows in enumerate(logits)}


# ---- generate


def _generate(name: str) -> Case:
    return Case(
        stem="llama",
        name=f"generate-{name}",
        axes={"golden": name, "max_tokens": MAX_TOKENS, "num_blocks": _num_blocks(name)},
        make_inputs=lambda seed: _inputs(name),
        reference=lambda **inputs: _generate_reference(name, **inputs),
        candidate=lambda ops, **inputs: _generate_candidate(name, inputs["prompts"]),
    )


def _num_blocks(name: str) -> int:
    """A pool in which the prompts fit (2 + 6 blocks, of three 18 more), and their ends do not (3 + 7, and 20 more)."""
    return 28 if name in GOLDENS else 9


def _generate_reference(name: str, config: ModelConfig, weights: Inputs, prompts: list[list[int]]) -> Outputs:
    """What a prompt decides on is not that of the model without a cache, which sees a longer sequence: ids only."""
    outputs: Outputs = {}
    for i, prompt in enumerate(prompts):
        new_ids = generate(config, weights, prompt, MAX_TOKENS, ignore_eos=True)
        outputs[f"token_ids{i}"] = np.array(new_ids, np.int64)
        if name not in LASTING:
            logprobs = log_softmax(forward(config, weights, prompt + new_ids))
            outputs[f"logprobs{i}"] = logprobs[np.arange(len(prompt) - 1, len(prompt + new_ids) - 1), new_ids]
    return outputs


def _generate_candidate(name: str, prompts: Sequence[Sequence[int]]) -> Outputs:
    with tempfile.TemporaryDirectory() as folder:
        config = EngineConfig(
            device="cpu",
            model=str(make_model(folder, name)),
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=_num_blocks(name),
            max_model_len=128 if name == "dynamic" else None,
            max_num_seqs=len(prompts),
            max_num_batched_tokens=64,
        )
        engine = build_engine(config, progress=False).engine
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, logprobs=0)
    for i, prompt in enumerate(prompts):
        engine.add(GenerationRequest(str(i), tuple(prompt), sampling))
    token_ids: list[list[int]] = [[] for _ in prompts]
    logprobs: list[list[float]] = [[] for _ in prompts]
    for event in drain(engine):
        token_ids[int(event.request_id)] += event.token_ids
        logprobs[int(event.request_id)] += [entry.logprob for entry in event.logprobs or ()]
    assert engine.scheduler.num_preemptions > 0, "the pool was meant to be too small"
    outputs: Outputs = {f"token_ids{i}": np.array(ids, np.int64) for i, ids in enumerate(token_ids)}
    if name not in LASTING:
        outputs |= {f"logprobs{i}": np.array(values, np.float32) for i, values in enumerate(logprobs)}
    return outputs
