"""What is not there yet is a 400 that names it: API-12 to API-15, API-21, API-22, SEC-02, SEC-03, SEC-09, SEC-10."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.calls import CHAT, COMPLETIONS, app_of, error_of, post
from tests.server.fake_client import FakeClient

TOOL = {"type": "function", "function": {"name": "w", "parameters": {"type": "object"}}}
SCHEMA = {"type": "json_schema", "json_schema": {"name": "r", "schema": {"$ref": "#/nope"}}}


def nested(depth: int) -> Any:
    schema: Any = {"type": "string"}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        pytest.param({"tools": [TOOL], "tool_choice": "required"}, "tools", id="api-12-a"),
        pytest.param({"tools": [TOOL], "tool_choice": {"type": "function"}}, "tools", id="api-12-b"),
        pytest.param({"tool_choice": "required"}, "tool_choice", id="api-12-c"),
        pytest.param({"tools": [], "tool_choice": "none"}, "tools", id="api-12-e"),
        pytest.param({"tool_choice": "auto"}, "tool_choice", id="tool-choice-auto"),
        pytest.param({"functions": [{}]}, "functions", id="functions"),
        pytest.param({"function_call": "auto"}, "function_call", id="function-call"),
        pytest.param({"response_format": SCHEMA}, "response_format", id="api-22-c"),
        pytest.param({"response_format": {"type": "json_schema"}}, "response_format", id="api-22-f"),
        pytest.param({"response_format": {"type": "json_object"}}, "response_format", id="json-object"),
        pytest.param({"response_format": nested(100)}, "response_format", id="sec-09"),
        pytest.param({"structured_outputs": {"regex": "a"}}, "structured_outputs", id="structured-outputs"),
        pytest.param({"guided_regex": "x{2}**"}, "guided_regex", id="api-22-a"),
        pytest.param({"guided_regex": "(a?){5000}a{5000}"}, "guided_regex", id="sec-10-b"),
        pytest.param({"guided_json": {}}, "guided_json", id="guided-json"),
        pytest.param({"guided_choice": ["a"]}, "guided_choice", id="guided-choice"),
        pytest.param({"guided_grammar": "("}, "guided_grammar", id="guided-grammar"),
        pytest.param({"chat_template": "{{ 'z' * 1000000000 }}"}, "chat_template", id="sec-03-a"),
        pytest.param({"documents": [{"text": "a"}]}, "documents", id="documents"),
        pytest.param({"modalities": ["text", "audio"]}, "modalities", id="modalities"),
        pytest.param({"use_beam_search": True}, "use_beam_search", id="beam"),
        pytest.param({"priority": -1000000}, "priority", id="priority"),
        pytest.param({"priority": 10**400}, "priority", id="huge-priority"),
        pytest.param({"prompt_embeds": "AAAA"}, "prompt_embeds", id="prompt-embeds"),
        pytest.param({"logits_processors": ["os.system"]}, "logits_processors", id="logits-processors"),
        pytest.param({"suffix": "end"}, "suffix", id="suffix"),
        pytest.param({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens", id="truncate"),
        pytest.param({"thinking_token_budget": 5}, "thinking_token_budget", id="thinking"),
        pytest.param({"return_tokens_as_token_ids": True}, "return_tokens_as_token_ids", id="as-ids"),
        pytest.param({"spaces_between_special_tokens": False}, "spaces_between_special_tokens", id="spaces"),
    ],
)
@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_is_refused_by_name(path: str, fields: dict[str, Any], param: str, streamed: bool) -> None:
    client = FakeClient()
    body = {"prompt": "x", "messages": [{"role": "user", "content": "x"}], "stream": streamed, **fields}
    error = error_of(post(app_of(client), path, body), 400)
    assert (error["param"], error["code"]) == (param, "unsupported_parameter")
    assert error["message"].startswith(f"{param} is not supported yet")
    assert client.requests == []


def test_chat_only() -> None:
    messages = [{"role": "user", "content": "x"}]
    for name in ("echo", "add_special_tokens"):
        assert error_of(post(app_of(), CHAT, {"messages": messages, name: True}), 400)["param"] == name


def test_values_that_ask_for_nothing_are_taken() -> None:
    fields = {
        "tools": None,
        "tool_choice": "none",
        "functions": None,
        "function_call": None,
        "response_format": {"type": "text"},
        "structured_outputs": None,
        "guided_json": None,
        "chat_template": None,
        "documents": [],
        "modalities": ["text"],
        "use_beam_search": False,
        "priority": 0,
        "suffix": None,
        "best_of": 1,
        "truncate_prompt_tokens": None,
        "spaces_between_special_tokens": True,
    }
    for path, prompt in ((CHAT, {"messages": [{"role": "user", "content": "x"}]}), (COMPLETIONS, {"prompt": "x"})):
        response = post(app_of(), path, {**prompt, **fields})
        assert response.status_code == 200, response.text
        assert "x-glint-ignored-fields" not in response.headers


def test_reasoning_effort_is_reported_as_ignored() -> None:
    body = {"messages": [{"role": "user", "content": "x"}], "reasoning_effort": "high", "parallel_tool_calls": True}
    assert post(app_of(), CHAT, body).headers["x-glint-ignored-fields"] == "reasoning_effort, parallel_tool_calls"
