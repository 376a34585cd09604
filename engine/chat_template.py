"""Renders a conversation to the prompt text that a model was trained on.

Rules:
- Content given as a list of text parts becomes one string, the parts joined with nothing between them. Parts of
  other types are refused; nothing is ever fetched.
- continue_final_message renders without a generation prompt and cuts the text right after the last message's
  content, so the model goes on writing that message.
- Everything that goes wrong while rendering is an error of the request and carries the template's own words.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from jinja2 import TemplateSyntaxError

from engine.errors import ConfigError, RequestError
from engine.template_sandbox import RaisedByTemplate, TemplateEnvironment
from engine.tokenizer import SPECIAL_NAMES, read_json

CONTINUE_MARK = "\ue000continue here\ue000"  # U+E000 is for private use; no text of a user needs it
MAX_ERROR_CHARS = 500
RESERVED = frozenset((*SPECIAL_NAMES, "messages", "tools", "documents", "add_generation_prompt"))


class ChatTemplate:
    """A template that has been read and compiled. Safe to share by threads."""

    def __init__(self, text: str, special_tokens: Mapping[str, str], source: str) -> None:
        """
        Args:
            special_tokens: variables of the template: "bos_token", "eos_token", ….
            source: names the template in errors.

        Raises:
            ConfigError: the text is no template, cannot be compiled, or wants to include other files.
        """
        self._environment = TemplateEnvironment()
        self._special_tokens = dict(special_tokens)
        self._reserved = RESERVED | self._environment.globals.keys()
        try:
            self._template = self._environment.from_string(text)
        except Exception as error:  # Jinja's own, and all that Python's compiler says of the code that Jinja makes
            line = error.lineno if isinstance(error, TemplateSyntaxError) else None
            place = "" if line is None else f" in line {line}"
            raise ConfigError(f"the chat template of {source} is broken{place}: {error}") from error

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt text, to be encoded with nothing added.

        Args:
            messages: objects with "role" and "content" (a string, a list of text parts, or None).
            template_kwargs: further variables of the template, such as enable_thinking.

        Raises:
            RequestError: messages that cannot be rendered, a variable with a reserved name, or whatever the template
                raises; names messages or the variable.
        """
        if add_generation_prompt and continue_final_message:
            raise RequestError(
                "continue_final_message and add_generation_prompt are both set; only one of them can be",
                "continue_final_message",
            )
        extra = dict(template_kwargs or {})
        self._check_names(extra)
        flat = [_flat_message(message, index) for index, message in enumerate(messages)]
        if continue_final_message:
            flat = [*flat[:-1], _marked(flat[-1] if flat else {})]
        text = self._render({**extra, "messages": flat, "add_generation_prompt": add_generation_prompt})
        return _cut(text) if continue_final_message else text

    def _check_names(self, extra: Mapping[str, Any]) -> None:
        for name in extra:
            if name in self._reserved or not name.isidentifier() or name.startswith("_"):
                raise RequestError(f"chat_template_kwargs cannot set {name!r}", f"chat_template_kwargs.{name}")

    def _render(self, variables: Mapping[str, Any]) -> str:
        given = {"tools": None, "documents": None, **self._special_tokens, **variables}
        try:
            return self._environment.render_text(self._template, given)
        except RaisedByTemplate as error:
            reason = str(error)
        except Exception as error:  # a template can raise anything; all of it is about these messages
            reason = f"{type(error).__name__}: {error}"
        if len(reason) > MAX_ERROR_CHARS:
            reason = reason[:MAX_ERROR_CHARS] + "…"
        raise RequestError(f"the chat template cannot render these messages: {reason}", "messages")


