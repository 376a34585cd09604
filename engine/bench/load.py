"""Load on a running server at fixed rates: time to first token, time per output token, throughput.

Arrivals are Poisson from a seed, prompts are random token ids, outputs have a fixed length. The report holds them, and
what the server says of itself (versions, device, driver, flags), so it can be run again from itself (--again FILE).
Each run has a cache salt of its own: no prompt is found in the cache because an earlier run has sent it.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import platform
import secrets
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from engine.bench.arguments import above_zero, above_zero_list, http_url, positive, report_file
from engine.bench.http_client import Reply, get, post
from engine.bench.load_picture import picture
from engine.bench.load_report import (
    DEFAULTS,
    HEAD,
    Report,
    Row,
    Settings,
    as_json,
    highest_rate,
    mean_and_p95,
    poisson_arrivals,
    prompts,
    read_report,
    row_text,
    verdict,
)
from engine.errors import ConfigError, RequestFailedError
from engine.system import usable_cores, versions

MAX_REASONS = 8  # of failures at one rate that are listed
MAX_REASON = 200  # characters


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", type=http_url, default="http://127.0.0.1:8000")
    parser.add_argument("--rates", type=above_zero_list, help="requests a second, such as 0.25,0.5,1 (0.5,1)")
    parser.add_argument("--requests", type=positive, help="at each rate (16)")
    parser.add_argument("--input-tokens", type=positive, help="(128)")
    parser.add_argument("--output-tokens", type=positive, help="(32)")
    parser.add_argument("--vocab-size", type=positive, help="token ids of prompts are from 3 on and below this (1000)")
    parser.add_argument("--seed", type=int, help="of arrivals and prompts (0)")
    parser.add_argument("--most-ttft-s", type=above_zero, help="limit of the P95 of the time to first token (4)")
    parser.add_argument("--most-tpot-ms", type=above_zero, help="limit of the P95 of the time per output token (50)")
    parser.add_argument("--timeout-s", type=above_zero, default=600.0, help="a request that takes longer has failed")
    parser.add_argument("--api-key", default="")
    parser.add_argument("--json", type=report_file, help="file for the report")
    parser.add_argument("--svg", type=report_file, help="file for its picture: TTFT and TPOT by rate")
    parser.add_argument(
        "--again", metavar="FILE", type=Path, help="take lengths, arrivals, seed and limits from an earlier report"
    )
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints a table, writes the report and the picture; 1 where no request at all was answered."""
    settings, arrivals = _load(arguments)
    report = asyncio.run(_measure(arguments, settings, arrivals))
    print(verdict(report))
    if arguments.json:
        Path(arguments.json).write_bytes(as_json(report))
    if arguments.svg:
        Path(arguments.svg).write_text(picture(report), encoding="utf-8")
    return int(not any(row.completed for row in report.rows))


def _load(arguments: argparse.Namespace) -> tuple[Settings, list[tuple[float, ...]]]:
    """What to ask, and when at each rate."""
    given = {field.name: getattr(arguments, field.name) for field in fields(Settings)}
    given = {name: value for name, value in given.items() if value is not None}
    if arguments.again is not None:
        if given:
            flags = ", ".join(f"--{name.replace('_', '-')}" for name in given)
            raise ConfigError(f"--again {arguments.again} says what to ask: leave out {flags}")
        earlier = read_report(arguments.again)
        return earlier.settings, [row.arrivals for row in earlier.rows]
    settings = replace(DEFAULTS, **given)
    if settings.vocab_size < 4:
        raise ConfigError(f"--vocab-size {settings.vocab_size}: token ids of prompts begin with 3; use 4 or more")
    return settings, [poisson_arrivals(settings, rate) for rate in settings.rates]


