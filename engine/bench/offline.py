"""Decode and prefill of a model in this process, against the memory limit of this machine and, if asked, a peer."""

from __future__ import annotations

import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass

import numpy as np

from engine.api import GenerationRequest, SamplingParams
from engine.bench.memory_limit import read_gb_per_s
from engine.build import BuiltEngine, build_engine
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.system import usable_cores

PROMPT_TOKENS = 32
PEER = "conformance.peers.transformers_decode"


@dataclass(frozen=True, slots=True)
class Decode:
    """Milliseconds a decode step at one batch size, and what reading every weight once would take."""

    batch: int
    median_ms: float
    min_ms: float
    limit_ms: float

    @property
    def share_of_limit(self) -> float:
        return self.limit_ms / self.median_ms


@dataclass(frozen=True, slots=True)
class Prefill:
    num_tokens: int
    milliseconds: float


@dataclass(frozen=True, slots=True)
class Report:
    model: str
    num_threads: int
    weight_mb: float
    read_gb_per_s: float
    decode: tuple[Decode, ...]
    prefill: tuple[Prefill, ...]
    peak_rss_mb: float  # of the whole process; pages of the KV pool count once they are written


def measure(config: EngineConfig, batches: Sequence[int], prefills: Sequence[int], num_steps: int) -> Report:
    """Times a model; every figure is the median over num_steps steps (decode) or 3 runs (prefill)."""
    bandwidth = read_gb_per_s(config.num_threads)
    built = build_engine(config)
    limit_ms = built.memory.weights / bandwidth / 1e6
    decode = tuple(decode_steps(built, batch, num_steps, limit_ms) for batch in batches)
    prefill = tuple(_prefill(built, num_tokens) for num_tokens in prefills)
    return Report(
        model=built.info.names[0],
        num_threads=config.num_threads or usable_cores(),
        weight_mb=built.memory.weights / 1e6,
        read_gb_per_s=bandwidth,
        decode=decode,
        prefill=prefill,
        peak_rss_mb=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6,
    )


def _prompt(built: BuiltEngine, num_tokens: int, seed: int) -> tuple[int, ...]:
    ids = np.random.default_rng(seed).integers(3, built.info.vocab_size, num_tokens)
    return tuple(ids.tolist())


def decode_steps(built: BuiltEngine, batch: int, num_steps: int, limit_ms: float) -> Decode:
    """Times decoding of so many sequences."""
    engine = built.engine
    sampling = SamplingParams(temperature=0, max_tokens=num_steps + 2, ignore_eos=True)
    for number in range(batch):
        prompt = _prompt(built, PROMPT_TOKENS, number + 1000 * batch)
        engine.add(GenerationRequest(f"decode-{batch}-{number}", prompt, sampling))
    while any(seq.num_remaining > 1 for seq in engine.scheduler.running) or engine.scheduler.waiting:
        engine.step()
    engine.step()
    times = []
    while engine.has_work:
        started = time.perf_counter()
        engine.step()
        if len(engine.scheduler.running) == batch:
            times.append((time.perf_counter() - started) * 1e3)
    return Decode(batch, statistics.median(times), min(times), limit_ms)


def _prefill(built: BuiltEngine, num_tokens: int) -> Prefill:
    engine = built.engine
    times = []
    for run in range(3):
        prompt = _prompt(built, num_tokens, 77 * num_tokens + run)
        engine.add(
            GenerationRequest(f"prefill-{num_tokens}-{run}", prompt, SamplingParams(temperature=0, max_tokens=1))
        )
        started = time.perf_counter()
        while engine.has_work:
            engine.step()
        times.append((time.perf_counter() - started) * 1e3)
    return Prefill(num_tokens, statistics.median(times))


def table(report: Report) -> str:
    """The report for people."""
    lines = [
        f"{report.model}: {report.weight_mb:,.0f} MB of weights; this machine reads {report.read_gb_per_s:.1f} GB/s",
        "decode    batch   median ms     min ms   limit ms   share of limit",
    ]
    lines += [
        f"          {row.batch:5d}  {row.median_ms:10.1f} {row.min_ms:10.1f} {row.limit_ms:10.1f}"
        f"  {row.share_of_limit:13.0%}"
        for row in report.decode
    ]
    lines += [f"prefill   {row.num_tokens:5d} tokens in {row.milliseconds:.0f} ms" for row in report.prefill]
    lines.append(f"peak memory of the process {report.peak_rss_mb:,.0f} MB")
    return "\n".join(lines)


def compare_with_transformers(
    config: EngineConfig, python: str, batches: Sequence[int], rounds: int, num_steps: int
) -> str:
    """Paired runs, one process at a time: ours, the peer's, ours, … and the ratio of the medians.

    Args:
        python: an interpreter with the `oracle` extra; the peer never enters this process.

    Raises:
        ConfigError: python cannot be run, or lacks what the peer needs.
    """
    try:
        subprocess.run([python, "-c", "import torch, transformers"], check=True, capture_output=True)
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(
            f"--against-transformers {python}: no Python with torch and transformers ({error})"
        ) from error
    threads = config.num_threads or usable_cores()
    settings = ["--model", config.model, "--steps", str(num_steps), "--threads", str(threads)]
    ours: dict[int, list[float]] = {batch: [] for batch in batches}
    theirs: dict[int, list[float]] = {batch: [] for batch in batches}
    sizes = ",".join(map(str, batches))
    for _ in range(rounds):
        command = [sys.executable, "-m", "engine.bench", "offline", *settings, "--batches", sizes]
        for row in _json_of([*command, "--prefills", "", "--json", "-"])["decode"]:
            ours[row["batch"]].append(row["median_ms"])
        for row in _json_of([python, "-m", PEER, *settings, "--batches", sizes])["decode"]:
            theirs[row["batch"]].append(row["median_ms"])
    lines = ["decode    batch    glint ms   transformers ms    ratio"]
    for batch in batches:
        mine, peer = statistics.median(ours[batch]), statistics.median(theirs[batch])
        lines.append(f"          {batch:5d}  {mine:10.1f}  {peer:16.1f}  {peer / mine:6.2f}x")
    return "\n".join(lines)


def _json_of(command: Sequence[str]) -> dict:  # type: ignore[type-arg]
    output = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return dict(json.loads(output.strip().splitlines()[-1]))


def as_json(report: Report) -> str:
    return json.dumps(asdict(report))
