"""engine/template_sandbox.py and template_limits.py: templates that try to get out, or to cost too much."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from engine import template_limits
from engine.chat_template import ChatTemplate, load_chat_template
from engine.errors import ConfigError, RequestError

MESSAGES = [{"role": "user", "content": "hello"}]


def refused(text: str, messages: list[dict[str, str]] = MESSAGES) -> str:
    """The reason that the request gets."""
    with pytest.raises(RequestError) as caught:
        ChatTemplate(text, {}, "test").render(messages)
    assert caught.value.param == "messages"
    return str(caught.value)


def rendered(text: str) -> str:
    return ChatTemplate(text, {}, "test").render(MESSAGES)


ESCAPES = [
    "{{ cycler.__init__.__globals__.os.mkdir('%s') }}",
    "{{ joiner.__init__.__globals__['os'].mkdir('%s') }}",
    "{{ namespace.__init__.__globals__.os.mkdir('%s') }}",
    "{{ range.__globals__ }}",
    "{{ raise_exception.__globals__.sys }}",
    "{{ strftime_now.__code__ }}",
    "{{ self._TemplateReference__context }}",
    "{{ ''.__class__.__mro__[1].__subclasses__() }}",
    "{{ ''['__class__'] }}",
    "{{ ''|attr('__class__') }}",
    "{{ [''] | map(attribute='__class__') | list }}",
    "{{ '{0.__class__}'.format('') }}",
    "{{ '{x.__class__}'.format_map({'x': ''}) }}",
    "{% set f = ''.format %}{{ f.__closure__ }}",
    "{{ namespace(__class__=1) }}",
    "{{ messages.append(1) }}",
    "{{ messages[0].update(role='system') }}",
    "{{ messages[0].pop('role') }}",
    "{{ messages.clear() }}",
    "{{ messages.sort() }}",
]


@pytest.mark.parametrize("text", ESCAPES)
def test_sec_02_ways_out_are_refused(tmp_path: Path, text: str) -> None:
    """SEC-02 a, b, c: built-ins' globals, classes, changes of the messages: a 400, and nothing has happened."""
    target = tmp_path / "pwn"
    messages = json.loads(json.dumps(MESSAGES))
    assert "SecurityError" in refused(text.replace("%s", str(target)), messages)
    assert not target.exists()
    assert messages == MESSAGES


LOADS = [
    "{% include '/etc/passwd' %}",
    "{% if false %}{% include '/etc/passwd' %}{% endif %}",
    "{% extends '/etc/passwd' %}",
    "{% import '/etc/passwd' as x %}",
    "{% from '/etc/passwd' import x %}",
]


@pytest.mark.parametrize("text", LOADS)
@pytest.mark.parametrize("where", ["tokenizer_config.json", "chat_template.jinja"])
def test_sec_02_nothing_can_be_included(tmp_path: Path, text: str, where: str) -> None:
    """SEC-02 d: refused when the model is loaded, from either file."""
    (tmp_path / where).write_text(json.dumps({"chat_template": text}) if where.endswith("json") else text)
    with pytest.raises(ConfigError, match="nothing is loaded"):
        load_chat_template(tmp_path, {})


TOO_LARGE = [
    "{{ 'z' * 1000000000 }}",
    "{{ 1000000000 * 'z' }}",
    "{% set x = [0] * 1000000000 %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x='ab') %}{% for i in range(60) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[1]) %}{% for i in range(60) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
    "{% set ns = namespace(x=[]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "{% set ns = namespace(x=[]) %}{% for i in range(60) %}{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x|tojson }}",
    "{% set ns = namespace(x=[]) %}{% for i in range(60) %}{% set ns.x = {1: ns.x, 2: ns.x} %}{% endfor %}{{ ns.x~1 }}",
    "{% set ns = namespace(x=7) %}{% for i in range(60) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "{{ 10 ** 10000000 }}",
    "{{ 'a'.ljust(1000000000) }}",
    "{{ 'a'.center(width=1000000000) if false else 'a'.zfill(1000000000) }}",
    "{{ 'a\t'.expandtabs(1000000000) }}",
    "{{ 'a' | center(1000000000) }}",
    "{{ 'a\nb' | indent(1000000000) }}",
    "{{ [] | slice(1000000000) | list }}",
    "{{ [1] | batch(1000000000, 0) | list }}",
    "{{ '%1000000000d' % 1 }}",
    "{{ '%-1000000000s' | format(1) }}",
    "{{ '%*d' % (1000000000, 1) }}",
    "{{ '{:>1000000000}'.format(1) }}",
    "{{ '{:>{w}}'.format(1, w=1000000000) }}",
    "{{ '{x:>1000000000}'.format_map({'x': 1}) }}",
    "{{ ('a' * 1000000).replace('a', 'b' * 1000000) }}",
    "{{ ('a' * 1000000) | replace('a', 'b' * 1000000) }}",
    "{{ ('a' * 100000) | join('b' * 1000000) }}",
    "{{ ('b' * 1000000).join('a' * 100000) }}",
    "{{ 'a'.translate({97: 'b' * 1000000}) }}",
    "{{ 'a' | tojson(indent=1000000000) }}",
    "{% for i in range(99999999) %}x{% endfor %}",
    "{{ range(99999999) | list }}",
]


