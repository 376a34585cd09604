"""GET /v1/models and GET /v1/models/{id}."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from engine.api import ModelInfo
from server.service import Service, known_model, model_name
from server.wire import json_response


async def list_models(service: Service, request: Request) -> Response:
    model = known_model(service.client)
    return json_response({"object": "list", "data": [_card(name, model) for name in model.names]})


async def get_model(service: Service, request: Request) -> Response:
    model = known_model(service.client)
    return json_response(_card(model_name(request.path_params["id"], model), model))


def _card(name: str, model: ModelInfo) -> dict[str, Any]:
    return {
        "id": name,
        "object": "model",
        "created": model.created,
        "owned_by": "glint",
        "root": model.root,
        "parent": None,
        "max_model_len": model.max_model_len,
        "permission": [],
    }
