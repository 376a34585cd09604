"""The Jinja environment in which chat templates run: no way out, no change of data, bounded cost.

Templates come with model files, so they are as untrusted as any download. Jinja's immutable sandbox refuses private
attributes and every method that changes a list or dict, and there is no loader, so nothing can be included. What a
render may cost is in template_limits.
"""

from __future__ import annotations

import json
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
    MAX_CHARS,
    REMOVED_FILTERS,
    Budget,
    bounded_filter,
    bounded_range,
    check_field,
    check_growth,
    check_nested,
    check_operator,
)

_BUDGET = "budget of this render"  # not an identifier, so no template can name it


class RaisedByTemplate(TemplateError):
    """The template called raise_exception: the conversation is not one that it can render."""


class GenerationTag(Extension):
    """{% generation %} … {% endgeneration %} marks what the assistant wrote; it only matters in training."""

    tags = {"generation"}  # noqa: RUF012 (Jinja's interface)

    def parse(self, parser: Parser) -> list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class _Guards(NodeTransformer):
    """Sends loops and the ~ operator, which Jinja compiles to plain Python, through the environment."""

    def visit_For(self, node: nodes.For) -> nodes.Node:
        self.generic_visit(node)
        node.iter = _guarded("counted", [node.iter])
        return node

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _guarded("joined", node.nodes)


def _guarded(name: str, arguments: Iterable[nodes.Node]) -> nodes.Expr:
    given: list[Any] = [nodes.ContextReference(), *arguments]
    return nodes.Call(nodes.EnvironmentAttribute(name), given, [], None, None)


class TemplateEnvironment(ImmutableSandboxedEnvironment):
    """Jinja as chat templates expect it: trimmed blocks, break and continue, no HTML escaping."""

    intercepted_binops = frozenset(("*", "**", "+", "%"))

    def __init__(self) -> None:
        super().__init__(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, GenerationTag], finalize=check_nested
        )
        kept = {name: function for name, function in self.filters.items() if name not in REMOVED_FILTERS}
        self.filters = {name: bounded_filter(name, function) for name, function in kept.items()}
        self.filters["tojson"] = _to_json
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
        for part in template.generate({**variables, _BUDGET: Budget()}):
            num_chars += len(part)
            if num_chars > MAX_CHARS:
                raise SecurityError(f"the rendered prompt is longer than {MAX_CHARS} characters")
            parts.append(part)
        return "".join(parts)

    def counted(self, context: Context, iterable: Iterable[Any]) -> Iterator[Any]:
        """Takes each item of a loop off the budget."""
        budget = _budget(context)
        for item in iterable:
            budget.step()
            yield item

    def joined(self, context: Context, *values: object) -> str:
        """The ~ operator."""
        texts = [str(check_nested(value)) for value in values]
        _budget(context).build(sum(map(len, texts)), MAX_CHARS)
        return "".join(texts)

    def call_binop(self, context: Context, operator: str, left: Any, right: Any) -> Any:
        check_operator(operator, left, right, _budget(context))
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        budget = _budget(__context)
        budget.step()
        if isinstance(__obj, LoopContext) and args:  # a recursive loop
            args = (__self.counted(__context, args[0]), *args[1:])
        owner = getattr(__obj, "__self__", None)
        if isinstance(owner, str):
            budget.step(len(owner) // 64)
            check_growth(__obj.__name__, owner, args, kwargs)
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


def _budget(context: Context) -> Budget:
    budget: Budget = context.parent[_BUDGET]
    return budget


def _check_names(names: Iterable[str]) -> None:
    for name in names:
        if name.startswith("__"):
            raise SecurityError(f"a namespace cannot have an attribute {name!r}")


def _make_dict(*args: Any, **kwargs: Any) -> dict[Any, Any]:
    return dict(*args, **kwargs)


def _raise_exception(message: object) -> NoReturn:
    raise RaisedByTemplate(str(message))


def _strftime_now(pattern: str) -> str:
    return datetime.now().strftime(pattern)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """JSON as the model saw it in training: not escaped for HTML, other scripts kept."""
    if isinstance(indent, int) and indent > 64:
        raise SecurityError(f"tojson with an indent of {indent}")
    return json.dumps(
        check_nested(value), ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
    )
