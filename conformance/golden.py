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
from conformance.golden_families import CHANGES_UNDER_WAY, FAMILY_GOLDENS, family_prompts, family_tensors
from conformance.golden_models import GOLDEN_SEED, GOLDENS, golden_prompts, llama_config, llama_tensors
from conformance.tolerance import GOLDEN
from engine.ops import OpTable
from ref.config import parse_config
from ref.generate import generate
from ref.model.fields import ModelConfig
from ref.model.registry import family_of, forward

FOLDER = Path(__file__).parent / "golden"
NAMES = (*GOLDENS, *FAMILY_GOLDENS)
# models without stored ids: an oracle without a cache changes its rope table, or what tokens see, under way
NO_GREEDY = ("dynamic", *CHANGES_UNDER_WAY)


def cases() -> list[Case]:
    """A case a stored array: the stem is the family's file in ref/model."""
    found = [_case(name, i, "logits", _logits) for name in NAMES for i in range(len(prompts(name)))]
    greedy = [name for name in NAMES if name not in NO_GREEDY]
    return found + [_case(name, i, "greedy", _greedy) for name in greedy for i in range(len(prompts(name)))]


def _case(name: str, prompt: int, array: str, reference: Any) -> Case:
    architecture = FAMILY_GOLDENS[name]["architectures"][0] if name in FAMILY_GOLDENS else "LlamaForCausalLM"
    token_ids = prompts(name)[prompt]
    return Case(
        stem=family_of(architecture).forward.__module__.rpartition(".")[2],
        name=f"{name}-{array}{prompt}",
        axes={"golden": name, "num_tokens": len(token_ids)},
        make_inputs=lambda seed: model_inputs(name) | {"token_ids": token_ids},
        reference=reference,
        candidate=partial(_stored, name=name, key=f"{array}{prompt}", output=array),
        tolerance=GOLDEN,
    )


def prompts(name: str) -> list[list[int]]:
    return family_prompts(name) if name in FAMILY_GOLDENS else golden_prompts(name)


def model_inputs(name: str) -> Inputs:
    """config and weights of a golden model."""
    if name in FAMILY_GOLDENS:
        config = FAMILY_GOLDENS[name]
        return {"config": parse_config(config), "weights": family_tensors(config, GOLDEN_SEED)}
    config = llama_config(**GOLDENS[name])
    return {"config": parse_config(config), "weights": llama_tensors(config, GOLDEN_SEED)}


def _logits(config: ModelConfig, weights: Inputs, token_ids: list[int]) -> Outputs:
    return {"logits": forward(config, weights, token_ids)}


def _greedy(config: ModelConfig, weights: Inputs, token_ids: list[int]) -> Outputs:
    return {"greedy": np.array(generate(config, weights, token_ids, 16, ignore_eos=True), np.int32)}


def _stored(ops: OpTable, name: str, key: str, output: str, **inputs: Any) -> Outputs:
    with np.load(FOLDER / f"{name}.npz") as file:
        return {output: file[key]}
