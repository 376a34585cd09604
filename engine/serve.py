"""`python -m engine.serve`: one model behind an OpenAI-compatible HTTP server.

The process that is started owns the engine and steps it; HTTP runs in a process of its own (engine.http_process).
SIGTERM and SIGINT drain: no new requests, what is running gets shutdown_grace_s, then the rest ends with an error.
"""

from __future__ import annotations

import contextlib
import io
import logging
import os
import queue
import signal
import sys
import time
from dataclasses import replace
from types import FrameType

from engine.api import TokenEvent
from engine.build import BuiltEngine, build_engine
from engine.comm.launcher import relaunch
from engine.comm.ranks import Ranks, join_ranks
from engine.config import EngineConfig
from engine.env import launched_rank, read_environment
from engine.errors import CapacityError, ConfigError, EngineDeadError, GlintError, RequestError, StopSignal
from engine.front_end import FrontEnd, listen
from engine.log import set_up_logging
from engine.loop import Engine
from engine.messages import (
    Abort,
    Draining,
    Events,
    FrontEndFailed,
    FrontEndReady,
    Loaded,
    Rejected,
    Stop,
    Submit,
    ToEngine,
)
from engine.options import parse_args

logger = logging.getLogger(__name__)

IDLE_S = 0.5  # how long an idle loop sleeps before it looks at signals again
LINGER_S = 1.0  # after the engine has died: /health says so meanwhile
STOPPING = (signal.SIGTERM, signal.SIGINT)


class Service:
    """Feeds the engine from the front end until it is told to stop."""

    def __init__(self, built: BuiltEngine, front_end: FrontEnd, grace_s: float) -> None:
        self._engine: Engine = built.engine
        self._front_end = front_end
        self._grace_s = grace_s
        self._deadline: float | None = None  # of draining, on the monotonic clock
        self._last_stats = built.engine.stats()

    def request_stop(self) -> None:
        """Begins to drain; a second call ends at once what is still running."""
        now = time.monotonic()
        self._deadline = now + self._grace_s if self._deadline is None else now

    def run(self) -> None:
        """Returns when everything has been answered after request_stop.

        Raises:
            EngineDeadError: the engine or the front end cannot go on.
        """
        announced = False
        while True:
            if self._deadline is not None:
                if not announced:
                    announced = True
                    logger.info("stopping: %d requests get %.1f s", self._engine.num_requests, self._grace_s)
                    self._front_end.send(Draining())
                if time.monotonic() >= self._deadline:
                    self._publish(self._engine.abort_all())
                if not self._engine.has_work and self._front_end.inbox.empty():
                    return
            self._take_messages()
            if self._engine.has_work:
                self._publish(self._engine.step())

    def _take_messages(self) -> None:
        """Handles all that has arrived; waits for something if there is nothing to compute."""
        inbox = self._front_end.inbox
        try:
            message = inbox.get(block=not self._engine.has_work, timeout=IDLE_S)
            while True:
                self._handle(message)
                message = inbox.get_nowait()
        except queue.Empty:
            pass

    def _handle(self, message: ToEngine | None) -> None:
        match message:
            case Submit(request=request):
                try:
                    self._engine.add(request)
                except RequestError as error:
                    self._front_end.send(Rejected(request.request_id, str(error), False, error.param, error.code))
                except CapacityError as error:
                    self._front_end.send(Rejected(request.request_id, str(error), True))
            case Abort(request_id=request_id, index=index):
                self._engine.abort(request_id, index)
                if not self._engine.has_work:
                    self._publish([])
            case None:
                raise EngineDeadError("the HTTP process is gone")
            case _:
                raise TypeError(f"unexpected message {type(message).__name__}")

    def _publish(self, events: list[TokenEvent]) -> None:
        stats = self._engine.stats()
        if events or stats != self._last_stats:
            self._last_stats = stats
            self._front_end.send(Events(events, stats))


