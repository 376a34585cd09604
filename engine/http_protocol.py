"""HTTP/1.1 as the server speaks it: uvicorn's protocol over h11, with limits on a request's head.

- A head (request line and headers) is there HEAD_S seconds after the server began to wait for it, which is when the
  connection was made or the answer before it ended. A part of one gets 408; a connection that said nothing is closed.
- A head has at most MAX_HEAD_BYTES, else 431. A header counts as its name, its value and 32 (RFC 9113, section 6.5.2,
  measures so), which limits how many there are, too.
- What is not HTTP gets 400. All of these are the JSON error object, with Connection: close, and are logged at debug:
  what a stranger sends is no event of the server's.
- An Upgrade header is ignored, as RFC 9110, section 7.8 allows: the request is answered in HTTP/1.1.
- HTTP/1.0 gets no chunks: the end of the connection ends the answer.
- A client that closes its sending side has left: its request is aborted, as it cannot be told from one that closed
  the connection, and nobody shall compute for the latter.

Of uvicorn it overrides one private name, H11Protocol._should_upgrade; without it, an Upgrade header would be ignored
all the same, with a warning.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from server.errors import INVALID_REQUEST, ErrorReply
from server.wire import error_response

HEAD_S = 30.0
MAX_HEAD_BYTES = 64 * 1024
HEADER_OVERHEAD_BYTES = 32
LINGER_S = 2.0  # for a refused client to read why: closing while it still sends would throw the answer away

_CODES = {408: "request_timeout", 431: "headers_too_large", 501: "not_implemented"}
_log = logging.getLogger(__name__)


class _Connection(h11.Connection):
    """One that keeps what is wrong with the input, instead of raising it, and counts whole heads too.

    h11 compares its limit with incomplete heads only, so that a head that comes in one piece may be longer.
    """

    def __init__(self) -> None:
        super().__init__(h11.SERVER, MAX_HEAD_BYTES)
        self.error: h11.RemoteProtocolError | None = None

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next event; NEED_DATA once error is set."""
        if self.error is not None:
            return h11.NEED_DATA
        try:
            event = super().next_event()
        except h11.RemoteProtocolError as error:
            self.error = error
            return h11.NEED_DATA
        if isinstance(event, h11.Request) and _head_bytes(event) > MAX_HEAD_BYTES:
            self.error = h11.RemoteProtocolError("the head is too long", error_status_hint=431)
            return h11.NEED_DATA
        return event


class HttpProtocol(H11Protocol):
    """One connection of a client."""

    conn: _Connection

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.conn = _Connection()
        self._head_timer: asyncio.TimerHandle | None = None
        self._linger_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._watch_head()

    def connection_lost(self, exc: Exception | None) -> None:
        for timer in (self._head_timer, self._linger_timer):
            if timer is not None:
                timer.cancel()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        # after a request with Connection: close (old clients end a body with a line break), and after a refusal
        if self._linger_timer is None and self.conn.their_state not in (h11.MUST_CLOSE, h11.CLOSED):
            super().data_received(data)

    def handle_events(self) -> None:
        super().handle_events()
        if self.conn.error is not None:
            status = self.conn.error.error_status_hint
            self._refuse(status, f"the request is not valid HTTP/1.1: {self.conn.error}")
        self._watch_head()

    def _should_upgrade(self) -> bool:
        return False

    def _watch_head(self) -> None:
        """Runs the head's timer as long as the next head is not there, even behind a body that nobody reads."""
        waits = (self.conn.their_state is h11.IDLE or self.conn.our_state is h11.DONE) and self._linger_timer is None
        if waits and self._head_timer is None:
            self._head_timer = self.loop.call_later(HEAD_S, self._on_head_timeout)
        elif not waits and self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None

    def _on_head_timeout(self) -> None:
        begun, _ = self.conn.trailing_data
        if begun:
            self._refuse(408, f"the request's headers did not come within {HEAD_S:g} s")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str) -> None:
        """Answers with an error, if no answer has begun, and ends the connection."""
        _log.debug("refused what %s sent: %s", self.client, message)
        if self.cycle is not None:  # the application, if it still runs, sees a client that has left
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        if self.transport.is_closing() or self.conn.our_state not in (h11.IDLE, h11.SEND_RESPONSE):
            self.transport.close()
            return
        if status == 431:
            message = f"the request line and headers are longer than {MAX_HEAD_BYTES} bytes"
        reply = error_response(ErrorReply(status, INVALID_REQUEST, _CODES.get(status, "bad_http"), message))
        head = h11.Response(status_code=status, headers=[*reply.raw_headers, (b"Connection", b"close")])
        for event in (head, h11.Data(data=bytes(reply.body)), h11.EndOfMessage()):
            self.transport.write(self.conn.send(event))
        self._linger_timer = self.loop.call_later(LINGER_S, self.transport.abort)
        self.flow.resume_reading()
        self.transport.write_eof()


def _head_bytes(request: h11.Request) -> int:
    headers = sum(len(name) + len(value) + HEADER_OVERHEAD_BYTES for name, value in request.headers)
    return len(request.method) + len(request.target) + headers
