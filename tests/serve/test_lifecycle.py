"""Start, drain, stop and death of the server's processes (SHD-01, SHD-03, DST-04, LDR-03 end to end)."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import threading
import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.serve.servers import Server, running, start, text_model, until

BODY = {"prompt": "Hello there", "ignore_eos": True, "temperature": 0, "stream": True}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_model(tmp_path_factory.mktemp("model"), max_position_embeddings=16384)


class Stream(threading.Thread):
    """Reads a stream to its end in the background."""

    def __init__(self, url: str, max_tokens: int) -> None:
        super().__init__()
        self._request = (f"{url}/v1/completions", {**BODY, "max_tokens": max_tokens})
        self.events: list[str] = []
        self.error: Exception | None = None
        self.start()

    def run(self) -> None:
        url, body = self._request
        try:
            with httpx.stream("POST", url, json=body, timeout=60) as reply:
                self.events = [line for line in reply.iter_lines() if line]
        except httpx.HTTPError as error:
            self.error = error

    @property
    def finish_reasons(self) -> list[str]:
        chunks = [json.loads(event[6:]) for event in self.events if event.startswith("data: {")]
        return [chunk["choices"][0]["finish_reason"] for chunk in chunks if chunk.get("choices")]


def is_gone(process: psutil.Process) -> bool:
    try:
        return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE
    except psutil.NoSuchProcess:
        return True


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_shd_01_streams_are_drained(model: Path, number: int) -> None:
    """Short streams finish whole, endless ones end with an error event, new requests get 503, exit code 0."""
    with running(model, "--shutdown-grace-s", "3") as server:
        http = server.http_process
        endless = [Stream(server.url, 16000) for _ in range(2)]
        assert until(lambda: server.metrics()["num_requests_running"] == 2)
        prompt_tokens = server.metrics()["prompt_tokens_total"]
        short = [Stream(server.url, 100) for _ in range(2)]
        assert until(lambda: server.metrics()["prompt_tokens_total"] == 2 * prompt_tokens)  # the short ones have begun
        server.process.send_signal(number)
        assert until(lambda: httpx.get(f"{server.url}/health").status_code == 503, 2)
        refused = httpx.post(f"{server.url}/v1/completions", json={"prompt": "hi"})
        assert refused.status_code == 503
        assert "Retry-After" in refused.headers
        for stream in (*endless, *short):
            stream.join(20)
        assert server.wait(10) == 0
        assert until(lambda: is_gone(http))
        assert "Traceback" not in "".join(server.lines)
    for stream in short:
        assert stream.error is None
        assert stream.finish_reasons[-1] == "length"
        assert stream.events[-1] == "data: [DONE]"
    for stream in endless:
        assert stream.error is None
        assert "shutting down" in stream.events[-2]
        assert stream.events[-1] == "data: [DONE]"


def test_a_signal_to_the_whole_group_drains_too(model: Path) -> None:
    """As a terminal's Ctrl-C or a supervisor that signals all processes does it."""
    server = start(model, new_group=True).wait_until_ready()
    stream = Stream(server.url, 50)
    assert until(lambda: server.metrics()["num_requests_running"] == 1 or not stream.is_alive())
    os.killpg(server.process.pid, signal.SIGINT)
    stream.join(20)
    assert server.wait(15) == 0
    assert stream.finish_reasons[-1] == "length"


@pytest.mark.parametrize("said", ["", "LlamaForCausalLM", "loaded", "memory", "startup complete"])
def test_shd_03_a_signal_during_start_ends_it(model: Path, said: str) -> None:
    """At once, and just after each of the things that a start says."""
    server = start(model)
    assert until(lambda: said in "".join(server.lines))
    children = psutil.Process(server.process.pid).children()
    code = server.stop()
    assert code != 0 or server.url  # 0 only if it was ready already
    assert until(lambda: all(is_gone(child) for child in children))


