"""Starts `python -m engine.serve` for tests, and reads what it says."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from conformance.golden_models import rand_model
from tests.engine.tiny_tokenizers import byte_level_tokenizer, write_tokenizer

START_S = 60.0
ROOT = Path(__file__).parents[2]
MPIRUN = str(Path(sys.executable).parent / "mpirun")


class Server:
    """A running server. lines holds what it has written to standard error."""

    def __init__(self, process: subprocess.Popen[str]) -> None:
        self.process = process
        self.lines: list[str] = []
        self.url = ""
        self._ready = threading.Event()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()

    def _read(self) -> None:
        assert self.process.stderr is not None
        with self.process.stderr as stream:
            for line in stream:
                self.lines.append(line)
                found = re.search(r"ready after .*?: (http:\S+) serves", line)
                if found:
                    self.url = found.group(1)
                    self._ready.set()
        self._ready.set()

    def wait_until_ready(self) -> Server:
        assert self._ready.wait(START_S), "the server is not ready in time"
        assert self.url, "".join(self.lines)
        return self

    @property
    def http_process(self) -> psutil.Process:
        """The process that speaks HTTP."""
        (child,) = psutil.Process(self.process.pid).children()
        return child

    @property
    def ranks(self) -> list[psutil.Process]:
        """The ranks that mpirun has started, in order."""
        return [child for proxy in psutil.Process(self.process.pid).children() for child in proxy.children()]

    @property
    def errors(self) -> list[str]:
        """Lines of what went wrong, from all ranks."""
        return [line for line in self.lines if re.search(r" rank \d+ ERROR |^engine\.serve: ", line)]

    def metrics(self) -> dict[str, float]:
        """Engine metrics without labels, by name without prefix."""
        text = httpx.get(f"{self.url}/metrics").text
        found = re.findall(r"^glint:(\w+) (\S+)$", text, re.MULTILINE)
        return {name: float(value) for name, value in found}

    def is_idle(self) -> bool:
        values = self.metrics()
        return values["num_requests_running"] == values["num_requests_waiting"] == values["kv_blocks_used"] == 0

    def stop(self, number: int = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.wait(20)

    def wait(self, seconds: float) -> int:
        """The exit code; fails if the server is still there after so many seconds."""
        code = self.process.wait(seconds)
        self._reader.join(seconds)
        return code

    def kill(self) -> None:
        """Ends it at once, if it is still there."""
        self.process.kill()
        self.wait(10)


def start(
    model: str | Path,
    *flags: str,
    new_group: bool = False,
    num_ranks: int = 0,
    launcher: Sequence[str] = (),
    module: Sequence[str] = ("engine.serve",),
) -> Server:
    """Starts a server on a free port; does not wait for it.

    Args:
        num_ranks: by mpirun; 0 means without.
        launcher: a command that starts ranks otherwise.
        module: what to run, and its first arguments.
    """
    command = [
        *([MPIRUN, "-n", str(num_ranks)] if num_ranks else launcher),
        sys.executable,
        "-m",
        *module,
        "--model",
        str(model),
        "--port",
        "0",
        "--device",
        "cpu",
        "--num-threads",
        "1",
        *flags,
    ]
    environment = {**os.environ, "GLINT_API_KEY": ""}
    process = subprocess.Popen(
        command, stderr=subprocess.PIPE, text=True, cwd=ROOT, env=environment, start_new_session=new_group
    )
    return Server(process)


@contextlib.contextmanager
def running(model: str | Path, *flags: str, **details: Any) -> Iterator[Server]:
    """A ready server, killed at the end; details are those of start."""
    server = start(model, *flags, **details)
    try:
        yield server.wait_until_ready()
    finally:
        server.kill()


def until(condition: Callable[[], bool], seconds: float = 10.0) -> bool:
    """Whether condition becomes true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


def text_model(folder: Path, **overrides: object) -> Path:
    """A random model with a byte-level tokenizer and a chat template."""
    tokenizer = byte_level_tokenizer()
    rand_model(folder, vocab_size=tokenizer.get_vocab_size(), **overrides)
    write_tokenizer(folder, tokenizer)
    return folder