@pytest.mark.parametrize("text", TOO_LARGE)
def test_sec_03_huge_values_are_never_built(text: str) -> None:
    """SEC-03: refused before memory is taken, by the operator, the method or the filter that would build it."""
    reason = refused(text)
    assert "SecurityError" in reason
    assert "rendered prompt" not in reason, "it was built, and only the output was refused"


ENDLESS = [
    "{% for i in range(100000) %}{% for j in range(100000) %}{% endfor %}{% endfor %}",
    "{% for i in range(100000) recursive %}{{ loop(range(100000)) if loop.depth < 9 }}{% endfor %}",
    "{% macro f() %}{% endmacro %}{% for i in range(9) %}{% for j in range(9) %}{% for k in range(100) %}"
    "{{ f() }}{% endfor %}{% endfor %}{% endfor %}",
    "{% for i in range(3000) | map('string') %}{% for c in i | map('upper') %}{% endfor %}{% endfor %}",
]


@pytest.mark.parametrize("text", ENDLESS)
def test_sec_03_steps_are_counted(monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    """SEC-03: loops of every kind, recursive ones and calls take from one budget."""
    monkeypatch.setattr(template_limits, "MAX_STEPS", 5000)
    assert "more than 5000 steps" in refused(text)


def test_sec_03_each_render_has_its_own_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_STEPS", 1000)
    compiled = ChatTemplate("{% for i in range(600) %}x{% endfor %}", {}, "test")
    assert compiled.render(MESSAGES) == compiled.render(MESSAGES) == "x" * 600


def test_sec_03_time_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_SECONDS", -1.0)
    assert "seconds" in refused("{% for i in range(100) %}{% endfor %}")


def test_sec_03_output_is_limited() -> None:
    text = "{% set x = 'y' * 1000000 %}{% for i in range(100) %}{{ x }}{% endfor %}"
    assert "longer than 8000000 characters" in refused(text)


def test_sec_03_many_small_values_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(template_limits, "MAX_BUILT", 10_000)
    text = "{% set ns = namespace(x=[]) %}{% for i in range(100) %}{% set ns.x = ns.x + ['z' * 1000] %}{% endfor %}"
    assert "too large" in refused(text)


def test_sec_03_many_short_messages_are_fine() -> None:
    """SEC-03: an ordinary template, 100 000 messages."""
    text = "{% for m in messages %}{{ '<' ~ m['role'] + '>' }}{{ m.content|trim }}{% endfor %}"
    assert ChatTemplate(text, {}, "test").render(MESSAGES * 100_000) == "<user>hello" * 100_000


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("{{ 3 * 4 }} {{ 2 ** 10 }} {{ 7 % 4 }} {{ 1.5 + 2 }} {{ 2 * 1.5 }}", "12 1024 3 3.5 3.0"),
        (
            "{{ 'a' + 'b' }} {{ 'ab' * 2 }} {{ 'x' ~ 3 ~ none }} {{ [1] + [2] }} {{ [0] * 2 }}",
            "ab abab x3None [1, 2] [0, 0]",
        ),
        ("{{ '%s-%03d %5.1f%%' % ('a', 7, 2.5) }} {{ '**%s** 100000' | format('b') }}", "a-007   2.5% **b** 100000"),
        ("{{ '{:>4}|{x}|{{}} 123456'.format(1, x='y') }}", "   1|y|{} 123456"),
        (
            "{{ [1, 2] | join(', ') }} {{ ', '.join(['a', 'b']) }} {{ messages|map(attribute='role')|join(d='+') }}",
            "1, 2 a, b user",
        ),
        ("{{ 'a-b'.replace('-', '+') }} {{ 'a-b' | replace('-', '') }} {{ 'a' | center(3) }}.", "a+b ab  a ."),
        ("{{ ['x', 'y'] | batch(1) | list }} {{ 'a\nb' | indent(2) }}", "[['x'], ['y']] a\n  b"),
        ("{{ dict(a=1).items() | list }} {{ dict([('b', 2)]) }}", "[('a', 1)] {'b': 2}"),
        ("{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        ("{% for k, v in {'a': 1}.items() %}{{ k }}{{ v }}{{ loop.length }}{{ loop.last }}{% endfor %}", "a11True"),
        ("{% for c in 'ab' if c != 'a' %}{{ c }}{{ loop.index }}{% else %}none{% endfor %}", "b1"),
        ("{% for x in [[1, [2]], [3]] recursive %}{{ loop(x) if x is iterable else x }}{% endfor %}", "123"),
        ("{% for x in nothing %}x{% else %}none{% endfor %}", "none"),
        ("{% macro f(x) %}<{{ x }}>{% endmacro %}{% for i in [1, 2] %}{{ f(i) }}{% endfor %}", "<1><2>"),
        ("{{ messages[0]['content'].upper().split('L') }} {{ messages[0].content[::-1] }}", "['HE', '', 'O'] olleh"),
        ("{% set c = cycler('a', 'b') %}{{ c.next() }}{{ c.next() }}{{ c.next() }}", "aba"),
    ],
)
def test_ordinary_templates_render_as_in_plain_jinja(text: str, expected: str) -> None:
    assert rendered(text) == expected


