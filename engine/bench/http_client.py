"""The least HTTP client that can load a server: raw sockets, so that it takes little from the machine it shares."""

from __future__ import annotations

import asyncio
import json
import re
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any
from urllib.parse import urlsplit

from engine.errors import RequestFailedError


@dataclass(slots=True)
class Reply:
    """What came back and when, in seconds of the monotonic clock."""

    started: float
    status: int = 0
    chunk_times: list[float] = field(default_factory=list)  # of each data event of a stream
    chunks: list[bytes] = field(default_factory=list)  # the JSON of these events
    body: bytes = b""  # of an answer that is not a stream
    usage: Mapping[str, Any] = field(default_factory=dict)

    @property
    def num_output_tokens(self) -> int:
        return int(self.usage.get("completion_tokens", 0))


async def get(url: str, path: str, api_key: str = "") -> bytes:
    """The body of a GET; raises RequestFailedError unless the status is 200."""
    reply = await _exchange(url, f"GET {path}", b"", _authorization(api_key))
    if reply.status != 200:
        raise RequestFailedError(f"{url}{path} answered {reply.status}: {reply.body[:200]!r}")
    return reply.body


async def metrics(url: str, api_key: str = "") -> dict[str, float]:
    """The server's own numbers by their names, labels included, without the prefix glint: of each."""
    text = (await get(url, "/metrics", api_key)).decode()
    found = re.findall(r"^glint:(\S+) (\S+)$", text, re.MULTILINE)
    if not found:
        raise RequestFailedError(f"{url}/metrics names no number of this engine")
    return {name: float(value) for name, value in found}


async def post(url: str, path: str, body: Mapping[str, Any], api_key: str = "") -> Reply:
    """Sends a JSON body and reads the whole answer, streamed or not."""
    headers = {"Content-Type": "application/json", **_authorization(api_key)}
    return await _exchange(url, f"POST {path}", json.dumps(body).encode(), headers)


def _authorization(api_key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {api_key}"} if api_key else {}


async def _exchange(url: str, line: str, body: bytes, headers: Mapping[str, str]) -> Reply:
    parts = urlsplit(url)
    reply = Reply(time.monotonic())
    reader, writer = await asyncio.open_connection(parts.hostname, parts.port or 80)
    try:
        lines = [f"{line} HTTP/1.1", f"Host: {parts.netloc}", "Connection: close", f"Content-Length: {len(body)}"]
        lines += [f"{name}: {value}" for name, value in headers.items()]
        writer.write("\r\n".join([*lines, "", ""]).encode() + body)
        head = (await reader.readuntil(b"\r\n\r\n")).lower()
        reply.status = int(head.split(b" ", 2)[1])
        if b"text/event-stream" in head:
            await _read_stream(reader, reply)
        else:
            reply.body = await reader.read()
            if reply.status == 200 and b"application/json" in head:
                reply.usage = json.loads(reply.body).get("usage") or {}
    finally:
        writer.close()
    return reply


async def _read_stream(reader: asyncio.StreamReader, reply: Reply) -> None:
    line = b""
    async for line in reader:
        if line.startswith(b"data: {"):
            reply.chunk_times.append(time.monotonic())
            reply.chunks.append(line[len(b"data: ") :])
        elif line.startswith(b"data: [DONE]"):
            break
    event = json.loads(reply.chunks[-1]) if reply.chunks else {}
    reply.usage = event.get("usage") or {}
    if "error" in event:
        raise RequestFailedError(f"the stream ended with {event['error']}")
    if not line.startswith(b"data: [DONE]"):
        raise RequestFailedError("the stream broke off")
