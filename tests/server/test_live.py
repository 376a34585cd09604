"""Over real sockets: the official client, and connections that end: STR-05, STR-06, STR-08, STR-09."""

from __future__ import annotations

import json
import socket
import struct
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import openai
import pytest
import uvicorn

from server.app import create_app
from server.settings import ServerSettings
from tests.server.fake_client import FakeClient

KEY = "secret"


@contextmanager
def serving(client: FakeClient, **settings: Any) -> Iterator[int]:
    """The app on a free port of this machine."""
    app = create_app(client, ServerSettings(api_keys=(KEY,), **settings))
    listener = socket.create_server(("127.0.0.1", 0))
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 8192)  # inherited: a reader that stops is felt early
    server = uvicorn.Server(uvicorn.Config(app, log_config=None, lifespan="off", timeout_graceful_shutdown=1))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [listener]})
    thread.start()
    try:
        until(lambda: server.started)
        yield listener.getsockname()[1]
    finally:
        server.should_exit = True
        thread.join()
        listener.close()


def until(condition: Any, limit_s: float = 10.0) -> None:
    end = time.monotonic() + limit_s
    while not condition():
        assert time.monotonic() < end, "never became true"
        time.sleep(0.005)


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    with serving(FakeClient(replies=("Hello é", "second"), delay_s=0)) as number:
        yield number


@pytest.fixture
def client(port: int) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key=KEY, max_retries=0) as official:
        yield official


def test_official_client_chat_str_09(client: openai.OpenAI) -> None:
    answer = client.chat.completions.create(
        model="M", messages=[{"role": "user", "content": "Hi"}], max_tokens=20, logprobs=True, top_logprobs=2, n=2
    )
    assert [choice.message.content for choice in answer.choices] == ["Hello é", "second"]
    assert answer.choices[0].finish_reason == "stop"
    assert answer.choices[0].logprobs is not None
    assert answer.choices[0].logprobs.content is not None
    assert len(answer.choices[0].logprobs.content) == 8
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 14
    assert answer.usage.prompt_tokens_details is not None


def test_official_client_chat_stream_str_09(client: openai.OpenAI) -> None:
    chunks = list(
        client.chat.completions.create(
            model="M",
            messages=[{"role": "user", "content": "Hi"}],
            max_tokens=20,
            stream=True,
            stream_options={"include_usage": True},
        )
    )
    assert chunks[0].choices[0].delta.role == "assistant"
    assert "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1]) == "Hello é"
    assert chunks[-2].choices[0].finish_reason == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 8


def test_official_client_completions(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="M", prompt=["a", "b"], max_tokens=3, echo=True, logprobs=1)
    assert [choice.text for choice in answer.choices] == ["aHel", "bHel"]
    chunks = list(client.completions.create(model="M", prompt="a", max_tokens=3, stream=True))
    assert "".join(chunk.choices[0].text for chunk in chunks) == "Hel"


def test_official_client_errors(client: openai.OpenAI, port: int) -> None:
    with pytest.raises(openai.BadRequestError) as bad:
        client.completions.create(model="M", prompt="x", temperature=-1)
    assert (bad.value.param, bad.value.code) == ("temperature", "invalid_value")
    with pytest.raises(openai.NotFoundError) as missing:
        client.completions.create(model="other", prompt="x")
    assert missing.value.code == "model_not_found"
    stranger = openai.OpenAI(base_url=f"http://127.0.0.1:{port}/v1", api_key="wrong", max_retries=0)
    with stranger, pytest.raises(openai.AuthenticationError):
        stranger.models.list()


def test_official_client_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["M", "alias/of-M"]
    assert client.models.retrieve("M").id == "M"


def test_official_client_sees_a_failure_in_a_stream_str_10() -> None:
    fake = FakeClient(failure=RuntimeError("boom"), fail_at=3, delay_s=0)
    with serving(fake) as number:
        official = openai.OpenAI(base_url=f"http://127.0.0.1:{number}/v1", api_key=KEY, max_retries=0)
        with official, pytest.raises(openai.APIError, match="the server failed"):
            list(official.completions.create(model="M", prompt="x", stream=True))


def dial(port: int, body: dict[str, Any], receive_buffer: int | None = None) -> socket.socket:
    connection = socket.socket()
    if receive_buffer is not None:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    connection.settimeout(10)
    connection.connect(("127.0.0.1", port))
    data = json.dumps(body).encode()
    head = (
        "POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
        f"Authorization: Bearer {KEY}\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    connection.sendall(head.encode() + data)
    return connection


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("reset", [False, True])
def test_closed_socket_aborts_the_request_str_05_str_06(streamed: bool, reset: bool) -> None:
    fake = FakeClient(delay_s=0.005)
    with serving(fake) as number:
        connection = dial(number, {"prompt": "x", "max_tokens": 4000, "ignore_eos": True, "stream": streamed, "n": 60})
        if streamed:
            assert connection.recv(100).startswith(b"HTTP/1.1 200")
        until(lambda: fake.running == 1)
        if reset:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        connection.close()
        until(lambda: fake.running == 0)
    assert (len(fake.aborted), fake.finished) == (1, [])


def test_reader_that_stops_is_cut_off_str_08() -> None:
    """One reader never reads; another one on the same server gets its answer."""
    fake = FakeClient(delay_s=0, replies=("aaaaa",))
    with serving(fake, write_timeout_s=0.3) as number:
        body = {"prompt": "x", "n": 100, "max_tokens": 60, "ignore_eos": True, "stream": True}
        slow = dial(number, body, receive_buffer=4096)
        until(lambda: fake.running > 0)
        official = openai.OpenAI(base_url=f"http://127.0.0.1:{number}/v1", api_key=KEY, max_retries=0)
        with official:
            assert official.completions.create(model="M", prompt="x", max_tokens=5).choices[0].text == "aaaaa"
        until(lambda: fake.running == 0)
        slow.close()
    assert (len(fake.aborted), len(fake.finished)) == (1, 1)
