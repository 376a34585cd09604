"""What is done around every route. All of it is plain ASGI: nothing is buffered, and a disconnect stays visible."""

from __future__ import annotations

import hashlib
import hmac
import logging
import re
import uuid
from collections.abc import Iterable, Sequence

from prometheus_client import CollectorRegistry, Counter, generate_latest
from starlette.datastructures import Headers, MutableHeaders
from starlette.routing import BaseRoute, Match, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from server.errors import ClientGoneError, ClientTooSlowError, HttpError, reply_of
from server.wire import error_response

REQUEST_ID_HEADER = "X-Request-Id"
OPEN_PATHS = frozenset({"/health"})  # the only routes that answer without a key

_REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_CLIENT_CLOSED = 499  # in the metrics only: the client left before an answer began

_log = logging.getLogger("glint.server")


class HttpMetrics:
    """Counters of one application, in a registry of its own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        self._requests = Counter(
            "http_requests", "Answered HTTP requests", ["method", "path", "status"], registry=self._registry
        )

    def count(self, method: str, template: str, status: int) -> None:
        """template is a route's, never a path of a client, so that the number of series is bounded."""
        self._requests.labels(method if method in _METHODS else "other", template, str(status)).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


class RequestContext:
    """Outermost: strips the root path, gives each request an id, counts it by route template.

    A client's X-Request-Id is kept only if it is short and plain; it never names anything in the engine.
    """

    def __init__(self, app: ASGIApp, root_path: str, routes: Sequence[BaseRoute], metrics: HttpMetrics) -> None:
        self._app = app
        self._root_path = "/" + root_path.strip("/") if root_path.strip("/") else ""
        self._routes = [route for route in routes if isinstance(route, Route)]
        self._metrics = metrics

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "websocket":  # there are none
            await send({"type": "websocket.close", "code": 1008})
            return
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        scope = {**scope, "path": self._route_path(scope["path"]), "root_path": ""}
        asked = Headers(scope=scope).get(REQUEST_ID_HEADER, "")
        request_id = asked if _REQUEST_ID.fullmatch(asked) else uuid.uuid4().hex
        scope["glint.request_id"] = request_id
        status = _CLIENT_CLOSED

        async def send_with_id(message: Message) -> None:
            nonlocal status
            if message["type"] == "http.response.start":
                status = message["status"]
                MutableHeaders(scope=message)[REQUEST_ID_HEADER] = request_id
            await send(message)

        try:
            await self._app(scope, receive, send_with_id)
        finally:
            self._metrics.count(scope["method"], self._template(scope), status)

    def _route_path(self, path: str) -> str:
        prefix = self._root_path
        return path[len(prefix) :] if prefix and path.startswith(prefix + "/") else path

    def _template(self, scope: Scope) -> str:
        return next((route.path for route in self._routes if route.matches(scope)[0] is not Match.NONE), "unmatched")


class Errors:
    """Turns every exception into an error reply if nothing has been sent yet."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def send_watched(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        request_id = scope.get("glint.request_id", "-")
        try:
            await self._app(scope, receive, send_watched)
        except ClientGoneError:
            _log.debug("request %s: the client left", request_id)
        except ClientTooSlowError:
            _log.warning("request %s: the client stopped reading; its connection is dropped", request_id)
        except Exception as exc:
            reply = reply_of(exc)
            if reply.code == "internal_error" or started:
                _log.exception("request %s failed", request_id)
            if not started:
                await error_response(reply)(scope, receive, send)


class ApiKeyGuard:
    """Asks for a key on every route but OPEN_PATHS, also on paths that do not exist.

    OPTIONS carries no key by design of browsers, and no route answers it with data.
    """

    def __init__(self, app: ASGIApp, api_keys: Iterable[str]) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in api_keys]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and self._digests and not self._is_allowed(scope):
            message = "give a valid key in the header Authorization: Bearer KEY"
            raise HttpError(401, "invalid_api_key", message, {"WWW-Authenticate": "Bearer"})
        await self._app(scope, receive, send)

    def _is_allowed(self, scope: Scope) -> bool:
        if scope["path"] in OPEN_PATHS or scope["method"] == "OPTIONS":
            return True
        values = [value for name, value in scope["headers"] if name.lower() == b"authorization"]
        if len(values) != 1:
            return False
        scheme, _, token = values[0].partition(b" ")
        if scheme.lower() != b"bearer" or not token.strip():
            return False
        given = _digest(token.strip())
        # Digests of one length, all compared: the time tells nothing about a key or how many there are.
        return sum(hmac.compare_digest(given, digest) for digest in self._digests) > 0


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()
