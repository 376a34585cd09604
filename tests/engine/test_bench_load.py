"""`python -m engine.bench serve`: figures by hand, refusals, the picture, and a run on a real server and again."""

from __future__ import annotations

import argparse
import asyncio
import itertools
import json
import random
import re
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import msgspec
import pytest

from engine.bench import load
from engine.bench.__main__ import main
from engine.bench.http_client import Reply, metrics
from engine.bench.load_picture import picture, ticks
from engine.bench.load_report import (
    DEFAULTS,
    Report,
    Row,
    as_json,
    highest_rate,
    mean_and_p95,
    percentile,
    poisson_arrivals,
    prompts,
    read_report,
    row_text,
    verdict,
)
from engine.errors import ConfigError, RequestFailedError
from tests.serve.servers import Server, running, text_model

LOAD = ["--rates", "20,40", "--requests", "4", "--input-tokens", "40", "--output-tokens", "5", "--vocab-size", "250"]


def row(rate: float, ttft_p95: float | None = 3000.0, tpot_p95: float | None = 40.0, **changed: Any) -> Row:
    known = Row(rate, 2, 0, 2000.0, ttft_p95, 30.0, tpot_p95, 1.5, 48.0, 1.0, {}, (0.0, 0.25))
    return replace(known, **changed)


def report(*rows: Row, **changed: Any) -> Report:
    settings = replace(DEFAULTS, rates=tuple(row.rate for row in rows), requests=2)
    best = highest_rate(rows, settings)
    found = Report("engine.bench serve", "today", settings, best, rows, "http://h:1", {"id": "M"}, {}, {})
    return replace(found, **changed)


# ---- by hand


def test_percentiles() -> None:
    """The nearest rank: the ⌈0.95 n⌉-th of n."""
    assert percentile([7.0], 95) == 7.0
    assert percentile([float(n) for n in range(1, 21)], 95) == 19.0
    assert percentile([float(n) for n in range(1, 22)], 95) == 20.0
    assert percentile([1.0, 2.0, 3.0, 4.0], 50) == 2.0
    assert percentile([1.0, 2.0], 0) == 1.0
    assert mean_and_p95([4.0, 1.0, 1.0]) == (2.0, 4.0)
    assert mean_and_p95([]) == (None, None)


def test_arrivals() -> None:
    """From the seed and the rate alone; gaps of mean 1 / rate."""
    settings = replace(DEFAULTS, requests=4000)
    times = poisson_arrivals(settings, 8.0)
    assert times == poisson_arrivals(settings, 8.0)
    assert times[0] == 0
    assert list(times) == sorted(times)
    assert times != poisson_arrivals(replace(settings, seed=1), 8.0)
    gaps = [later - sooner for sooner, later in itertools.pairwise(times)]
    assert sum(gaps) / len(gaps) == pytest.approx(1 / 8, rel=5 / 4000**0.5), "five standard deviations"
    above = sum(gap > 1 / 8 for gap in gaps) / len(gaps)
    assert above == pytest.approx(0.368, abs=5 * (0.368 * 0.632 / 4000) ** 0.5), "1 / e of them"


def test_prompts() -> None:
    settings = replace(DEFAULTS, requests=3, input_tokens=200, vocab_size=10)
    made = prompts(settings, 1.0)
    assert [len(prompt) for prompt in made] == [200] * 3
    assert {token for prompt in made for token in prompt} == set(range(3, 10))
    assert made[0] != made[1]
    assert made == prompts(settings, 1.0) != prompts(settings, 2.0)


def reply(started: float, *chunk_times: float, num_tokens: int) -> Reply:
    return Reply(started, 200, list(chunk_times), usage={"completion_tokens": num_tokens})


def test_a_row_by_hand() -> None:
    answers = [
        reply(10.0, 10.5, 10.6, 10.7, 10.71, num_tokens=3),  # the last event holds the usage
        reply(11.0, 11.1, 11.5, 11.6, num_tokens=3),
        "answered 429: busy",
        "answered 429: busy",
    ]
    found = load._row(2.0, answers, 4.0, 0.003, (0.0, 0.1, 0.2, 0.3))
    assert (found.completed, found.failed, found.reasons) == (2, 2, {"answered 429: busy": 2})
    assert (found.ttft_mean, found.ttft_p95) == (pytest.approx(300), pytest.approx(500))
    assert (found.tpot_mean, found.tpot_p95) == (pytest.approx(150), pytest.approx(200))
    assert (found.requests_per_s, found.output_tokens_per_s, found.latest_ms) == (0.5, 1.5, 3.0)
    nothing = load._row(2.0, ["no"], 4.0, 0.0, (0.0,))
    assert (nothing.ttft_p95, nothing.tpot_p95, nothing.failed) == (None, None, 1)
    assert load._row(2.0, [reply(0.0, 0.2, 0.3, num_tokens=1)], 1.0, 0.0, (0.0,)).tpot_mean is None