SHARED = (  # two equal values of 2 ** 40 items, small in memory
    "{% set ns = namespace(a=[], b=[]) %}{% for i in range(40) %}"
    "{% set ns.a = [ns.a, ns.a] %}{% set ns.b = [ns.b, ns.b] %}{% endfor %}"
)
SHARED_USES = [
    "{{ ns.a == ns.b }}",
    "{{ 1 if ns.a != ns.b }}",
    "{{ ns.a < ns.b }}",
    "{{ ns.a in [1, ns.b] }}",
    "{{ ns.a not in ns.b }}",
    "{{ ns.a is eq(ns.b) }}",
    "{{ ns.a is in([ns.b]) }}",
    "{{ [ns.a] | select('eq', ns.b) | list }}",
    "{{ [{'k': ns.a}] | selectattr('k', '==', ns.b) | list }}",
    "{{ [ns.a, ns.b] | sort }}",
    "{{ [ns.a, ns.b] | min }}",
    "{{ [ns.a, ns.b] | max }}",
    "{{ [ns.a, ns.b] | map('list') | max }}",
    "{{ [{'k': ns.a}, {'k': ns.b}] | groupby('k') }}",
    "{{ {'k': ns.a, 'l': ns.b} | dictsort(by='value') }}",
    "{{ [ns.a].index(ns.b) }}",
    "{{ [ns.a].count(ns.b) }}",
    "{% for x in [ns.a, ns.b] %}{{ loop.changed(x) }}{% endfor %}",
    "{{ {'k': ns.a}.items() }}",
    "{{ {'k': ns.a}.values() | string }}",
    "{{ namespace(k=ns.a) }}",
    "{{ 'x' | attr(ns.a) }}",
    "{{ {}[ns.a] }}",
    "{{ raise_exception(ns.a) }}",
]


@pytest.mark.parametrize("use", SHARED_USES)
def test_sec_03_shared_lists_are_counted_as_written_out(use: str) -> None:
    """SEC-03: each of these would take 2 ** 40 steps in one operation."""
    assert "nested value" in refused(SHARED + use)


TUPLES = SHARED.replace("[ns.a, ns.a]", "(ns.a, ns.a)").replace("a=[]", "a=()")
DEEP = "{% set ns = namespace(a=()) %}{% for i in range(100000) %}{% set ns.a = (ns.a,) %}{% endfor %}"


@pytest.mark.parametrize(
    "use",
    [
        "{{ {ns.a: 1} }}",
        "{{ {}.get(ns.a) }}",
        "{{ {}[ns.a] }}",
        "{{ dict([(ns.a, 1)]) }}",
        "{{ [ns.a] | unique | list }}",
    ],
)
@pytest.mark.parametrize("values", [TUPLES, DEEP], ids=["shared", "deep"])
def test_sec_03_hashed_tuples_are_counted(values: str, use: str) -> None:
    """SEC-03: deep ones would overflow the stack of the process."""
    assert "nested value" in refused(values + use)


