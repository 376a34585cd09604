"""Chat messages as the template gets them, with every rule that does not depend on a template."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import msgspec

from engine.api import EngineClient, ModelInfo
from engine.errors import RequestError
from server.schema import ChatRequest, ContentPart, Message, TokenizeRequest, ToolCall

# The template's view of a role. Templates know no developer; it keeps its place among the messages.
_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}


async def render(body: ChatRequest | TokenizeRequest, model: ModelInfo, client: EngineClient) -> list[int]:
    """Prompt ids of a conversation.

    Raises:
        RequestError: a message breaks a rule, the model has no tokenizer or template, the template refuses, or
            chat_template_kwargs has a reserved name.
    """
    if not model.has_tokenizer:
        message = "this model has no tokenizer: use /v1/completions with token ids as the prompt"
        raise RequestError(message, "messages", "no_tokenizer")
    if not model.has_chat_template:
        message = "this model has no chat template: use /v1/completions, or start the server with --chat-template"
        raise RequestError(message, "messages", "no_chat_template")
    continue_final = bool(body.continue_final_message)
    add_prompt = not continue_final if body.add_generation_prompt is None else body.add_generation_prompt
    if continue_final and add_prompt:
        message = "continue_final_message and add_generation_prompt cannot both be true"
        raise RequestError(message, "continue_final_message")
    messages = template_messages(body.messages or [])
    must_fit = isinstance(body, ChatRequest)
    return await client.render_chat(messages, add_prompt, continue_final, body.chat_template_kwargs, must_fit)


def template_messages(messages: Sequence[Message]) -> list[dict[str, Any]]:
    """Messages as plain dicts: text content is one string, tool arguments are objects, absent fields are absent.

    Raises:
        RequestError: names the message and the field.
    """
    if not messages:
        raise RequestError("messages is empty: give at least one", "messages")
    return [_template_message(message, f"messages[{i}]") for i, message in enumerate(messages)]


def _template_message(message: Message, where: str) -> dict[str, Any]:
    role = _ROLES.get(message.role)
    if role is None:
        known = ", ".join(_ROLES)
        raise RequestError(f"{where}.role must be one of {known}", f"{where}.role")
    is_assistant = role == "assistant"
    calls = message.tool_calls if is_assistant else None
    if message.content is None and not calls:
        raise RequestError(f"{where}.content is missing or null", f"{where}.content")
    rendered: dict[str, Any] = {"role": role, "content": _text(message.content, f"{where}.content")}
    if message.name is not None:
        rendered["name"] = message.name
    if role == "tool" and message.tool_call_id is not None:
        rendered["tool_call_id"] = message.tool_call_id
    if calls:
        rendered["tool_calls"] = [_tool_call(call, f"{where}.tool_calls[{j}]") for j, call in enumerate(calls)]
    reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
    if is_assistant and reasoning is not None:  # templates read one or the other name
        rendered["reasoning"] = rendered["reasoning_content"] = reasoning
    return rendered


def _text(content: str | list[ContentPart] | None, where: str) -> str:
    """The text of a message; parts are joined with nothing between. Null (beside tool calls) is the empty string."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not content:
        raise RequestError(f"{where} is an empty list: give a string or at least one text part", where)
    texts = []
    for i, part in enumerate(content):
        if part.type != "text":
            message = f"{where}[{i}] is not text; other parts are not supported yet"
            raise RequestError(message, f"{where}[{i}].type", "unsupported_parameter")
        if part.text is None:
            raise RequestError(f"{where}[{i}].text is missing", f"{where}[{i}].text", "missing_required_parameter")
        texts.append(part.text)
    return "".join(texts)


def _tool_call(call: ToolCall, where: str) -> dict[str, Any]:
    if call.type not in (None, "function"):
        raise RequestError(f"{where}.type must be function", f"{where}.type")
    arguments = _arguments(call.function.arguments, f"{where}.function.arguments")
    rendered: dict[str, Any] = {"type": "function", "function": {"name": call.function.name, "arguments": arguments}}
    if call.id is not None:
        rendered["id"] = call.id
    return rendered


def _arguments(arguments: str | dict[str, Any] | None, where: str) -> dict[str, Any]:
    """Arguments as an object, which templates expect, however the client sent them; no text means no arguments."""
    if not arguments:
        return {}
    if isinstance(arguments, dict):
        return arguments
    try:
        return msgspec.json.decode(arguments, type=dict[str, Any])
    except (msgspec.DecodeError, RecursionError):
        raise RequestError(f"{where} must be a JSON object written as a string", where) from None
