"""Follows the texts of conformance/golden/starter.json with an engine and says how far its logprobs are from theirs.

The golden is float32. A type of 16 bits leads away from it whoever computes, so it also has what transformers makes of
the same texts in each: that error is the yardstick, and the rule is that of conformance.tolerance, twice the
yardstick. An engine that takes another token than the golden (two were close) is put back onto the text, so that every
place is compared in every run.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

import conformance
from conformance.tolerance import FACTOR
from engine.api import GenerationRequest, SamplingParams, TokenLogprob
from engine.loop import Engine, drain

NUM_TOP = 20  # alternatives that are asked for: the golden's five must be among them
FLOAT32_BOUND = 2e-3  # sums in another order over 30 layers (seen: 7e-5)
CLAIM = 0.05  # how close most logprobs of a type of 16 bits are

Entry = Mapping[str, Any]
GOLDEN: list[Entry] = json.loads((Path(conformance.__file__).parent / "golden" / "starter.json").read_text())


@dataclass(slots=True)
class Deviation:
    """Differences between logprobs and the golden's, and where other tokens were taken."""

    differences: list[float] = field(default_factory=list)
    gaps: list[float] = field(default_factory=list)  # between the golden's two best, where another token was taken
    num_places: int = 0

    @property
    def rms(self) -> float:
        return float(np.sqrt(np.mean(np.square(self.differences)))) if self.differences else 0.0

    @property
    def worst(self) -> float:
        return max(self.differences, default=0.0)

    @property
    def largest_gap(self) -> float:
        return max(self.gaps, default=0.0)

    def share_within(self, bound: float) -> float:
        """Of the differences, 0 to 1."""
        return float(np.mean(np.array(self.differences) <= bound)) if self.differences else 1.0


@dataclass(frozen=True, slots=True)
class Bound:
    """The largest root mean square and the largest single difference that pass."""

    rms: float
    worst: float

    def faults(self, found: Deviation) -> list[str]:
        """What does not pass, in words. Logprobs that are each off by worst change places from a gap of twice that."""
        wrong = []
        if found.rms > self.rms:
            wrong.append(f"rms {found.rms:.4g} > {self.rms:.4g}")
        if found.worst > self.worst:
            wrong.append(f"worst {found.worst:.4g} > {self.worst:.4g}")
        if found.largest_gap > 2 * self.worst:
            wrong.append(f"another token where the two best are {found.largest_gap:.4g} apart")
        return wrong


def yardstick(dtype: str) -> Deviation:
    """How far transformers in this type of 16 bits is from the golden."""
    found = Deviation()
    for entry in GOLDEN:
        for best, others in zip(entry["top5"], entry[f"top5_{dtype}"], strict=True):
            found.differences += [abs(theirs - other) for (_, theirs), other in zip(best, others, strict=True)]
    return found


def bound_for(dtype: str) -> Bound:
    """float32: a fixed one. 16 bits: FACTOR times the yardstick."""
    if dtype == "float32":
        return Bound(FLOAT32_BOUND, FLOAT32_BOUND)
    measured = yardstick(dtype)
    return Bound(FACTOR * measured.rms, FACTOR * measured.worst)


def follow(engine: Engine, entries: Sequence[Entry], with_logprobs: bool = True) -> Deviation:
    """Greedy decoding of all entries in one batch; rounds of it, until every place has been compared.

    Without logprobs only the tokens are compared, and steps may overlap.

    Raises:
        AssertionError: a request ended in an error, or a golden token is not among the NUM_TOP best.
    """
    found = Deviation()
    starts = {entry["name"]: 0 for entry in entries}
    while starts:
        open_entries = [entry for entry in entries if entry["name"] in starts]
        outputs = _decode(engine, open_entries, starts, with_logprobs)
        for entry in open_entries:
            name = entry["name"]
            starts[name] = _take(found, entry, starts[name], *outputs[name])
            if starts[name] == len(entry["greedy_ids"]):
                del starts[name]
    return found


def score(engine: Engine, entries: Sequence[Entry]) -> Deviation:
    """The same logprobs from a prefill: the whole text as a prompt whose logprobs are asked for."""
    found = Deviation()
    for entry in entries:
        ids = (*entry["prompt_ids"], *entry["greedy_ids"])
        sampling = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=NUM_TOP)
        engine.add(GenerationRequest(entry["name"], ids, sampling))
    scored = {event.request_id: event.prompt_logprobs for event in drain(engine) if event.prompt_logprobs}
    for entry in entries:
        places = scored[entry["name"]][len(entry["prompt_ids"]) :]
        for place, logprob in enumerate(places):
            assert logprob is not None
            _compare(found, entry, place, logprob)
    return found


def _decode(
    engine: Engine, entries: Sequence[Entry], starts: Mapping[str, int], with_logprobs: bool
) -> dict[str, tuple[list[int], list[TokenLogprob]]]:
    for entry in entries:
        done = entry["greedy_ids"][: starts[entry["name"]]]
        sampling = SamplingParams(
            temperature=0,
            max_tokens=len(entry["greedy_ids"]) - len(done),
            ignore_eos=True,
            logprobs=NUM_TOP if with_logprobs else None,
        )
        engine.add(GenerationRequest(entry["name"], (*entry["prompt_ids"], *done), sampling))
    outputs: dict[str, tuple[list[int], list[TokenLogprob]]] = {entry["name"]: ([], []) for entry in entries}
    for event in drain(engine):
        assert event.error is None, event.error
        outputs[event.request_id][0].extend(event.token_ids)
        outputs[event.request_id][1].extend(event.logprobs or ())
    return outputs


def _take(found: Deviation, entry: Entry, start: int, ids: Sequence[int], logprobs: Sequence[TokenLogprob]) -> int:
    """Compares up to and including the first other token; the place behind it."""
    for offset, token_id in enumerate(ids):
        place = start + offset
        if logprobs:
            _compare(found, entry, place, logprobs[offset])
        found.num_places += 1
        if token_id != entry["greedy_ids"][place]:
            (_, best), (_, second) = entry["top5"][place][:2]
            found.gaps.append(best - second)
            return place + 1
    return start + len(ids)


def _compare(found: Deviation, entry: Entry, place: int, logprob: TokenLogprob) -> None:
    mine = dict(logprob.top)
    for token_id, theirs in entry["top5"][place]:
        assert token_id in mine, f"{entry['name']}, place {place}: token {token_id} is not among the {NUM_TOP} best"
        found.differences.append(abs(mine[token_id] - theirs))
