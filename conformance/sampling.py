"""Cases of the sampling functions."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import Case, Inputs, Kept, Outputs
from conformance.inputs import guarded, normal
from engine.ops import OpTable
from ref.sampling import apply_penalties, greedy, sample, token_logprobs

Array = NDArray[Any]

BORDER = 1e-5  # a draw this near to a border between two tokens may fall on either side in float32
NUM_ROWS = 12
FILTERS: dict[str, dict[str, Any]] = {
    "plain": {},
    "cold": {"temperature": 0.2},
    "hot": {"temperature": 5.0},
    "greedy-rows": {"temperature": (0.0, 1.0, 1e-6)},
    "top-k": {"top_k": (1, 5, 0, -1, 50)},
    "top-k-beyond": {"top_k": 10**6},
    "top-p": {"top_p": (0.1, 0.5, 0.9, 0.99)},
    "top-p-tiny": {"top_p": 1e-6},
    "min-p": {"min_p": (0.01, 0.1, 0.5)},
    "min-p-1": {"min_p": 1.0},
    "all": {"temperature": (0.7, 1.3), "top_k": (40, 7), "top_p": (0.9, 0.8), "min_p": (0.05, 0.0)},
}
KINDS = ("spread", "ties", "banned", "not-finite")


def cases() -> list[Case]:
    found = [_sample(name, kind, 300, filters) for name, filters in FILTERS.items() for kind in ("spread", "ties")]
    found += [_sample("all", kind, 300, FILTERS["all"]) for kind in ("banned", "not-finite")]
    found += [_sample("all-one-token", "spread", 1, FILTERS["all"])]
    found += [_sample("all-large", "spread", 5003, FILTERS["all"], 4), _sample("plain-large", "spread", 5003, {}, 4)]
    found += [_rows_case("greedy", kind, _greedy) for kind in KINDS]
    found += [_rows_case(f"logprobs-{k}", kind, partial(_logprobs, k=k)) for k in (0, 1, 20) for kind in KINDS[:2]]
    found += [_rows_case("logprobs-beyond", "spread", partial(_logprobs, k=400))]
    return found + [_penalties(name, *values) for name, values in PENALTIES.items()]


def _logits(rng: np.random.Generator, kind: str, num_rows: int, vocab_size: int) -> NDArray[np.float32]:
    """Rows with a few likely tokens, in any order; some kinds with equal values, with −inf, with rows that are bad."""
    logits = normal(rng, num_rows, vocab_size, scale=3.0)
    if kind == "ties":
        logits = np.round(logits)
    if kind == "banned":
        logits[rng.random(logits.shape) < 0.9] = -np.inf
        logits[:, 7] = 1.0
    if kind == "not-finite":
        logits[1, 17], logits[3, 5] = np.nan, np.inf
        logits[4] = -np.inf
    return logits


# ---- sample


def _sample(name: str, kind: str, vocab_size: int, filters: dict[str, Any], num_rows: int = NUM_ROWS) -> Case:
    axes: dict[str, Any] = {"num_rows": num_rows, "vocab_size": vocab_size, "kind": kind}
    return Case(
        stem="sampling",
        name=f"sample-{name}-{kind}",
        axes={**axes, **filters},
        make_inputs=partial(_sample_inputs, **axes, filters=filters),
        reference=lambda **inputs: {"token_ids": sample(**inputs)},
        candidate=lambda ops, **inputs: {"token_ids": ops.sampling.sample(**inputs)},
        disturb=partial(_disturb, outputs=("token_ids",)),
    )


def _sample_inputs(seed: int, num_rows: int, vocab_size: int, kind: str, filters: dict[str, Any]) -> Inputs:
    rng = np.random.default_rng(seed)
    logits = _logits(rng, kind, num_rows, vocab_size)
    usual: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    inputs: Inputs = {"logits": guarded(logits, num_axes=1)}
    for name, value in (usual | filters).items():
        dtype = np.int64 if name == "top_k" else np.float64
        inputs[name] = np.resize(np.array(value, dtype), num_rows)
    uniforms = np.zeros(num_rows, np.float32)
    unsettled = np.arange(num_rows)
    while len(unsettled):
        uniforms[unsettled] = rng.integers(0, 2**24, len(unsettled)) / 2**24
        rows = {name: value[unsettled] for name, value in (inputs | {"uniforms": uniforms}).items()}
        unsettled = unsettled[~_is_settled(rows)]
    return {**inputs, "uniforms": uniforms}


def _is_settled(rows: Inputs) -> NDArray[np.bool_]:
    """Rows whose token stays the same if what decides it goes a little to either side. [num_rows]"""
    exact = {name: value.astype(np.float64) for name, value in rows.items()}
    tokens = []
    for p, m, u in itertools.product(*(_sides(exact[name]) for name in ("top_p", "min_p", "uniforms"))):
        tokens.append(sample(**exact | {"top_p": p, "min_p": m, "uniforms": np.clip(u, 0, 1 - 2**-24)}))
    settled: NDArray[np.bool_] = np.all(np.stack(tokens) == tokens[0], axis=0)
    return settled


def _sides(values: Array) -> tuple[Array, ...]:
    """values a little lower and higher; as they are where all are 0 or 1, which switches a filter off or is exact."""
    inner = (values > 0) & (values < 1)
    return (values - BORDER * inner * values, values + BORDER * inner * values) if inner.any() else (values,)


# ---- greedy and logprobs: rows of logits in, a few numbers a row out


def _rows_case(name: str, kind: str, outputs_of: Callable[[Any, Array], Outputs]) -> Case:
    axes: dict[str, Any] = {"num_rows": NUM_ROWS, "vocab_size": 333, "kind": kind}
    return Case(
        stem="sampling",
        name=f"{name}-{kind}",
        axes=axes,
        make_inputs=partial(_row_inputs, **axes),
        reference=partial(outputs_of, _REF),
        candidate=lambda ops, logits: outputs_of(ops.sampling, logits),
        disturb=partial(_disturb, outputs=("token_ids", "own", "top_ids", "top")),
    )


class _REF:
    """The names of ref.sampling that an op table's sampling has too."""

    greedy = staticmethod(greedy)
    token_logprobs = staticmethod(token_logprobs)


