"""A streamed answer.

The status waits for the engine's first delta, so that a request that fails before its first token gets a real
HTTP error. If the first delta takes longer than sse_ping_s, the headers go out with a comment (": ping") that
keeps proxies awake; from then on a failure is one event with an error object, followed by [DONE].
A client that takes nothing for write_timeout_s is cut off. Either way its request is aborted.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from engine.api import EngineClient, OutputDelta
from engine.errors import GlintError
from server.errors import ClientGoneError, ClientTooSlowError, reply_of
from server.events import Events
from server.generation import Format, Job, Tally
from server.settings import ServerSettings
from server.wire import DONE, PING, sse_event

_log = logging.getLogger("glint.server")


class EventStreamResponse(Response):
    """Runs a job while it is being sent."""

    media_type = "text/event-stream"

    def __init__(
        self, job: Job, style: Format, client: EngineClient, settings: ServerSettings, headers: Mapping[str, str]
    ) -> None:
        self.status_code = 200
        self.background = None
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no", **headers})
        self._job = job
        self._style = style
        self._client = client
        self._settings = settings
        self._tally = Tally(job)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        ping_s = self._settings.sse_ping_s
        async with Events(self._client, self._job.requests, self._job.num_choices, receive) as events:
            batch = await events.next(ping_s)
            await self._write(
                send, {"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers}
            )
            try:
                while batch or events.open:
                    await self._write_body(send, self._encode(batch) if batch else PING)
                    batch = await events.next(ping_s) if events.open else {}
                tail = self._usage_event() + DONE
            except (ClientGoneError, ClientTooSlowError):
                raise
            except Exception as exc:
                if not isinstance(exc, GlintError):
                    _log.exception("request %s failed in its stream", self._job.id)
                tail = sse_event(reply_of(exc).body()) + DONE
            await self._write(send, {"type": "http.response.body", "body": tail, "more_body": False})

    def _encode(self, batch: Mapping[int, OutputDelta]) -> bytes:
        """Events for new text, b"" if there is nothing to show yet."""
        events = []
        for choice, delta in batch.items():
            self._tally.add(choice, delta)
            events += [self._event([entry]) for entry in self._style.chunks(choice, delta, self._tally)]
        return b"".join(events)

    def _event(self, choices: list[dict[str, Any]]) -> bytes:
        chunk = self._job.envelope(self._style.chunk_object, choices)
        if self._job.include_usage:
            chunk["usage"] = self._tally.usage() if self._job.continuous_usage else None
        return sse_event(chunk)

    def _usage_event(self) -> bytes:
        if not self._job.include_usage:
            return b""
        chunk = self._job.envelope(self._style.chunk_object, [])
        return sse_event({**chunk, "usage": self._tally.usage()})

    async def _write_body(self, send: Send, body: bytes) -> None:
        if body:
            await self._write(send, {"type": "http.response.body", "body": body, "more_body": True})

    async def _write(self, send: Send, message: Message) -> None:
        try:
            async with asyncio.timeout(self._settings.write_timeout_s):
                await send(message)
        except TimeoutError:
            raise ClientTooSlowError from None
