"""HTTP itself: limits on a request's head, old clients, clients that ask for an upgrade, and what is no HTTP."""

from __future__ import annotations

import asyncio
import contextlib
import json
import logging
import socket
import time
from collections.abc import AsyncIterator, Iterator
from typing import Any

import pytest
import uvicorn

from engine import http_protocol
from engine.http_protocol import MAX_HEAD_BYTES, HttpProtocol
from tests.serve.servers import Server, running, text_model, until

COMPLETION = b'{"prompt": "Hello there", "max_tokens": 4, "ignore_eos": true, "temperature": 0}'
STREAM = COMPLETION.replace(b"}", b', "stream": true}')
HEAD_S = 0.6  # of the servers in this process


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = text_model(tmp_path_factory.mktemp("model"), max_position_embeddings=8192)
    with running(folder, "--max-num-seqs", "8", "--num-gpu-blocks-override", "2048") as server:
        yield server


def connect(server: Server) -> socket.socket:
    host, port = server.url.removeprefix("http://").split(":")
    return socket.create_connection((host, int(port)), timeout=20)


def exchange(server: Server, *pieces: bytes) -> tuple[int, dict[str, str], bytes]:
    """Sends the pieces, a moment apart, and reads until the server closes: status, headers in lower case, body."""
    with connect(server) as sock:
        for number, piece in enumerate(pieces):
            if number:
                time.sleep(0.1)
            with contextlib.suppress(BrokenPipeError, ConnectionResetError):  # refused before all was sent
                sock.sendall(piece)
        with sock.makefile("rb") as file:
            return parse(file.read())


def parse(reply: bytes) -> tuple[int, dict[str, str], bytes]:
    head, _, body = reply.partition(b"\r\n\r\n")
    first, *lines = head.decode().split("\r\n")
    headers = dict(line.lower().split(": ", 1) for line in lines)
    return int(first.split()[1]), headers, body


def post(body: bytes, *headers: str, version: str = "1.1") -> bytes:
    lines = [f"POST /v1/completions HTTP/{version}", "Host: x", "Content-Type: application/json", *headers]
    return "\r\n".join([*lines, f"Content-Length: {len(body)}", "", ""]).encode() + body


def get(*headers: str, version: str = "1.1") -> bytes:
    return "\r\n".join([f"GET /health HTTP/{version}", "Host: x", *headers, "", ""]).encode()


def check_refusal(reply: tuple[int, dict[str, str], bytes], status: int, code: str) -> str:
    """Checks the one error object; returns its message."""
    found, headers, body = reply
    assert found == status
    assert headers["connection"] == "close"
    assert headers["content-type"] == "application/json"
    assert int(headers["content-length"]) == len(body)
    error = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert (error["type"], error["param"], error["code"]) == ("invalid_request_error", None, code)
    return str(error["message"])


@pytest.mark.parametrize(
    "headers",
    [
        ["X-Long: " + "a" * 1_000_000],
        ["X-Long: " + "a" * MAX_HEAD_BYTES],  # comes in one piece
        [f"X-{number}: a" for number in range(10_000)],
        ["a:"] * 10_000,  # few bytes, many headers
    ],
    ids=["1 MB", "64 KiB", "10000 headers", "10000 short headers"],
)
def test_a_head_that_is_too_long_is_refused(server: Server, headers: list[str]) -> None:
    message = check_refusal(exchange(server, get(*headers)), 431, "headers_too_large")
    assert str(MAX_HEAD_BYTES) in message


def test_a_target_that_is_too_long_is_refused(server: Server) -> None:
    request = get().replace(b"/health", b"/" + b"a" * MAX_HEAD_BYTES)
    check_refusal(exchange(server, request), 431, "headers_too_large")


def test_a_long_head_within_the_limit_is_served(server: Server) -> None:
    headers = ["X-Long: " + "a" * 60_000, *(f"X-{number}: a" for number in range(100)), "Connection: close"]
    assert exchange(server, get(*headers))[0] == 200


