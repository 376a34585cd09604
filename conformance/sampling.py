"""Cases of the sampling functions."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import Case, Inputs, Kept, Outputs
from conformance.inputs import guarded, normal
from engine.api import SamplingParams
from engine.logit_edits import NOT_FINITE, NOTHING_LEFT, SAMPLED, SlotEdits, pack_edits
from engine.ops import OpTable
from ref.philox import uniform
from ref.sampling import (
    apply_logit_bias,
    apply_mask,
    apply_penalties,
    banned_by_bad_words,
    sample,
    token_logprobs,
)

Array = NDArray[Any]

# A draw this near to a border between two tokens, as a share of the mass before it, may fall on either side. In float32
# a weight e^−x has a relative error of at most (x + 1) · 2^-22 (x rounded as a difference, by the temperature and as a
# product, then the exponential's last two bits), and a sum of them has the mean of that over its mass, at most
# (ln vocab) · 2^-22; both sums of a share err, so 2 · 12 · 2^-22 = 6e-6. What only a sum in one running float32 would
# lose does not fit in here.
BORDER = 1e-5
STORAGES = ("float32",)  # logits are nothing else
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
    found += [_sample("greedy", kind, 333, {"temperature": 0.0}) for kind in KINDS]
    found += [_sample("greedy-large", "ties", 10001, {"temperature": 0.0}, 3)]
    found += [_logprobs(k, kind) for k in (0, 1, 20) for kind in KINDS[:2]] + [_logprobs(400, "spread")]
    found += [_penalties(name, *values) for name, values in PENALTIES.items()]
    return found + [_edits(kind) for kind in ("spread", "not-finite")]


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
        reference=_sample_reference,
        candidate=_sample_candidate,
        storages=STORAGES,
        disturb=partial(_disturb, outputs=("token_ids", "status")),
    )


def _sample_inputs(seed: int, num_rows: int, vocab_size: int, kind: str, filters: dict[str, Any]) -> Inputs:
    rng = np.random.default_rng(seed)
    logits = _logits(rng, kind, num_rows, vocab_size)
    usual: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    rows: dict[str, Array] = {}  # of the host, whatever the target: a table, not inputs of their own
    for name, value in (usual | filters).items():
        dtype = np.int64 if name == "top_k" else np.float64
        rows[name] = np.resize(np.array(value, dtype), num_rows)
    for name in ("position", "stream"):
        rows[name] = rng.integers(0, 2**40, num_rows)
    rows["seed"] = np.zeros(num_rows, np.uint64)
    unsettled = np.arange(num_rows)
    while len(unsettled):
        rows["seed"][unsettled] = rng.integers(0, 2**64, len(unsettled), np.uint64)
        settled = _is_settled(logits[unsettled], {name: value[unsettled] for name, value in rows.items()})
        unsettled = unsettled[~settled]
    return {"logits": guarded(logits, num_axes=1), "filters": rows}


def arguments_of_ref(logits: Array, filters: dict[str, Array]) -> dict[str, Array]:
    """The arguments of ref.sample for those of an op table's sample_rows."""
    rows = dict(filters)
    return {"logits": logits, "uniforms": uniform(rows.pop("seed"), rows.pop("position"), rows.pop("stream")), **rows}


def _sample_reference(logits: Array, filters: dict[str, Array], storage: str | None = None) -> Outputs:
    token_ids = sample(**arguments_of_ref(logits, filters))
    best = np.take_along_axis(logits, token_ids[:, None].astype(np.int64), axis=1)[:, 0]
    return {"token_ids": token_ids, "status": np.where(np.isfinite(best), SAMPLED, NOT_FINITE).astype(np.int32)}


def _sample_candidate(ops: OpTable, logits: Array, filters: dict[str, Array]) -> Outputs:
    token_ids, status = ops.sampling.start_copy(ops.sampling.sample_rows(logits, **filters))()
    return {"token_ids": token_ids, "status": status}


def _is_settled(logits: Array, filters: dict[str, Array]) -> NDArray[np.bool_]:
    """Rows whose token stays the same if what decides it goes a little to either side. [num_rows]"""
    tokens = tokens_near(logits, filters)
    settled: NDArray[np.bool_] = np.all(tokens == tokens[0], axis=0)
    return settled


def tokens_near(logits: Array, filters: dict[str, Array]) -> NDArray[np.int32]:
    """What ref draws in float64 with top_p, min_p and the uniform BORDER lower and higher. [num_ways, num_rows]"""
    exact = {name: value.astype(np.float64) for name, value in arguments_of_ref(logits, filters).items()}
    ways = itertools.product(*(_sides(exact[name]) for name in ("top_p", "min_p", "uniforms")))
    return np.stack(
        [sample(**exact | {"top_p": p, "min_p": m, "uniforms": np.clip(u, 0, 1 - 2**-24)}) for p, m, u in ways]
    )


def _sides(values: Array) -> tuple[Array, ...]:
    """values a little lower and higher; as they are where all are 0 or 1, which switches a filter off or is exact."""
    inner = (values > 0) & (values < 1)
    return (values - BORDER * inner * values, values + BORDER * inner * values) if inner.any() else (values,)


# ---- logprobs


def _logprobs(k: int, kind: str) -> Case:
    axes: dict[str, Any] = {"num_rows": NUM_ROWS, "vocab_size": 333, "kind": kind}
    return Case(
        stem="sampling",
        name=f"logprobs-{k}-{kind}",
        axes={**axes, "k": k},
        make_inputs=lambda seed: _row_inputs(seed, **axes) | {"k": k},
        reference=lambda logits, token_ids, k, storage=None: _logprob_outputs(
            *token_logprobs(logits, token_ids["own"], k)
        ),
        candidate=lambda ops, logits, token_ids, k: _logprob_outputs(
            *ops.sampling.token_logprobs(logits, token_ids["own"], k)
        ),
        storages=STORAGES,
        disturb=partial(_disturb, outputs=("own", "top_ids", "top")),
    )


