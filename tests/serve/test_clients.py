"""A real server and clients that come and go: disconnects, storms, slow readers (STR-05 … STR-08, SCH-02, SCH-05)."""

from __future__ import annotations

import asyncio
import random
import socket
import struct
from collections.abc import Iterator
from pathlib import Path

import httpx
import openai
import psutil
import pytest

from tests.serve.servers import Server, running, text_model, until

ENDLESS = {"prompt": "Hello there", "max_tokens": 4000, "ignore_eos": True, "temperature": 0}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    folder = text_model(tmp_path_factory.mktemp("model"), max_position_embeddings=8192)
    with running(folder, "--max-num-seqs", "8", "--num-gpu-blocks-override", "2048") as server:
        yield server


def answer(server: Server, prompt: str = "How are you", **fields: object) -> str:
    body = {"prompt": prompt, "max_tokens": 12, "temperature": 0, **fields}
    reply = httpx.post(f"{server.url}/v1/completions", json=body, timeout=30)
    assert reply.status_code == 200, reply.text
    return str(reply.json()["choices"][0]["text"])


def open_stream(server: Server, body: bytes) -> socket.socket:
    """A raw connection that has asked and reads nothing."""
    host, port = server.url.removeprefix("http://").split(":")
    sock = socket.create_connection((host, int(port)))
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    sock.sendall(f"{head}\r\n\r\n".encode() + body)
    return sock


def stream_body(max_tokens: int = 4000) -> bytes:
    return (
        b'{"prompt": "Hello there", "max_tokens": %d, "ignore_eos": true, "temperature": 0, "stream": true}'
        % max_tokens
    )


