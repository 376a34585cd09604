"""What the engine's process and the HTTP process say to each other, and the wire that carries it.

Frames of MessagePack over a local stream socket: a little-endian uint32 length, then the message.
"""

from __future__ import annotations

import socket
import struct
from typing import Any, Literal

import msgspec

from engine.api import GenerationRequest, ModelInfo, TokenEvent
from engine.stats import EngineStats

_LENGTH = struct.Struct("<I")


# ---- to the engine


class Submit(msgspec.Struct, tag=True, frozen=True):
    request: GenerationRequest


class Abort(msgspec.Struct, tag=True, frozen=True):
    """Ends one choice of a request, or all of them."""

    request_id: str
    index: int | None = None


class FrontEndReady(msgspec.Struct, tag=True, frozen=True):
    """The tokenizer has been loaded; requests may come."""


class FrontEndFailed(msgspec.Struct, tag=True, frozen=True):
    """The tokenizer or the template is wrong; the message is for the user."""

    message: str


ToEngine = Submit | Abort | FrontEndReady | FrontEndFailed

# ---- to the front end


class FrontEndSettings(msgspec.Struct, tag=True, frozen=True):
    """The first message: how to serve."""

    api_keys: tuple[str, ...]
    root_path: str
    allowed_origins: tuple[str, ...]


class Loaded(msgspec.Struct, tag=True, frozen=True):
    """The model is in memory; its text side is to be loaded from source (see checkpoint.source.ModelSource)."""

    info: ModelInfo
    source_kind: Literal["folder", "gguf"]
    source_path: str
    chat_template: str | None


class Events(msgspec.Struct, tag=True, frozen=True):
    """What one step gave."""

    events: list[TokenEvent]
    stats: EngineStats


class Rejected(msgspec.Struct, tag=True, frozen=True):
    """A request that was not accepted: is_busy tells CapacityError from RequestError."""

    request_id: str
    message: str
    is_busy: bool = False
    param: str | None = None
    code: str = "invalid_value"


class Draining(msgspec.Struct, tag=True, frozen=True):
    """No new requests from now on."""


class Died(msgspec.Struct, tag=True, frozen=True):
    """The engine cannot go on."""

    reason: str


class Stop(msgspec.Struct, tag=True, frozen=True):
    """Everything has been answered: the process may end."""


ToFrontEnd = FrontEndSettings | Loaded | Events | Rejected | Draining | Died | Stop

_encoder = msgspec.msgpack.Encoder()


def frame(message: ToEngine | ToFrontEnd) -> bytes:
    """A message as it goes over the wire."""
    body = _encoder.encode(message)
    return _LENGTH.pack(len(body)) + body


def frame_length(header: bytes) -> int:
    """Bytes of the message that follows a header of HEADER_SIZE bytes."""
    return int(_LENGTH.unpack(header)[0])


HEADER_SIZE = _LENGTH.size
decode_to_engine = msgspec.msgpack.Decoder(ToEngine).decode
decode_to_front_end = msgspec.msgpack.Decoder(ToFrontEnd).decode


def read_exactly(sock: socket.socket, num_bytes: int) -> bytes | None:
    """The next bytes of a blocking socket; None if it was closed."""
    parts: list[Any] = []
    while num_bytes:
        part = sock.recv(num_bytes)
        if not part:
            return None
        parts.append(part)
        num_bytes -= len(part)
    return b"".join(parts)
