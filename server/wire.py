"""Bytes of answers: strict JSON, and events of a text/event-stream."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import msgspec
from starlette.responses import Response

from server.errors import ErrorReply

LOGPROB_FLOOR = -9999.0  # stands for minus infinity, which JSON cannot say

PING = b": ping\n\n"
DONE = b"data: [DONE]\n\n"

# Legal inside JSON strings, but some clients split the lines of a stream at them.
_LINE_SEPARATORS = (("\u2028", b"\\u2028"), ("\u2029", b"\\u2029"), ("\u0085", b"\\u0085"))

_encode = msgspec.json.Encoder().encode


def finite(logprob: float) -> float:
    """logprob, with the floor in place of anything that JSON cannot say."""
    return logprob if math.isfinite(logprob) else LOGPROB_FLOOR


def json_response(content: Any, status: int = 200, headers: Mapping[str, str] | None = None) -> Response:
    return Response(_encode(content), status, headers, media_type="application/json")


def error_response(reply: ErrorReply) -> Response:
    return json_response(reply.body(), reply.status, reply.headers)


def sse_event(content: Any) -> bytes:
    """One event with JSON data; holds no raw line break but the two that end it."""
    data = _encode(content)
    for character, escaped in _LINE_SEPARATORS:
        data = data.replace(character.encode(), escaped)
    return b"data: " + data + b"\n\n"
