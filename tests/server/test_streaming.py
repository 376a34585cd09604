"""Streams: API-07, STR-09 to STR-11."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from engine.errors import CapacityError, EngineDeadError, GlintError, RequestError, RequestFailedError
from tests.server.calls import (
    CHAT,
    COMPLETIONS,
    Connection,
    app_of,
    error_of,
    events_of,
    joined,
    post,
    run,
    stream,
    strict_json,
)
from tests.server.fake_client import FakeClient

HI: dict[str, Any] = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 4}
ENDLESS: dict[str, Any] = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}


def test_several_choices_api_07() -> None:
    client = FakeClient(replies=("Once", "upon a", "a time é"), delay_s=0, num_cached_tokens=2)
    body = {"prompt": "Once", "n": 3, "max_tokens": 8, "temperature": 1, "seed": 7}
    events = stream(app_of(client), COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
    assert len({(event["id"], event["created"], event["model"]) for event in events}) == 1
    entries = [entry for event in events for entry in event["choices"]]
    assert {entry["index"] for entry in entries} == {0, 1, 2}
    for index in range(3):
        finishes = [entry["finish_reason"] for entry in entries if entry["index"] == index]
        assert all(finish is None for finish in finishes[:-1])
        assert finishes[-1] in ("stop", "length")
    assert all(event["usage"] is None for event in events[:-1])
    assert events[-1]["choices"] == []
    assert events[-1]["usage"] == {
        "prompt_tokens": 4,
        "completion_tokens": 4 + 6 + 8,
        "total_tokens": 22,
        "prompt_tokens_details": {"cached_tokens": 2},
    }
    whole = strict_json(post(app_of(client), COMPLETIONS, body))
    assert [joined(events, index) for index in range(3)] == [choice["text"] for choice in whole["choices"]]
    assert whole["usage"] == events[-1]["usage"]


def test_chat_chunk_fields_str_09() -> None:
    client = FakeClient(delay_s=0, stop_reason="s")
    events = stream(app_of(client), CHAT, {**HI, "n": 2, "stream_options": {"include_usage": True}})
    assert {event["object"] for event in events} == {"chat.completion.chunk"}
    assert all("system_fingerprint" in event for event in events)
    for index in range(2):
        entries = [entry for event in events for entry in event["choices"] if entry["index"] == index]
        assert entries[0]["delta"] == {"role": "assistant", "content": ""}
        assert all("role" not in entry["delta"] for entry in entries[1:])
        assert all({"index", "delta", "finish_reason"} <= set(entry) for entry in entries)
        assert [entry["finish_reason"] for entry in entries] == [None] * (len(entries) - 1) + ["length"]
        assert [entry["stop_reason"] for entry in entries if "stop_reason" in entry] == ["s"]
        assert joined(events, index) == "Hell"
    assert [event["choices"] == [] for event in events] == [False] * (len(events) - 1) + [True]
    assert [event["usage"] is None for event in events] == [True] * (len(events) - 1) + [False]


def test_no_usage_unless_asked_str_09() -> None:
    for options in (None, {}, {"include_usage": False}, {"include_usage": None}, {"continuous_usage_stats": True}):
        events = stream(app_of(), CHAT, {**HI, "stream_options": options})
        assert all("usage" not in event and event["choices"] for event in events)


def test_continuous_usage() -> None:
    options = {"include_usage": True, "continuous_usage_stats": True}
    events = stream(app_of(FakeClient(delay_s=0)), CHAT, {**HI, "stream_options": options})
    counts = [event["usage"]["completion_tokens"] for event in events]
    assert counts == sorted(counts)
    assert (counts[0], counts[-1]) == (1, 4)


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize("streamed", [False, None])
def test_stream_options_without_stream_str_09(path: str, streamed: bool | None) -> None:
    body = {**HI, "prompt": "x", "stream": streamed, "stream_options": {"include_usage": True}}
    assert error_of(post(app_of(), path, body), 400)["param"] == "stream_options"


def test_no_raw_line_break_in_an_event_str_09() -> None:
    text = "a\n\r\n\u2028\u2029\u0085b\x0b\x0c\x1c"
    response = post(app_of(FakeClient(replies=(text,))), COMPLETIONS, {"prompt": "x", "max_tokens": 50, "stream": True})
    assert joined(events_of(response.text)) == text
    assert len(response.text.splitlines()) == response.text.count("\n")


def test_headers_of_a_stream() -> None:
    response = post(app_of(), CHAT, {**HI, "stream": True, "user": "x"}, headers={"X-Request-Id": "r1"})
    assert response.headers["x-request-id"] == "r1"
    assert response.headers["x-glint-ignored-fields"] == "user"
    assert response.headers["cache-control"] == "no-cache"
    assert "content-length" not in response.headers


FAILURES = [
    (RequestError("no", "stop"), 400),
    (CapacityError("queue is full", 7), 429),
    (RequestFailedError("step failed"), 500),
    (EngineDeadError("gone"), 503),
    (ValueError("secret /srv/file.py"), 500),
]


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("failure", "status"), FAILURES)
def test_failure_before_the_first_token_has_a_status_str_10(failure: Exception, status: int, streamed: bool) -> None:
    client = FakeClient(failure=failure)
    response = post(app_of(client), CHAT, {**HI, "stream": streamed})
    error = error_of(response, status)
    if isinstance(failure, GlintError):
        assert error["message"] == str(failure)
    else:
        assert "secret" not in response.text
    assert ("retry-after" in response.headers) == (status in (429, 503))
    if status == 429:
        assert response.headers["retry-after"] == "7"
    assert client.running == 0


@pytest.mark.parametrize(("failure", "status"), FAILURES)
def test_failure_after_the_first_token_is_an_event_str_10(failure: Exception, status: int) -> None:
    client = FakeClient(failure=failure, fail_at=2, delay_s=0)
    *events, error = stream(app_of(client), COMPLETIONS, {"prompt": "x", "max_tokens": 9})
    assert joined(events) == "He"
    assert set(error) == {"error"}
    assert set(error["error"]) == {"message", "type", "param", "code"}
    assert "secret" not in str(error)
    assert client.running == 0


def test_others_go_on_when_one_fails_str_10() -> None:
    async def work() -> None:
        bad = FakeClient(failure=RequestFailedError("x"), fail_at=2, delay_s=0.001)
        good = FakeClient(delay_s=0.001)
        connections = [Connection(app_of(bad), CHAT, {**HI, "stream": True})]
        connections += [Connection(app_of(good), CHAT, {**HI, "stream": True}) for _ in range(3)]
        await asyncio.gather(*(connection.run() for connection in connections))
        assert [joined(events_of(connection.text)) for connection in connections[1:]] == ["Hell"] * 3

    run(work())


def test_failure_of_one_prompt_aborts_the_others() -> None:
    client = FakeClient(failure=RequestFailedError("x"), fail_at=1, delay_s=0.001)
    error_of(post(app_of(client), COMPLETIONS, {"prompt": ["a", "b", "c"], "max_tokens": 5}), 500)
    assert client.running == 0
    assert len(client.aborted) == 3


def test_text_before_a_failure_is_not_lost() -> None:
    client = FakeClient(failure=RequestFailedError("x"), fail_at=2)  # no pause: text and failure are there together
    *events, error = stream(app_of(client), COMPLETIONS, {"prompt": "x", "max_tokens": 9})
    assert joined(events) == "He"
    assert error["error"]["code"] == "request_failed"


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
@pytest.mark.parametrize(("delay_s", "burst"), [(None, 1), (None, 3), (0, 1), (0, 4)])
def test_many_tokens_in_one_event_str_11(path: str, delay_s: float | None, burst: int) -> None:
    """Without a pause the engine is always ahead, and everything it has is merged."""
    replies = ("Count: é 2 3", "two\u2028 \U0001f600", "3")
    client = FakeClient(replies=replies, delay_s=delay_s, burst=burst)
    body: dict[str, Any] = {"prompt": "x", "messages": HI["messages"], "n": 3, "max_tokens": 50, "temperature": 1}
    body["logprobs"] = True if path == CHAT else 0
    events = stream(app_of(client), path, {**body, "stream_options": {"include_usage": True}})
    assert tuple(joined(events, index) for index in range(3)) == replies
    entries = [entry for event in events for entry in event["choices"]]
    counted = sum(
        len(entry["logprobs"]["content" if path == CHAT else "tokens"]) for entry in entries if entry["logprobs"]
    )
    assert counted == events[-1]["usage"]["completion_tokens"] == sum(len(reply.encode()) for reply in replies)
    for index in range(3):
        own = [entry for entry in entries if entry["index"] == index]
        assert [entry["finish_reason"] is not None for entry in own] == [False] * (len(own) - 1) + [True]
    if delay_s is None:
        assert len(events) <= 3 * 2 + 1


def test_what_piles_up_behind_a_slow_reader_comes_in_one_chunk_str_11() -> None:
    async def work() -> None:
        client = FakeClient(gate=asyncio.Event())
        connection = Connection(app_of(client), COMPLETIONS, {**ENDLESS, "stream": True, "logprobs": 0})
        task = asyncio.create_task(connection.run())
        await asyncio.sleep(0.01)
        assert client.gate is not None
        client.gate.set()
        await asyncio.wait_for(task, 5)
        events = events_of(connection.text)
        assert len(events) == 1
        assert len(events[0]["choices"][0]["logprobs"]["tokens"]) == 63

    run(work())


def test_pings_while_nothing_comes() -> None:
    client = FakeClient(prefill_s=0.1)
    response = post(app_of(client, sse_ping_s=0.02), COMPLETIONS, {"prompt": "x", "max_tokens": 8, "stream": True})
    assert response.text.startswith(": ping\n\n")
    assert joined(events_of(response.text)) == "Hello é"
    client = FakeClient(delay_s=0.03, replies=("ab",))
    response = post(app_of(client, sse_ping_s=0.02), COMPLETIONS, {"prompt": "x", "max_tokens": 8, "stream": True})
    assert ": ping\n\n" in response.text.partition('"a"')[2]


def test_failure_after_a_ping_is_an_event_str_10() -> None:
    client = FakeClient(prefill_s=0.05, failure=CapacityError("queue is full"))
    response = post(app_of(client, sse_ping_s=0.01), COMPLETIONS, {"prompt": "x", "stream": True})
    assert response.status_code == 200
    assert events_of(response.text)[0]["error"]["code"] == "rate_limit_exceeded"


def test_abort_by_the_engine_is_a_finish_reason() -> None:
    client = FakeClient(finish_reason="abort")
    assert stream(app_of(client), CHAT, HI)[-1]["choices"][0]["finish_reason"] == "abort"
    error_of(post(app_of(FakeClient(finish_reason="error")), CHAT, HI), 500)


class SilentClient(FakeClient):
    """Ends every request without a word."""

    def _script(self, request: Any) -> list[Any]:
        return []


@pytest.mark.parametrize("streamed", [False, True])
def test_engine_that_says_nothing_is_an_error(streamed: bool) -> None:
    error_of(post(app_of(SilentClient()), CHAT, {**HI, "stream": streamed}), 500)
