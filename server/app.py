"""The ASGI application: the table of routes and what lies around them."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from functools import partial

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.middleware.cors import CORSMiddleware
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from engine.api import EngineClient
from server.chat import chat_completions
from server.completions import completions
from server.errors import reply_of
from server.health import health, metrics, version
from server.middleware import REQUEST_ID_HEADER, ApiKeyGuard, Errors, HttpMetrics, RequestContext
from server.models import get_model, list_models
from server.parse import IGNORED_FIELDS_HEADER
from server.service import Service
from server.settings import ServerSettings
from server.tokenize import detokenize, tokenize
from server.wire import error_response

Handler = Callable[[Service, Request], Awaitable[Response]]

ROUTES: tuple[tuple[str, str, Handler], ...] = (
    ("POST", "/v1/chat/completions", chat_completions),
    ("POST", "/v1/completions", completions),
    ("GET", "/v1/models", list_models),
    ("GET", "/v1/models/{id:path}", get_model),
    ("POST", "/tokenize", tokenize),
    ("POST", "/detokenize", detokenize),
    ("GET", "/health", health),
    ("GET", "/version", version),
    ("GET", "/metrics", metrics),
)


def create_app(client: EngineClient, settings: ServerSettings) -> Starlette:
    """The whole server over one engine.

    The root path is handled here; the HTTP server around it must not be given one too.
    """
    service = Service(client, settings, HttpMetrics())
    routes = [
        Route(path, partial(handler, service), methods=[method], name=handler.__name__)
        for method, path, handler in ROUTES
    ]
    cors = Middleware(
        CORSMiddleware,
        allow_origins=settings.allowed_origins,
        allow_methods=["GET", "POST"],
        allow_headers=["Authorization", "Content-Type", REQUEST_ID_HEADER],
        expose_headers=[REQUEST_ID_HEADER, IGNORED_FIELDS_HEADER],
    )
    app = Starlette(
        routes=routes,
        middleware=[
            Middleware(RequestContext, root_path=settings.root_path, routes=routes, metrics=service.metrics),
            *([cors] if settings.allowed_origins else []),
            Middleware(Errors),
            Middleware(ApiKeyGuard, api_keys=settings.api_keys),
        ],
        exception_handlers={HTTPException: _http_exception},
    )
    app.router.redirect_slashes = False
    return app


def _http_exception(request: Request, exc: Exception) -> Response:
    return error_response(reply_of(exc))