def _flat_message(message: Mapping[str, Any], index: int) -> dict[str, Any]:
    """A copy of a message with its content as one string (or None)."""
    if not isinstance(message, Mapping):
        raise RequestError(f"a message must be an object, found {type(message).__name__}", f"messages[{index}]")
    flat = dict(message)
    content = flat.get("content")
    if isinstance(content, list | tuple):
        flat["content"] = "".join(_part_text(part, f"messages[{index}].content[{n}]") for n, part in enumerate(content))
        if not content:
            raise RequestError("content is an empty list; give at least one text part", f"messages[{index}].content")
    elif content is not None and not isinstance(content, str):
        raise RequestError(
            f"content must be a string or a list of text parts, found {type(content).__name__}",
            f"messages[{index}].content",
        )
    return flat


def _part_text(part: object, param: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else type(part).__name__
    if not isinstance(part, Mapping) or kind != "text":
        raise RequestError(f"content part of type {kind!r}: this model takes parts of type 'text' only", param)
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError("a content part of type 'text' must have a string 'text'", f"{param}.text")
    return text


def _marked(message: Mapping[str, Any]) -> dict[str, Any]:
    """The message with a mark behind its content; the space behind the mark shows whether the template trims."""
    content = message.get("content")
    if not isinstance(content, str):
        raise RequestError("continue_final_message needs a last message with text content", "continue_final_message")
    return {**message, "content": f"{content}{CONTINUE_MARK} "}


def _cut(text: str) -> str:
    """Everything before the mark; trailing space goes too where the template trims content."""
    before, mark, after = text.rpartition(CONTINUE_MARK)
    if not mark:
        raise RequestError(
            "continue_final_message cannot be used: the chat template does not write out the last message's content",
            "continue_final_message",
        )
    return before if after.startswith(" ") else before.rstrip()


def load_chat_template(
    path: Path,
    special_tokens: Mapping[str, str],
    override: str | None = None,
    gguf_metadata: Mapping[str, Any] | None = None,
) -> ChatTemplate | None:
    """The chat template of a model, None if it has none.

    Looked for in this order: override (--chat-template: a file, or the template itself), the metadata of a GGUF
    file, chat_template.jinja, tokenizer_config.json, chat_template.json. Of a list of named templates "default"
    is taken.

    Args:
        path: Hugging Face folder, or the GGUF file.
        special_tokens: Tokenizer.special_tokens.

    Raises:
        ConfigError: the template or its file is broken or missing; names it.
    """
    if override is not None:
        text, source = _override_text(override)
        return ChatTemplate(text, special_tokens, source)
    if gguf_metadata is not None:
        found, source = gguf_metadata.get("tokenizer.chat_template"), str(path)
    elif (path / "chat_template.jinja").is_file():
        found, source = _read(path / "chat_template.jinja"), str(path / "chat_template.jinja")
    else:
        found, source = None, ""
        for name in ("tokenizer_config.json", "chat_template.json"):
            if found is None:
                found, source = read_json(path / name).get("chat_template"), str(path / name)
    return None if found is None else ChatTemplate(_default_text(found, source), special_tokens, source)


def _default_text(found: object, source: str) -> str:
    """One text, or of [{"name", "template"}, …] or {name: template} the one named "default" or the only one."""
    if isinstance(found, str):
        return found
    named: dict[Any, Any] = {}
    if isinstance(found, dict):
        named = found
    elif isinstance(found, list) and all(isinstance(entry, dict) for entry in found):
        named = {entry.get("name"): entry.get("template") for entry in found}
    text = next(iter(named.values())) if len(named) == 1 else named.get("default")
    if not isinstance(text, str):
        raise ConfigError(
            f"{source}: chat_template must be a string or a list of named templates with one named 'default', "
            f"found {f'the names {list(named)}' if named else type(found).__name__}"
        )
    return text


def _override_text(override: str) -> tuple[str, str]:
    if "{" in override:
        return override, "--chat-template"
    file = Path(override)
    try:
        is_file = file.is_file()
    except OSError:  # no file can have such a name
        is_file = False
    if not is_file:
        raise ConfigError(f"--chat-template {override!r} is neither a file nor a template (a template has '{{' in it)")
    return _read(file), str(file)


def _read(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"the chat template {file} cannot be read: {error}") from error