@pytest.mark.parametrize(
    "text",
    [
        "{{ [[[1] * 1000]] | sum(start=[]) }}",
        "{{ [] | sum(start='') }}",
        "{{ [1] | tojson(separators=('x' * 1000000, ':')) }}",
        "{{ [1] | tojson(indent='x' * 1000000) }}",
        "{% set ns = namespace(a=[0] * 100000) %}{% for i in range(90) %}{% set ns.a = [ns.a] %}{% endfor %}"
        "{{ ns.a | tojson(indent=64) }}",
        "{{ 1.5 | round(7000000, 'ceil') }}",
        "{{ 'a'.encode().ljust(1000000000) }}",
        "{{ (5).to_bytes(1000000000, 'big') }}",
        "{{ strftime_now('%1000000000d') }}",
        "{{ strftime_now('%c' * 1000000) }}",
    ],
)
def test_sec_03_other_ways_to_grow_are_refused(text: str) -> None:
    assert "SecurityError" in refused(text)


def test_sec_03_wordwrap_is_no_filter() -> None:
    """It takes time in the square of a word's length."""
    with pytest.raises(ConfigError, match="wordwrap"):
        ChatTemplate("{{ 'a' | wordwrap(1) }}", {}, "test")


@pytest.mark.parametrize(
    "use", ["{{ ns.a == ns.b }}", "{{ ns.a | sort }}", "{{ ns.a in [ns.b] }}", "{{ ns.a.count(1) }}"]
)
def test_sec_03_comparing_large_values_takes_steps(monkeypatch: pytest.MonkeyPatch, use: str) -> None:
    monkeypatch.setattr(template_limits, "MAX_STEPS", 1000)
    assert "more than 1000 steps" in refused("{% set ns = namespace(a=[0] * 100000, b=[0] * 100000) %}" + use)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        (
            "{{ 1 < 2 <= 2 }} {{ [1, [2]] == [1, [2]] }} {{ x is defined and x == 'a' }} {{ x != 'a' }}",
            "True True False True",
        ),
        ("{{ 'e' in messages[0].content }} {{ 'role' in messages[0] }} {{ 1 not in [1] }}", "True True False"),
        ("{{ [3, 1, 2] | sort }} {{ 'ba' | sort | join }} {{ [3, 1] | min }} {{ [3, 1] | sum }}", "[1, 2, 3] ab 1 4"),
        (
            "{{ messages | selectattr('role', 'equalto', 'user') | list | length }} {{ [1, 1] | unique | list }}",
            "1 [1]",
        ),
        ("{{ messages | sum(attribute='n', start=2.5) if false else [1] | sum(start=2.5) }}", "3.5"),
        ("{% for r, g in messages | groupby('role') %}{{ r }}{{ g | length }}{% endfor %}", "user1"),
        (
            "{{ {'b': 1, 'a': 2} | dictsort }} {{ {'a': {'b': [1]}} | tojson(indent=1) }}",
            "[('a', 2), ('b', 1)] {\n \"a\": {\n  \"b\": [\n   1\n  ]\n }\n}",
        ),
        ("{{ [1, 2] | tojson(separators=(',', ':')) }} {{ 2.345 | round(2, 'floor') }} {{ 5 - 7 }}", "[1,2] 2.34 -2"),
        ("{{ {1: 2, 'a': 3}[1] }} {{ [1, 2].index(2) }} {{ {'a': 1}.get('a') }} {{ 3 is in([3]) }}", "2 1 1 True"),
        ("{% for m in messages + messages %}{{ loop.changed(m.role) }}{% endfor %}", "TrueFalse"),
    ],
)
def test_comparisons_and_filters_work_as_in_plain_jinja(text: str, expected: str) -> None:
    assert rendered(text) == expected


def test_sec_03_looking_at_all_messages_for_each_costs_a_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """SEC-03: what ordinary templates do in their loops."""
    monkeypatch.setattr(template_limits, "MAX_STEPS", 20_000)
    text = "{% for m in messages %}{{ 'x' if loop.index0 == (messages | length) - 1 and m is not none }}{% endfor %}"
    assert ChatTemplate(text, {}, "test").render(MESSAGES * 5000) == "x"