def test_dst_04_a_port_in_use_is_found_before_the_model_is_read(tmp_path: Path) -> None:
    """The model does not even exist: the port is the first thing that is looked at."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        server = start(tmp_path / "none", "--port", port)
        assert server.wait(10) == 1
    message = "".join(server.lines)
    assert port in message
    assert "--port" in message
    assert "Traceback" not in message


def test_dst_04_a_restart_on_the_same_port_needs_no_wait(model: Path) -> None:
    """Also after a kill -9 with an open connection."""
    with running(model) as first:
        port = first.url.rsplit(":", 1)[1]
        stream = Stream(first.url, 16000)
        assert until(lambda: first.metrics()["num_requests_running"] == 1)
        http = first.http_process
        first.process.kill()
        stream.join(10)
        assert until(lambda: is_gone(http), 10)
    with running(model, "--port", port) as second:
        assert httpx.get(f"{second.url}/health").status_code == 200


def test_the_http_process_ends_with_the_engine(model: Path) -> None:
    """Open streams end with an error event, /health is 503 until the process goes by itself."""
    with running(model) as server:
        http = server.http_process
        stream = Stream(server.url, 16000)
        assert until(lambda: server.metrics()["num_requests_running"] == 1)
        server.process.kill()
        stream.join(10)
        assert "engine process is gone" in stream.events[-2]
        assert until(lambda: is_gone(http), 10)


def test_the_engine_ends_with_the_http_process(model: Path) -> None:
    with running(model) as server:
        server.http_process.kill()
        assert server.wait(10) == 1
        assert "HTTP process is gone" in server.lines[-1]


@contextlib.contextmanager
def failing(model: Path, *flags: str) -> Iterator[Server]:
    server = start(model, *flags)
    assert server.wait(30) == 1
    assert not server.url
    assert "Traceback" not in "".join(server.lines)
    yield server


def test_what_cannot_be_served_ends_the_start_with_one_clear_line(model: Path, tmp_path: Path) -> None:
    """A missing model, a tensor that does not fit, a tokenizer of another model: exit code 1, never ready."""
    with failing(tmp_path / "none.gguf") as server:
        assert "none.gguf" in server.lines[-1]
    wrong = text_model(tmp_path / "wrong")
    config = json.loads((wrong / "config.json").read_text())
    (wrong / "config.json").write_text(json.dumps(config | {"intermediate_size": 300}))
    with failing(wrong) as server:
        assert "gate_proj" in "".join(server.lines)
    foreign = text_model(tmp_path / "foreign", num_hidden_layers=1)
    tokenizer = json.loads((foreign / "tokenizer.json").read_text())
    tokenizer["model"]["vocab"]["another"] = 4000
    (foreign / "tokenizer.json").write_text(json.dumps(tokenizer))
    with failing(foreign) as server:
        assert "4000" in server.lines[-1]
    with failing(model, "--max-model-len", "999999999") as server:
        assert "--max-model-len" in server.lines[-1]


def test_ranks_that_mpi_does_not_see_are_refused(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The launcher of another MPI: each rank would serve a model of its own. It says so instead."""
    monkeypatch.setenv("PMI_SIZE", "8")
    with failing(model) as server:
        assert "8 ranks" in server.lines[-1]


def test_keys_origins_and_the_root_path_reach_the_http_process(model: Path) -> None:
    flags = ("--api-key", "secret", "--allowed-origins", "https://app.example", "--root-path", "/llm")
    with running(model, *flags) as server:
        models = f"{server.url}/llm/v1/models"
        assert httpx.get(models).status_code == 401
        headers = {"Authorization": "Bearer secret", "Origin": "https://app.example"}
        reply = httpx.get(models, headers=headers)
        assert reply.status_code == 200
        assert reply.headers["access-control-allow-origin"] == "https://app.example"
        assert httpx.get(f"{server.url}/health").status_code == 200
        assert "secret" not in "".join(server.lines)


def test_an_idle_server_sleeps(model: Path) -> None:
    """Both processes together use less than a tenth of a core while nobody asks for anything."""

    def cpu_seconds(processes: list[psutil.Process]) -> float:
        return sum(sum(process.cpu_times()[:2]) for process in processes)

    with running(model) as server:
        assert httpx.post(f"{server.url}/v1/completions", json={"prompt": "a", "max_tokens": 5}).status_code == 200
        processes = [psutil.Process(server.process.pid), server.http_process]
        before = cpu_seconds(processes)
        time.sleep(2)
        assert cpu_seconds(processes) - before < 0.2