def test_a_line_of_the_table() -> None:
    line, *reasons = row_text(row(0.25, None, None, ttft_mean=None, failed=1, reasons={"gone": 1})).splitlines()
    assert line.split() == ["0.25", "2", "1", "-", "-", "30.0", "-", "1.50", "48.0"]
    assert reasons == ["       1 failed: gone"]


@pytest.mark.parametrize(
    ("beyond", "best"),
    [
        (row(2.0), 2.0),
        (row(2.0, ttft_p95=4000.0, tpot_p95=50.0), 2.0),
        (row(2.0, ttft_p95=4001.0), 1.0),
        (row(2.0, tpot_p95=50.1), 1.0),
        (row(2.0, failed=1), 1.0),
        (row(2.0, ttft_p95=None), 1.0),
        (row(2.0, tpot_p95=None), 2.0),
    ],
)
def test_the_highest_rate(beyond: Row, best: float) -> None:
    assert highest_rate([row(1.0), beyond, row(0.5)], DEFAULTS) == best


def test_the_last_line() -> None:
    limits = "highest rate with TTFT P95 ≤ 4 s and TPOT P95 ≤ 50 ms: "
    assert verdict(report(row(1.0), row(1.5))) == limits + "1.5 requests a second"
    assert verdict(report(row(1.0, tpot_p95=60.0))) == limits + "none of these"


# ---- the picture


def test_the_picture() -> None:
    """Two panels with two curves each, a dot a rate; the limit is drawn where it lies in the panel."""
    made = report(row(0.5), row(1.0, 5000.0), row(2.0, None, None), server={"device": "abacus"})
    drawn = ElementTree.fromstring(picture(made))
    svg = "{http://www.w3.org/2000/svg}"
    words = [element.text for element in drawn.iter(f"{svg}text")]
    assert {"time to first token", "time per output token", "M, 128 in + 32 out; abacus"} <= set(words)
    assert words.count("P95") == words.count("mean") == 2
    assert len(list(drawn.iter(f"{svg}polyline"))) == 4
    assert len(list(drawn.iter(f"{svg}circle"))) == 3 + 2 + 3 + 2
    assert len([line for line in drawn.iter(f"{svg}line") if "stroke-dasharray" in line.attrib]) == 1
    numbers = [
        float(value)
        for element in drawn.iter(f"{svg}circle")
        for value in (element.get("cx"), element.get("cy"))
        if value
    ]
    assert all(0 < value < 800 for value in numbers)


def test_the_picture_of_nothing() -> None:
    nothing = row(1.0, None, None, ttft_mean=None, tpot_mean=None)
    assert picture(report(nothing)).count("<circle") == 0


def test_ticks() -> None:
    assert ticks(1.0) == [0, 0.2, 0.4, 0.6, 0.8, 1.0]
    assert ticks(57.0) == [0, 20, 40]
    assert ticks(0.092) == [0, 0.02, 0.04, 0.06, 0.08]
    rng = random.Random(0)
    for top in (10 ** rng.uniform(-4, 5) for _ in range(200)):
        assert 3 <= len(ticks(top)) <= 6
        assert ticks(top)[-1] <= top * 1.001


# ---- what is refused


