"""Answers of /v1/completions as token ids and logprobs, and whether two of one greedy request are equal."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import Any

from engine.bench.http_client import Reply
from engine.errors import RequestFailedError


@dataclass(slots=True)
class Answer:
    """One choice; logprobs and alternatives (best first) have one entry a token, if they were asked for."""

    token_ids: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    alternatives: list[list[float]] = field(default_factory=list)
    finish_reason: str | None = None
    num_prompt_logprobs: int = 0

    def until(self, max_tokens: int, stop_token_ids: Collection[int]) -> Answer:
        """What the same request gives with fewer tokens, or with ids that end it."""
        ends = (place for place, token_id in enumerate(self.token_ids) if token_id in stop_token_ids)
        stop = next(ends, None)
        if stop is not None and stop < max_tokens:
            count, reason = stop + 1, "stop"
        else:
            count, reason = min(max_tokens, len(self.token_ids)), "length"
        return Answer(self.token_ids[:count], self.logprobs[:count], self.alternatives[:count], reason)


@dataclass(frozen=True, slots=True)
class Comparison:
    """num_equal: tokens that two answers have in common. gap: how far the quiet run's two best logprobs are apart where
    the other took another token; None: nowhere. differences: between the logprobs that both have, in common tokens.
    """

    num_equal: int
    gap: float | None
    differences: list[float]


def read_answers(reply: Reply, num_choices: int) -> list[Answer]:
    """The choices of a reply, streamed or not, by their index.

    Raises:
        RequestFailedError: a choice is missing, has no end, or goes on behind it.
    """
    answers = [Answer() for _ in range(num_choices)]
    for entry in _entries(reply):
        answer = answers[entry["index"]]
        if answer.finish_reason is not None:
            raise RequestFailedError(f"choice {entry['index']} goes on behind its end")
        answer.token_ids += entry["token_ids"]
        answer.finish_reason = entry["finish_reason"]
        answer.num_prompt_logprobs += len(entry.get("prompt_logprobs") or ())
        if entry["logprobs"] is not None:
            answer.logprobs += entry["logprobs"]["token_logprobs"]
            answer.alternatives += [sorted(best.values(), reverse=True) for best in entry["logprobs"]["top_logprobs"]]
    unfinished = [index for index, answer in enumerate(answers) if answer.finish_reason is None]
    if unfinished:
        raise RequestFailedError(f"choices {unfinished} have no end")
    return answers


def _entries(reply: Reply) -> Iterator[dict[str, Any]]:
    for body in reply.chunks or [reply.body]:
        yield from json.loads(body)["choices"]


def compare(quiet: Answer, other: Answer) -> Comparison:
    """Two answers of one greedy request, the first with logprobs=2 or more; behind the first token in which they differ
    the two need have nothing in common.

    Raises:
        RequestFailedError: the same tokens, but another end.
    """
    differences: list[float] = []
    for place, (expected, found) in enumerate(zip(quiet.token_ids, other.token_ids, strict=False)):
        if other.logprobs:
            pairs = list(zip(quiet.alternatives[place][:2], other.alternatives[place][:2], strict=True))
            if found == expected:
                pairs.append((quiet.logprobs[place], other.logprobs[place]))
            differences += [abs(ours - theirs) for ours, theirs in pairs]
        if found != expected:
            best, second = quiet.alternatives[place][:2]
            return Comparison(place, best - second, differences)
    found_end = (len(other.token_ids), other.finish_reason)
    if found_end != (len(quiet.token_ids), quiet.finish_reason):
        raise RequestFailedError(f"ended as {found_end}, alone as {(len(quiet.token_ids), quiet.finish_reason)}")
    return Comparison(len(quiet.token_ids), None, differences)
