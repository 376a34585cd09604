"""engine/chat_template.py: where templates come from, what they are given, and what they may answer."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from engine.chat_template import ChatTemplate, load_chat_template
from engine.errors import ConfigError, RequestError
from engine.tokenizer import load_tokenizer
from tests.engine.tiny_tokenizers import CHAT_TEMPLATE, byte_level_tokenizer, write_tokenizer

SPECIAL = {"bos_token": "<s>", "eos_token": "</s>"}
USER = {"role": "user", "content": "Hi"}
CONTENT_ONLY = "{% for message in messages %}[{{ message.role }}:{{ message.content }}]{% endfor %}"


def template(text: str) -> ChatTemplate:
    return ChatTemplate(text, SPECIAL, "test")


def rendered(text: str, messages: list[dict[str, Any]] | None = None, **options: Any) -> str:
    return template(text).render(messages or [USER], **options)


def test_chat_ml_by_hand() -> None:
    """API-20: what the template writes is all there is; nothing is added when it is encoded."""
    messages = [{"role": "system", "content": "S"}, USER]
    text = "<|im_start|>system\nS<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n"
    assert rendered(CHAT_TEMPLATE, messages, add_generation_prompt=False) == text
    assert rendered(CHAT_TEMPLATE, messages) == text + "<|im_start|>assistant\n"


def test_api_20_rendered_chat_has_one_bos(tmp_path: Path) -> None:
    """API-20: the template writes the BOS, the tokenizer would add one: the ids have one."""
    write_tokenizer(tmp_path, byte_level_tokenizer(add_bos=True), "{{ bos_token }}{{ messages[0].content }}")
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    loaded = load_chat_template(tmp_path, tokenizer.special_tokens)
    assert loaded is not None
    text = loaded.render([{"role": "user", "content": "hello"}])
    ids = tokenizer.encode(text, add_special_tokens=False)
    assert ids == [1, *tokenizer.encode("hello", add_special_tokens=False)]
    assert tokenizer.encode(text) == ids


@pytest.mark.parametrize("role", ["system", "user", "assistant", "tool"])
def test_api_18_parts_are_joined_with_nothing_between(role: str) -> None:
    """API-18 a: the same text as one string, in every role; no brackets, no quotes."""
    parts = [{"type": "text", "text": "Hello "}, {"type": "text", "text": "world"}]
    joined = rendered(CHAT_TEMPLATE, [{"role": role, "content": "Hello world"}])
    assert rendered(CHAT_TEMPLATE, [{"role": role, "content": parts}]) == joined


@pytest.mark.parametrize(
    ("content", "param", "words"),
    [
        ([], "messages[1].content", "empty list"),
        ([{"type": "image_url", "image_url": {"url": "file:///etc/passwd"}}], "messages[1].content[0]", "'image_url'"),
        ([{"type": "text", "text": "a"}, {"type": "text"}], "messages[1].content[1].text", "string 'text'"),
        ([{"type": "text", "text": None}], "messages[1].content[0].text", "string 'text'"),
        (["a"], "messages[1].content[0]", "'str'"),
        ([{"text": "a"}], "messages[1].content[0]", "None"),
        (5, "messages[1].content", "found int"),
        ({"type": "text", "text": "a"}, "messages[1].content", "found dict"),
    ],
)
def test_api_18_other_parts_are_refused(content: object, param: str, words: str) -> None:
    """API-18 b, c, d: a 400 that names the part; nothing is opened or fetched."""
    with pytest.raises(RequestError, match=words) as caught:
        rendered(CHAT_TEMPLATE, [USER, {"role": "user", "content": content}])
    assert caught.value.param == param


def test_a_message_must_be_an_object() -> None:
    with pytest.raises(RequestError, match="found str") as caught:
        template(CHAT_TEMPLATE).render(["hi"])  # type: ignore[list-item]
    assert caught.value.param == "messages[0]"


def test_messages_of_the_caller_stay_as_they_are() -> None:
    messages = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    before = json.dumps(messages)
    rendered(CHAT_TEMPLATE, messages, add_generation_prompt=False, continue_final_message=True)
    assert json.dumps(messages) == before


# --- continue_final_message ------------------------------------------------------------------------------------

ASSISTANT = {"role": "assistant", "content": "The answer"}


def test_continue_final_message_cuts_after_its_content() -> None:
    text = rendered(CHAT_TEMPLATE, [USER, ASSISTANT], add_generation_prompt=False, continue_final_message=True)
    assert text == "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\nThe answer"


@pytest.mark.parametrize("content", ["", "e", "<|im_end|>", "two words ", "a\n", " Hi ", "<|im_start|>user\nHi"])
def test_continue_final_message_with_text_that_stands_elsewhere_too(content: str) -> None:
    messages = [USER, {"role": "assistant", "content": content}]
    text = rendered(CHAT_TEMPLATE, messages, add_generation_prompt=False, continue_final_message=True)
    assert text == f"<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n{content}"


def test_continue_final_message_where_the_template_trims() -> None:
    trims = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}</>{% endfor %}"
    messages = [USER, {"role": "assistant", "content": " The answer \n"}]
    text = rendered(trims, messages, add_generation_prompt=False, continue_final_message=True)
    assert text == "<user>Hi</><assistant>The answer"


@pytest.mark.parametrize(
    ("text", "messages", "words"),
    [
        ("{{ messages[0].content }}", [USER, ASSISTANT], "does not write out"),
        (CHAT_TEMPLATE, [{"role": "assistant", "content": None}], "text content"),
        (CHAT_TEMPLATE, [{"role": "assistant"}], "text content"),
    ],
)
def test_continue_final_message_that_cannot_be(text: str, messages: list[dict[str, Any]], words: str) -> None:
    with pytest.raises(RequestError, match=words) as caught:
        rendered(text, messages, add_generation_prompt=False, continue_final_message=True)
    assert caught.value.param == "continue_final_message"


def test_continue_final_message_without_messages() -> None:
    with pytest.raises(RequestError, match="text content"):
        template(CHAT_TEMPLATE).render([], add_generation_prompt=False, continue_final_message=True)


def test_continue_and_generation_prompt_exclude_each_other() -> None:
    with pytest.raises(RequestError, match="only one of them") as caught:
        rendered(CHAT_TEMPLATE, [USER, ASSISTANT], continue_final_message=True)
    assert caught.value.param == "continue_final_message"


# --- variables -------------------------------------------------------------------------------------------------


def test_variables_of_a_template() -> None:
    text = (
        "{{ bos_token }}{{ eos_token }}{{ unk_token }}{{ tools is none }}{{ documents is none }}{{ enable_thinking }}"
    )
    assert rendered(text, template_kwargs={"enable_thinking": False}) == "<s></s>TrueTrueFalse"


RESERVED = [
    "messages",
    "tools",
    "documents",
    "add_generation_prompt",
    "bos_token",
    "eos_token",
    "pad_token",
    "raise_exception",
    "strftime_now",
    "range",
    "namespace",
    "budget of this render",
    "_x",
    "",
]


@pytest.mark.parametrize("name", RESERVED)
def test_sec_03_reserved_names_cannot_be_set(name: str) -> None:
    """SEC-03 b: a client cannot replace the messages, the special tokens or the guards."""
    with pytest.raises(RequestError, match="cannot set") as caught:
        rendered(CHAT_TEMPLATE, template_kwargs={name: []})
    assert caught.value.param == f"chat_template_kwargs.{name}"


def test_blocks_are_trimmed_and_loops_can_break() -> None:
    text = (
        "{% for m in messages %}\n  {% if loop.index > 2 %}\n{% break %}\n  {% endif %}\n{{ m.content }}\n{% endfor %}"
    )
    assert rendered(text, [USER] * 4) == "Hi\nHi\n"


def test_generation_tag_leaves_its_text() -> None:
    assert rendered("a{% generation %}b{{ messages[0].content }}{% endgeneration %}c") == "abHic"


def test_tojson_as_models_were_trained_on() -> None:
    """Not escaped for HTML, other scripts kept, spaces after separators; indent works."""
    value = {"é": "<b>'漢'</b>", "a": [1, None, True]}
    text = "{{ value | tojson }}\n{{ value.a | tojson(indent=2) }}"
    expected = '{"é": "<b>\'漢\'</b>", "a": [1, null, true]}\n[\n  1,\n  null,\n  true\n]'
    assert rendered(text, template_kwargs={"value": value}) == expected


def test_strftime_now_gives_a_date() -> None:
    assert rendered("{{ strftime_now('%Y-%m-%d') }}").count("-") == 2


# --- errors ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{{ raise_exception('Roles must alternate: user/assistant') }}", "Roles must alternate: user/assistant"),
        ("{{ messages[5].content }}", "list object has no element 5"),
        ("{{ messages[0].content + messages[0].tool_calls }}", "tool_calls"),
        ("{{ 'a' + none }}", "TypeError: can only concatenate str"),
        ("{{ 1 / 0 }}", "ZeroDivisionError"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
        ("{{ dict(a=1) | tojson(indent='x' * 3, separators=5) }}", "TypeError"),
        ("{{ messages | nothing_such | x }}{{ y", "broken"),
    ],
)
def test_what_a_template_raises_is_the_requests_fault(text: str, words: str) -> None:
    """The template's own words, without a traceback; faults of the template's text stop the start."""
    if words == "broken":
        with pytest.raises(ConfigError, match="chat template of test is broken in line 1"):
            template(text)
        return
    with pytest.raises(RequestError) as caught:
        rendered(text)
    assert words in str(caught.value)
    assert "Traceback" not in str(caught.value)
    assert caught.value.param == "messages"


def test_long_errors_are_cut() -> None:
    with pytest.raises(RequestError) as caught:
        rendered("{{ raise_exception('x' * 100000) }}")
    assert len(str(caught.value)) < 1000


@pytest.mark.parametrize("text", ["{% if %}", "{{", "{% for x in y %}", "{% endfor %}", "{{ x | no_such_filter }}"])
def test_broken_syntax_stops_the_start(text: str) -> None:
    with pytest.raises(ConfigError, match="test is broken"):
        template(text)


# --- where it comes from ---------------------------------------------------------------------------------------


def _load(folder: Path, override: str | None = None, gguf_metadata: dict[str, Any] | None = None) -> str | None:
    loaded = load_chat_template(folder, SPECIAL, override, gguf_metadata)
    return None if loaded is None else loaded.render([USER])


def _write_config(folder: Path, name: str, chat_template: object) -> None:
    (folder / name).write_text(json.dumps({"chat_template": chat_template}), encoding="utf-8")


def test_order_of_sources(tmp_path: Path) -> None:
    assert _load(tmp_path) is None
    _write_config(tmp_path, "chat_template.json", "json {{ eos_token }}")
    assert _load(tmp_path) == "json </s>"
    _write_config(tmp_path, "tokenizer_config.json", "config")
    assert _load(tmp_path) == "config"
    (tmp_path / "chat_template.jinja").write_text("jinja é", encoding="utf-8")
    assert _load(tmp_path) == "jinja é"
    assert _load(tmp_path, "text {{ bos_token }}") == "text <s>"
    file = tmp_path / "own.txt"
    file.write_text("own", encoding="utf-8")
    assert _load(tmp_path, str(file)) == "own"


def test_template_of_a_gguf_file(tmp_path: Path) -> None:
    assert _load(tmp_path / "m.gguf", None, {"tokenizer.chat_template": "g {{ messages[0].content }}"}) == "g Hi"
    assert _load(tmp_path / "m.gguf", None, {}) is None
    assert _load(tmp_path / "m.gguf", "{{ 'own' }}", {"tokenizer.chat_template": "g"}) == "own"


@pytest.mark.parametrize(
    "named",
    [
        [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}],
        [{"name": "rag", "template": "d"}],
        {"tool_use": "t", "default": "d"},
    ],
)
def test_of_named_templates_the_default_is_taken(tmp_path: Path, named: object) -> None:
    _write_config(tmp_path, "tokenizer_config.json", named)
    assert _load(tmp_path) == "d"


@pytest.mark.parametrize("named", [[], {}, 5, ["d"], [{"name": "a", "template": "x"}, {"name": "b", "template": "y"}]])
def test_templates_without_a_default_are_refused(tmp_path: Path, named: object) -> None:
    _write_config(tmp_path, "tokenizer_config.json", named)
    with pytest.raises(ConfigError, match=r"tokenizer_config\.json: chat_template must be"):
        _load(tmp_path)


def test_an_override_that_is_neither_file_nor_template(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a file nor a template"):
        _load(tmp_path, str(tmp_path / "nothing.jinja"))


def test_a_template_file_that_is_no_text(tmp_path: Path) -> None:
    (tmp_path / "chat_template.jinja").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match=r"chat_template\.jinja cannot be read"):
        _load(tmp_path)


NOT_COMPILED = {
    "nested": "{% for a in [1] %}" * 25 + "{% endfor %}" * 25,
    "break": "{% break %}",
    "twice": "{% macro a(x, x) %}{% endmacro %}",
    "digits": "{{ " + "9" * 5000 + " }}",
    "deep": "{{ " + "(" * 5000 + ")" * 5000 + " }}",
}


@pytest.mark.parametrize("name", NOT_COMPILED)
def test_what_cannot_be_compiled_is_an_error_of_the_config(name: str) -> None:
    """Jinja lets errors of Python's own compiler through."""
    with pytest.raises(ConfigError, match="the chat template of test is broken"):
        template(NOT_COMPILED[name])


def test_an_override_that_no_file_can_be_named_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="neither a file nor a template"):
        load_chat_template(tmp_path, SPECIAL, override="x" * 300)


@pytest.mark.parametrize("name", ["chat_template.jinja", "tokenizer_config.json", "chat_template.json"])
def test_a_byte_order_mark_is_no_part_of_the_template(tmp_path: Path, name: str) -> None:
    text = "[{{ messages[0].content }}]"
    content = text if name.endswith("jinja") else json.dumps({"chat_template": text})
    (tmp_path / name).write_text(content, encoding="utf-8-sig")
    loaded = load_chat_template(tmp_path, SPECIAL)
    assert loaded is not None
    assert loaded.render([USER]) == "[Hi]"
