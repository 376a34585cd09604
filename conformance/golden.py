"""The stored logits of conformance/golden: ref against an independent implementation, transformers.

Here the stored arrays are the candidate. So ref in float64 is what they are measured with, as everywhere else, and a
fault in ref shows as an error of theirs.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from conformance.case import Case, Inputs, Outputs
from conformance.golden_models import (
    GOLDEN_PROMPT_LENGTHS,
    GOLDEN_SEED,
    GOLDENS,
    golden_prompts,
    llama_config,
    llama_tensors,
)
from conformance.tolerance import GOLDEN
from engine.ops import OpTable
from ref.config import parse_config
from ref.generate import generate
from ref.model.llama import LlamaConfig, llama

FOLDER = Path(__file__).parent / "golden"
NO_GREEDY = ("dynamic",)  # models without stored ids: an oracle without a cache changes its rope table under way


def cases() -> list[Case]:
    """A case a stored array: the stem is the family's file in ref/model."""
    prompts = range(len(GOLDEN_PROMPT_LENGTHS))
    found = [_case(name, i, "logits", _logits) for name in GOLDENS for i in prompts]
    return found + [_case(name, i, "greedy", _greedy) for name in GOLDENS if name not in NO_GREEDY for i in prompts]


def _case(name: str, prompt: int, array: str, reference: Any) -> Case:
    return Case(
        stem="llama",
        name=f"{name}-{array}{prompt}",
        axes={"golden": name, "num_tokens": GOLDEN_PROMPT_LENGTHS[prompt]},
        make_inputs=lambda seed: model_inputs(name) | {"token_ids": golden_prompts(name)[prompt]},
        reference=reference,
        candidate=partial(_stored, name=name, key=f"{array}{prompt}", output=array),
        tolerance=GOLDEN,
    )


def model_inputs(name: str) -> Inputs:
    """config and weights of a golden model."""
    config = llama_config(**GOLDENS[name])
    return {"config": parse_config(config), "weights": llama_tensors(config, GOLDEN_SEED)}


def _logits(config: LlamaConfig, weights: Inputs, token_ids: list[int]) -> Outputs:
    return {"logits": llama(config, weights, token_ids)}


def _greedy(config: LlamaConfig, weights: Inputs, token_ids: list[int]) -> Outputs:
    return {"greedy": np.array(generate(config, weights, token_ids, 16, ignore_eos=True), np.int32)}


def _stored(ops: OpTable, name: str, key: str, output: str, **inputs: Any) -> Outputs:
    with np.load(FOLDER / f"{name}.npz") as file:
        return {output: file[key]}
