"""Ranks of several hosts, which are network namespaces here: MPI carries plans and sums between them."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import psutil
import pytest

from tests.serve.servers import MPIRUN, running, text_model, until
from tests.serve.test_lifecycle import is_gone

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(os.geteuid() != 0 or shutil.which("ip") is None, reason="needs root and ip"),
]
# In place of ssh: options, a host, a command.
SHELL = """#!/bin/sh
while [ "${1#-}" != "$1" ]; do shift; done
number=${1##*.}; shift
exec nsenter --net=/var/run/netns/NAME$number sh -c "$*"
"""
BODY = {"prompt": "Hello there", "max_tokens": 20, "temperature": 0, "ignore_eos": True}


def ip(*arguments: str) -> None:
    subprocess.run(["ip", *arguments], check=True, capture_output=True, text=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_model(tmp_path_factory.mktemp("model"), max_position_embeddings=16384)


@pytest.fixture(scope="module")
def launcher(tmp_path_factory: pytest.TempPathFactory) -> Iterator[list[str]]:
    """mpirun's flags for two ranks on each of two hosts; the first is joined to this one."""
    name = f"glint{os.getpid()}-"
    hosts = [f"{name}{number}" for number in (1, 2)]
    shell = tmp_path_factory.mktemp("shell") / "shell"
    shell.write_text(SHELL.replace("NAME", name))
    shell.chmod(0o755)
    try:
        for host in hosts:
            ip("netns", "add", host)
        ip("link", "add", "one", "netns", hosts[0], "type", "veth", "peer", "name", "two", "netns", hosts[1])
        for number, (host, link) in enumerate(zip(hosts, ("one", "two"), strict=True), 1):
            ip("-n", host, "addr", "add", f"10.77.0.{number}/24", "dev", link)
            for device in ("lo", link):
                ip("-n", host, "link", "set", device, "up")
        yield [
            *("ip", "netns", "exec", hosts[0], MPIRUN, "-launcher", "ssh", "-launcher-exec", str(shell)),
            *("-hosts", "10.77.0.1,10.77.0.2", "-localhost", "10.77.0.1", "-ppn", "2", "-n", "4"),
        ]
    finally:
        for host in hosts:
            subprocess.run(["ip", "netns", "del", host], capture_output=True, check=False)


def ask(url: str, host: str) -> str:
    """The text of a completion, asked for on a host."""
    code = "import httpx, json, sys; print(httpx.post(sys.argv[1], json=json.loads(sys.argv[2]), timeout=60).text)"
    command = ["ip", "netns", "exec", host, sys.executable, "-c", code, f"{url}/v1/completions", json.dumps(BODY)]
    answer = json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
    return str(answer["choices"][0]["text"])


def test_hosts_give_the_answer_of_one_rank(model: Path, launcher: list[str]) -> None:
    """Each host is a stage: layers are not shared between them. A signal drains; a death on one ends both."""
    with running(model) as server:
        expected = httpx.post(f"{server.url}/v1/completions", json=BODY, timeout=60).json()["choices"][0]["text"]
    with running(model, launcher=launcher) as server:
        assert ask(server.url, launcher[3]) == expected
        assert "tensor parallel 2, pipeline parallel 2" in "".join(server.lines)
        assert server.stop(signal.SIGTERM) == 0
    with running(model, launcher=launcher) as server:
        processes = psutil.Process(server.process.pid).children(recursive=True)
        victim = next(process for process in processes if process.environ().get("PMI_RANK") == "3")
        victim.kill()
        assert server.wait(20) != 0
        assert until(lambda: all(map(is_gone, processes)), 10)
    named = [line for line in server.lines if f"rank 3 (pid {victim.pid})" in line]
    assert len(named) == 1
