"""The Jinja environment in which chat templates run: no way out, no change of data, bounded cost.

Templates come with model files, so they are as untrusted as any download. Jinja's immutable sandbox refuses private
attributes and every method that changes a list or dict, and there is no loader, so nothing can be included. What a
render may cost is in template_limits.
"""

from __future__ import annotations

import json
import re
import reprlib
import types
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import Template, TemplateError, nodes
from jinja2.exceptions import SecurityError
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.runtime import Context, LoopContext
from jinja2.sandbox import ImmutableSandboxedEnvironment, SandboxedFormatter
from jinja2.utils import Cycler, Joiner, Namespace
from jinja2.visitor import NodeTransformer

from engine.template_limits import (
    BUDGET,
    COMPARING_TESTS,
    ITEMS_PER_STEP,
    MAX_CHARS,
    REMOVED_FILTERS,
    Budget,
    bounded,
    bounded_range,
    budget_of,
    check_call,
    check_field,
    check_nested,
    check_operator,
    count_nested,
)


class RaisedByTemplate(TemplateError):
    """The template called raise_exception: the conversation is not one that it can render."""


class GenerationTag(Extension):
    """{% generation %} … {% endgeneration %} marks what the assistant wrote; it only matters in training."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Guards(NodeTransformer):
    """Sends what Jinja compiles to plain Python through the environment: loops, ~, comparisons, keys of dicts."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _guarded("counted", [node.iter])
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _guarded("joined", node.nodes)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        values = [node.expr, *(operand.expr for operand in node.ops)]
        if sum(not isinstance(value, nodes.Const) for value in values) > 1:  # with a constant Python is done at once
            node.expr = _measured(node.expr)
            for operand in node.ops:
                operand.expr = _measured(operand.expr)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _measured(node.key)
        return node


def _measured(node: nodes.Expr) -> nodes.Expr:
    return node if isinstance(node, nodes.Const) else _guarded("measured", [node])


