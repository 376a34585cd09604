"""From request fields to SamplingParams: API-03, API-06, API-10, API-23 and the ranges of the sampling cases."""

from __future__ import annotations

import dataclasses
import time
from typing import Any

import pytest

from engine.api import SamplingParams
from tests.server.calls import CHAT, COMPLETIONS, app_of, error_of, post, strict_json
from tests.server.fake_client import MODEL, FakeClient

MESSAGES = [{"role": "user", "content": "Hi"}]


def sampling_of(fields: dict[str, Any], client: FakeClient | None = None, path: str = COMPLETIONS) -> SamplingParams:
    client = client or FakeClient()
    body = {"prompt": "Hi", **fields} if path == COMPLETIONS else {"messages": MESSAGES, **fields}
    response = post(app_of(client), path, body)
    assert response.status_code == 200, response.text
    return client.requests[0].sampling


def refused(fields: dict[str, Any], path: str = COMPLETIONS, client: FakeClient | None = None) -> dict[str, Any]:
    client = client or FakeClient()
    body = {"prompt": "Hi", **fields} if path == COMPLETIONS else {"messages": MESSAGES, **fields}
    error = error_of(post(app_of(client), path, body), 400)
    assert client.requests == []
    return error


def test_every_field_arrives() -> None:
    fields = {
        "temperature": 0.5,
        "top_k": 7,
        "top_p": 0.9,
        "min_p": 0.1,
        "repetition_penalty": 1.1,
        "presence_penalty": 0.2,
        "frequency_penalty": -0.3,
        "logit_bias": {"5": 2, "7": -101},
        "allowed_token_ids": [1, 2],
        "bad_words": ["no"],
        "seed": 3,
        "n": 2,
        "max_tokens": 6,
        "min_tokens": 2,
        "stop": ["a", "b"],
        "stop_token_ids": [9],
        "ignore_eos": True,
        "include_stop_str_in_output": True,
        "skip_special_tokens": False,
        "logprobs": 4,
        "prompt_logprobs": 1,
    }
    assert sampling_of(fields) == SamplingParams(
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        repetition_penalty=1.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        logit_bias={5: 2.0, 7: -100.0},
        allowed_token_ids=(1, 2),
        bad_words=("no",),
        seed=3,
        n=2,
        max_tokens=6,
        min_tokens=2,
        stop=("a", "b"),
        stop_token_ids=(9,),
        ignore_eos=True,
        include_stop_str_in_output=True,
        skip_special_tokens=False,
        logprobs=4,
        prompt_logprobs=1,
    )


def test_null_means_left_out() -> None:
    names = [
        *("temperature", "top_k", "top_p", "min_p", "repetition_penalty", "presence_penalty", "frequency_penalty"),
        *("logit_bias", "allowed_token_ids", "bad_words", "seed", "n", "best_of", "max_tokens", "min_tokens", "stop"),
        *("stop_token_ids", "ignore_eos", "include_stop_str_in_output", "skip_special_tokens", "logprobs", "echo"),
        *("prompt_logprobs", "stream", "stream_options", "cache_salt", "max_completion_tokens", "return_token_ids"),
    ]
    assert sampling_of(dict.fromkeys(names)) == SamplingParams(max_tokens=16)


def test_model_defaults_stand_in_for_missing_values() -> None:
    model = dataclasses.replace(
        MODEL, default_sampling={"temperature": 0.6, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05}
    )
    sampling = sampling_of({"temperature": None}, FakeClient(model))
    assert (sampling.temperature, sampling.top_p, sampling.top_k, sampling.repetition_penalty) == (0.6, 0.8, 20, 1.05)
    assert sampling_of({"temperature": 0, "top_k": -1}, FakeClient(model)).temperature == 0


@pytest.mark.parametrize(
    ("asked", "used"), [(0, 0.0), (1e-30, 1e-30), (9e-6, 9e-6), (1e-5, 0.01), (0.0001, 0.01), (0.01, 0.01), (2, 2.0)]
)
def test_small_temperatures_sam_01(asked: float, used: float) -> None:
    """Below 1e-5 is greedy (the engine's own rule), up to 0.01 is raised to 0.01."""
    assert sampling_of({"temperature": asked}).temperature == used


