"""Every exception as an HTTP status and the one error object that clients parse.

The object is {"error": {"message", "type", "param", "code"}}; code is always a string, and the number of the
status is in the status line only. 422 is never sent.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from starlette.exceptions import HTTPException

from engine.errors import CapacityError, EngineDeadError, RequestError, RequestFailedError

MAX_MESSAGE_CHARS = 1000
NOT_READY_RETRY_S = 5

INVALID_REQUEST = "invalid_request_error"
SERVER_ERROR = "server_error"
RATE_LIMIT = "rate_limit_error"


class HttpError(Exception):
    """A request that fails for a reason of HTTP itself: key, path, size, type, readiness."""

    def __init__(self, status: int, code: str, message: str, headers: dict[str, str] | None = None) -> None:
        super().__init__(message)
        self.status = status
        self.code = code
        self.headers = headers or {}


class ClientGoneError(Exception):
    """The client closed the connection; nobody is left to answer."""


class ClientTooSlowError(Exception):
    """The client took nothing for write_timeout_s; its connection is dropped."""


@dataclass(frozen=True, slots=True)
class ErrorReply:
    """What is sent for an exception."""

    status: int
    type: str
    code: str
    message: str
    param: str | None = None
    headers: dict[str, str] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        message = self.message
        if len(message) > MAX_MESSAGE_CHARS:
            message = message[:MAX_MESSAGE_CHARS] + "…"
        return {"error": {"message": printable(message), "type": self.type, "param": self.param, "code": self.code}}


def reply_of(exc: Exception) -> ErrorReply:
    """The reply for any exception; what was not raised on purpose becomes a 500 that tells nothing."""
    match exc:
        case HttpError():
            kind = SERVER_ERROR if exc.status >= 500 else INVALID_REQUEST
            return ErrorReply(exc.status, kind, exc.code, str(exc), headers=exc.headers)
        case HTTPException():
            return _router_reply(exc)
        case RequestError():
            status = 404 if exc.code == "model_not_found" else 400
            return ErrorReply(status, INVALID_REQUEST, exc.code, str(exc), exc.param)
        case CapacityError():
            headers = {"Retry-After": str(exc.retry_after_s)}
            return ErrorReply(429, RATE_LIMIT, "rate_limit_exceeded", str(exc), headers=headers)
        case EngineDeadError():
            headers = {"Retry-After": str(NOT_READY_RETRY_S)}
            return ErrorReply(503, SERVER_ERROR, "engine_unavailable", str(exc), headers=headers)
        case RequestFailedError():
            return ErrorReply(500, SERVER_ERROR, "request_failed", str(exc))
        case _:
            return ErrorReply(500, SERVER_ERROR, "internal_error", "the server failed; its log says why")


def _router_reply(exc: HTTPException) -> ErrorReply:
    code, message = {
        404: ("not_found", "no such path"),
        405: ("method_not_allowed", "this path does not take this method"),
    }.get(exc.status_code, ("http_error", "the request could not be served"))
    return ErrorReply(exc.status_code, INVALID_REQUEST, code, message, headers=dict(exc.headers or {}))


def quoted(text: str, longest: int = 64) -> str:
    """Text of a client, cut short and without control characters, for use in a message."""
    return ascii(text if len(text) <= longest else text[:longest] + "…")


def printable(text: str) -> str:
    """text with lone surrogates escaped, so that it can always be encoded as UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode("utf-8")
