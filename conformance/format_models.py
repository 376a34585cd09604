"""Whole models whose weights are quantized, over the op table of kernels, against the plain models of ref.

Every format of conformance/golden_formats, of a Llama and of a Qwen 2 (with biases on q, k and v), in sizes that let
layers stay as they are stored: 4-bit integers in groups, with act-order too, and codes of 8 bits with 8-bit
activations. What ref multiplies is what the format's kernel does (ref.quant.coded.quantized_linear).
"""

from __future__ import annotations

import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from conformance.case import Case, Outputs
from conformance.end_to_end import CHUNKS
from conformance.engine_run import LikeStore, run_chunks
from conformance.golden_formats import FORMAT_FAMILIES, FORMATS, format_folder
from conformance.golden_models import Config, random_ids
from conformance.split_ranks import ranks_as_one
from engine.ops import OpTable
from ref.config import parse_config
from ref.model.registry import forward
from ref.quant.scheme import read_weights

Array = Any  # of a device

PROMPT_LENGTHS = (3, 18)
_SIZES: Config = {"hidden_size": 256, "intermediate_size": 384, "num_attention_heads": 4, "num_key_value_heads": 2}
FAMILIES: dict[str, tuple[Config, str]] = {  # config, and the type that its kernels store
    "llama": (FORMAT_FAMILIES["llama"] | _SIZES | {"head_dim": 64}, "bfloat16"),
    "qwen2": (FORMAT_FAMILIES["qwen2"] | _SIZES, "float16"),
}
_HEADS_OF_128: Config = FAMILIES["llama"][0] | {"head_dim": 128}
RANKED = ("gptq_act_order", "ct_int4", "fp8_block")  # on two ranks; of int8 each rank would find other scales of
# activations than one rank does
LOGITS = tuple(f"logits{i}" for i in range(len(PROMPT_LENGTHS)))


def cases() -> list[Case]:
    """In their storage types already."""
    alone = [
        _case(f"{family}-{name}", family, *FAMILIES[family], name)
        for family in FAMILIES
        for name in FORMATS
        if name != "bf16"
    ]
    return alone + [_case(f"{name}-two-ranks", "llama", _HEADS_OF_128, "bfloat16", name, 2) for name in RANKED]


def _case(what: str, family: str, config: Config, storage: str, name: str, num_ranks: int = 1) -> Case:
    case = Case(
        stem="llama",
        name=f"forward-{what}",
        axes={"family": family, "format": name},
        make_inputs=lambda seed: {"like": np.zeros(0, np.float32)},
        reference=partial(_reference, config, name),
        candidate=partial(_candidate, config, name, num_ranks),
        storages=(storage,),
        wide=LOGITS,
    )
    return case.stored_as(storage)


def _prompts(config: Config) -> list[list[int]]:
    return random_ids(config["vocab_size"], PROMPT_LENGTHS)


def _reference(config: Config, name: str, like: Array, storage: str | None = None) -> Outputs:
    dtype: DTypeLike = np.float64 if storage is None else np.float32
    with tempfile.TemporaryDirectory() as folder:
        format_folder(folder, config, name)
        weights = read_weights(folder, dtype, activations="format")
    prompts = _prompts(config)
    return {
        f"logits{i}": forward(parse_config(config), weights, prompt, storage=storage)
        for i, prompt in enumerate(prompts)
    }


def _candidate(config: Config, name: str, num_ranks: int, ops: OpTable, like: NDArray[Any]) -> Outputs:
    prompts = _prompts(config)
    with tempfile.TemporaryDirectory() as folder:
        format_folder(folder, config, name)
        runner = ranks_as_one(Path(folder), ops, prompts, num_ranks, store=LikeStore(like), packed=True)
    return {f"logits{i}": logits for i, logits in enumerate(run_chunks(runner, prompts, CHUNKS["chunks"]))}
