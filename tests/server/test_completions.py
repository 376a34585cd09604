"""Text completions: API-01, API-02, API-08, API-09, API-11, and models without a tokenizer."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from tests.server.calls import CHAT, COMPLETIONS, app_of, error_of, joined, post, stream, strict_json
from tests.server.fake_client import CONTEXT, MODEL, FakeClient, ids_of, logprob_of

CAFE = "caf\u00e9 \U0001f600"


@pytest.mark.parametrize(("prompt", "param"), [("", "prompt"), (["", ""], "prompt[0]"), (["a", ""], "prompt[1]")])
def test_empty_text_starts_from_the_start_token_or_is_refused_api_01(prompt: Any, param: str) -> None:
    with_bos = FakeClient(add_bos=True)
    strict_json(post(app_of(with_bos), COMPLETIONS, {"prompt": prompt, "max_tokens": 4}))
    assert with_bos.requests[-1].prompt_ids == (0,)
    without = FakeClient()
    error = error_of(post(app_of(without), COMPLETIONS, {"prompt": prompt, "max_tokens": 4}), 400)
    assert error["param"] == param
    assert without.requests == []


@pytest.mark.parametrize(("prompt", "param"), [([], "prompt"), ([[]], "prompt[0]"), ([[1], []], "prompt[1]")])
def test_empty_lists_are_refused_api_01(prompt: Any, param: str) -> None:
    assert error_of(post(app_of(FakeClient(add_bos=True)), COMPLETIONS, {"prompt": prompt}), 400)["param"] == param


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("num", "max_tokens", "made"), [(CONTEXT - 1, 1, 1), (CONTEXT - 1, 2, 1), (10, None, 16)])
def test_prompt_near_the_limit_api_02(num: int, max_tokens: int | None, made: int, streamed: bool) -> None:
    client = FakeClient(replies=("x" * 100,))
    body = {"prompt": [5] * num, "max_tokens": max_tokens, "temperature": 0}
    if streamed:
        *_, last, usage = stream(app_of(client), COMPLETIONS, {**body, "stream_options": {"include_usage": True}})
        choice = last["choices"][0]
    else:
        usage = strict_json(post(app_of(client), COMPLETIONS, body))
        choice = usage["choices"][0]
    assert usage["usage"]["completion_tokens"] == made
    assert choice["finish_reason"] == "length"


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("num", "max_tokens"), [(CONTEXT, 1), (CONTEXT + 1, 1), (4 * CONTEXT, 1), (CONTEXT, 7)])
def test_prompt_over_the_limit_api_02(num: int, max_tokens: int, streamed: bool) -> None:
    client = FakeClient()
    body = {"prompt": [5] * num, "max_tokens": max_tokens, "stream": streamed}
    error = error_of(post(app_of(client), COMPLETIONS, body), 400)
    assert error["code"] == "context_length_exceeded"
    assert f"maximum context length is {CONTEXT} tokens. However, you requested {num + max_tokens}" in error["message"]
    assert client.requests == []


def test_long_chat_is_refused_in_words_that_agents_read_api_02() -> None:
    body = {"messages": [{"role": "user", "content": "y" * 100}], "max_tokens": 5}
    error = error_of(post(app_of(), CHAT, body), 400)
    assert (error["code"], error["param"]) == ("context_length_exceeded", "messages")
    assert "However, you requested 108 tokens (103 in the messages, 5 in the completion)" in error["message"]


def whole_choice(client: FakeClient, body: dict[str, Any], streamed: bool) -> dict[str, Any]:
    """Text, logprobs and finish_reason of choice 0, however it was sent."""
    if not streamed:
        return strict_json(post(app_of(client), COMPLETIONS, body))["choices"][0]
    entries = [event["choices"][0] for event in stream(app_of(client), COMPLETIONS, body) if event["choices"]]
    logprobs = None
    if entries[0]["logprobs"] is not None:
        names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
        logprobs = {name: [value for entry in entries for value in entry["logprobs"][name]] for name in names}
    text = "".join(entry["text"] for entry in entries)
    return {"text": text, "logprobs": logprobs, "finish_reason": entries[-1]["finish_reason"]}


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("burst", [1, 3])
@pytest.mark.parametrize("prompt", ["\n2. Mara owns 31", CAFE])
@pytest.mark.parametrize("logprobs", [0, 1, 5])
def test_echo_with_logprobs_api_08(prompt: str, logprobs: int, burst: int, streamed: bool) -> None:
    client = FakeClient(replies=("ö!",), burst=burst, delay_s=0)
    body = {"prompt": prompt, "max_tokens": 3, "echo": True, "logprobs": logprobs}
    choice = whole_choice(client, body, streamed)
    prompt_ids, new_ids = ids_of(prompt), ids_of("ö!")
    tokens, offsets = choice["logprobs"]["tokens"], choice["logprobs"]["text_offset"]
    assert len(tokens) == len(prompt_ids) + len(new_ids)
    assert choice["text"] == "".join(tokens) == prompt + "ö!"
    ends = [*offsets[1:], len(choice["text"])]
    assert [choice["text"][start:end] for start, end in zip(offsets, ends, strict=True)] == tokens
    expected = [logprob_of(i, prompt_ids[i]) for i in range(1, len(prompt_ids))]
    expected += [logprob_of(i, new_ids[i]) for i in range(len(new_ids))]
    assert choice["logprobs"]["token_logprobs"] == [None, *expected]
    tops = choice["logprobs"]["top_logprobs"]
    assert tops[0] is None
    for token, value, top in zip(tokens[1:], expected, tops[1:], strict=True):
        assert len(top) == logprobs + 1
        assert top[token] == value


@pytest.mark.parametrize("streamed", [False, True])
def test_score_only_api_08(streamed: bool) -> None:
    client = FakeClient(stop_reason=7)
    body = {"prompt": CAFE, "max_tokens": 0, "echo": True, "logprobs": 5}
    choice = whole_choice(client, body, streamed)
    assert (choice["text"], choice["finish_reason"]) == (CAFE, "length")
    assert len(choice["logprobs"]["tokens"]) == len(ids_of(CAFE))
    assert client.requests[0].sampling.max_tokens == 1


@pytest.mark.parametrize("streamed", [False, True])
def test_echo_without_logprobs_api_03(streamed: bool) -> None:
    client = FakeClient(replies=("ab",))
    choice = whole_choice(client, {"prompt": "Hi", "max_tokens": 0, "echo": True}, streamed)
    assert (choice["text"], choice["logprobs"]) == ("Hi", None)
    assert client.requests[0].sampling.prompt_logprobs is None
    assert whole_choice(client, {"prompt": "Hi", "max_tokens": 2, "echo": True}, streamed)["text"] == "Hiab"


def test_score_only_counts_no_output() -> None:
    body = {"prompt": "Hi", "max_tokens": 0, "echo": True}
    usage = strict_json(post(app_of(), COMPLETIONS, body))["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (2, 0, 2)


def test_echo_with_several_choices_and_prompts_streamed_api_08() -> None:
    client = FakeClient(replies=("ab", "cd"), delay_s=0)
    body = {"prompt": ["x", "yy"], "n": 2, "max_tokens": 2, "echo": True, "logprobs": 0}
    events = stream(app_of(client), COMPLETIONS, body)
    assert [joined(events, i) for i in range(4)] == ["xab", "xcd", "yyab", "yycd"]


@pytest.mark.parametrize("streamed", [False, True])
def test_lost_prompt_logprobs_are_an_error_not_a_null_api_08_api_09(streamed: bool) -> None:
    client = FakeClient(gives_prompt_logprobs=False)
    body = {"prompt": "Hi", "max_tokens": 1, "echo": True, "logprobs": 0, "stream": streamed}
    response = post(app_of(client), COMPLETIONS, body)
    if streamed:
        assert '{"error":' in response.text
    else:
        error_of(response, 500)
        error_of(post(app_of(client), COMPLETIONS, {"prompt": "Hi", "max_tokens": 1, "prompt_logprobs": 0}), 500)


def test_prompt_logprobs_api_09() -> None:
    body = {"prompt": "tools:", "max_tokens": 1, "prompt_logprobs": 1}
    entries = strict_json(post(app_of(), COMPLETIONS, body))["choices"][0]["prompt_logprobs"]
    ids = ids_of("tools:")
    assert len(entries) == len(ids)
    assert entries[0] is None
    for i, entry in enumerate(entries[1:], 1):
        assert entry[str(ids[i])] == {"logprob": logprob_of(i, ids[i]), "rank": None, "decoded_token": "tools:"[i]}
        assert entry["260"]["rank"] == 1
        assert len(entry) == 2


def test_prompt_logprobs_of_a_chat_and_beside_echo_api_09() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 1, "prompt_logprobs": 0}
    answer = strict_json(post(app_of(), CHAT, body))
    assert len(answer["prompt_logprobs"]) == answer["usage"]["prompt_tokens"] == 4
    both = {"prompt": "ab", "max_tokens": 1, "prompt_logprobs": 2, "echo": True, "logprobs": 1}
    choice = strict_json(post(app_of(), COMPLETIONS, both))["choices"][0]
    assert len(choice["prompt_logprobs"][1]) == 3
    assert len(choice["logprobs"]["top_logprobs"][1]) == 2


@pytest.mark.parametrize("streamed", [False, True])
def test_minus_infinity_has_a_floor_api_11(streamed: bool) -> None:
    client = FakeClient(top_logprobs=[-0.1, -math.inf, math.nan], replies=("ab",))
    choice = whole_choice(client, {"prompt": "x", "max_tokens": 2, "logprobs": 3}, streamed)
    assert sorted(choice["logprobs"]["top_logprobs"][0].values())[:2] == [-9999.0, -9999.0]
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "logprobs": True, "top_logprobs": 3}
    body = stream(app_of(client), CHAT, chat)[1] if streamed else strict_json(post(app_of(client), CHAT, chat))
    top = body["choices"][0]["logprobs"]["content"][0]["top_logprobs"]
    assert [entry["logprob"] for entry in top] == [-0.1, -9999.0, -9999.0]


def test_alternatives_with_one_text_keep_keys_of_their_own_tok_05() -> None:
    """All alternatives of the fake have no text and no bytes; none may replace another."""
    choice = strict_json(post(app_of(), COMPLETIONS, {"prompt": "x", "max_tokens": 1, "logprobs": 3}))["choices"][0]
    assert list(choice["logprobs"]["top_logprobs"][0]) == ["H", "token_id:260", "token_id:261", "token_id:262"]


def test_bytes_of_entries_join_to_the_content_tok_05() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 20, "logprobs": True}
    choice = strict_json(post(app_of(FakeClient(replies=(CAFE,))), CHAT, body))["choices"][0]
    data = [byte for entry in choice["logprobs"]["content"] for byte in entry["bytes"]]
    assert bytes(data).decode() == choice["message"]["content"]


def test_answer_fields() -> None:
    client = FakeClient(stop_reason="END", num_cached_tokens=3)
    answer = strict_json(post(app_of(client), COMPLETIONS, {"prompt": ["abcd", "efgh"], "max_tokens": 20}))
    assert answer["id"].startswith("cmpl-")
    assert answer["object"] == "text_completion"
    assert answer["usage"] == {
        "prompt_tokens": 8,
        "completion_tokens": 16,
        "total_tokens": 24,
        "prompt_tokens_details": {"cached_tokens": 6},
    }
    assert answer["choices"][1] == {
        "index": 1,
        "text": "Hello é",
        "logprobs": None,
        "finish_reason": "stop",
        "stop_reason": "END",
    }
    chat = strict_json(post(app_of(client), CHAT, {"messages": [{"role": "user", "content": "x"}]}))
    assert chat["id"].startswith("chatcmpl-")
    assert chat["object"] == "chat.completion"
    assert chat["choices"] == [
        {
            "index": 0,
            "message": {"role": "assistant", "content": "Hello é", "refusal": None},
            "logprobs": None,
            "finish_reason": "stop",
            "stop_reason": "END",
        }
    ]


def test_token_ids_on_request() -> None:
    body = {"prompt": "x", "max_tokens": 2, "return_token_ids": True}
    choice = strict_json(post(app_of(), COMPLETIONS, body))["choices"][0]
    assert (choice["prompt_token_ids"], choice["token_ids"]) == (ids_of("x"), ids_of("He"))
    chat = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, "return_token_ids": True}
    answer = strict_json(post(app_of(), CHAT, chat))
    assert (answer["prompt_token_ids"], answer["choices"][0]["token_ids"]) == (ids_of("u:x;"), ids_of("He"))
    events = stream(app_of(), CHAT, chat)
    assert [i for event in events for i in event["choices"][0].get("token_ids", ())] == ids_of("He")


def test_special_tokens_of_a_text_prompt() -> None:
    client = FakeClient(add_bos=True)
    for add, ids in ((True, (0, *ids_of("x"))), (None, (0, *ids_of("x"))), (False, tuple(ids_of("x")))):
        post(app_of(client), COMPLETIONS, {"prompt": "x", "max_tokens": 1, "add_special_tokens": add})
        assert client.requests[-1].prompt_ids == ids
    post(app_of(client), COMPLETIONS, {"prompt": [9], "max_tokens": 1})
    assert client.requests[-1].prompt_ids == (9,)


@pytest.mark.parametrize("streamed", [False, True])
def test_without_a_tokenizer_ids_work_and_text_is_null(streamed: bool) -> None:
    client = FakeClient(dataclasses.replace(MODEL, has_tokenizer=False))
    body = {"prompt": [5, 6], "max_tokens": 2, "stream": streamed}
    response = post(app_of(client), COMPLETIONS, body)
    if streamed:
        choices = [event["choices"][0] for event in stream(app_of(client), COMPLETIONS, body)]
    else:
        choices = response.json()["choices"]
    assert all(choice["text"] is None for choice in choices)
    assert [i for choice in choices for i in choice["token_ids"]] == ids_of("He")


def test_without_a_tokenizer_text_is_refused() -> None:
    client = FakeClient(dataclasses.replace(MODEL, has_tokenizer=False))
    for path, body, param in (
        (COMPLETIONS, {"prompt": "x"}, "prompt"),
        (COMPLETIONS, {"prompt": ["x"]}, "prompt[0]"),
        (COMPLETIONS, {"prompt": [5], "echo": True}, "echo"),
        (COMPLETIONS, {"prompt": [5], "stop": "a"}, "stop"),
        (CHAT, {"messages": [{"role": "user", "content": "x"}]}, "messages"),
        ("/tokenize", {"prompt": "x"}, "prompt"),
        ("/detokenize", {"tokens": [5]}, "tokens"),
    ):
        error = error_of(post(app_of(client), path, body), 400)
        assert (error["code"], error["param"]) == ("no_tokenizer", param)
        assert "tokenizer" in error["message"]


def test_without_a_template_chat_is_refused() -> None:
    client = FakeClient(dataclasses.replace(MODEL, has_chat_template=False))
    error = error_of(post(app_of(client), CHAT, {"messages": [{"role": "user", "content": "x"}]}), 400)
    assert "no chat template" in error["message"]
