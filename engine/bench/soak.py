"""Many clients on a running server: random lengths, seeds, streams, choices and stops, and some of them leave.

First a set of greedy requests is answered one by one, alone, and once more: to the last bit the same. Then, while the
crowd is there, each of them must get the answer that it got alone: logprobs within the tolerance, and ids equal but for
a place where the two best of the quiet run are closer than that. In the end nothing may be left: no request, no KV
block, no memory of the GPU; no step and no request may have failed.

Requests whose next draw depends on their text make steps wait for each other (logprobs, penalties), so they come in
every other phase only: the phases between are of steps that overlap.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import shutil
import subprocess
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from engine.bench.answers import Answer, compare, read_answers
from engine.bench.arguments import report_file
from engine.bench.http_client import Reply, get, metrics, post
from engine.errors import ConfigError, RequestFailedError

Body = dict[str, Any]

PHASE_S = 5.0  # of requests that let steps overlap, then as long of all kinds
QUIET_KINDS = {"greedy": 6, "stopped": 1, "sampled": 3}  # how often
INFORMED_KINDS = {"greedy": 3, "stopped": 1, "sampled": 2, "logprobs": 2, "penalised": 2, "scored": 1}
ANSWER_S = 300.0  # a request that takes longer hangs
IDLE_S = 15.0  # for a server that nobody asks anything any more to let go of everything
MAX_LISTED = 20  # failures in a report
GAUGES = ("num_requests_running", "num_requests_waiting", "kv_blocks_used")
COUNTERS = {  # of the server; what must stay 0 is True
    "failed_steps_total": True,
    "bad_logits_rows_total": True,
    "late_allocations_total": True,
    'request_success_total{finished_reason="error"}': True,
    "preemptions_total": False,
    "prefix_cache_hits_total": False,
    "engine_steps_total": False,
    "generation_tokens_total": False,
}


@dataclass(slots=True)
class Report:
    """What was seen. failures is what should not have been; empty: passed."""

    settings: dict[str, Any]
    completed: dict[str, int] = field(default_factory=dict)  # requests by kind
    left: int = 0  # clients that did not wait for their answer
    compared_answers: int = 0
    compared_tokens: int = 0
    near_ties: int = 0  # answers that went on differently from a near tie
    largest_gap: float = 0.0  # between the two best where an answer went on differently
    compared_logprobs: int = 0
    rms_logprob_difference: float = 0.0
    worst_logprob_difference: float = 0.0
    counters: dict[str, float] = field(default_factory=dict)
    gpu_bytes: tuple[int, int] | None = None  # in use on the machine's GPUs, before and after; None: there are none
    num_failures: int = 0
    failures: list[str] = field(default_factory=list)

    def fail(self, message: str) -> None:
        self.num_failures += 1
        if len(self.failures) < MAX_LISTED:
            self.failures.append(message)


@dataclass(frozen=True, slots=True)
class Known:
    """A greedy request and what it was answered alone."""

    prompt: list[int]
    max_tokens: int
    answer: Answer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--url", default="http://127.0.0.1:8000")
    parser.add_argument("--clients", type=int, default=256)
    parser.add_argument("--seconds", type=float, default=120.0, help="how long clients go on asking")
    parser.add_argument("--known", type=int, default=32, help="greedy requests that are first answered alone")
    parser.add_argument("--prompt-tokens", type=int, default=512, help="at most; lengths are random")
    parser.add_argument("--output-tokens", type=int, default=128, help="at most")
    parser.add_argument("--vocab-size", type=int, default=1000, help="token ids of prompts are below this")
    parser.add_argument("--leave", type=float, default=0.15, help="share of clients that leave before their answer")
    parser.add_argument(
        "--tolerance", type=float, default=0.05, help="of logprobs: 0.05 for bfloat16 and float16, 1e-4 for float32"
    )
    parser.add_argument("--preemptions", type=int, default=0, help="fail with fewer; few KV blocks make them happen")
    parser.add_argument(
        "--gpu-growth-mb", type=float, default=0.0, help="fail if the GPU's memory in use grows by more"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--api-key", default="")
    parser.add_argument("--json", type=report_file, help="file for the report")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> int:
    """Prints and writes the report; 1 where something failed."""
    report = asyncio.run(Soak(arguments).run())
    for name, value in asdict(report).items():
        if name not in ("settings", "failures"):
            print(f"{name}: {value}")
    for failure in report.failures:
        print(f"FAILED: {failure}")
    if arguments.json:
        Path(arguments.json).write_text(json.dumps(asdict(report), indent=1) + "\n", encoding="utf-8")
    return int(report.num_failures > 0)


class Soak:
    """One run against one server."""

    def __init__(self, arguments: argparse.Namespace) -> None:
        settings = {name: value for name, value in vars(arguments).items() if name not in ("run", "api_key", "command")}
        self._asked = arguments
        self._report = Report(settings)
        self._rng = random.Random(arguments.seed)
        self._known: list[Known] = []
        self._began = 0.0
        self._squares = 0.0  # sum of those of logprob differences

    async def run(self) -> Report:
        """Quiet answers, the crowd, and what it left behind."""
        asked, report = self._asked, self._report
        try:
            await get(asked.url, "/health")
        except OSError as error:
            raise ConfigError(f"--url {asked.url}: no server answers there ({error})") from error
        shared = self._tokens(asked.prompt_tokens)
        self._known = [await self._ask_alone(shared) for _ in range(asked.known)]
        counters, gpu_bytes = await metrics(asked.url, asked.api_key), gpu_bytes_used()
        self._began = time.monotonic()
        await asyncio.gather(*(self._client(number) for number in range(asked.clients)))
        await self._check_idle()
        report.rms_logprob_difference = (self._squares / max(1, report.compared_logprobs)) ** 0.5
        after, gpu_bytes_after = await metrics(asked.url, asked.api_key), gpu_bytes_used()
        for name, must_stay in COUNTERS.items():
            report.counters[name] = after[name] - counters[name]
            if must_stay and report.counters[name]:
                report.fail(f"{name} grew by {report.counters[name]:g}")
        if report.counters["preemptions_total"] < asked.preemptions:
            report.fail(f"{report.counters['preemptions_total']:g} preemptions, wanted {asked.preemptions}")
        if gpu_bytes is not None and gpu_bytes_after is not None:
            report.gpu_bytes = (gpu_bytes, gpu_bytes_after)
            if gpu_bytes_after - gpu_bytes > asked.gpu_growth_mb * 1e6:
                report.fail(f"GPU memory in use grew by {(gpu_bytes_after - gpu_bytes) / 1e6:,.0f} MB")
        return report

    async def _ask_alone(self, shared: list[int]) -> Known:
        """Half of the prompts begin alike, so that the prefix cache has something to find."""
        asked, rng = self._asked, self._rng
        length = rng.randint(1, asked.prompt_tokens)
        prompt = self._tokens(length)
        if rng.random() < 0.5:
            common = rng.randint(0, length)
            prompt[:common] = shared[:common]
        max_tokens = rng.randint(1, asked.output_tokens)
        body = {**self._greedy(prompt, max_tokens), "logprobs": 2}
        found = [read_answers(await self._post(body | {"cache_salt": salt}), 1)[0] for salt in ("first", "second")]
        if found[0] != found[1]:
            self._report.fail(f"a prompt of {length} tokens, alone: a second run differs from the first")
        return Known(prompt, max_tokens, found[0])

    async def _client(self, number: int) -> None:
        """Asks one request after another until the time is over."""
        asked, report = self._asked, self._report
        rng = random.Random(f"{asked.seed} {number}")
        while time.monotonic() < self._began + asked.seconds:
            calm = (time.monotonic() - self._began) // min(PHASE_S, asked.seconds / 4) % 2 == 0
            kinds = QUIET_KINDS if calm else INFORMED_KINDS
            (kind,) = rng.choices(list(kinds), list(kinds.values()))
            known = rng.choice(self._known)
            body = {**self._body(kind, known, rng), "stream": rng.random() < 0.5 and kind != "scored"}
            leaves = rng.random() < asked.leave
            try:
                reply = await asyncio.wait_for(self._post(body), rng.uniform(0, 2) if leaves else ANSWER_S)
                self._check(kind, known, body, read_answers(reply, body.get("n", 1)))
                report.completed[kind] = report.completed.get(kind, 0) + 1
            except TimeoutError:
                report.left += 1
                if not leaves:
                    report.fail(f"client {number}, {kind}: no answer in {ANSWER_S:g} s")
            except (OSError, EOFError, ValueError, LookupError, RequestFailedError) as error:
                report.fail(f"client {number}, {kind}: {error!r}")

    def _body(self, kind: str, known: Known, rng: random.Random) -> Body:
        body = self._greedy(known.prompt, known.max_tokens)
        if rng.random() < 0.3:  # finds nothing in the prefix cache
            body["cache_salt"] = f"salt {rng.random()}"
        match kind:
            case "logprobs":
                body["logprobs"] = 2
            case "stopped":  # by an id that the quiet answer has
                body["stop_token_ids"] = [rng.choice(known.answer.token_ids)]
            case "scored":
                body |= {"prompt_logprobs": 1, "max_tokens": 1}
            case "sampled" | "penalised":
                body |= {"temperature": rng.uniform(0.2, 1.5), "seed": rng.randrange(1000), "n": rng.randint(1, 3)}
                body |= {
                    "top_p": rng.choice([1.0, 0.9]),
                    "top_k": rng.choice([0, 40]),
                    "min_p": rng.choice([0.0, 0.05]),
                }
                body |= {"max_tokens": rng.randint(1, self._asked.output_tokens)}
                if kind == "penalised":
                    body |= {"presence_penalty": 0.5, "frequency_penalty": 0.2, "repetition_penalty": 1.1}
        return body

    def _check(self, kind: str, known: Known, body: Body, answers: list[Answer]) -> None:
        """Raises RequestFailedError for an answer that is not what was asked for."""
        asked, report = self._asked, self._report
        for answer in answers:
            if answer.finish_reason not in ("stop", "length") or not 0 < len(answer.token_ids) <= body["max_tokens"]:
                raise RequestFailedError(
                    f"{len(answer.token_ids)} of {body['max_tokens']} tokens, {answer.finish_reason}"
                )
        if kind in ("sampled", "penalised"):
            if any(len(answer.token_ids) != body["max_tokens"] for answer in answers):
                raise RequestFailedError(f"not all of {body['max_tokens']} tokens came")
            return
        if kind == "scored" and answers[0].num_prompt_logprobs != len(known.prompt):
            raise RequestFailedError(f"{answers[0].num_prompt_logprobs} prompt logprobs of {len(known.prompt)}")
        found = compare(known.answer.until(body["max_tokens"], body.get("stop_token_ids", [])), answers[0])
        report.compared_answers += 1
        report.compared_tokens += found.num_equal
        report.near_ties += found.gap is not None
        report.largest_gap = max(report.largest_gap, found.gap or 0.0)
        report.compared_logprobs += len(found.differences)
        self._squares += sum(difference**2 for difference in found.differences)
        worst = max(found.differences, default=0.0)
        report.worst_logprob_difference = max(report.worst_logprob_difference, worst)
        if worst > asked.tolerance:
            raise RequestFailedError(f"logprobs differ by {worst:.4f}, tolerance {asked.tolerance}")
        if found.gap is not None and found.gap >= asked.tolerance:
            message = f"another token than alone at {found.num_equal}, where the two best are {found.gap:.4f} apart"
            raise RequestFailedError(message)

    async def _check_idle(self) -> None:
        deadline = time.monotonic() + IDLE_S
        while time.monotonic() < deadline:
            found = await metrics(self._asked.url, self._asked.api_key)
            if not any(found[name] for name in GAUGES):
                return
            await asyncio.sleep(0.1)
        self._report.fail("the server did not become idle: " + ", ".join(f"{name} {found[name]:g}" for name in GAUGES))

    def _greedy(self, prompt: list[int], max_tokens: int) -> Body:
        return {
            "prompt": prompt,
            "max_tokens": max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "return_token_ids": True,
        }

    def _tokens(self, count: int) -> list[int]:
        return [self._rng.randrange(3, self._asked.vocab_size) for _ in range(count)]

    async def _post(self, body: Body) -> Reply:
        reply = await post(self._asked.url, "/v1/completions", body, self._asked.api_key)
        if reply.status != 200:
            raise RequestFailedError(f"answered {reply.status}: {reply.body[:300]!r}")
        return reply


def gpu_bytes_used() -> int | None:
    """Memory in use on all GPUs of this machine, of all processes; None where there is no nvidia-smi."""
    if shutil.which("nvidia-smi") is None:
        return None
    command = ["nvidia-smi", "--query-gpu=memory.used", "--format=csv,noheader,nounits"]
    found = subprocess.run(command, capture_output=True, text=True, check=False)
    return sum(int(line) for line in found.stdout.split()) << 20 if found.returncode == 0 else None
