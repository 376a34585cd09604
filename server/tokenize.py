"""POST /tokenize and POST /detokenize."""

from __future__ import annotations

from collections.abc import Sequence

from starlette.requests import Request
from starlette.responses import Response

from engine.api import EngineClient, ModelInfo
from engine.errors import RequestError
from server.messages import render
from server.parse import read_body
from server.schema import DetokenizeRequest, TokenizeRequest
from server.service import Service, model_name, ready_model
from server.wire import json_response


async def tokenize(service: Service, request: Request) -> Response:
    model = ready_model(service.client)
    body, headers = await read_body(request, TokenizeRequest, service.settings)
    model_name(body.model, model)
    ids = await _token_ids(body, model, service.client)
    strings = await service.client.token_strings(ids) if body.return_token_strs else None
    answer = {"count": len(ids), "max_model_len": model.max_model_len, "tokens": ids, "token_strs": strings}
    return json_response(answer, headers=headers)


async def detokenize(service: Service, request: Request) -> Response:
    model = ready_model(service.client)
    body, headers = await read_body(request, DetokenizeRequest, service.settings)
    model_name(body.model, model)
    _check_has_tokenizer(model, "tokens")
    _check_ids(body.tokens, model.vocab_size)
    return json_response({"prompt": await service.client.detokenize(body.tokens)}, headers=headers)


async def _token_ids(body: TokenizeRequest, model: ModelInfo, client: EngineClient) -> list[int]:
    if (body.prompt is None) == (body.messages is None):
        raise RequestError("give one of prompt and messages", "prompt")
    if body.messages is not None:
        if body.add_special_tokens:
            message = "add_special_tokens is not supported yet with messages: the template adds them"
            raise RequestError(message, "add_special_tokens", "unsupported_parameter")
        return await render(body, model, client)
    assert body.prompt is not None
    _check_has_tokenizer(model, "prompt")
    return await client.tokenize(body.prompt, body.add_special_tokens is not False)


def _check_has_tokenizer(model: ModelInfo, param: str) -> None:
    if not model.has_tokenizer:
        raise RequestError("this model has no tokenizer", param, "no_tokenizer")


def _check_ids(ids: Sequence[int], vocab_size: int) -> None:
    if not ids or 0 <= min(ids) <= max(ids) < vocab_size:  # much faster than a loop, and there may be a million
        return
    i, wrong = next((i, token_id) for i, token_id in enumerate(ids) if not 0 <= token_id < vocab_size)
    raise RequestError(f"tokens[{i}] is {wrong}; ids of this model are 0 to {vocab_size - 1}", f"tokens[{i}]")