@pytest.mark.parametrize(
    ("wrong", "said"),
    [
        (["--rates", "0"], "argument --rates: '0' is no list of numbers above 0"),
        (["--rates", "1,-2"], "argument --rates: '1,-2' is no list of numbers above 0"),
        (["--rates", "nan"], "argument --rates: 'nan' is no list"),
        (["--rates", "1,1.0"], "argument --rates: '1,1.0' has a number twice"),
        (["--requests", "0"], "argument --requests: 0 is below 1"),
        (["--input-tokens", "0"], "argument --input-tokens: 0 is below 1"),
        (["--most-ttft-s", "0"], "argument --most-ttft-s: 0 is not above 0"),
        (["--url", "https://h:1"], "argument --url: 'https://h:1' is not of the form http://HOST:PORT"),
        (["--url", "http://h:1/v1"], "argument --url: 'http://h:1/v1' is not"),
        (["--url", "http://h:port"], "argument --url: 'http://h:port' is not"),
        (["--svg", "no/such/folder/x.svg"], "argument --svg: no/such/folder/x.svg cannot be written"),
    ],
)
def test_wrong_arguments(wrong: list[str], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", *wrong])
    assert said in capsys.readouterr().err


def test_wrong_settings(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.json"
    file.write_bytes(as_json(report(row(1.0))))
    assert main(["serve", "--again", str(file), "--rates", "1", "--seed", "2"]) == 1
    assert "says what to ask: leave out --rates, --seed" in capsys.readouterr().err
    assert main(["serve", "--vocab-size", "3"]) == 1
    assert "--vocab-size 3" in capsys.readouterr().err
    assert main(["serve", "--url", "http://127.0.0.1:9"]) == 1
    assert "--url http://127.0.0.1:9: no server answers there" in capsys.readouterr().err


def without(name: str, value: Any = msgspec.UNSET, of: str = "") -> Any:
    """A report with a field that is not there, or another value."""
    known = json.loads(as_json(report(row(1.0))))
    place = {"": known, "settings": known["settings"], "rows": known["rows"][0]}[of]
    if value is msgspec.UNSET:
        del place[name]
    else:
        place[name] = value
    return known


@pytest.mark.parametrize(
    ("content", "said"),
    [
        ([], "is no report of engine.bench serve"),
        ({"settings": {"clients": 3}, "failures": []}, "is no report of engine.bench serve"),
        (without("kind"), "missing required field `kind`"),
        (without("kind", "engine.bench soak"), r"at `\$.kind`"),
        (without("rates", [0.0], "settings"), r"at `\$.settings.rates\[0\]`"),
        (without("rates", [], "settings"), r"at `\$.settings.rates`"),
        (without("requests", 0, "settings"), r"at `\$.settings.requests`"),
        (without("seed", "1", "settings"), r"at `\$.settings.seed`"),
        (without("output_tokens", of="settings"), "missing required field `output_tokens`"),
        (without("rates", [1.0, 2.0], "settings"), "its rows are not those of its settings"),
        (without("arrivals", [0.0], "rows"), "its rows are not those of its settings"),
        (without("arrivals", [0.0, -1.0], "rows"), r"at `\$.rows\[0\].arrivals\[1\]`"),
    ],
)
def test_another_kind_of_file(content: Any, said: str, tmp_path: Path) -> None:
    file = tmp_path / "other.json"
    file.write_text(json.dumps(content))
    with pytest.raises(ConfigError, match=said) as caught:
        read_report(file)
    assert f"--again {file}" in str(caught.value)


def test_no_file(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe")
    for name, said in (("none", "cannot be read: No such file"), ("bytes", "is no report")):
        with pytest.raises(ConfigError, match=said):
            read_report(tmp_path / name)


def test_a_report_is_read_as_it_was_written(tmp_path: Path) -> None:
    file = tmp_path / "r.json"
    made = report(row(0.5, None, None, reasons={"gone": 3}), row(2.0))
    file.write_bytes(as_json(made))
    assert read_report(file) == made


# ---- failures


BODY: Mapping[str, Any] = {"max_tokens": 3}


@pytest.mark.parametrize(
    ("answer", "reason"),
    [
        (Reply(0.0, 429, body=b"busy"), "answered 429: busy"),
        (reply(0.0, 0.1, 0.2, num_tokens=2), "answered with 2 tokens, 3 were asked for"),
        (reply(0.0, 0.1, num_tokens=3), "answered with 3 tokens, 3 were asked for"),
        (ConnectionResetError("reset"), "ConnectionResetError: reset"),
        (asyncio.IncompleteReadError(b"", 1), "IncompleteReadError: 0 bytes read"),
        (RequestFailedError("the stream broke off"), "RequestFailedError: the stream broke off"),
        (Reply(0.0, 500, body=b"x" * 999), "answered 500: " + "x" * 186),
    ],
)
def test_why_a_request_failed(answer: Reply | Exception, reason: str, monkeypatch: pytest.MonkeyPatch) -> None:
    async def post(*_: Any) -> Reply:
        if isinstance(answer, Exception):
            raise answer
        return answer

    monkeypatch.setattr(load, "post", post)
    found = asyncio.run(load._send("http://h:1", BODY, "", 5.0))
    assert isinstance(found, str)
    assert found.startswith(reason)
    assert len(found) <= load.MAX_REASON


def test_an_answer_that_does_not_come(monkeypatch: pytest.MonkeyPatch) -> None:
    async def post(*_: Any) -> Reply:
        await asyncio.sleep(60)
        raise AssertionError

    monkeypatch.setattr(load, "post", post)
    assert asyncio.run(load._send("http://h:1", BODY, "", 0.01)) == "no answer within 0.01 s"


def test_a_server_of_another_make(monkeypatch: pytest.MonkeyPatch) -> None:
    async def get(url: str, path: str, api_key: str) -> bytes:
        assert api_key == "k"
        if path == "/version":
            raise RequestFailedError("404")
        return b'{"data": [{"id": "peer"}]}'

    async def post(url: str, path: str, body: Mapping[str, Any], api_key: str) -> Reply:
        assert (body["model"], api_key) == ("peer", "k")
        return reply(0.0, 0.1, 0.2, num_tokens=2)

    monkeypatch.setattr(load, "get", get)
    monkeypatch.setattr(load, "post", post)
    settings = replace(DEFAULTS, rates=(50.0,), requests=2, output_tokens=2)
    arguments = argparse.Namespace(url="http://h:1", api_key="k", timeout_s=5.0)
    found = asyncio.run(load._measure(arguments, settings, [(0.0, 0.01)]))
    assert (found.server, found.rows[0].completed, found.model) == ({}, 2, {"id": "peer"})


@pytest.mark.parametrize("answer", [b"hello", b"{}", b'{"data": []}', b'{"data": [1]}'])
def test_no_openai_server(answer: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    async def get(*_: Any) -> bytes:
        return answer

    monkeypatch.setattr(load, "get", get)
    with pytest.raises(ConfigError, match="--url http://h:1: what answers /v1/models there is no OpenAI server"):
        asyncio.run(load._model("http://h:1", ""))


# ---- a real server


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    model = text_model(tmp_path_factory.mktemp("model"), max_position_embeddings=64)
    with running(model, "--api-key", "s3cret", "--seed", "5") as server:
        yield server


def test_a_run_and_again(server: Server, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The second takes its arrivals from the first; no prompt is found in the cache because the first has sent it."""
    first, second, drawn = (tmp_path / name for name in ("first.json", "second.json", "first.svg"))
    common = ["serve", "--url", server.url, "--api-key", "s3cret"]
    assert main([*common, *LOAD, "--seed", "9", "--json", str(first), "--svg", str(drawn)]) == 0
    printed = capsys.readouterr().out.splitlines()
    assert [line.split()[:3] for line in printed[1:3]] == [["20.00", "4", "0"], ["40.00", "4", "0"]]
    assert printed[-1].startswith("highest rate with TTFT P95 ≤ 4 s and TPOT P95 ≤ 50 ms: ")
    assert main([*common, "--again", str(first), "--json", str(second)]) == 0
    one, other = read_report(first), read_report(second)
    assert one.settings == other.settings
    assert [row.arrivals for row in one.rows] == [row.arrivals for row in other.rows]
    assert one.rows[0].arrivals == poisson_arrivals(one.settings, 20.0)
    assert asyncio.run(metrics(server.url, "s3cret"))["prefix_cache_hits_total"] == 0
    assert ElementTree.fromstring(drawn.read_text()).tag.endswith("svg")
    assert one.server["flags"] == {"device": "cpu", "num_threads": 1, "seed": 5}
    assert re.match(r"Python 3\.\d+\.\d+, glint-llm ", one.client["versions"])
    assert (one.server["tensor_parallel_size"], one.model["max_model_len"]) == (1, 64)
    assert "s3cret" not in first.read_text()
    for measured in (*one.rows, *other.rows):
        assert measured.ttft_mean is not None
        assert 0 < measured.ttft_mean <= (measured.ttft_p95 or 0)
        assert measured.output_tokens_per_s == pytest.approx(5 * measured.requests_per_s)


def test_refused_by_the_server(server: Server, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--url", server.url, *LOAD]) == 1
    assert "/v1/models answered 401" in capsys.readouterr().err
    common = ["serve", "--url", server.url, "--api-key", "s3cret", "--rates", "50", "--requests", "2"]
    assert main([*common, "--input-tokens", "60", "--output-tokens", "5"]) == 1
    assert "are more together than the model's 64 tokens" in capsys.readouterr().err
    assert main([*common, "--input-tokens", "5", "--output-tokens", "2", "--vocab-size", "90000"]) == 1
    printed = capsys.readouterr().out
    assert re.search(r"50\.00 +0 +2 +- +- ", printed)
    assert "failed: answered 400: " in printed
    assert printed.splitlines()[-1].endswith("none of these")
