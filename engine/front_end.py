"""The engine's side of the HTTP process: starts it, sends it events, queues what it sends."""

from __future__ import annotations

import contextlib
import queue
import socket
import subprocess
import sys
import threading

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.messages import (
    HEADER_SIZE,
    Died,
    FrontEndSettings,
    ToEngine,
    ToFrontEnd,
    decode_to_engine,
    frame,
    frame_length,
    read_exactly,
)

BACKLOG = 2048
TOLD_S = 0.2  # for a message to be taken by the system
STOP_S = 5.0  # for the process to end by itself


def listen(host: str, port: int) -> socket.socket:
    """Takes the port, before anything expensive is done.

    Raises:
        ConfigError: it cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    sock = socket.socket(family, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)  # a restart need not wait for old connections
    try:
        sock.bind((host, port))
        sock.listen(BACKLOG)
    except (OSError, OverflowError) as error:
        sock.close()
        reason = error.strerror if isinstance(error, OSError) and error.strerror else str(error)
        raise ConfigError(f"cannot listen on {host} port {port}: {reason}; choose another --port or --host") from error
    return sock


class FrontEnd:
    """Owns the HTTP process and the threads that read from and write to it, so that a step never waits for it."""

    def __init__(self, config: EngineConfig, listener: socket.socket) -> None:
        ours, theirs = socket.socketpair()
        self._sock = ours
        command = [sys.executable, "-m", "engine.http_process", str(theirs.fileno()), str(listener.fileno())]
        # a session of its own: what ends this process group must leave it time to tell its clients
        self._process = subprocess.Popen(command, pass_fds=(theirs.fileno(), listener.fileno()), start_new_session=True)
        theirs.close()
        listener.close()
        self.inbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()  # None: the process is gone
        self._outbox: queue.SimpleQueue[bytes | threading.Event | None] = queue.SimpleQueue()
        for name, target in (("front-end-reader", self._read), ("front-end-writer", self._write)):
            threading.Thread(target=target, name=name, daemon=True).start()
        self.send(FrontEndSettings(config.api_key, config.root_path, config.allowed_origins))

    def send(self, message: ToFrontEnd) -> None:
        """Queues a message; never blocks."""
        self._outbox.put(frame(message))

    def say_dead(self, reason: str) -> None:
        """The engine cannot go on: when this returns its clients will hear it, whatever becomes of this process."""
        self.send(Died(reason))
        written = threading.Event()
        self._outbox.put(written)
        written.wait(TOLD_S)

    def close(self) -> int:
        """Waits for the process to end after Stop, ends it if it does not, and returns its exit code."""
        self._outbox.put(None)
        try:
            return self._process.wait(STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            return self._process.wait()

    def kill(self) -> None:
        """Ends the process at once."""
        self._process.kill()
        self._process.wait()

    def _read(self) -> None:
        with contextlib.suppress(OSError):
            while (header := read_exactly(self._sock, HEADER_SIZE)) is not None:
                body = read_exactly(self._sock, frame_length(header))
                if body is None:
                    break
                self.inbox.put(decode_to_engine(body))
        self.inbox.put(None)

    def _write(self) -> None:
        with contextlib.suppress(OSError):
            while (item := self._outbox.get()) is not None:
                if isinstance(item, threading.Event):
                    item.set()
                else:
                    self._sock.sendall(item)