def test_the_official_client_gets_the_same_text_streamed_and_not(server: Server) -> None:
    client = openai.OpenAI(base_url=f"{server.url}/v1", api_key="none")
    messages = [{"role": "user", "content": "Say something"}]
    model = client.models.list().data[0].id
    whole = client.chat.completions.create(model=model, messages=messages, temperature=0, max_tokens=20)  # type: ignore[call-overload]
    stream = client.chat.completions.create(  # type: ignore[call-overload]
        model=model,
        messages=messages,
        temperature=0,
        max_tokens=20,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == whole.choices[0].message.content
    usage = chunks[-1].usage
    assert (usage.prompt_tokens, usage.completion_tokens) == (whole.usage.prompt_tokens, whole.usage.completion_tokens)
    assert whole.usage.completion_tokens == 20


@pytest.mark.parametrize("reset", [False, True])
def test_str_05_a_client_that_leaves_a_stream_is_aborted(server: Server, reset: bool) -> None:
    """Both ways of leaving: an orderly close and a reset."""
    sock = open_stream(server, stream_body())
    assert sock.recv(1000)
    assert until(lambda: server.metrics()["num_requests_running"] == 1)
    if reset:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()
    assert until(server.is_idle, 5)


@pytest.mark.parametrize("fields", [{}, {"n": 4, "temperature": 1}, {"prompt": ["a", "b", "c"]}])
def test_str_06_a_client_that_leaves_a_plain_request_is_aborted(server: Server, fields: dict[str, object]) -> None:
    with pytest.raises(httpx.ReadTimeout):
        httpx.post(f"{server.url}/v1/completions", json={**ENDLESS, **fields}, timeout=0.4)
    assert until(server.is_idle, 5)


def test_sch_02_queued_requests_can_be_aborted(server: Server) -> None:
    """64 requests on 8 places, all of whose clients leave at once."""
    sockets = [open_stream(server, stream_body()) for _ in range(64)]
    assert until(lambda: server.metrics()["num_requests_waiting"] > 20)
    for sock in sockets:
        sock.close()
    assert until(server.is_idle, 10)
    assert answer(server)


def test_sch_05_a_request_id_of_the_client_is_only_a_label(server: Server) -> None:
    """Two requests with one X-Request-Id run side by side; ending one leaves the other alone."""
    alone = answer(server, max_tokens=40, ignore_eos=True)
    headers = {"X-Request-Id": "same"}
    sock = open_stream(server, stream_body().replace(b"{", b"{", 1))
    body = {"prompt": "How are you", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
    with httpx.Client(headers=headers, timeout=30) as client:
        assert until(lambda: server.metrics()["num_requests_running"] == 1)
        sock.close()
        first = client.post(f"{server.url}/v1/completions", json=body)
        second = client.post(f"{server.url}/v1/completions", json=body)
    assert first.headers["X-Request-Id"] == second.headers["X-Request-Id"] == "same"
    assert first.json()["choices"][0]["text"] == second.json()["choices"][0]["text"] == alone
    assert first.json()["id"] != second.json()["id"]


def test_str_07_disconnect_storm(server: Server) -> None:
    """500 clients at once that leave at random moments, in rounds; nothing is left behind and answers stay right."""
    prompts = [f"Question {number}: what" for number in range(20)]
    before = [answer(server, prompt) for prompt in prompts]
    http = server.http_process
    files, threads = http.num_fds(), http.num_threads()
    body = stream_body(500)
    host, port = server.url.removeprefix("http://").split(":")
    request = (
        b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: "
        + str(len(body)).encode()
        + b"\r\n\r\n"
        + body
    )

    async def one(delay: float) -> None:
        reader, writer = await asyncio.open_connection(host, int(port))
        writer.write(request)
        try:
            await asyncio.wait_for(reader.read(), delay)
        except TimeoutError:
            pass
        finally:
            writer.transport.abort()

    async def storm(seed: int) -> None:
        rng = random.Random(seed)
        await asyncio.gather(*(one(rng.uniform(0, 0.3)) for _ in range(500)), return_exceptions=True)

    for seed in range(2):
        asyncio.run(storm(seed))
    assert until(server.is_idle, 30)
    assert [answer(server, prompt) for prompt in prompts] == before
    assert until(lambda: http.num_fds() <= files + 2, 10)
    assert http.num_threads() <= threads + 8  # the pool of threads that tokenize may have grown to its limit
    values = server.metrics()
    assert values["kv_blocks_used"] == 0
    assert psutil.pid_exists(server.process.pid)


def test_str_08_a_slow_reader_does_not_slow_the_others(server: Server) -> None:
    """Readers that take nothing are held by back-pressure; another client is served meanwhile, and all can leave."""
    sockets = []
    for _ in range(4):
        sock = open_stream(server, stream_body(3000))
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        sockets.append(sock)
    assert answer(server)
    for sock in sockets:
        sock.close()
    assert until(server.is_idle, 10)


def test_met_02_counters_balance(server: Server) -> None:
    """Every request that was started ends in exactly one of the outcomes."""

    def outcomes() -> dict[str, float]:
        text = httpx.get(f"{server.url}/metrics").text
        lines = [line for line in text.splitlines() if line.startswith("glint:request_success_total")]
        return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in lines}

    assert until(server.is_idle)
    before, tokens = outcomes(), server.metrics()["generation_tokens_total"]
    usage = 0
    for number in range(5):
        body = {"prompt": f"No {number}", "max_tokens": 7, "ignore_eos": True}
        usage += httpx.post(f"{server.url}/v1/completions", json=body, timeout=30).json()["usage"]["completion_tokens"]
    assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "x", "max_tokens": -1}).status_code == 400
    sock = open_stream(server, stream_body())
    assert sock.recv(100)
    sock.close()
    assert until(server.is_idle)
    after = outcomes()
    assert after["length"] - before["length"] == 5
    assert until(lambda: outcomes()["abort"] - before["abort"] == 1)
    assert after["error"] == before["error"]
    assert server.metrics()["generation_tokens_total"] - tokens >= usage == 35


def test_unfinished_requests_of_a_folder_without_tokenizer(tmp_path: Path) -> None:
    """Token ids go in and out, text is null, and what needs text is a 400 that says so."""
    from_ids = {"prompt": [5, 6, 7], "max_tokens": 3, "temperature": 0, "ignore_eos": True}
    folder = text_model(tmp_path)
    for file in ("tokenizer.json", "tokenizer_config.json"):
        (folder / file).unlink()
    with running(folder) as server:
        choice = httpx.post(f"{server.url}/v1/completions", json=from_ids).json()["choices"][0]
        assert choice["text"] is None
        assert len(choice["token_ids"]) == 3
        refused = httpx.post(f"{server.url}/v1/completions", json={**from_ids, "prompt": "hi"})
        assert refused.status_code == 400
        assert "tokenizer" in refused.json()["error"]["message"]
        chat = httpx.post(f"{server.url}/v1/chat/completions", json={"messages": [{"role": "user", "content": "hi"}]})
        assert chat.status_code == 400
        assert "tokenizer" in chat.json()["error"]["message"]