def _guarded(name: str, arguments: Iterable[nodes.Node]) -> nodes.Expr:
    given: list[Any] = [nodes.ContextReference(), *arguments]
    return nodes.Call(nodes.EnvironmentAttribute(name), given, [], None, None)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it: trimmed blocks, break and continue, no HTML escaping."""

    intercepted_binops = frozenset(("*", "**", "+", "-", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag], finalize=check_nested
        )
        kept: dict[str, Any] = {
            name: function for name, function in self.filters.items() if name not in REMOVED_FILTERS
        }
        kept["tojson"] = _to_json
        self.filters = {name: bounded(name, function) for name, function in kept.items()}
        tests: dict[str, Any] = self.tests
        self.tests = {name: bounded(name, tests[name]) if name in COMPARING_TESTS else tests[name] for name in tests}
        self.globals = {
            "range": bounded_range,
            "dict": _make_dict,
            "namespace": _PlainNamespace,
            "cycler": Cycler,
            "joiner": Joiner,
            "raise_exception": _raise_exception,
            "strftime_now": _strftime_now,
        }

    def _parse(self, source: str, name: str | None, filename: str | None) -> nodes.Template:
        tree = super()._parse(source, name, filename)
        for found in tree.find_all((nodes.Include, nodes.Import, nodes.FromImport, nodes.Extends)):
            raise SecurityError(
                f"line {found.lineno}: {type(found).__name__.lower()} is not allowed, nothing is loaded"
            )
        guarded: nodes.Template = _Guards().visit(tree)
        return guarded

    def render_text(self, template: Template, variables: Mapping[str, Any]) -> str:
        """Renders with a fresh budget.

        Raises:
            SecurityError: the template leaves the sandbox or costs too much.
            Exception: whatever else the template does wrong.
        """
        parts, num_chars = [], 0
        for part in template.generate({**variables, BUDGET: Budget()}):
            num_chars += len(part)
            if num_chars > MAX_CHARS:
                raise SecurityError(f"the rendered prompt is longer than {MAX_CHARS} characters")
            parts.append(part)
        return "".join(parts)

    def counted(self, context: Context, iterable: Iterable[Any]) -> Iterator[Any]:
        """Takes each item of a loop off the budget."""
        budget = budget_of(context)
        for item in iterable:
            budget.step()
            yield item

    def joined(self, context: Context, *values: object) -> str:
        """The ~ operator."""
        texts = [str(check_nested(value)) for value in values]
        budget_of(context).build(sum(map(len, texts)), MAX_CHARS)
        return "".join(texts)

    def measured(self, context: Context, value: Any) -> Any:
        """An operand of a comparison or a key, which Python will walk through."""
        if not isinstance(value, str | int):
            budget_of(context).step(count_nested(value) // ITEMS_PER_STEP)
        return value

    def getitem(self, obj: Any, argument: Any) -> Any:
        return super().getitem(obj, check_nested(argument))

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operator(operator, left, right, budget_of(context))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        if getattr(__obj, "__self__", None) is not __self:  # the guards take what they cost off the budget themselves
            check_call(__obj, args, kwargs, budget_of(__context))
        if isinstance(__obj, LoopContext) and args:  # a recursive loop
            args = (__self.counted(__context, args[0]), *args[1:])
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        """str.format and str.format_map, bound to this sandbox and to its limits."""
        is_method = isinstance(value, types.BuiltinMethodType) and isinstance(value.__self__, str)
        if not is_method or value.__name__ not in ("format", "format_map"):
            return None
        text, is_map = str(value.__self__), value.__name__ == "format_map"
        formatter = _BoundedFormatter(self)

        def bounded(*args: Any, **kwargs: Any) -> str:
            return formatter.vformat(text, (), args[0]) if is_map else formatter.vformat(text, args, kwargs)

        return bounded

    def unsafe_undefined(self, obj: Any, attribute: str) -> NoReturn:
        raise SecurityError(f"access to attribute {attribute!r} of a {type(obj).__name__} is not allowed")


class _BoundedFormatter(SandboxedFormatter):
    def format_field(self, value: Any, format_spec: str) -> str:
        check_field(value, format_spec)
        return str(super().format_field(value, format_spec))


class _PlainNamespace(Namespace):
    """Takes no names that Python itself gives a meaning."""

    def __init__(*args: Any, **kwargs: Any) -> None:
        _check_names(kwargs)
        Namespace.__init__(*args, **kwargs)

    def __setitem__(self, name: str, value: Any) -> None:
        _check_names((name,))
        Namespace.__setitem__(self, name, value)


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if name.startswith("__"):
            raise SecurityError(f"a namespace cannot have an attribute {name!r}")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    check_nested(args)
    return dict(*args, **kwargs)


def _raise_exception(message: object) -> NoReturn:
    raise RaisedByTemplate(str(check_nested(message)))


def _strftime_now(pattern: str) -> str:
    if len(pattern) > 200 or re.search("[0-9]{4}", pattern):
        raise SecurityError("strftime_now takes a short pattern without wide fields")
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as the model saw it in training: not escaped for HTML, other scripts kept."""
    if separators is not None and any(len(mark) > 8 for mark in separators):
        raise SecurityError("tojson with separators of more than 8 characters")
    if indent is not None and (not isinstance(indent, int) or indent > 64):
        raise SecurityError(f"tojson takes an indent of at most 64, found {reprlib.repr(indent)}")
    encoder = json.JSONEncoder(ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    if indent is None:
        return encoder.encode(value)
    parts, num_chars = [], 0
    for part in encoder.iterencode(value):  # the indents of a deep value can be far longer than the value
        num_chars += len(part)
        if num_chars > MAX_CHARS:
            raise SecurityError(f"tojson builds a text of more than {MAX_CHARS} characters")
        parts.append(part)
    return "".join(parts)
