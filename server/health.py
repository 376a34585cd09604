"""GET /health, /version and /metrics."""

from __future__ import annotations

from starlette.requests import Request
from starlette.responses import Response

from engine.errors import EngineDeadError
from server.service import Service, ready_model
from server.wire import json_response


async def health(service: Service, request: Request) -> Response:
    """200 with no body if a request would be answered, else 503."""
    ready_model(service.client)
    return Response(status_code=200)


async def version(service: Service, request: Request) -> Response:
    """The server's version; once there is a model, also what computes it, and with which flags."""
    try:
        about = service.client.model.about
    except EngineDeadError:
        about = {}
    return json_response({"version": service.settings.version, **about})


async def metrics(service: Service, request: Request) -> Response:
    """The server's own counters, then the engine's, in the Prometheus text format."""
    text = service.metrics.text() + service.client.metrics_text()
    return Response(text, media_type="text/plain; version=0.0.4; charset=utf-8")
