"""`python -m engine.bench soak`: what it calls equal, that each fault makes it fail, and a crowd on a real server."""

from __future__ import annotations

import argparse
import asyncio
import json
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from engine.bench import soak
from engine.bench.__main__ import main
from engine.bench.answers import Answer, compare, read_answers
from engine.bench.http_client import Reply
from engine.errors import RequestFailedError
from tests.serve.crowd import LARGE, Crowd

# ---- answers


def answer(ids: list[int], logprobs: list[float], second: list[float], finish_reason: str = "length") -> Answer:
    """Greedy: the best alternative is the token itself."""
    return Answer(ids, logprobs, [[best, other] for best, other in zip(logprobs, second, strict=True)], finish_reason)


QUIET = answer([5, 6, 7], [-1.0, -2.0, -0.5], [-1.01, -4.0, -3.0])


def test_equal_answers() -> None:
    found = compare(QUIET, QUIET)
    assert (found.num_equal, found.gap, max(found.differences)) == (3, None, 0.0)
    without = compare(QUIET, Answer([5, 6, 7], finish_reason="length"))
    assert (without.num_equal, without.gap, without.differences) == (3, None, [])


def test_another_token_is_reported_with_the_gap_there() -> None:
    assert compare(QUIET, Answer([9, 1, 1], finish_reason="length")).gap == pytest.approx(0.01)
    found = compare(QUIET, Answer([5, 9, 7], finish_reason="length"))
    assert (found.num_equal, found.gap) == (1, pytest.approx(2.0))


def test_logprobs_are_compared_up_to_the_place_where_tokens_part() -> None:
    """There the two best of both: whoever of them was taken."""
    other = answer([5, 9, 7], [-1.25, -3.0, 0.0], [-1.0, -3.5, 0.0])
    assert sorted(compare(QUIET, other).differences) == pytest.approx([0.01, 0.25, 0.25, 0.5, 1.0])


def test_another_end_is_no_equal_answer() -> None:
    for other in (Answer([5, 6], finish_reason="length"), Answer([5, 6, 7], finish_reason="stop")):
        with pytest.raises(RequestFailedError, match="ended as"):
            compare(QUIET, other)


def test_until() -> None:
    assert QUIET.until(3, []) == QUIET
    assert (QUIET.until(2, []).token_ids, QUIET.until(2, []).finish_reason) == ([5, 6], "length")
    assert (QUIET.until(3, [6]).token_ids, QUIET.until(3, [6]).finish_reason) == ([5, 6], "stop")
    assert QUIET.until(1, [6]).finish_reason == "length"
    assert QUIET.until(2, [6]).finish_reason == "stop"


def choice(index: int, ids: list[int], finish_reason: str | None, logprobs: Any = None) -> dict[str, Any]:
    return {"index": index, "token_ids": ids, "finish_reason": finish_reason, "logprobs": logprobs}


def reply(*chunks: list[dict[str, Any]]) -> Reply:
    return Reply(0.0, 200, chunks=[json.dumps({"choices": choices}).encode() for choices in chunks])


def test_chunks_of_several_choices_are_joined() -> None:
    logprobs = {"token_logprobs": [-1.0], "top_logprobs": [{"a": -2.0, "b": -1.0}]}
    found = read_answers(
        reply(
            [choice(1, [3], None)],
            [choice(0, [4], None, logprobs), choice(1, [5], "stop")],
            [choice(0, [], "stop")],
            [],
        ),
        2,
    )
    assert found == [Answer([4], [-1.0], [[-1.0, -2.0]], "stop"), Answer([3, 5], [], [], "stop")]


def test_choices_without_an_end_and_behind_it() -> None:
    with pytest.raises(RequestFailedError, match=r"choices \[1\] have no end"):
        read_answers(reply([choice(0, [4], "stop")], [choice(1, [4], None)]), 2)
    with pytest.raises(RequestFailedError, match="choice 0 goes on behind its end"):
        read_answers(reply([choice(0, [4], "stop")], [choice(0, [4], None)]), 1)


# ---- a server that is made up


class Server:
    """Answers n tokens 7, 8, 9, … with two best that are 1 apart; faults by field."""

    def __init__(self) -> None:
        self.num_posts = 0
        self.crowd_token = 7
        self.crowd_logprob = -1.0
        self.status = 200
        self.finish_reason = "length"
        self.gauges = dict.fromkeys(soak.GAUGES, 0.0)
        self.grows: tuple[str, ...] = ()
        self.num_metrics = 0

    async def get(self, url: str, path: str) -> bytes:
        return b""

    async def metrics(self, url: str, api_key: str) -> dict[str, float]:
        self.num_metrics += 1
        return {**self.gauges, **{name: float(name in self.grows) * self.num_metrics for name in soak.COUNTERS}}

    async def post(self, url: str, path: str, body: Mapping[str, Any], api_key: str) -> Reply:
        self.num_posts += 1
        await asyncio.sleep(0.001)
        quiet = body.get("cache_salt") in ("first", "second")
        first, logprob = (7, -1.0) if quiet else (self.crowd_token, self.crowd_logprob)
        ids, end = [first + place for place in range(body["max_tokens"])], "length"
        for place, token_id in enumerate(ids):
            if token_id in body.get("stop_token_ids", ()):
                ids, end = ids[: place + 1], "stop"
                break
        logprobs = None
        if "logprobs" in body:
            best = [{"a": logprob, "b": logprob - 1} for _ in ids]
            logprobs = {"token_logprobs": [logprob for _ in ids], "top_logprobs": best}
        choices = [
            choice(index, ids, end if quiet else self.finish_reason.replace("length", end), logprobs)
            for index in range(body.get("n", 1))
        ]
        if "prompt_logprobs" in body:
            choices[0]["prompt_logprobs"] = [None] * len(body["prompt"])
        return Reply(0.0, 200 if quiet else self.status, body=json.dumps({"choices": choices}).encode())


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    made = Server()
    for name in ("get", "metrics", "post"):
        monkeypatch.setattr(soak, name, getattr(made, name))
    monkeypatch.setattr(soak, "gpu_bytes_used", lambda: None)
    monkeypatch.setattr(soak, "IDLE_S", 0.2)
    return made