@pytest.mark.parametrize(
    ("path", "fields", "expected"),
    [
        (COMPLETIONS, {}, 16),
        (COMPLETIONS, {"max_tokens": None}, 16),
        (COMPLETIONS, {"max_tokens": 2147483648}, 2147483647),
        (COMPLETIONS, {"max_tokens": 10**400}, 2147483647),
        (CHAT, {}, None),
        (CHAT, {"max_tokens": None}, None),
        (CHAT, {"max_tokens": 5}, 5),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": 3}, 3),
        (CHAT, {"max_tokens": 5, "max_completion_tokens": None}, 5),
    ],
)
def test_max_tokens_api_03(path: str, fields: dict[str, Any], expected: int | None) -> None:
    assert sampling_of(fields, path=path).max_tokens == expected


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        (COMPLETIONS, {"max_tokens": 0}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": -1}, "max_tokens"),
        (COMPLETIONS, {"max_tokens": -1, "echo": True}, "max_tokens"),
        (CHAT, {"max_tokens": 0}, "max_tokens"),
        (CHAT, {"max_completion_tokens": 0, "max_tokens": 5}, "max_completion_tokens"),
    ],
)
def test_max_tokens_refused_api_03(path: str, fields: dict[str, Any], param: str, stream: bool) -> None:
    assert refused({**fields, "stream": stream}, path)["param"] == param


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        pytest.param({"n": 1000000000, "max_tokens": 1}, "n", id="a"),
        pytest.param({"n": 0}, "n", id="b"),
        pytest.param({"n": 2, "best_of": 1}, "best_of", id="c"),
        pytest.param({"best_of": 3}, "best_of", id="best_of"),
        pytest.param({"n": 2, "temperature": 0}, "n", id="greedy"),
        pytest.param({"prompt": ["x"] * 100000, "max_tokens": 1}, "prompt", id="100000-prompts"),
        pytest.param({"prompt": ["x"] * 100, "n": 100, "temperature": 1}, "prompt", id="product"),
    ],
)
def test_fan_out_is_refused_before_any_work_api_06(fields: dict[str, Any], param: str) -> None:
    client = FakeClient()
    app = app_of(client)
    post(app, COMPLETIONS, {"prompt": "warm"})
    client.requests.clear()
    start = time.perf_counter()
    assert error_of(post(app, COMPLETIONS, {"prompt": "x", **fields}), 400)["param"] == param
    assert time.perf_counter() - start < 2  # with any fan-out of the first it would be minutes; not a speed test
    assert client.requests == []


def test_choices_are_in_prompt_major_order_api_06() -> None:
    body = {"prompt": ["x", "y", "z"], "n": 2, "max_tokens": 2, "temperature": 1, "echo": True}
    answer = strict_json(post(app_of(FakeClient(replies=("ab", "cd"))), COMPLETIONS, body))
    assert [choice["index"] for choice in answer["choices"]] == [0, 1, 2, 3, 4, 5]
    assert [choice["text"] for choice in answer["choices"]] == ["xab", "xcd", "yab", "ycd", "zab", "zcd"]
    assert (answer["usage"]["prompt_tokens"], answer["usage"]["completion_tokens"]) == (3, 12)


def test_chat_logprobs_counts_api_10() -> None:
    asked = {"messages": MESSAGES, "max_tokens": 3, "logprobs": True}
    for top, count in ((5, 5), (0, 0), (None, 0)):
        answer = strict_json(post(app_of(), CHAT, {**asked, "top_logprobs": top}))
        content = answer["choices"][0]["logprobs"]["content"]
        assert [entry["token"] for entry in content] == ["H", "e", "l"]
        for entry in content:
            values = [other["logprob"] for other in entry["top_logprobs"]]
            assert len(values) == count
            assert values == sorted(values, reverse=True)
            assert isinstance(entry["logprob"], float)
    for off in (False, None):
        assert strict_json(post(app_of(), CHAT, {**asked, "logprobs": off}))["choices"][0]["logprobs"] is None


