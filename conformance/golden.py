"""The stored logits of conformance/golden: ref against an independent implementation, transformers.

Here the stored arrays are the candidate. So ref in float64 is what they are measured with, as everywhere else, and a
fault in ref shows as an error of theirs.
"""

from __future__ import annotations

import tempfile
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import Case, Inputs, Outputs
from conformance.golden_families import CHANGES_UNDER_WAY, FAMILY_GOLDENS, family_prompts, family_tensors
from conformance.golden_formats import FORMAT_FAMILIES, FORMATS, KEPT_TOKENS, format_model, format_prompt
from conformance.golden_models import GOLDEN_SEED, GOLDENS, golden_prompts, llama_config, llama_tensors
from conformance.tolerance import FORMAT_FLOAT, FORMAT_FP8, FORMAT_INT8, GOLDEN, WORST_FACTOR, Tolerance
from engine.ops import OpTable
from ref.config import parse_config, read_config
from ref.generate import forward_chunk, generate
from ref.model.cache import Cache
from ref.model.fields import ModelConfig
from ref.model.registry import family_of, forward
from ref.quant.scheme import read_weights

Array = NDArray[Any]

FOLDER = Path(__file__).parent / "golden"
NAMES = (*GOLDENS, *FAMILY_GOLDENS)
# models without stored ids: an oracle without a cache changes its rope table, or what tokens see, under way
NO_GREEDY = ("dynamic", *CHANGES_UNDER_WAY)
FORMAT_TOLERANCES = {None: FORMAT_FLOAT, "int8": FORMAT_INT8, "fp8": FORMAT_FP8}


def cases() -> list[Case]:
    """A case a stored array, or a family in a format with all of its arrays; the stem is the file in ref/model."""
    found = [_case(name, i, "logits", _logits) for name in NAMES for i in range(len(prompts(name)))]
    greedy = [name for name in NAMES if name not in NO_GREEDY]
    found += [_case(name, i, "greedy", _greedy) for name in greedy for i in range(len(prompts(name)))]
    for family, form in product(FORMAT_FAMILIES, FORMATS):
        found.append(_format_case(family, form, "float"))
        if FORMATS[form].activations is not None:
            found.append(_format_case(family, form, "format"))
    return found


def _case(name: str, prompt: int, array: str, reference: Any) -> Case:
    architecture = FAMILY_GOLDENS[name]["architectures"][0] if name in FAMILY_GOLDENS else "LlamaForCausalLM"
    token_ids = prompts(name)[prompt]
    return Case(
        stem=_stem(architecture),
        name=f"{name}-{array}{prompt}",
        axes={"golden": name, "num_tokens": len(token_ids)},
        make_inputs=lambda seed: model_inputs(name) | {"token_ids": token_ids},
        reference=reference,
        candidate=partial(_stored, name=name, key=f"{array}{prompt}", output=array),
        tolerance=GOLDEN,
    )


def _stem(architecture: str) -> str:
    return family_of(architecture).forward.__module__.rpartition(".")[2]


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


def _format_case(family: str, form: str, activations: str) -> Case:
    """All that is stored of a family in a format. activations: "float", or "format": as wide as the format has them."""
    tolerance = FORMAT_TOLERANCES[FORMATS[form].activations if activations == "format" else None]
    about: dict[str, Any] = {"family": family, "form": form, "activations": activations}
    return Case(
        stem=_stem(FORMAT_FAMILIES[family]["architectures"][0]),
        name=f"{family}-{form}-{activations}",
        axes={
            "golden": family,
            "format": form,
            "activations": activations,
            "num_tokens": len(format_prompt()),
        },
        make_inputs=lambda seed: about | {"arithmetic": np.zeros(0, np.float32)},
        reference=partial(_format_outputs, tolerance=tolerance),
        candidate=lambda ops, **inputs: format_stored(family, form, activations),
        tolerance=tolerance,
    )


def format_stored(family: str, form: str, activations: str) -> Outputs:
    """The arrays of one half of conformance/golden/formats/<family>-<form>.npz, by name."""
    with np.load(FOLDER / "formats" / f"{family}-{form}.npz") as file:
        is_format = [name for name in file if name.endswith("_format")]
        if activations == "format":
            return {name.removesuffix("_format"): file[name] for name in is_format}
        return {name: file[name] for name in file if name not in is_format}


def _format_outputs(family: str, form: str, activations: str, arithmetic: Array, tolerance: Tolerance) -> Outputs:
    """The same arrays by ref, from the folder as it is stored. arithmetic: its dtype is that of all arithmetic."""
    with tempfile.TemporaryDirectory() as folder:
        format_model(folder, family, form)
        config = read_config(folder)
        weights = read_weights(folder, arithmetic.dtype, activations=activations)
        stored = format_stored(family, form, activations)
        seen: Outputs = {}
        outputs: Outputs = {"logits": forward(config, weights, format_prompt(), trace=seen.__setitem__)}
        outputs["greedy"] = _greedy_up_to_ties(config, weights, stored["greedy"], tolerance)
    for name, value in seen.items():
        short = name.replace("mlp.expert_ids", "expert_ids").replace("block_sparse_moe.expert_ids", "expert_ids")
        if short in stored and short not in outputs:
            outputs[short] = np.sort(value)[-KEPT_TOKENS:] if short.endswith("expert_ids") else value[-KEPT_TOKENS:]
    return outputs


def _greedy_up_to_ties(config: ModelConfig, weights: Any, stored: Array, tolerance: Tolerance) -> Array:
    """The greedy ids of ref along the stored ones, through the paged cache: prefill, then decode token by token.

    A stored id whose logit is nearer to the best than two logits may move is a tie, and stays.
    """
    assert tolerance.norm is not None
    prompt = format_prompt()
    cache = Cache(len(prompt) + len(stored), 4, table_tokens=len(prompt))
    pending, found = prompt, []
    for token_id in stored.tolist():
        logits = forward_chunk(config, weights, pending, cache)[-1].astype(np.float64)
        margin = 2 * WORST_FACTOR * tolerance.norm * float(np.sqrt(np.mean(logits**2)))
        found.append(token_id if logits[token_id] >= logits.max() - margin else int(logits.argmax()))
        pending = [token_id]
    return np.array(found, np.int32)
