"""POST /v1/chat/completions."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.api import OutputDelta
from server.collect import collect
from server.generation import Job, Tally, check_prompt, new_job
from server.logprobs import chat_logprobs, prompt_logprobs
from server.messages import render
from server.parse import read_body
from server.sampling import chat_sampling
from server.schema import ChatRequest
from server.service import Service, model_name, ready_model
from server.sse import EventStreamResponse
from server.wire import json_response


async def chat_completions(service: Service, request: Request) -> Response:
    client = service.client
    model = ready_model(client)
    body, headers = await read_body(request, ChatRequest, service.settings)
    name = model_name(body.model, model)
    sampling = chat_sampling(body, model)
    ids = await render(body, model, client)
    check_prompt(ids, sampling, model, "messages")
    job = new_job("chatcmpl", body, name, [ids], sampling)
    style = ChatFormat(body, job)
    if body.stream:
        return EventStreamResponse(job, style, client, service.settings, headers)
    return json_response(await collect(job, style, client, request.receive), headers=headers)


class ChatFormat:
    """Chat answers; see generation.Format."""

    object = "chat.completion"
    chunk_object = "chat.completion.chunk"

    def __init__(self, body: ChatRequest, job: Job) -> None:
        self._num_top = body.top_logprobs or 0
        self._num_prompt_top = body.prompt_logprobs
        self._prompt_ids = job.requests[0].prompt_ids if body.return_token_ids else None
        self._started: set[int] = set()

    def chunks(self, choice: int, delta: OutputDelta, tally: Tally) -> list[dict[str, Any]]:
        entries = []
        if choice not in self._started:
            self._started.add(choice)
            first = {"role": "assistant", "content": ""}
            entries.append({"index": choice, "delta": first, "logprobs": None, "finish_reason": None})
        if delta.text or delta.logprobs or delta.finish_reason or self._prompt_ids is not None:
            entry = {
                "index": choice,
                "delta": {"content": delta.text} if delta.text else {},
                "logprobs": self._logprobs(delta),
                "finish_reason": delta.finish_reason,
            }
            if delta.finish_reason:
                entry["stop_reason"] = delta.stop_reason
            entries.append({**entry, **self._token_ids(delta)})
        return entries

    def answer(self, choice: int, whole: OutputDelta, tally: Tally) -> dict[str, Any]:
        return {
            "index": choice,
            "message": {"role": "assistant", "content": whole.text, "refusal": None},
            "logprobs": self._logprobs(whole),
            "finish_reason": whole.finish_reason,
            "stop_reason": whole.stop_reason,
            **self._token_ids(whole),
        }

    def extras(self, tally: Tally) -> dict[str, Any]:
        extras: dict[str, Any] = {}
        if self._num_prompt_top is not None:
            extras["prompt_logprobs"] = prompt_logprobs(tally.prompt_logprobs(0), self._num_prompt_top)
        if self._prompt_ids is not None:
            extras["prompt_token_ids"] = self._prompt_ids
        return extras

    def _logprobs(self, delta: OutputDelta) -> dict[str, Any] | None:
        return None if delta.logprobs is None else chat_logprobs(delta.logprobs, self._num_top)

    def _token_ids(self, delta: OutputDelta) -> dict[str, Any]:
        return {} if self._prompt_ids is None else {"token_ids": delta.token_ids}