def wait_until_front_end_is_ready(front_end: FrontEnd) -> None:
    """Raises ConfigError with what the front end found wrong with the tokenizer or the template."""
    match front_end.inbox.get():
        case FrontEndReady():
            return
        case FrontEndFailed(message=message):
            raise ConfigError(message)
        case None:
            raise EngineDeadError("the HTTP process ended while it was starting")
        case other:
            raise TypeError(f"unexpected message {type(other).__name__}")


def serve(config: EngineConfig, ranks: Ranks) -> None:
    """Serves until a signal says stop. Of several ranks, rank 0 does; the others follow until then.

    Raises:
        GlintError: it could not be started or cannot go on.
        StopSignal: stopped before it was ready.
        Followed: this is another rank than 0.
    """
    if ranks.rank != 0:
        for number in STOPPING:  # rank 0 drains, then it says when it is over
            signal.signal(number, signal.SIG_IGN)
        build_engine(config, ranks=ranks)
    service: Service | None = None

    def on_signal(number: int, frame: FrameType | None) -> None:
        if service is None:
            raise StopSignal(signal.Signals(number))
        service.request_stop()

    for number in STOPPING:
        signal.signal(number, on_signal)
    started = time.perf_counter()
    try:
        listener = listen(config.host, config.port)
    except ConfigError as error:
        if ranks.size > 1:
            build_engine(config, ranks=ranks, problems=(str(error),))  # which says it with what else is wrong
        raise
    url = f"http://{config.host}:{listener.getsockname()[1]}"
    front_end = FrontEnd(config, listener)
    if ranks.watch is not None:
        ranks.watch.tell = front_end.say_dead
    try:
        with ranks.guard():
            built = build_engine(config, ranks=ranks)
            source = built.source
            front_end.send(Loaded(built.info, source.kind, str(source.path), config.chat_template))
            wait_until_front_end_is_ready(front_end)
            service = Service(built, front_end, config.shutdown_grace_s)
            logger.info("ready after %.1f s: %s serves %s", time.perf_counter() - started, url, built.info.names[0])
            service.run()
        front_end.send(Stop())
        front_end.close()
    except EngineDeadError as error:
        front_end.say_dead(str(error))
        time.sleep(LINGER_S)
        raise
    finally:
        front_end.kill()


def main(argv: list[str]) -> int:
    """Returns the exit code: 0 after a stop, 1 after an error, 128 + the signal if stopped before ready."""
    try:
        environment = read_environment(os.environ)
        rank = launched_rank(os.environ)
        level = (
            "WARNING" if rank and environment.log_level == "INFO" else environment.log_level
        )  # rank 0 says it for all
        set_up_logging(f"rank {rank}", level)
        ranks = join_ranks(os.environ)
        config = _parse(argv, ranks)
        num_ranks = (config.tensor_parallel_size or 1) * (config.pipeline_parallel_size or 1)
        if ranks.size == 1 and num_ranks > 1:
            relaunch(num_ranks, ["-m", "engine.serve", *argv])
        serve(replace(config, api_key=config.api_key or environment.api_key), ranks)
    except StopSignal as stop:
        number = stop.args[0]
        print(f"engine.serve: stopped by {number.name} before it was ready", file=sys.stderr)
        return 128 + int(number)
    except GlintError as error:
        if launched_rank(os.environ) == 0:
            print(f"engine.serve: {error}", file=sys.stderr)
        return 1
    return 0


def _parse(argv: list[str], ranks: Ranks) -> EngineConfig:
    """The config, on all ranks; --help and problems are printed by rank 0 alone."""
    config, problems = None, []
    with contextlib.redirect_stdout(sys.stdout if ranks.rank == 0 else io.StringIO()):
        try:
            config = parse_args(argv)
        except ConfigError as error:
            problems.append(str(error))
    ranks.agree(problems, "reading the flags")
    assert config is not None, "or there was a problem"
    return config


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