def test_a_long_body_is_no_head(server: Server) -> None:
    body = COMPLETION.replace(b"{", b"{" + b" " * (4 * MAX_HEAD_BYTES))
    assert exchange(server, post(body, "Connection: close"))[0] == 200


@pytest.mark.parametrize("protocol", ["h2c", "websocket"])
@pytest.mark.parametrize("late", [False, True], ids=["at once", "body later"])
def test_an_upgrade_is_ignored_and_the_body_read(server: Server, protocol: str, late: bool) -> None:
    """Java's HttpClient asks for h2c with every first request."""
    said = len(server.lines)
    upgrade = [
        "Connection: Upgrade, HTTP2-Settings",
        f"Upgrade: {protocol}",
        "HTTP2-Settings: AAEAAEAAAAIAAAABAAMAAABk",
    ]
    request = post(COMPLETION, *upgrade)
    head, end, body = request.partition(b"\r\n\r\n")
    pieces = [head + end, body] if late else [request]
    # the second request, on the same connection, is served too, and ends it
    with connect(server) as sock:
        for piece in pieces:
            sock.sendall(piece)
            time.sleep(0.1)
        with sock.makefile("rb") as file:
            assert file.readline() == b"HTTP/1.1 200 OK\r\n"
            sock.sendall(get("Connection: close"))
            rest = file.read()
    assert b'"completion_tokens":4' in rest
    assert rest.count(b"HTTP/1.1 200 OK") == 1
    assert not any("WARNING" in line for line in server.lines[said:])


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_only_http_1_1_gets_chunks(server: Server, version: str) -> None:
    status, headers, body = exchange(server, post(STREAM, "Connection: close", version=version))
    assert status == 200
    assert headers["connection"] == "close"
    assert ("transfer-encoding" in headers) == (version == "1.1")
    if version == "1.0":
        assert body.startswith(b"data: {")
        assert body.endswith(b"data: [DONE]\n\n")


def test_a_line_break_behind_the_last_body_is_ignored(server: Server) -> None:
    """Old clients send one."""
    status, _, body = exchange(server, post(COMPLETION, "Connection: close"), b"\r\n")
    assert status == 200
    assert json.loads(body)["usage"]["completion_tokens"] == 4


@pytest.mark.parametrize(
    "request_bytes",
    [
        b"hello\r\n\r\n",
        b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03",  # TLS
        b"GET / HTTP/1.1\r\n\r\n",  # no Host
        b"GET / HTTP/1.1\r\nHost: x\r\nno colon\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: -1\r\n\r\n",
        b"POST / HTTP/1.1\r\nHost: x\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\n",
    ],
)
def test_what_is_not_http_gets_the_error_object(server: Server, request_bytes: bytes) -> None:
    said = len(server.lines)
    check_refusal(exchange(server, request_bytes), 400, "bad_http")
    assert exchange(server, get("Connection: close"))[0] == 200
    assert server.lines[said:] == []


def test_an_unknown_transfer_coding_is_501(server: Server) -> None:
    request = b"POST / HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: gzip\r\n\r\n"
    check_refusal(exchange(server, request), 501, "not_implemented")


def test_a_chunk_that_is_none_ends_the_request(server: Server) -> None:
    """The application waits for the body then; it must neither answer too nor log a failure."""
    said = len(server.lines)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\n"
    body = b"Transfer-Encoding: chunked\r\n\r\n1\r\n{\r\n"
    check_refusal(exchange(server, head + body, b"no chunk\r\n"), 400, "bad_http")
    assert server.lines[said:] == []


def test_a_bad_second_request_does_not_spoil_the_first(server: Server) -> None:
    with connect(server) as sock, sock.makefile("rb") as file:
        sock.sendall(post(STREAM) + b"rubbish\r\n\r\n")
        first, second = file.read().split(b"0\r\n\r\n", 1)
    assert b"[DONE]" in first
    check_refusal(parse(second), 400, "bad_http")


def test_a_client_that_closes_its_sending_side_has_left(server: Server) -> None:
    with connect(server) as sock:
        sock.sendall(post(STREAM.replace(b'"max_tokens": 4', b'"max_tokens": 4000')))
        assert sock.recv(100)
        sock.shutdown(socket.SHUT_WR)
        assert until(server.is_idle)


