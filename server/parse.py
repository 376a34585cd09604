"""From the bytes of a request to a typed body, and what to say when that fails."""

from __future__ import annotations

import asyncio
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import msgspec
from starlette.requests import ClientDisconnect, Request

from engine.errors import RequestError
from server.errors import ClientGoneError, HttpError
from server.schema import Message
from server.settings import ServerSettings

T = TypeVar("T", bound=msgspec.Struct)

IGNORED_FIELDS_HEADER = "X-Glint-Ignored-Fields"
MAX_MESSAGES = 4096
MAX_MESSAGE_PARTS = 8192  # content parts and tool calls of all messages
_MAX_NAME_CHARS = 64
_MAX_HEADER_CHARS = 512

# Fields other servers offer and this one does not yet, with the values that ask for nothing. Any other value is
# refused: an answer that silently lacks what was asked for is worse than an error. A field that an endpoint's own
# struct has is not looked up here.
_NOT_SUPPORTED: Mapping[str, tuple[Any, ...]] = {
    "tools": (None,),
    "tool_choice": (None, "none"),
    "functions": (None,),
    "function_call": (None, "none"),
    "response_format": (None, {"type": "text"}),
    "structured_outputs": (None,),
    "guided_json": (None,),
    "guided_regex": (None,),
    "guided_choice": (None,),
    "guided_grammar": (None,),
    "guided_decoding_backend": (None,),
    "guided_whitespace_pattern": (None,),
    "chat_template": (None,),
    "documents": (None, []),
    "modalities": (None, ["text"]),
    "audio": (None,),
    "web_search_options": (None,),
    "echo": (None, False),
    "suffix": (None, ""),
    "prompt_embeds": (None,),
    "logits_processors": (None, []),
    "logprob_token_ids": (None,),
    "use_beam_search": (None, False),
    "priority": (None, 0),
    "truncate_prompt_tokens": (None,),
    "thinking_token_budget": (None,),
    "repetition_detection": (None,),
    "return_tokens_as_token_ids": (None, False),
    "spaces_between_special_tokens": (None, True),
    "add_special_tokens": (None, False),
}


async def read_body(request: Request, kind: type[T], settings: ServerSettings) -> tuple[T, dict[str, str]]:
    """The body as a kind, and the response headers that tell which of its fields were ignored.

    Raises:
        HttpError: 408 too slow, 413 too large, 415 not JSON by its headers.
        RequestError: not one JSON object in UTF-8, a field of a wrong type, or a field that is not supported yet.
    """
    _check_headers(request, settings.max_body_bytes)
    try:
        async with asyncio.timeout(settings.read_timeout_s):
            data = await _read_bytes(request, settings.max_body_bytes)
    except TimeoutError:
        message = f"the body did not arrive within {settings.read_timeout_s:g} s"
        raise HttpError(408, "request_timeout", message, {"Connection": "close"}) from None
    return decode_body(data, kind)


def decode_body(data: bytes, kind: type[T]) -> tuple[T, dict[str, str]]:
    """See read_body."""
    try:
        data.decode("utf-8")
        fields = msgspec.json.decode(data, type=dict[str, msgspec.Raw])
        known = set(kind.__struct_fields__)
        _check_supported(fields, known)
        body = msgspec.json.decode(data, type=kind)
    except msgspec.ValidationError as exc:
        raise _wrong_type(str(exc)) from None
    except (msgspec.DecodeError, UnicodeDecodeError) as exc:
        raise RequestError(f"the body must be one JSON object in UTF-8: {exc}", None, "invalid_json") from None
    except RecursionError:
        raise RequestError("the body is nested too deeply", None, "invalid_json") from None
    _check_counts(getattr(body, "messages", None) or ())
    return body, _ignored_header([name for name in fields if name not in known and name not in _NOT_SUPPORTED])


def _check_counts(messages: Sequence[Message]) -> None:
    """Refuses a conversation of more pieces than anybody writes, before they are looked at one by one."""
    if len(messages) > MAX_MESSAGES:
        raise RequestError(f"messages has {len(messages)} entries; at most {MAX_MESSAGES} are allowed", "messages")
    lists = (part for message in messages for part in (message.content, message.tool_calls))
    num_parts = sum(len(part) for part in lists if isinstance(part, list))
    if num_parts > MAX_MESSAGE_PARTS:
        raise RequestError(
            f"messages has {num_parts} content parts and tool calls; at most {MAX_MESSAGE_PARTS} are allowed",
            "messages",
        )


def _check_headers(request: Request, max_bytes: int) -> None:
    # Any other type could be sent cross-site by a browser without asking first.
    media_type = request.headers.get("content-type", "").partition(";")[0].strip().lower()
    if media_type != "application/json" and not (
        media_type.startswith("application/") and media_type.endswith("+json")
    ):
        raise HttpError(415, "unsupported_media_type", "send the body with Content-Type: application/json")
    if request.headers.get("content-encoding", "identity").strip().lower() != "identity":
        raise HttpError(415, "unsupported_media_type", "compressed bodies are not accepted")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and (len(length) > 18 or int(length) > max_bytes):
        raise _too_large(max_bytes)


async def _read_bytes(request: Request, max_bytes: int) -> bytes:
    data = bytearray()
    try:
        async for piece in request.stream():
            data += piece
            if len(data) > max_bytes:
                raise _too_large(max_bytes)
    except ClientDisconnect:
        raise ClientGoneError from None
    return bytes(data)


def _too_large(max_bytes: int) -> HttpError:
    # The rest of the body is never read, so the connection cannot be used again.
    return HttpError(413, "body_too_large", f"the body is above {max_bytes} bytes", {"Connection": "close"})


def _check_supported(fields: Mapping[str, msgspec.Raw], known: set[str]) -> None:
    for name, harmless in _NOT_SUPPORTED.items():
        if name not in fields or name in known:
            continue
        try:
            asks_for_nothing = msgspec.json.decode(fields[name]) in harmless
        except msgspec.ValidationError:  # a number out of range: not one of the harmless values
            asks_for_nothing = False
        if not asks_for_nothing:
            raise RequestError(f"{name} is not supported yet: leave it out", name, "unsupported_parameter")


_AT = re.compile(r" - at `(?:key in )?\$\.?(?P<path>[^`]*)`$")
_MISSING = re.compile(r"Object missing required field `(?P<field>[^`]*)`")


def _wrong_type(message: str) -> RequestError:
    """A decoder's "Expected `int`, got `str` - at `$.messages[0].role`" with its path as the param."""
    found = _AT.search(message)
    path = found["path"] if found else ""
    reason = _AT.sub("", message)
    missing = _MISSING.match(reason)
    if missing:
        param = f"{path}.{missing['field']}" if path else missing["field"]
        return RequestError(f"{param} is missing", param, "missing_required_parameter")
    reason = (reason[0].lower() + reason[1:]).replace("`", "").replace(" | ", " or ")
    return RequestError(f"{path or 'the body'}: {reason}", path or None, "invalid_type")


def _ignored_header(names: list[str]) -> dict[str, str]:
    if not names:
        return {}
    shown = ", ".join(
        re.sub(r"[^A-Za-z0-9_.-]", "?", name[:_MAX_NAME_CHARS]) or "?" for name in names[:_MAX_NAME_CHARS]
    )
    if len(shown) > _MAX_HEADER_CHARS or len(names) > _MAX_NAME_CHARS:
        shown = shown[:_MAX_HEADER_CHARS] + ", and more"
    return {IGNORED_FIELDS_HEADER: shown}
