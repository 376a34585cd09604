"""Load on a running server at fixed rates: time to first token, time per output token, throughput.

Arrivals are Poisson from a seed, prompts are random token ids, outputs have a fixed length, so a report can be run
again from itself (--again FILE).
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import random
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from engine.bench.arguments import report_file
from engine.bench.http_client import Reply, get, post
from engine.errors import ConfigError

FIELDS = ("url", "rates", "requests", "input_tokens", "output_tokens", "seed")


@dataclass(frozen=True, slots=True)
class Row:
    """One rate. Times in milliseconds; the rates are requests and output tokens a second."""

    rate: float
    completed: int
    failed: int
    ttft_mean: float
    ttft_p95: float
    tpot_mean: float
    tpot_p95: float
    requests_per_s: float
    output_tokens_per_s: float


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--rates", type=_rates, default=(0.5, 1.0), help="requests a second, such as 0.25,0.5,1")
    parser.add_argument("--requests", type=int, default=16, help="at each rate")
    parser.add_argument("--input-tokens", type=int, default=128)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--api-key", default="")
    parser.add_argument("--json", type=report_file, help="file for the report")
    parser.add_argument("--again", metavar="FILE", help="take everything but the url from an earlier report")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    """Prints a table and writes the report."""
    if arguments.again:
        _take_settings(arguments, Path(arguments.again))
    rows, model = asyncio.run(_measure(arguments))
    print("  rate  done fail   TTFT mean / P95 ms    TPOT mean / P95 ms   req/s  out tok/s")
    for row in rows:
        print(
            f"{row.rate:6.2f} {row.completed:5d} {row.failed:4d} {row.ttft_mean:10.0f} {row.ttft_p95:9.0f} "
            f"{row.tpot_mean:12.1f} {row.tpot_p95:9.1f} {row.requests_per_s:9.2f} {row.output_tokens_per_s:9.1f}"
        )
    if arguments.json:
        report = {
            "settings": {name: getattr(arguments, name) for name in FIELDS},
            "model": model,
            "python": platform.python_version(),
            "machine": platform.machine(),
            "date": time.strftime("%Y-%m-%d"),
            "rows": [asdict(row) for row in rows],
        }
        Path(arguments.json).write_text(json.dumps(report, indent=1) + "\n")


def _take_settings(arguments: argparse.Namespace, file: Path) -> None:
    try:
        settings = json.loads(file.read_text())["settings"]
        for name in FIELDS[1:]:
            setattr(arguments, name, settings[name])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError(f"--again {file}: is no report of this command ({error})") from error


async def _measure(arguments: argparse.Namespace) -> tuple[list[Row], dict[str, Any]]:
    try:
        model = json.loads(await get(arguments.url, "/v1/models"))["data"][0]
    except OSError as error:
        raise ConfigError(f"--url {arguments.url}: no server answers there ({error})") from error
    return [await _at_rate(arguments, rate) for rate in arguments.rates], model


async def _at_rate(arguments: argparse.Namespace, rate: float) -> Row:
    rng = random.Random(f"{arguments.seed} {rate}")
    tasks = []
    started = time.monotonic()
    for _ in range(arguments.requests):
        body = {
            "prompt": [rng.randrange(3, 1000) for _ in range(arguments.input_tokens)],
            "max_tokens": arguments.output_tokens,
            "ignore_eos": True,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        tasks.append(asyncio.create_task(post(arguments.url, "/v1/completions", body, arguments.api_key)))
        await asyncio.sleep(rng.expovariate(rate))
    replies = await asyncio.gather(*tasks, return_exceptions=True)
    seconds = time.monotonic() - started
    good = [reply for reply in replies if isinstance(reply, Reply) and reply.status == 200]
    return _row(rate, good, len(replies) - len(good), seconds)


def _row(rate: float, replies: Sequence[Reply], failed: int, seconds: float) -> Row:
    first = sorted((reply.chunk_times[0] - reply.started) * 1e3 for reply in replies)
    between = sorted(
        # the last event holds the usage and no token
        (reply.chunk_times[-2] - reply.chunk_times[0]) * 1e3 / max(1, reply.num_output_tokens - 1)
        for reply in replies
    )
    tokens = sum(reply.num_output_tokens for reply in replies)
    return Row(
        rate,
        len(replies),
        failed,
        *_mean_p95(first),
        *_mean_p95(between),
        len(replies) / seconds,
        tokens / seconds,
    )


def _mean_p95(ordered: Sequence[float]) -> tuple[float, float]:
    if not ordered:
        return float("nan"), float("nan")
    return sum(ordered) / len(ordered), ordered[min(len(ordered) - 1, int(0.95 * len(ordered)))]


def _rates(text: str) -> tuple[float, ...]:
    return tuple(float(part) for part in text.split(","))
