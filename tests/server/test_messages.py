"""Chat messages on their way to the template: API-16 to API-19, SEC-03."""

from __future__ import annotations

from typing import Any

import pytest

from tests.server.calls import CHAT, app_of, error_of, post, strict_json
from tests.server.fake_client import FakeClient

CALL = {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": '{"city": "Lima"}'}}
USER = {"role": "user", "content": "x"}


def rendered(messages: list[Any], **fields: Any) -> dict[str, Any]:
    client = FakeClient()
    response = post(app_of(client), CHAT, {"messages": messages, "max_tokens": 1, **fields})
    assert response.status_code == 200, response.text
    return client.rendered[0]


def refused(messages: Any, **fields: Any) -> dict[str, Any]:
    return error_of(post(app_of(), CHAT, {"messages": messages, "max_tokens": 1, **fields}), 400)


def test_null_and_missing_content_beside_tool_calls_are_the_same_api_16() -> None:
    tool = {"role": "tool", "tool_call_id": "c1", "content": "09:41"}
    with_null = rendered([USER, {"role": "assistant", "content": None, "tool_calls": [CALL]}, tool])
    without = rendered([USER, {"role": "assistant", "tool_calls": [CALL]}, tool])
    assert with_null == without
    assert without["messages"][1:] == [
        {
            "role": "assistant",
            "content": "",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "clock", "arguments": {"city": "Lima"}}}
            ],
        },
        tool,
    ]


@pytest.mark.parametrize("role", ["system", "developer", "user", "tool", "assistant"])
@pytest.mark.parametrize("message", [{"content": None}, {}, {"content": None, "tool_calls": []}])
def test_null_content_is_refused_api_16(role: str, message: dict[str, Any]) -> None:
    assert refused([USER, {"role": role, **message}])["param"] == "messages[1].content"


@pytest.mark.parametrize("arguments", ["{", "[1]", "null", '{"a": NaN}', "[" * 100000, '"text"'])
def test_broken_arguments_are_named_api_17(arguments: str) -> None:
    call = {"id": "c1", "type": "function", "function": {"name": "echo", "arguments": arguments}}
    error = refused([USER, {"role": "assistant", "content": "", "tool_calls": [CALL, call]}])
    assert error["param"] == "messages[1].tool_calls[1].function.arguments"


@pytest.mark.parametrize(("arguments", "used"), [("", {}), (None, {}), ({"a": 1}, {"a": 1}), ('{"a":[]}', {"a": []})])
def test_arguments_become_an_object_api_17(arguments: Any, used: dict[str, Any]) -> None:
    call = {"type": "function", "function": {"name": "echo", "arguments": arguments}}
    message = rendered([USER, {"role": "assistant", "tool_calls": [call]}])["messages"][1]
    assert message["tool_calls"] == [{"type": "function", "function": {"name": "echo", "arguments": used}}]


def test_orphan_tool_message_is_rendered_api_17() -> None:
    message = {"role": "tool", "tool_call_id": "zz", "content": "y"}
    assert rendered([message])["messages"] == [message]


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_text_parts_are_joined_api_18(role: str) -> None:
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "world"}]
    assert rendered([{"role": role, "content": parts}]) == rendered([{"role": role, "content": "Hello world"}])


@pytest.mark.parametrize(
    ("content", "param"),
    [
        pytest.param([], "messages[0].content", id="b"),
        pytest.param(
            [{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], "messages[0].content[0].type", id="c"
        ),
        pytest.param([{"type": "text"}], "messages[0].content[0].text", id="d"),
        pytest.param([{"type": "text", "text": "a"}, {"type": "input_audio"}], "messages[0].content[1].type", id="e"),
        pytest.param([{"text": "a"}], "messages[0].content[0].type", id="f"),
        pytest.param([{"type": "text", "text": 1}], "messages[0].content[0].text", id="g"),
    ],
)
def test_odd_parts_are_refused_api_18(content: Any, param: str) -> None:
    error = refused([{"role": "user", "content": content}])
    assert error["param"] == param
    assert "passwd" not in error["message"]


def test_developer_is_a_system_message_in_its_place_api_19() -> None:
    messages = [{"role": "system", "content": "A1"}, {"role": "developer", "content": "B2"}, USER]
    assert rendered(messages)["messages"] == [
        {"role": "system", "content": "A1"},
        {"role": "system", "content": "B2"},
        USER,
    ]


@pytest.mark.parametrize("role", ["wizard", "", "User", "function"])
def test_unknown_role_is_refused_api_19(role: str) -> None:
    assert refused([{"role": role, "content": "q"}])["param"] == "messages[0].role"


@pytest.mark.parametrize("stream", [False, True])
def test_message_of_the_template_reaches_the_client_api_19(stream: bool) -> None:
    error = refused([{"role": "user", "content": "REFUSE"}], stream=stream)
    assert error["message"] == "the chat template refuses: roles must alternate"


def test_empty_messages_api_01() -> None:
    assert refused([])["param"] == "messages"
    client = FakeClient()
    strict_json(post(app_of(client), CHAT, {"messages": [{"role": "user", "content": ""}], "max_tokens": 4}))


def test_generation_prompt_and_final_message() -> None:
    plain = rendered([USER])
    assert (plain["add_generation_prompt"], plain["continue_final_message"]) == (True, False)
    final = rendered([USER], continue_final_message=True)
    assert (final["add_generation_prompt"], final["continue_final_message"]) == (False, True)
    assert rendered([USER], add_generation_prompt=False)["add_generation_prompt"] is False
    both = refused([USER], add_generation_prompt=True, continue_final_message=True)
    assert both["param"] == "continue_final_message"


def test_template_kwargs_sec_03() -> None:
    assert rendered([USER], chat_template_kwargs={"enable_thinking": False})["template_kwargs"] == {
        "enable_thinking": False
    }
    error = refused([USER], chat_template_kwargs={"messages": "x"})  # which names are reserved is the renderer's rule
    assert error["param"] == "chat_template_kwargs.messages"


def test_reasoning_of_the_history_has_both_names() -> None:
    message = rendered([USER, {"role": "assistant", "content": "a", "reasoning_content": "r"}])["messages"][1]
    assert message == {"role": "assistant", "content": "a", "reasoning": "r", "reasoning_content": "r"}


def test_history_as_the_openai_client_dumps_it() -> None:
    dumped = {
        "role": "assistant",
        "content": "a",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    assert rendered([USER, dumped])["messages"][1] == {"role": "assistant", "content": "a"}
