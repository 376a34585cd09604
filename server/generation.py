"""What chat completions and completions have in common between the parsed body and the answer."""

from __future__ import annotations

import time
import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from engine.api import GenerationRequest, ModelInfo, OutputDelta, SamplingParams, TextLogprob
from engine.errors import RequestError, RequestFailedError
from server.sampling import cache_salt
from server.schema import GenerationFields


class Format(Protocol):
    """How one endpoint writes its answers; holds what one streamed request has to remember."""

    object: str
    chunk_object: str

    def chunks(self, choice: int, delta: OutputDelta, tally: Tally) -> list[dict[str, Any]]:
        """The entries of "choices" for new text of a choice, one an event; none if there is nothing to show."""

    def answer(self, choice: int, whole: OutputDelta, tally: Tally) -> dict[str, Any]:
        """The entry of "choices" for a finished choice."""

    def extras(self, tally: Tally) -> dict[str, Any]:
        """Fields beside "choices" in an answer that is not streamed."""


@dataclass(frozen=True, slots=True)
class Job:
    """A request that has passed every check of the HTTP side."""

    id: str
    created: int  # Unix time
    model: str
    requests: tuple[GenerationRequest, ...]
    num_choices: int  # of each prompt
    include_usage: bool
    continuous_usage: bool
    counts_output: bool  # False if only the prompt is wanted back

    def envelope(self, kind: str, choices: Sequence[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "system_fingerprint": None,
            "choices": choices,
        }


class Tally:
    """What adds up over the deltas of a job, and what comes once a prompt."""

    def __init__(self, job: Job) -> None:
        self._num_choices = job.num_choices
        self._counts_output = job.counts_output
        self._requests = job.requests
        self._num_prompt_tokens = sum(len(request.prompt_ids) for request in job.requests)
        self._num_output_tokens = 0
        self._num_cached_tokens: dict[int, int] = {}
        self._prompt_logprobs: dict[int, tuple[TextLogprob | None, ...]] = {}

    def add(self, choice: int, delta: OutputDelta) -> None:
        prompt = choice // self._num_choices
        if self._counts_output:
            self._num_output_tokens += len(delta.token_ids)
        self._num_cached_tokens.setdefault(prompt, delta.num_cached_tokens)
        if delta.prompt_logprobs is not None:
            self._prompt_logprobs.setdefault(prompt, delta.prompt_logprobs)

    def prompt_logprobs(self, choice: int) -> tuple[TextLogprob | None, ...]:
        """Those of the prompt that a choice belongs to, one a token.

        Raises:
            RequestFailedError: the engine has not given them, or not all.
        """
        prompt = choice // self._num_choices
        entries = self._prompt_logprobs.get(prompt, ())
        if len(entries) != len(self._requests[prompt].prompt_ids):
            raise RequestFailedError("the engine gave no log-probabilities for the prompt")
        return entries

    def usage(self) -> dict[str, Any]:
        """Each prompt counted once, the output of all choices."""
        return {
            "prompt_tokens": self._num_prompt_tokens,
            "completion_tokens": self._num_output_tokens,
            "total_tokens": self._num_prompt_tokens + self._num_output_tokens,
            "prompt_tokens_details": {"cached_tokens": sum(self._num_cached_tokens.values())},
        }


def new_job(
    id_prefix: str,
    body: GenerationFields,
    name: str,
    prompts: Sequence[Sequence[int]],
    sampling: SamplingParams,
    counts_output: bool = True,
) -> Job:
    """Raises RequestError for a bad cache_salt."""
    job_id = f"{id_prefix}-{uuid.uuid4().hex}"
    salt = cache_salt(body)
    options = body.stream_options
    include_usage = bool(options and options.include_usage)
    return Job(
        id=job_id,
        created=int(time.time()),
        model=name,
        requests=tuple(GenerationRequest(f"{job_id}-{i}", tuple(ids), sampling, salt) for i, ids in enumerate(prompts)),
        num_choices=sampling.n,
        include_usage=include_usage,
        continuous_usage=include_usage and bool(options and options.continuous_usage_stats),
        counts_output=counts_output,
    )


def check_prompt(ids: Sequence[int], sampling: SamplingParams, model: ModelInfo, param: str) -> None:
    """Refuses a prompt that cannot be served, before the engine hears of it.

    Raises:
        RequestError: empty, token ids outside the vocabulary, or no room for one new token.
    """
    # The sampling parameters have been checked once; long lists in them are not checked again for each prompt.
    request = GenerationRequest("", tuple(ids), SamplingParams(max_tokens=sampling.max_tokens))
    try:
        request.validate(model.vocab_size, model.max_model_len, model.max_logprobs)
    except RequestError as exc:
        raise RequestError(str(exc), param, exc.code) from None