def _row_inputs(seed: int, num_rows: int, vocab_size: int, kind: str) -> Inputs:
    return {"logits": guarded(_logits(np.random.default_rng(seed), kind, num_rows, vocab_size), num_axes=1)}


def _greedy(ops: Any, logits: Array) -> Outputs:
    return {"token_ids": ops.greedy(logits)}


def _logprobs(ops: Any, logits: Array, k: int) -> Outputs:
    token_ids = (np.arange(len(logits), dtype=np.int32) * 31) % logits.shape[1]
    own, top_ids, top = ops.token_logprobs(logits, token_ids, k)
    return {"own": own[:, None], "top_ids": top_ids, "top": top}


def _disturb(inputs: Inputs, rng: np.random.Generator, outputs: tuple[str, ...]) -> Kept:
    logits = inputs["logits"]
    keep = int(rng.integers(len(logits)))
    others = np.arange(len(logits)) != keep
    logits[others] = normal(rng, int(others.sum()), logits.shape[1])
    return dict.fromkeys(outputs, slice(keep, keep + 1))


# ---- penalties

PENALTIES = {  # repetition, presence, frequency, number of prompt and output ids
    "penalties-none": (1.0, 0.0, 0.0, 9, 9),
    "penalties-repetition": (1.3, 0.0, 0.0, 40, 30),
    "penalties-reward": (0.7, -1.5, -0.3, 40, 30),
    "penalties-presence": (1.0, 1.5, 0.0, 40, 30),
    "penalties-frequency": (1.0, 0.0, 0.7, 40, 200),
    "penalties-all": (1.2, 0.5, 0.25, 40, 200),
    "penalties-no-output": (1.2, 0.5, 0.25, 40, 0),
    "penalties-nothing-seen": (1.2, 0.5, 0.25, 0, 0),
}


def _penalties(
    name: str, repetition: float, presence: float, frequency: float, num_prompt: int, num_output: int
) -> Case:
    factors = {"repetition_penalty": repetition, "presence_penalty": presence, "frequency_penalty": frequency}
    axes: dict[str, Any] = {"num_prompt": num_prompt, "num_output": num_output, "vocab_size": 97}
    return Case(
        stem="sampling",
        name=name,
        axes={**axes, **factors},
        make_inputs=lambda seed: _penalty_inputs(seed, **axes) | factors,
        reference=lambda **inputs: {"logits": apply_penalties(**inputs)},
        candidate=_penalty_candidate,
        changes=("logits",),
    )


def _penalty_inputs(seed: int, num_prompt: int, num_output: int, vocab_size: int) -> Inputs:
    rng = np.random.default_rng(seed)
    prompt_ids, output_ids = (rng.integers(0, vocab_size, n) for n in (num_prompt, num_output))
    return {
        "logits": guarded(_logits(rng, "banned" if num_prompt == 9 else "spread", 1, vocab_size)[0]),
        "prompt_ids": prompt_ids,
        "output_ids": output_ids,
    }


def _penalty_candidate(ops: OpTable, logits: Array, prompt_ids: Array, output_ids: Array, **factors: float) -> Outputs:
    """The engine's own function is told each seen id once, and how often the output has it."""
    seen_ids = np.unique(np.concatenate([prompt_ids, output_ids]))
    output_counts = np.bincount(output_ids, minlength=len(logits))[seen_ids]
    ops.sampling.apply_penalties(logits, seen_ids, output_counts, *factors.values())
    return {"logits": logits}