@pytest.mark.parametrize(
    ("path", "fields", "param"),
    [
        pytest.param(CHAT, {"top_logprobs": 5}, "top_logprobs", id="c"),
        pytest.param(CHAT, {"logprobs": True, "top_logprobs": 21}, "top_logprobs", id="d"),
        pytest.param(CHAT, {"logprobs": True, "top_logprobs": -1}, "top_logprobs", id="e"),
        pytest.param(COMPLETIONS, {"logprobs": True}, "logprobs", id="f"),
        pytest.param(COMPLETIONS, {"logprobs": 21}, "logprobs", id="completions-21"),
        pytest.param(COMPLETIONS, {"logprobs": -1}, "logprobs", id="completions-minus-1"),
        pytest.param(COMPLETIONS, {"prompt_logprobs": 21}, "prompt_logprobs", id="prompt-21"),
        pytest.param(COMPLETIONS, {"prompt_logprobs": 1, "stream": True}, "prompt_logprobs", id="prompt-stream"),
        pytest.param(CHAT, {"prompt_logprobs": 0, "stream": True}, "prompt_logprobs", id="chat-prompt-stream"),
    ],
)
def test_logprobs_refused_api_10(path: str, fields: dict[str, Any], param: str) -> None:
    assert refused(fields, path)["param"] == param


@pytest.mark.parametrize("stop", [[""], "", ["a", ""], ["a", 1], ["a" * 100] * 10000, ["a" * 1_000_000]])
def test_odd_stops_are_refused_api_23(stop: Any) -> None:
    assert refused({"stop": stop})["param"] in ("stop", "stop[1]")


@pytest.mark.parametrize(
    ("stop", "used"), [([], ()), (None, ()), ("ab", ("ab",)), (["a", "a", "aa"], ("a", "a", "aa"))]
)
def test_stops_api_23(stop: Any, used: tuple[str, ...]) -> None:
    assert sampling_of({"stop": stop}).stop == used


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"temperature": -1}, "temperature"),
        ({"top_p": -1}, "top_p"),
        ({"top_p": 0}, "top_p"),
        ({"top_p": 1.5}, "top_p"),
        ({"min_p": 1.1}, "min_p"),
        ({"top_k": -2}, "top_k"),
        ({"repetition_penalty": 0}, "repetition_penalty"),
        ({"presence_penalty": 3}, "presence_penalty"),
        ({"max_tokens": 4, "min_tokens": 5}, "min_tokens"),
        ({"logit_bias": {"999999999": 5}}, "logit_bias"),
        ({"logit_bias": {"9" * 4000: 5}}, "logit_bias"),
        ({"logit_bias": {"-1": 5}}, "logit_bias"),
        ({"logit_bias": {"abc": 5}}, "logit_bias"),
        ({"logit_bias": {"5": "1"}}, "logit_bias[...]"),
        ({"logit_bias": {" 5": 1}}, "logit_bias"),
        ({"allowed_token_ids": []}, "allowed_token_ids"),
        ({"allowed_token_ids": [300]}, "allowed_token_ids"),
        ({"stop_token_ids": [-1]}, "stop_token_ids"),
        ({"bad_words": [""]}, "bad_words"),
        ({"cache_salt": ""}, "cache_salt"),
        ({"cache_salt": "s" * 129}, "cache_salt"),
    ],
)
def test_out_of_range_values_sam_02_sam_03_sam_06_tok_06(fields: dict[str, Any], param: str) -> None:
    assert refused(fields)["param"] == param


@pytest.mark.parametrize("bias", [{}, None])
def test_no_bias_sam_06(bias: Any) -> None:
    assert sampling_of({"logit_bias": bias}).logit_bias == {}


def test_huge_top_k_stays_small_sam_03() -> None:
    assert sampling_of({"top_k": 10**30}).top_k == 2**31 - 1


def test_cache_salt_arrives() -> None:
    client = FakeClient()
    sampling_of({"cache_salt": "s" * 128}, client)
    assert client.requests[0].cache_salt == "s" * 128