def report(*flags: str) -> soak.Report:
    parser = argparse.ArgumentParser()
    soak.add_arguments(parser)
    small = ["--clients", "8", "--seconds", "0.2", "--known", "3", "--output-tokens", "9", "--prompt-tokens", "9"]
    return asyncio.run(soak.Soak(parser.parse_args([*small, *flags])).run())


@pytest.mark.parametrize("kind", soak.INFORMED_KINDS)
def test_nothing_wrong(server: Server, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for kinds in ("QUIET_KINDS", "INFORMED_KINDS"):
        monkeypatch.setattr(soak, kinds, {kind: 1})
    found = report("--leave", "0")
    assert found.failures == []
    assert found.completed.keys() == {kind}
    assert (found.left, found.near_ties) == (0, 0)
    assert (found.compared_tokens > 0) == (kind not in ("sampled", "penalised"))
    assert (found.compared_logprobs > 0) == (kind == "logprobs")


@pytest.mark.parametrize(
    ("fault", "said"),
    [
        ({"crowd_token": 8}, "another token than alone at 0, where the two best are 1.0000 apart"),
        ({"crowd_logprob": -1.1}, "logprobs differ by 0.1000, tolerance 0.05"),
        ({"finish_reason": "stop"}, "ended as"),
        ({"finish_reason": "error"}, "tokens, error"),
        ({"status": 500}, "answered 500"),
        ({"gauges": dict.fromkeys(soak.GAUGES, 2.0)}, "did not become idle"),
        ({"grows": ("failed_steps_total",)}, "failed_steps_total grew by"),
        ({"grows": ('request_success_total{finished_reason="error"}',)}, "grew by"),
    ],
)
def test_each_fault_is_seen(server: Server, fault: dict[str, Any], said: str) -> None:
    for name, value in fault.items():
        setattr(server, name, value)
    found = report()
    assert found.num_failures >= len(found.failures) > 0
    assert any(said in failure for failure in found.failures), found.failures


def test_a_near_tie_is_no_fault(server: Server) -> None:
    server.crowd_token = 8
    found = report("--tolerance", "1.5")
    assert found.failures == []
    assert found.near_ties > 0
    assert found.largest_gap == 1.0


def test_memory_that_grows_is_a_fault(server: Server, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = iter([10 << 20, 12 << 20] * 2)
    monkeypatch.setattr(soak, "gpu_bytes_used", lambda: next(sizes))
    assert report().failures == ["GPU memory in use grew by 2 MB"]
    assert report("--gpu-growth-mb", "3").failures == []


def test_preemptions_that_were_wanted(server: Server) -> None:
    assert report("--preemptions", "1").failures == ["0 preemptions, wanted 1"]


def test_no_server(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["soak", "--url", "http://127.0.0.1:9"]) == 1
    assert "no server answers there" in capsys.readouterr().err


# ---- a real server

ROUNDS = 12  # at most: a busy machine gets through less in each


def saw_enough(crowd: Crowd, folder: Path, rounds: int, tokens: int, preemptions: int) -> bool:
    """Whether so many rounds, or a few more, compare so many tokens and see so many preemptions, none with a fault."""
    num_tokens, num_preemptions = 0, 0.0
    with closing(crowd.rounds(folder)) as reports:
        for number, found in zip(range(1, ROUNDS + 1), reports, strict=False):
            assert found["failures"] == []
            num_tokens += found["compared_tokens"]
            num_preemptions += found["counters"]["preemptions_total"]
            if number >= rounds and num_tokens >= tokens and num_preemptions >= preemptions:
                return True
    return False


def test_a_crowd_on_few_blocks(tmp_path: Path) -> None:
    """Show 4 of the engine in small: all kinds of requests, preemption, clients that leave."""
    small = Crowd(clients=24, seconds=4, max_num_seqs=16, num_blocks=24)
    assert saw_enough(small, tmp_path, rounds=1, tokens=20, preemptions=3)


@pytest.mark.slow
def test_a_crowd_for_half_a_minute(tmp_path: Path) -> None:
    assert saw_enough(LARGE, tmp_path, rounds=3, tokens=2000, preemptions=50)
