"""POST /v1/completions.

An echoed prompt is the text of its token ids, also if it was sent as a string, so that tokens, offsets and text
always fit together.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.api import EngineClient, ModelInfo, OutputDelta, SamplingParams, TextLogprob
from engine.errors import RequestError
from server.collect import collect
from server.generation import Job, Tally, check_prompt, new_job
from server.logprobs import completion_logprobs, prompt_logprobs
from server.parse import read_body
from server.sampling import completion_sampling, is_score_only
from server.schema import CompletionRequest
from server.service import Service, model_name, ready_model
from server.sse import EventStreamResponse
from server.wire import json_response


async def completions(service: Service, request: Request) -> Response:
    client = service.client
    model = ready_model(client)
    body, headers = await read_body(request, CompletionRequest, service.settings)
    name = model_name(body.model, model)
    sampling = completion_sampling(body, model)
    _check_num_choices(body.prompt, sampling.n, service.settings.max_choices)
    prompts = _split(body.prompt)
    ids = [await _prompt_ids(prompt, param, body, model, sampling, client) for param, prompt in prompts.items()]
    pieces = [await client.prompt_pieces(prompt) for prompt in ids] if body.echo else None
    job = new_job("cmpl", body, name, ids, sampling, counts_output=not is_score_only(body))
    style = CompletionFormat(body, job, pieces, return_ids=bool(body.return_token_ids) or not model.has_tokenizer)
    if body.stream:
        return EventStreamResponse(job, style, client, service.settings, headers)
    return json_response(await collect(job, style, client, request.receive), headers=headers)


Prompt = str | list[int]


def _check_num_choices(prompt: str | list[str | int | list[int]], n: int, most: int) -> None:
    """Raises RequestError for too many choices, before anything walks the prompts."""
    num_prompts = len(prompt) if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) else 1
    if num_prompts * n > most:
        raise RequestError(
            f"{num_prompts} prompts times n {n} is above {most} choices", "prompt" if num_prompts > 1 else "n"
        )


def _split(prompt: str | list[str | int | list[int]]) -> dict[str, Prompt]:
    """The prompts of a request by the name of their place in it.

    Raises:
        RequestError: an empty list, or one that mixes strings, ids and lists.
    """
    if isinstance(prompt, str):
        return {"prompt": prompt}
    if not prompt:
        raise RequestError("prompt is an empty list: give at least one prompt or token id", "prompt")
    kind = type(prompt[0])
    for i, item in enumerate(prompt):
        if type(item) is not kind:
            message = "prompt must be a string, a list of strings, a list of token ids, or a list of lists of token ids"
            raise RequestError(f"{message}; entry {i} is unlike the first", f"prompt[{i}]", "invalid_type")
    if kind is int:
        return {"prompt": [item for item in prompt if isinstance(item, int)]}
    return {f"prompt[{i}]": item for i, item in enumerate(prompt) if not isinstance(item, int)}


async def _prompt_ids(
    prompt: Prompt,
    param: str,
    body: CompletionRequest,
    model: ModelInfo,
    sampling: SamplingParams,
    client: EngineClient,
) -> list[int]:
    """Token ids of one prompt; ids are taken as they are, nothing is added."""
    if not model.has_tokenizer and (isinstance(prompt, str) or body.echo):
        message = "this model has no tokenizer: give the prompt as token ids, without echo"
        raise RequestError(message, "echo" if body.echo else param, "no_tokenizer")
    if isinstance(prompt, str):
        try:
            prompt = await client.tokenize(prompt, body.add_special_tokens is not False, must_fit=True)
        except RequestError as exc:
            raise RequestError(str(exc), param, exc.code) from None
    check_prompt(prompt, sampling, model, param)
    return prompt


class CompletionFormat:
    """Text completions; see generation.Format."""

    object = "text_completion"
    chunk_object = "text_completion"

    def __init__(
        self, body: CompletionRequest, job: Job, pieces: Sequence[Sequence[str]] | None, return_ids: bool
    ) -> None:
        self._job = job
        self._pieces = pieces  # of each prompt, if they are echoed
        self._score_only = not job.counts_output
        self._num_top = body.logprobs
        self._num_prompt_top = body.prompt_logprobs
        self._return_ids = return_ids
        self._return_prompt_ids = bool(body.return_token_ids)
        self._offsets: dict[int, int] = {}  # characters of the tokens listed so far, of each started choice

    def chunks(self, choice: int, delta: OutputDelta, tally: Tally) -> list[dict[str, Any]]:
        entry = self._entry(choice, delta, tally)
        if not (entry["text"] or entry["logprobs"] or delta.finish_reason or self._return_ids):
            return []
        if delta.finish_reason:
            entry["stop_reason"] = self._stop_reason(delta)
        return [entry]

    def answer(self, choice: int, whole: OutputDelta, tally: Tally) -> dict[str, Any]:
        entry = {**self._entry(choice, whole, tally), "stop_reason": self._stop_reason(whole)}
        if self._num_prompt_top is not None:
            entry["prompt_logprobs"] = prompt_logprobs(tally.prompt_logprobs(choice), self._num_prompt_top)
        if self._return_prompt_ids:
            entry["prompt_token_ids"] = self._job.requests[choice // self._job.num_choices].prompt_ids
        return entry

    def extras(self, tally: Tally) -> dict[str, Any]:
        return {}

    def _entry(self, choice: int, delta: OutputDelta, tally: Tally) -> dict[str, Any]:
        """text, logprobs and finish_reason of new text, with the echoed prompt before the first of a choice."""
        is_first = choice not in self._offsets
        offset = self._offsets.setdefault(choice, 0)
        text = "" if self._score_only else delta.text
        new = () if self._score_only else delta.logprobs or ()
        tokens = [entry.token for entry in new]
        entries: list[TextLogprob | None] = list(new)
        if is_first and self._pieces is not None:
            pieces = self._pieces[choice // self._job.num_choices]
            text = "".join(pieces) + (text or "")
            if self._num_top is not None:
                tokens = [*pieces, *tokens]
                entries = [*tally.prompt_logprobs(choice), *entries]
        self._offsets[choice] = offset + sum(len(token) for token in tokens)
        logprobs = None
        if self._num_top is not None:
            logprobs = completion_logprobs(tokens, entries, self._num_top, offset)
        entry: dict[str, Any] = {
            "index": choice,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": "length" if self._score_only and delta.finish_reason else delta.finish_reason,
        }
        if self._return_ids:
            entry["token_ids"] = () if self._score_only else delta.token_ids
        return entry

    def _stop_reason(self, delta: OutputDelta) -> str | int | None:
        return None if self._score_only else delta.stop_reason
