"""The process that speaks HTTP for rank 0: `python -m engine.http_process ENGINE_FD LISTEN_FD`, started by serve.

It has its own interpreter, so that parsing, tokenizing and streaming never delay a step. It answers /health with
503 from its first moment, and goes when the engine tells it to or is gone.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Iterator
from pathlib import Path

import uvicorn

from engine.checkpoint.source import ModelSource
from engine.checkpoint.text import load_text
from engine.client import AsyncEngineClient
from engine.env import read_environment
from engine.errors import GlintError
from engine.http_protocol import HttpProtocol
from engine.log import set_up_logging
from engine.messages import (
    HEADER_SIZE,
    FrontEndFailed,
    FrontEndReady,
    FrontEndSettings,
    Loaded,
    Stop,
    ToFrontEnd,
    decode_to_front_end,
    frame,
    frame_length,
)
from server.app import create_app
from server.settings import ServerSettings

LINGER_S = 1.0  # after the engine is gone: long enough for open streams to end with an error
CLOSE_S = 2  # for connections that are still open when the server stops


class _Server(uvicorn.Server):
    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Signals are the engine process's business: it says when to stop."""
        yield


async def main(engine_fd: int, listen_fd: int) -> int:
    """Runs until the engine says Stop (returns 0) or is gone (returns 1)."""
    reader, writer = await asyncio.open_unix_connection(sock=socket.socket(fileno=engine_fd))
    settings = await _read(reader)
    assert isinstance(settings, FrontEndSettings)
    client = AsyncEngineClient(writer)
    app = create_app(
        client,
        ServerSettings(
            api_keys=settings.api_keys, root_path=settings.root_path, allowed_origins=settings.allowed_origins
        ),
    )
    config = uvicorn.Config(
        app, http=HttpProtocol, ws="none", log_config=None, access_log=False, timeout_graceful_shutdown=CLOSE_S
    )
    server = _Server(config)
    serving = asyncio.create_task(server.serve(sockets=[socket.socket(fileno=listen_fd)]))
    code = await _follow(reader, writer, client)
    server.should_exit = True
    await serving
    return code


async def _follow(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, client: AsyncEngineClient) -> int:
    """Does what the engine says until it says Stop or is gone."""
    while True:
        message = await _read(reader)
        if message is None:
            client.set_dead("the engine process is gone")
            await asyncio.sleep(LINGER_S)
            return 1
        if isinstance(message, Stop):
            return 0
        if isinstance(message, Loaded):
            source = ModelSource(message.source_kind, Path(message.source_path), message.info.names[0])
            try:
                tokenizer, template = await asyncio.to_thread(
                    load_text, source, message.info.vocab_size, message.chat_template
                )
            except GlintError as error:
                writer.write(frame(FrontEndFailed(str(error))))
                continue
            client.set_ready(message.info, tokenizer, template)
            writer.write(frame(FrontEndReady()))
        else:
            client.on_message(message)


async def _read(reader: asyncio.StreamReader) -> ToFrontEnd | None:
    try:
        header = await reader.readexactly(HEADER_SIZE)
        return decode_to_front_end(await reader.readexactly(frame_length(header)))
    except (asyncio.IncompleteReadError, ConnectionError):
        return None


if __name__ == "__main__":
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    set_up_logging("http", read_environment(os.environ).log_level)
    sys.exit(asyncio.run(main(int(sys.argv[1]), int(sys.argv[2]))))
