"""Whole models over the op table of kernels, in the storage type, against the plain models of ref in the same type.

Every golden of a dense family, with heads of a size that has kernels (64 to 128, where those of conformance/golden have
12 to 24), and one of them as a GGUF file. All logits of the prompts, computed together in chunks of their own sizes, so
that decoding and prefilling rows meet in a step; and the greedy id after each token.
"""

from __future__ import annotations

import tempfile
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import HALVES, Case, Inputs, Outputs
from conformance.end_to_end import CHUNKS
from conformance.engine_run import BLOCK_SIZE, LikeStore, make_runner, run_chunks
from conformance.gguf_models import write_gguf
from conformance.golden_families import FAMILY_GOLDENS, family_tensors
from conformance.golden_models import GOLDEN_SEED, GOLDENS, Config, llama_config, random_ids, write_checkpoint
from conformance.tolerance import FACTOR
from engine.coded_kv import KVKind
from engine.ops import OpTable
from ref.config import parse_config
from ref.model.cache import Cache
from ref.model.fields import ModelConfig
from ref.model.registry import forward

Array = Any  # of a device

PROMPT_LENGTHS = (5, 21, 40)
UNDECIDED = -1  # in place of a greedy id where two tokens are too close to tell
_HIDDEN: Config = {"hidden_size": 256, "intermediate_size": 136}
MODELS: dict[str, Config] = {
    "llama2": llama_config(**GOLDENS["llama2"], head_dim=64),
    "llama3": llama_config(**GOLDENS["llama3"], head_dim=64),
    "linear": llama_config(**GOLDENS["linear"], head_dim=64),
    "dynamic": llama_config(**GOLDENS["dynamic"], head_dim=64),
    "mistral": llama_config(**{**GOLDENS["mistral"], "head_dim": 80}),
    "bias": llama_config(**GOLDENS["bias"], head_dim=96),
    "gguf": llama_config(**{**GOLDENS["linear"], "rope_scaling": None, "hidden_size": 256}),
    "qwen1": {**FAMILY_GOLDENS["qwen1"], **_HIDDEN, "seq_length": 16},  # the longer prompts are past it
    "qwen2": {**FAMILY_GOLDENS["qwen2"], **_HIDDEN},
    "qwen2_yarn": {**FAMILY_GOLDENS["qwen2_yarn"], **_HIDDEN},
    "qwen2_window": {**FAMILY_GOLDENS["qwen2_window"], **_HIDDEN},
    "qwen3": {**FAMILY_GOLDENS["qwen3"], "head_dim": 128},
    "qwen3_bias": {**FAMILY_GOLDENS["qwen3_bias"], "head_dim": 64},
    "command_r": {**FAMILY_GOLDENS["command_r"], **_HIDDEN},
    "command_r_plus": {**FAMILY_GOLDENS["command_r_plus"], **_HIDDEN},
    "minicpm": {**FAMILY_GOLDENS["minicpm"], **_HIDDEN},
    "cpm1": {**FAMILY_GOLDENS["cpm1"], "n_embd": 256},
}
KV_CODES: dict[str, tuple[KVKind, str]] = {  # caches of codes: turned, windowed, normed, in pairs, and as they are
    "llama3": ("int8", "float16"),
    "mistral": ("int8", "float16"),
    "qwen3": ("fp8", "float16"),
    "command_r": ("int8", "bfloat16"),
    "cpm1": ("fp8", "bfloat16"),
}
LOGITS = tuple(f"logits{i}" for i in range(len(PROMPT_LENGTHS)))


def cases() -> list[Case]:
    """In their storage types already."""
    found = [_case(name, "chunks", storage) for storage in HALVES for name in MODELS]
    found += [_case("llama3", "whole", "bfloat16"), _case("mistral", "decode", "bfloat16")]
    return found + [_case(name, "chunks", storage, codes) for name, (codes, storage) in KV_CODES.items()]


def write_model(folder: str, name: str, weights: dict[str, NDArray[np.float32]]) -> Path:
    """A model of MODELS as what --model takes."""
    if name == "gguf":
        return write_gguf(Path(folder, "model.gguf"), MODELS[name], weights)
    return write_checkpoint(folder, MODELS[name], weights)


def _case(name: str, chunking: str, storage: str, kv_codes: KVKind | None = None) -> Case:
    case = Case(
        stem="llama",
        name=f"forward-{name}-{chunking}" + (f"-kv-{kv_codes}" if kv_codes else ""),
        axes={"golden": name, "chunks": CHUNKS[chunking]},
        make_inputs=lambda seed: _inputs(MODELS[name]),
        reference=partial(_reference, stored_as=storage, kv_codes=kv_codes),
        candidate=lambda ops, **inputs: _candidate(ops, name, CHUNKS[chunking], kv_codes=kv_codes, **inputs),
        storages=(storage,),
        wide=LOGITS,
        undecided=UNDECIDED,
    )
    return case.stored_as(storage)


def _inputs(config: Config) -> Inputs:
    """like: an array of no numbers, which lies on the device and is of the storage type."""
    parsed = parse_config(config)
    prompts = random_ids(parsed.vocab_size, PROMPT_LENGTHS)
    weights = family_tensors(config, GOLDEN_SEED)
    return {"config": parsed, "weights": weights, "prompts": prompts, "like": np.zeros(0, np.float32)}


def _reference(
    config: ModelConfig,
    weights: Inputs,
    prompts: list[list[int]],
    like: Array,
    stored_as: str,
    kv_codes: KVKind | None,
    storage: str | None = None,
) -> Outputs:
    """Logits, and greedy ids but where two logits are nearer than they may err: each by FACTOR times what ref in the
    storage type does."""
    outputs: Outputs = {}
    for i, prompt in enumerate(prompts):
        logits, rounded = (
            forward(config, weights, prompt, storage=to, cache=_coded_cache(prompt, kv_codes))
            for to in (storage, stored_as)
        )
        best = np.sort(logits, axis=-1)[:, -2:]
        margin = 2 * FACTOR * np.abs(rounded - logits).max(axis=-1)
        outputs[f"logits{i}"] = logits
        outputs[f"token_ids{i}"] = np.where(best[:, 1] - best[:, 0] < margin, UNDECIDED, np.argmax(logits, axis=-1))
    return outputs


def _coded_cache(prompt: Sequence[int], kv_codes: KVKind | None) -> Cache | None:
    return None if kv_codes is None else Cache(len(prompt), BLOCK_SIZE, len(prompt), kv_codes)


def _candidate(
    ops: OpTable,
    name: str,
    chunks: Sequence[int],
    weights: dict[str, NDArray[np.float32]],
    prompts: list[list[int]],
    like: Array,
    kv_codes: KVKind | None,
    **inputs: Any,
) -> Outputs:
    with tempfile.TemporaryDirectory() as folder:
        runner = make_runner(write_model(folder, name, weights), ops, prompts, store=LikeStore(like), kv_codes=kv_codes)
    found = run_chunks(runner, prompts, chunks)
    outputs = {f"logits{i}": logits for i, logits in enumerate(found)}
    return outputs | {f"token_ids{i}": np.argmax(logits, axis=-1) for i, logits in enumerate(found)}