async def _echo(scope: dict[str, Any], receive: Any, send: Any) -> None:
    """Answers at once; /late after twice the time of a head."""
    if scope["path"] == "/late":
        await asyncio.sleep(2 * HEAD_S)
    await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
    await send({"type": "http.response.body", "body": b"ok"})


@contextlib.asynccontextmanager
async def serving(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[int]:
    """The port of a server in this process, with a short time for a head."""
    monkeypatch.setattr(http_protocol, "HEAD_S", HEAD_S)
    config = uvicorn.Config(_echo, http=HttpProtocol, ws="none", lifespan="off", log_config=None)  # type: ignore[arg-type]
    config.load()
    server = uvicorn.Server(config)
    loop = asyncio.get_running_loop()
    state = server.server_state
    listener = await loop.create_server(
        lambda: HttpProtocol(config=config, server_state=state, app_state={}), "127.0.0.1", 0
    )
    async with listener:
        yield listener.sockets[0].getsockname()[1]


async def trickle(writer: asyncio.StreamWriter, data: bytes, every_s: float) -> None:
    with contextlib.suppress(ConnectionError):
        for number in range(len(data)):
            writer.write(data[number : number + 1])
            await writer.drain()
            await asyncio.sleep(every_s)


@pytest.mark.parametrize("requests_before", [0, 1])
def test_a_head_that_trickles_in_gets_408(monkeypatch: pytest.MonkeyPatch, requests_before: int) -> None:
    """Bytes that come do not prolong the time, and the second request of a connection has no more."""

    async def run() -> tuple[float, bytes]:
        async with serving(monkeypatch) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            for _ in range(requests_before):
                writer.write(get())
                assert (await reader.readuntil(b"ok")).startswith(b"HTTP/1.1 200")
            begin = time.monotonic()
            slow = asyncio.create_task(trickle(writer, get("X-Long: " + "a" * 10_000), HEAD_S / 10))
            reply = await asyncio.wait_for(reader.read(), 10 * HEAD_S)
            waited = time.monotonic() - begin
            slow.cancel()
            writer.close()
            return waited, reply

    waited, reply = asyncio.run(run())
    assert "did not come within 0.6 s" in check_refusal(parse(reply), 408, "request_timeout")
    assert waited > HEAD_S / 2


def test_a_connection_that_says_nothing_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> bytes:
        async with serving(monkeypatch) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            reply = await asyncio.wait_for(reader.read(), 10 * HEAD_S)
            writer.close()
            return reply

    assert asyncio.run(run()) == b""


def test_a_body_that_trickles_in_behind_its_answer_ends_the_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> bytes:
        async with serving(monkeypatch) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            slow = asyncio.create_task(trickle(writer, post(b"a" * 10_000), 0))
            await reader.readuntil(b"ok")
            slow.cancel()
            slow = asyncio.create_task(trickle(writer, b"a" * 1000, HEAD_S / 10))
            reply = await asyncio.wait_for(reader.read(), 10 * HEAD_S)
            slow.cancel()
            writer.close()
            return reply

    assert asyncio.run(run()) == b""


def test_the_time_for_a_head_is_not_the_time_for_an_answer(monkeypatch: pytest.MonkeyPatch) -> None:
    async def run() -> bytes:
        async with serving(monkeypatch) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(get("Connection: close").replace(b"/health", b"/late"))
            reply = await reader.read()
            writer.close()
            return reply

    assert parse(asyncio.run(run()))[0] == 200


def test_a_refusal_is_logged_at_debug(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    async def run() -> None:
        async with serving(monkeypatch) as port:
            reader, writer = await asyncio.open_connection("127.0.0.1", port)
            writer.write(b"rubbish\r\n\r\n")
            await reader.read()
            writer.close()

    with caplog.at_level(logging.DEBUG):
        asyncio.run(run())
    records = [record for record in caplog.records if record.name != "asyncio"]
    assert [(record.name, record.levelno) for record in records] == [("engine.http_protocol", logging.DEBUG)]
