"""Bodies that are no good: API-04, API-05, SEC-06, SEC-12, SEC-13."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import re
import time
from typing import Any

import pytest

from tests.server.calls import CHAT, COMPLETIONS, Connection, app_of, error_of, get, post, run, send, strict_json
from tests.server.fake_client import MODEL, FakeClient

JSON_HEADERS = {"content-type": "application/json"}


@pytest.mark.parametrize(
    ("body", "param"),
    [
        pytest.param({"model": "M", "prompt": {"a": 1}}, "prompt", id="a"),
        pytest.param({"model": "M", "prompt": "x", "max_tokens": "5"}, "max_tokens", id="b"),
        pytest.param({"model": "M", "prompt": "x", "max_tokens": True}, "max_tokens", id="c"),
        pytest.param({"model": ["M"], "prompt": "x"}, "model", id="d"),
        pytest.param({"model": "M", "messages": "hi"}, "messages", id="e"),
        pytest.param({"model": "M", "messages": [None]}, "messages[0]", id="f"),
        pytest.param({"model": "M", "messages": [{"role": "user"}]}, "messages[0].content", id="g"),
        pytest.param({"model": "M", "messages": [{"content": "x"}]}, "messages[0].role", id="no-role"),
        pytest.param([], None, id="h"),
        pytest.param(None, None, id="i"),
        pytest.param({"model": "M", "prompt": [1, "a"]}, "prompt[1]", id="j"),
        pytest.param({"model": "M", "prompt": [1, True]}, "prompt[1]", id="bool-id"),
        pytest.param({"model": "M", "prompt": [[1], "a"]}, "prompt[1]", id="mixed-list"),
        pytest.param({"model": "M", "prompt": ["a", [1]]}, "prompt[1]", id="mixed-str"),
        pytest.param({"model": "M", "prompt": [-1]}, "prompt", id="k"),
        pytest.param({"model": "M", "prompt": [999999999]}, "prompt", id="l"),
        pytest.param({"model": "M", "prompt": [[1], [300]]}, "prompt[1]", id="l-list"),
        pytest.param({"model": "M", "prompt": "x", "stream": "yes"}, "stream", id="m"),
        pytest.param({"model": "M"}, "prompt", id="no-prompt"),
        pytest.param({"model": "M", "prompt": None}, "prompt", id="null-prompt"),
    ],
)
def test_wrong_types_name_the_field_api_04(body: Any, param: str | None) -> None:
    client = FakeClient()
    path = CHAT if isinstance(body, dict) and "messages" in body else COMPLETIONS
    error = error_of(post(app_of(client), path, content=json.dumps(body).encode()), 400)
    assert error["param"] == param
    if param:
        assert param.split("[")[0] in error["message"]
    assert client.requests == []


@pytest.mark.parametrize(
    "content",
    [
        b"{:",
        b"",
        b'{"model":"M"',
        '{"model":"M","prompt":"x"}'.encode("utf-16"),
        '{"model":"M","prompt":"x"}'.encode("utf-16-le"),
        '{"model":"M","prompt":"你好"}'.encode("gbk"),
        b'{"model":"M","other":"\xff","prompt":"x"}',
        b'{"model":"M","prompt":"x\x00"}',
        b'\x00{"model":"M","prompt":"x"}',
        b'{"model":"M","prompt":"x"}{"model":"M","prompt":"x"}',
        b'{"model":"M","prompt":"x","temperature":NaN}',
        b'{"model":"M","prompt":"x","temperature":Infinity}',
        b'{"model":"M","prompt":"x","unknown":NaN}',
        b'{"model":"\\ud83d","prompt":"x"}',
        b'{"model":"M","prompt":"\\ud800 lone","max_tokens":4}',
        b'{"model":"M","prompt":"x","stop":["\\udfff"]}',
        b'{"model":"M","prompt":' + b"[" * 1_000_000,
        b'{"model":"M","prompt":"x","unknown":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    ],
    ids=lambda content: repr(content[:40]),
)
def test_broken_json_is_a_400_api_04_sec_06_sec_13(content: bytes) -> None:
    assert error_of(post(app_of(), COMPLETIONS, content=content), 400)["code"] == "invalid_json"


@pytest.mark.parametrize("media_type", ["text/plain", "application/x-www-form-urlencoded", "", "text/json"])
def test_other_content_types_are_refused_api_04(media_type: str) -> None:
    content = b'{"model":"M","prompt":"x"}'
    error_of(post(app_of(), COMPLETIONS, content=content, headers={"content-type": media_type}), 415)


@pytest.mark.parametrize("media_type", ["application/json; charset=utf-8", "Application/JSON", "application/x+json"])
def test_json_content_types_are_taken(media_type: str) -> None:
    content = b'{"model":"M","prompt":"x","max_tokens":1}'
    assert post(app_of(), COMPLETIONS, content=content, headers={"content-type": media_type}).status_code == 200


def test_last_of_a_duplicate_key_wins_api_04() -> None:
    client = FakeClient()
    assert post(app_of(client), COMPLETIONS, content=b'{"prompt":"x","max_tokens":9,"max_tokens":2}').status_code == 200
    assert client.requests[0].sampling.max_tokens == 2


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        pytest.param(b'"seed":9223372036854775808', "seed", id="a"),
        pytest.param(b'"stop_token_ids":[18446744073709551616]', "stop_token_ids", id="c"),
        pytest.param(b'"max_tokens":1.0', "max_tokens", id="f"),
        pytest.param(b'"temperature":-1e999', "temperature", id="inf"),
        pytest.param(b'"max_tokens":' + b"9" * 5000, "max_tokens", id="5000-digits"),
        pytest.param(b'"temperature":' + b"9" * 5000, "temperature", id="5000-digits-float"),
        pytest.param(b'"n":' + b"9" * 4300, "n", id="4300-digits"),
        pytest.param(b'"seed":-' + b"9" * 4000, "seed", id="4000-digits-negative"),
    ],
)
def test_numbers_out_of_range_name_the_field_api_05(fields: bytes, param: str) -> None:
    client = FakeClient()
    start = time.perf_counter()
    error = error_of(post(app_of(client), COMPLETIONS, content=b'{"prompt":"x",' + fields + b"}"), 400)
    assert error["param"] == param
    assert len(error["message"]) < 1100
    assert client.requests == []
    assert time.perf_counter() - start < 5  # a slow parse of 5000 digits repeated would show; not a speed test


def test_numbers_that_are_adjusted_api_05() -> None:
    """b: seed -1 is none; e: a huge bias is cut to 100. (d, a huge temperature, is refused: tests/engine.)"""
    client = FakeClient()
    body = {"prompt": "x", "max_tokens": 1, "seed": -1, "temperature": 100, "logit_bias": {"5": 1e308}}
    assert post(app_of(client), COMPLETIONS, body).status_code == 200
    sampling = client.requests[0].sampling
    assert (sampling.seed, sampling.temperature, sampling.logit_bias) == (None, 100.0, {5: 100.0})


def test_body_limit_sec_06() -> None:
    app = app_of(max_body_bytes=1000)
    inside = b'{"prompt":"x","max_tokens":1}'.ljust(1000)
    assert post(app, COMPLETIONS, content=inside).status_code == 200
    for headers in (JSON_HEADERS, {**JSON_HEADERS, "content-length": "9" * 30}):
        response = post(app, COMPLETIONS, content=inside + b" ", headers=headers)
        assert error_of(response, 413)["code"] == "body_too_large"
        assert response.headers["connection"] == "close"


def test_endless_body_is_cut_at_the_limit_sec_06() -> None:
    sent = 0

    async def endless() -> Any:
        nonlocal sent
        while True:
            sent += 100
            yield b" " * 100

    async def work() -> None:
        app = app_of(max_body_bytes=1000)
        error_of(await send(app, "POST", COMPLETIONS, content=endless(), headers=JSON_HEADERS), 413)

    run(work())
    assert sent <= 1200


def test_compressed_body_is_refused_sec_06() -> None:
    headers = {**JSON_HEADERS, "content-encoding": "gzip"}
    error_of(post(app_of(), COMPLETIONS, content=b"\x1f\x8b", headers=headers), 415)


def test_ignored_fields_are_reported_and_reach_nothing_sec_12() -> None:
    client = FakeClient()
    body = {
        "model": "M",
        "prompt": "x",
        "max_tokens": 1,
        "request_id": "1",
        "block_ids": [0],
        "peer_host": "192.0.2.1",
        "abort": True,
        "__class__": "x",
        "prompt_ids": [7],
        "sampling": {"n": 5},
        "bad\r\nX-Evil: 1": 1,
        "ü" * 5: 1,
    }
    response = post(app_of(client), COMPLETIONS, body)
    strict_json(response)
    ignored = response.headers["x-glint-ignored-fields"].split(", ")
    assert ignored[:7] == ["request_id", "block_ids", "peer_host", "abort", "__class__", "prompt_ids", "sampling"]
    assert ignored[7:] == ["bad??X-Evil??1", "?????"]
    assert "x-evil" not in response.headers
    assert client.requests[0].request_id != "1"
    assert client.requests[0].prompt_ids == (ord("x") + 1,)
    assert client.requests[0].sampling.n == 1


def test_no_header_without_ignored_fields_and_a_cap_on_many() -> None:
    plain = {"prompt": "x", "max_tokens": 1, "temperature": None, "tools": None, "suffix": ""}
    assert "x-glint-ignored-fields" not in post(app_of(), COMPLETIONS, plain).headers
    many = {**plain, **{f"field_{i}" * 20: i for i in range(10000)}}
    assert len(post(app_of(), COMPLETIONS, many).headers["x-glint-ignored-fields"]) < 600


def test_unknown_model_name_is_cut_in_the_message_sec_13() -> None:
    error = error_of(post(app_of(), COMPLETIONS, {"model": "z" * 1_000_000, "prompt": "x"}), 404)
    assert len(error["message"]) < 200
    assert (error["code"], error["param"]) == ("model_not_found", "model")
    named = error_of(post(app_of(), COMPLETIONS, {"model": "M\n2030-01-01 ERROR fake", "prompt": "x"}), 404)
    assert "\n" not in named["message"]


def test_odd_bytes_in_a_path_sec_13() -> None:
    error_of(get(app_of(), "/%ff%fe"), 404)
    error_of(get(app_of(), "/v1/models/%ff%fe%ed%a0%80"), 404)


@pytest.mark.parametrize("model", ["M", "alias/of-M", "", None])
def test_model_names(model: str | None) -> None:
    body = {"model": model, "prompt": "x", "max_tokens": 1}
    assert strict_json(post(app_of(), COMPLETIONS, body))["model"] == (model or "M")


def test_body_that_never_ends_in_time_is_a_408() -> None:
    async def slow() -> Any:
        yield b'{"prompt":'
        await asyncio.sleep(60)

    async def work() -> None:
        app = app_of(read_timeout_s=0.02)
        error_of(await send(app, "POST", COMPLETIONS, content=slow(), headers=JSON_HEADERS), 408)

    run(work())


def test_client_that_leaves_inside_its_body_gets_nothing() -> None:
    async def work() -> None:
        client = FakeClient()
        connection = Connection(app_of(client), COMPLETIONS, {"prompt": "x"})
        connection.incoming[0]["more_body"] = True
        connection.leave()
        await connection.run()
        assert connection.messages == []
        assert client.requests == []

    run(work())


def test_counts_are_checked_before_anything_is_walked_sec_06() -> None:
    """The last entry of each list is wrong in itself; what is said is that there are too many."""
    message = {"role": "user", "content": "x"}
    part = {"type": "text", "text": "x"}
    call = {"function": {"name": "f"}}
    bodies: list[tuple[str, dict[str, Any], str]] = [
        (COMPLETIONS, {"prompt": ["x"] * 256 + [1]}, "prompt"),
        (COMPLETIONS, {"prompt": [[1]] * 256 + ["x"]}, "prompt"),
        (COMPLETIONS, {"prompt": "x", "logit_bias": {**{str(i): 0 for i in range(1024)}, "x": 0}}, "logit_bias"),
        (CHAT, {"messages": [message] * 4096 + [{**message, "role": "no"}]}, "messages"),
        ("/tokenize", {"messages": [message] * 4096 + [{**message, "role": "no"}]}, "messages"),
        (CHAT, {"messages": [{**message, "content": [part] * 8192 + [{"type": "no"}]}]}, "messages"),
        (
            CHAT,
            {"messages": [{"role": "assistant", "tool_calls": [call] * 8192 + [{**call, "type": "x"}]}]},
            "messages",
        ),
        (COMPLETIONS, {"prompt": "x", "bad_words": ["a"] * 128 + [""]}, "bad_words"),
        (COMPLETIONS, {"prompt": "x", "stop": ["a"] * 64 + [""]}, "stop"),
    ]
    for path, body, param in bodies:
        client = FakeClient()
        error = error_of(post(app_of(client), path, body), 400)
        assert error["param"] == param, body.keys()
        assert re.search(r"at most \d+ are allowed|above 256 choices", error["message"]), error["message"]
        assert client.requests == []
        assert client.rendered == []


def test_as_many_as_are_allowed_pass() -> None:
    client = FakeClient(dataclasses.replace(MODEL, vocab_size=2000))
    body = {
        "prompt": "x",
        "max_tokens": 1,
        "logit_bias": {str(i): 0 for i in range(1024)},
        "bad_words": ["a" * 128] * 128,
        "stop": ["a" * 256] * 64,
    }
    assert post(app_of(client), COMPLETIONS, body).status_code == 200
    messages = {"messages": [{"role": "user", "content": [{"type": "text", "text": "x"}] * 2}] * 4096}
    assert post(app_of(client), "/tokenize", messages).status_code == 200


def test_a_body_above_4_mib_is_refused_by_default_sec_06() -> None:
    body = b'{"prompt":"x","max_tokens":1}'
    assert post(app_of(), COMPLETIONS, content=body.ljust(4 * 2**20)).status_code == 200
    error_of(post(app_of(), COMPLETIONS, content=body.ljust(4 * 2**20 + 1)), 413)


def test_prompts_must_fit_and_texts_to_tokenize_need_not_sec_06() -> None:
    client = FakeClient()
    for prompt, param in (("x" * 1001, "prompt"), (["x", "x" * 1001], "prompt[1]")):
        error = error_of(post(app_of(client), COMPLETIONS, {"prompt": prompt}), 400)
        assert (error["code"], error["param"]) == ("context_length_exceeded", param)
        assert "at least 1001 tokens" in error["message"]
    assert strict_json(post(app_of(client), "/tokenize", {"prompt": "x" * 1001}))["count"] == 1001
    messages = [{"role": "user", "content": "x"}]
    for path in (CHAT, "/tokenize"):
        assert post(app_of(client), path, {"messages": messages}).status_code == 200
    assert [rendered["must_fit"] for rendered in client.rendered] == [True, False]


def test_a_prompt_of_too_many_ids_is_refused_before_they_are_looked_at() -> None:
    error = error_of(post(app_of(), COMPLETIONS, {"prompt": [5] * 64 + [9999]}), 400)
    assert error["code"] == "context_length_exceeded"


@pytest.mark.parametrize("wrong", [-1, 300])
def test_ids_to_detokenize_name_the_wrong_one(wrong: int) -> None:
    error = error_of(post(app_of(), "/detokenize", {"tokens": [5, wrong, -7]}), 400)
    assert (error["param"], f"is {wrong};" in error["message"]) == ("tokens[1]", True)