def _row_inputs(seed: int, num_rows: int, vocab_size: int, kind: str) -> Inputs:
    logits = _logits(np.random.default_rng(seed), kind, num_rows, vocab_size)
    token_ids = (np.arange(num_rows, dtype=np.int32) * 31) % vocab_size
    return {"logits": guarded(logits, num_axes=1), "token_ids": {"own": token_ids}}  # a table: it is of the host


def _logprob_outputs(own: Array, top_ids: Array, top: Array) -> Outputs:
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
        reference=lambda logits, text, storage=None, **factors: {
            "logits": apply_penalties(logits[0], **text, **factors)[None]
        },
        candidate=_penalty_candidate,
        storages=STORAGES,
        changes=("logits",),
    )


def _penalty_inputs(seed: int, num_prompt: int, num_output: int, vocab_size: int) -> Inputs:
    rng = np.random.default_rng(seed)
    prompt_ids, output_ids = (rng.integers(0, vocab_size, n) for n in (num_prompt, num_output))
    return {
        "logits": guarded(_logits(rng, "banned" if num_prompt == 9 else "spread", 1, vocab_size), num_axes=1),
        "text": {"prompt_ids": prompt_ids, "output_ids": output_ids},
    }


def _penalty_candidate(ops: OpTable, logits: Array, text: dict[str, Array], **factors: Any) -> Outputs:
    prompt_ids, output_ids = text["prompt_ids"].tolist(), text["output_ids"].tolist()
    one = SlotEdits(replace(SamplingParams(), **factors), prompt_ids, output_ids, (), logits.shape[1])
    ops.sampling.edit_logits(logits, pack_edits([0], [one], np.array([len(output_ids)]), [False]))
    return {"logits": logits}


# ---- all edits

EDITED_VOCAB = 203
EDITED = {  # row → what it does; two rows of the batch do nothing
    0: SamplingParams(repetition_penalty=1.3, frequency_penalty=0.2, logit_bias={3: -100.0, 5: 2.5, 7: -1.0, 202: 9.0}),
    1: SamplingParams(logit_bias={0: -100.0, 1: 3.0}),
    2: SamplingParams(allowed_token_ids=(0, 31, 32, 33, 64, 201, 202), logit_bias={0: -100.0, 6: 50.0, 31: 1.0}),
    4: SamplingParams(allowed_token_ids=(202,), presence_penalty=0.5, bad_words_ids=((3,), (9, 10))),
    5: SamplingParams(allowed_token_ids=(4, 8), bad_words_ids=((4,), (8,))),
    6: SamplingParams(min_tokens=4, stop_token_ids=(11, 12), bad_words_ids=((8, 9, 13), (7, 9, 14))),
}
EDITED_PROMPT, EDITED_OUTPUT = (5, 202, 5, 77), (5, 8, 9)


def _edits(kind: str) -> Case:
    axes: dict[str, Any] = {"num_rows": 8, "vocab_size": EDITED_VOCAB, "kind": kind}
    return Case(
        stem="sampling",
        name=f"edits-{kind}",
        axes=axes,
        make_inputs=lambda seed: {
            "logits": guarded(_logits(np.random.default_rng(seed), kind, 8, EDITED_VOCAB), num_axes=1)
        },
        reference=_edit_reference,
        candidate=_edit_candidate,
        storages=STORAGES,
        changes=("logits",),
    )


def _edit_reference(logits: Array, storage: str | None = None) -> Outputs:
    edited, reasons = logits.copy(), np.full(len(logits), NOT_FINITE, np.int32)
    for row, sampling in EDITED.items():
        if np.isfinite(logits[row].max()):
            edited[row] = _edited_row(logits[row], sampling)
            reasons[row] = NOTHING_LEFT
    return {"logits": edited, "reasons": reasons, "raw": logits[[2, 6]]}


def _edited_row(row: Array, sampling: SamplingParams) -> Array:
    factors = (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty)
    row = apply_penalties(row, EDITED_PROMPT, EDITED_OUTPUT, *factors)
    row = apply_logit_bias(row, sampling.logit_bias)
    allowed = np.ones(EDITED_VOCAB, np.bool_)
    if sampling.allowed_token_ids is not None:
        allowed = np.isin(np.arange(EDITED_VOCAB), sampling.allowed_token_ids)
    allowed[banned_by_bad_words(sampling.bad_words_ids, EDITED_OUTPUT)] = False
    if len(EDITED_OUTPUT) < sampling.min_tokens:
        allowed[[2, *sampling.stop_token_ids]] = False
    return apply_mask(row, allowed)


def _edit_candidate(ops: OpTable, logits: Array) -> Outputs:
    slots = [SlotEdits(s, EDITED_PROMPT, EDITED_OUTPUT, (2,), EDITED_VOCAB) for s in EDITED.values()]
    num_output = np.full(len(slots), len(EDITED_OUTPUT))
    edits = pack_edits(list(EDITED), slots, num_output, [row in (2, 6) for row in EDITED])
    reasons, raw = ops.sampling.edit_logits(logits, edits)
    return {"logits": logits, "reasons": ops.sampling.start_copy(reasons)(), "raw": ops.sampling.start_copy(raw)()}