async def _measure(arguments: argparse.Namespace, settings: Settings, arrivals: Sequence[tuple[float, ...]]) -> Report:
    url, api_key = arguments.url, arguments.api_key
    model = await _model(url, api_key)
    longest = model.get("max_model_len") or settings.input_tokens + settings.output_tokens
    if settings.input_tokens + settings.output_tokens > longest:
        raise ConfigError(
            f"--input-tokens {settings.input_tokens} and --output-tokens {settings.output_tokens}: are more together "
            f"than the model's {longest} tokens"
        )
    try:
        server = json.loads(await get(url, "/version", api_key))
    except RequestFailedError:  # a server of another make
        server = {}
    print(HEAD)
    rows = []
    for rate, times in zip(settings.rates, arrivals, strict=True):
        rows.append(await _at_rate(arguments, settings, rate, times, model["id"]))
        print(row_text(rows[-1]), flush=True)
    return Report(
        kind="engine.bench serve",
        date=time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
        settings=settings,
        highest_rate=highest_rate(rows, settings),
        rows=tuple(rows),
        url=url,
        model=model,
        server=server,
        client={"versions": versions(), "machine": platform.machine(), "cores": usable_cores()},
    )


async def _model(url: str, api_key: str) -> dict[str, Any]:
    try:
        model: dict[str, Any] = json.loads(await get(url, "/v1/models", api_key))["data"][0]
        return model | {"id": model["id"]}
    except (OSError, EOFError) as error:
        raise ConfigError(f"--url {url}: no server answers there ({error})") from error
    except (ValueError, KeyError, IndexError, TypeError) as error:
        raise ConfigError(f"--url {url}: what answers /v1/models there is no OpenAI server") from error


async def _at_rate(
    arguments: argparse.Namespace, settings: Settings, rate: float, arrivals: tuple[float, ...], model: str
) -> Row:
    common = {
        "model": model,
        "max_tokens": settings.output_tokens,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
        "cache_salt": secrets.token_hex(8),
    }
    bodies = [{"prompt": prompt, **common} for prompt in prompts(settings, rate)]
    tasks, latest = [], 0.0
    started = time.monotonic()
    for arrival, body in zip(arrivals, bodies, strict=True):
        await asyncio.sleep(max(0.0, started + arrival - time.monotonic()))
        latest = max(latest, time.monotonic() - started - arrival)
        tasks.append(asyncio.create_task(_send(arguments.url, body, arguments.api_key, arguments.timeout_s)))
    answers = await asyncio.gather(*tasks)
    return _row(rate, answers, time.monotonic() - started, latest, arrivals)


async def _send(url: str, body: Mapping[str, Any], api_key: str, timeout_s: float) -> Reply | str:
    """The answer, or why it is none."""
    wanted = body["max_tokens"]
    try:
        async with asyncio.timeout(timeout_s):
            reply = await post(url, "/v1/completions", body, api_key)
    except TimeoutError:
        return f"no answer within {timeout_s:g} s"
    except (OSError, EOFError, ValueError, RequestFailedError) as error:
        return f"{type(error).__name__}: {error}"[:MAX_REASON]
    if reply.status != 200:
        return f"answered {reply.status}: {reply.body.decode(errors='replace')}"[:MAX_REASON]
    if reply.num_output_tokens != wanted or len(reply.chunk_times) < 2:
        return f"answered with {reply.num_output_tokens} tokens, {wanted} were asked for"
    return reply


def _row(
    rate: float, answers: Sequence[Reply | str], seconds: float, latest: float, arrivals: tuple[float, ...]
) -> Row:
    replies = [answer for answer in answers if isinstance(answer, Reply)]
    reasons = Counter(answer for answer in answers if isinstance(answer, str))
    first = [(reply.chunk_times[0] - reply.started) * 1e3 for reply in replies]
    between = [
        # the last event holds the usage and no token
        (reply.chunk_times[-2] - reply.chunk_times[0]) * 1e3 / (reply.num_output_tokens - 1)
        for reply in replies
        if reply.num_output_tokens > 1
    ]
    ttft_mean, ttft_p95 = mean_and_p95(first)
    tpot_mean, tpot_p95 = mean_and_p95(between)
    return Row(
        rate=rate,
        completed=len(replies),
        failed=len(answers) - len(replies),
        ttft_mean=ttft_mean,
        ttft_p95=ttft_p95,
        tpot_mean=tpot_mean,
        tpot_p95=tpot_p95,
        requests_per_s=len(replies) / seconds,
        output_tokens_per_s=sum(reply.num_output_tokens for reply in replies) / seconds,
        latest_ms=latest * 1e3,
        reasons=dict(reasons.most_common(MAX_REASONS)),
        arrivals=arrivals,
    )
