"""What a load test asked for and what came of it: a file that says enough to run the same load again from it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from engine.errors import ConfigError

Above0 = Annotated[float, Meta(gt=0)]
From0 = Annotated[float, Meta(ge=0)]
From1 = Annotated[int, Meta(ge=1)]
FIRST_ID = 3  # of prompts: those below are often special

HEAD = "  rate  done fail   TTFT mean / P95 ms    TPOT mean / P95 ms   req/s  out tok/s"


@dataclass(frozen=True, slots=True)
class Settings:
    """What is asked of a server; the same settings make the same arrivals and prompts."""

    rates: Annotated[tuple[Above0, ...], Meta(min_length=1)]  # requests a second
    requests: From1  # at each rate
    input_tokens: From1
    output_tokens: From1
    vocab_size: Annotated[int, Meta(gt=FIRST_ID)]  # token ids of prompts are below this
    seed: int
    most_ttft_s: Above0  # P95, of a rate that counts as served
    most_tpot_ms: Above0


DEFAULTS = Settings((0.5, 1.0), 16, 128, 32, 1000, 0, 4.0, 50.0)


@dataclass(frozen=True, slots=True)
class Row:
    """One rate. Times in milliseconds, None where no request shows them; arrivals in seconds since the first one."""

    rate: Above0
    completed: int
    failed: int
    ttft_mean: float | None
    ttft_p95: float | None
    tpot_mean: float | None
    tpot_p95: float | None
    requests_per_s: float
    output_tokens_per_s: float
    latest_ms: float  # how late a request was sent at most, behind its arrival
    reasons: dict[str, int]  # why requests failed, and how often
    arrivals: tuple[From0, ...]


@dataclass(frozen=True, slots=True)
class Report:
    """The file."""

    kind: Literal["engine.bench serve"]
    date: str
    settings: Settings
    highest_rate: float | None  # that was served within the limits
    rows: tuple[Row, ...]
    url: str
    model: dict[str, Any]  # as GET /v1/models has it
    server: dict[str, Any]  # as GET /version has it: versions, device, driver, split, flags
    client: dict[str, Any]  # versions and machine of this side


def poisson_arrivals(settings: Settings, rate: float) -> tuple[float, ...]:
    """[requests] seconds: exponential gaps of mean 1 / rate, the first request at 0."""
    rng = random.Random(f"arrivals {settings.seed} {rate}")
    times = [0.0]
    for _ in range(settings.requests - 1):
        times.append(round(times[-1] + rng.expovariate(rate), 6))
    return tuple(times)


def prompts(settings: Settings, rate: float) -> list[list[int]]:
    """[requests][input_tokens] random token ids."""
    rng = random.Random(f"prompts {settings.seed} {rate}")
    return [
        [rng.randrange(FIRST_ID, settings.vocab_size) for _ in range(settings.input_tokens)]
        for _ in range(settings.requests)
    ]


def read_report(file: Path) -> Report:
    """Raises ConfigError: the file cannot be read, or is no report of this command."""
    try:
        report = msgspec.json.decode(file.read_bytes(), type=Report)
    except OSError as error:
        raise ConfigError(f"--again {file} cannot be read: {error.strerror}") from error
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"--again {file}: is no report of engine.bench serve ({error})") from error
    settings = report.settings
    rates = tuple(row.rate for row in report.rows)
    if rates != settings.rates or {len(row.arrivals) for row in report.rows} != {settings.requests}:
        raise ConfigError(
            f"--again {file}: its rows are not those of its settings, {settings.requests} arrivals a rate"
        )
    return report


def percentile(ordered: Sequence[float], percent: int) -> float:
    """The least of these numbers that so many percent of them do not exceed (nearest rank); ordered: upwards."""
    return ordered[max(0, -(-percent * len(ordered) // 100) - 1)]


def mean_and_p95(values: Sequence[float]) -> tuple[float, float] | tuple[None, None]:
    """Of what there is; None of nothing."""
    return (sum(values) / len(values), percentile(sorted(values), 95)) if values else (None, None)


def highest_rate(rows: Sequence[Row], settings: Settings) -> float | None:
    """The highest rate at which nothing failed and the 95th percentiles are within the limits; None: there is none."""
    return max((row.rate for row in rows if _is_served(row, settings)), default=None)


def _is_served(row: Row, settings: Settings) -> bool:
    ttft_s = float("inf") if row.ttft_p95 is None else row.ttft_p95 / 1e3
    tpot_ms = row.tpot_p95 or 0.0  # an answer of one token has none
    return not row.failed and ttft_s <= settings.most_ttft_s and tpot_ms <= settings.most_tpot_ms


def row_text(row: Row) -> str:
    """A line of the table, and one for each reason why requests failed."""
    ttft, ttft_p95, tpot, tpot_p95 = (
        "-" if ms is None else f"{ms:.{digits}f}"
        for ms, digits in ((row.ttft_mean, 0), (row.ttft_p95, 0), (row.tpot_mean, 1), (row.tpot_p95, 1))
    )
    line = (
        f"{row.rate:6.2f} {row.completed:5d} {row.failed:4d} {ttft:>10} {ttft_p95:>9} {tpot:>12} {tpot_p95:>9} "
        f"{row.requests_per_s:9.2f} {row.output_tokens_per_s:9.1f}"
    )
    return "\n".join([line, *(f"       {count} failed: {reason}" for reason, count in row.reasons.items())])


def verdict(report: Report) -> str:
    """The last line."""
    settings, rate = report.settings, report.highest_rate
    found = "none of these" if rate is None else f"{rate:g} requests a second"
    limits = f"TTFT P95 ≤ {settings.most_ttft_s:g} s and TPOT P95 ≤ {settings.most_tpot_ms:g} ms"
    return f"highest rate with {limits}: {found}"


def as_json(report: Report) -> bytes:
    """One field a line."""
    return msgspec.json.format(msgspec.json.encode(report), indent=1) + b"\n"
