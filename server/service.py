"""What every handler is given, and the two questions that come before any work."""

from __future__ import annotations

from dataclasses import dataclass

from engine.api import EngineClient, ModelInfo
from engine.errors import EngineDeadError, RequestError
from server.errors import NOT_READY_RETRY_S, HttpError, quoted
from server.middleware import HttpMetrics
from server.settings import ServerSettings


@dataclass(frozen=True, slots=True)
class Service:
    """The first argument of every handler."""

    client: EngineClient
    settings: ServerSettings
    metrics: HttpMetrics


def ready_model(client: EngineClient) -> ModelInfo:
    """The served model, if a request would be answered now.

    Raises:
        HttpError: 503 with Retry-After while starting, draining or dead.
    """
    state = client.state
    if state.phase == "ready":
        return client.model
    reason = f": {state.reason}" if state.reason else ""
    headers = {"Retry-After": str(NOT_READY_RETRY_S)}
    raise HttpError(503, f"engine_{state.phase}", f"the engine is {state.phase}{reason}", headers)


def known_model(client: EngineClient) -> ModelInfo:
    """The served model, also while no request would be answered; 503 before it is known."""
    try:
        return client.model
    except EngineDeadError as exc:
        raise EngineDeadError(f"no model is loaded: {exc}") from exc


def model_name(asked: str | None, model: ModelInfo) -> str:
    """The name to answer under; a missing or empty name means the default.

    Raises:
        RequestError: model_not_found.
    """
    if not asked:
        return model.names[0]
    if asked not in model.names:
        served = ", ".join(model.names)
        raise RequestError(f"the model {quoted(asked)} does not exist; served: {served}", "model", "model_not_found")
    return asked
