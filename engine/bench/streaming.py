"""What streaming clients cost the engine: the mean step with N open streams against N plain requests.

Starts a server of its own. Both kinds of clients ask for the same tokens, in turns; steps are timed by the engine.
The clients run on the same machine, so what they take themselves is part of the difference.
"""

from __future__ import annotations

import argparse
import asyncio
import re
import statistics
import subprocess
import sys

from engine.bench.http_client import metrics, post
from engine.errors import EngineDeadError

PROMPT_TOKENS = 16
START_S = 300


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model", default="starter")
    parser.add_argument("--clients", type=int, default=64)
    parser.add_argument("--tokens", type=int, default=48, help="output tokens of each request")
    parser.add_argument("--rounds", type=int, default=4, help="of both kinds, in turns")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Prints the comparison."""
    command = [sys.executable, "-m", "engine.serve", "--model", arguments.model, "--port", "0"]
    command += ["--max-num-seqs", str(arguments.clients)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            url = _wait_until_ready(process)
            plain, streamed = asyncio.run(_measure(url, arguments))
        finally:
            process.terminate()
    print(
        f"{arguments.clients} clients, {arguments.tokens} tokens each: mean step {plain:.1f} ms with plain requests, "
        f"{streamed:.1f} ms with streams: {streamed / plain - 1:+.1%}"
    )


def _wait_until_ready(process: subprocess.Popen[str]) -> str:
    assert process.stderr is not None
    for line in process.stderr:
        found = re.search(r"ready after .*?: (http:\S+) serves", line)
        if found:
            return found.group(1)
    raise EngineDeadError("the server ended before it was ready")


async def _measure(url: str, arguments: argparse.Namespace) -> tuple[float, float]:
    """Median over the rounds of the mean step in milliseconds, plain and streamed."""
    times: dict[bool, list[float]] = {False: [], True: []}
    await _round(url, arguments, stream=False, seed=0)  # warms everything up
    for number in range(arguments.rounds):
        for stream in (False, True):
            times[stream].append(await _round(url, arguments, stream, 1 + 2 * number + stream))
    return statistics.median(times[False]), statistics.median(times[True])


async def _round(url: str, arguments: argparse.Namespace, stream: bool, seed: int) -> float:
    steps, seconds = await _counters(url)
    bodies = [
        {
            "prompt": [3 + (seed * 7919 + client * 31 + place) % 1000 for place in range(PROMPT_TOKENS)],
            "max_tokens": arguments.tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": stream,
        }
        for client in range(arguments.clients)
    ]
    await asyncio.gather(*(post(url, "/v1/completions", body) for body in bodies))
    await asyncio.sleep(0.2)  # the last step's numbers may still be on their way
    steps_after, seconds_after = await _counters(url)
    return (seconds_after - seconds) / (steps_after - steps) * 1e3


async def _counters(url: str) -> tuple[float, float]:
    found = await metrics(url)
    return found["engine_steps_total"], found["engine_step_seconds_total"]
