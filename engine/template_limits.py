"""What a chat template may cost: a budget for each render, and a size that no single value may pass.

A sandbox limits what a template can reach, not how much it computes; a line such as {{ 'z' * 1000000000 }} would
stall the server. Sizes are worked out before a value is built.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from jinja2.exceptions import SecurityError

MAX_CHARS = 8_000_000  # of a rendered prompt and of every string on the way
MAX_ITEMS = 1_000_000  # of a list built by an operator
MAX_BUILT = 1_000_000_000  # characters and items of all values that the operators of one render build
MAX_STEPS = 2_000_000  # loop iterations and calls of one render
MAX_SECONDS = 10.0  # of one render
MAX_RANGE = 100_000
MAX_INT_BITS = 4096
STEPS_PER_LOOK = 64  # at the clock

REMOVED_FILTERS = frozenset(("pprint", "random", "striptags", "urlize", "xmlattr"))
_SIZE_FILTERS = frozenset(("batch", "center", "format", "indent", "replace", "round", "slice", "truncate", "wordwrap"))
_PLAIN_FILTERS = frozenset(
    ("capitalize", "e", "escape", "forceescape", "lower", "safe", "string", "title", "trim", "upper", "urlencode")
)
_WIDE_PERCENT = re.compile(r"%(\([^)]*\))?[#0\- +]*\d*\.?(\*|\d{5})")
_WIDE_SPEC = re.compile(r"\d{5}")


class Budget:
    """What one render has used up so far."""

    __slots__ = ("_built", "_deadline", "_look_at", "_steps")

    def __init__(self) -> None:
        self._steps = 0
        self._built = 0
        self._look_at = STEPS_PER_LOOK
        self._deadline = time.monotonic() + MAX_SECONDS

    def step(self, num: int = 1) -> None:
        """Raises SecurityError when the steps or the time are used up."""
        self._steps += num
        if self._steps > MAX_STEPS:
            raise SecurityError(f"the template takes more than {MAX_STEPS} steps")
        if self._steps >= self._look_at:
            self._look_at = self._steps + STEPS_PER_LOOK
            if time.monotonic() > self._deadline:
                raise SecurityError(f"the template takes more than {MAX_SECONDS:g} seconds")

    def build(self, size: int, limit: int) -> None:
        """Raises SecurityError if a new value of so many characters or items is too large, or all of them are."""
        self._built += size
        if size > limit or self._built > MAX_BUILT:
            raise SecurityError(f"the template builds values that are too large ({size} characters or items)")


def check_operator(operator: str, left: Any, right: Any, budget: Budget) -> None:
    """Raises SecurityError if left operator right (one of * ** + %) is too large to be built."""
    if operator == "%":
        if isinstance(left, str):
            check_percent(left, right)
    elif isinstance(left, int) and isinstance(right, int):
        bits = left.bit_length() * max(right, 0) if operator == "**" else left.bit_length() + right.bit_length()
        if bits > MAX_INT_BITS:
            raise SecurityError(f"the template builds an integer of more than {MAX_INT_BITS} bits")
    else:
        sizes = [len(value) if hasattr(value, "__len__") else value for value in (left, right)]
        if all(isinstance(size, int) for size in sizes):
            size = sizes[0] * sizes[1] if operator == "*" else sum(sizes)
            budget.build(size, MAX_CHARS if isinstance(left, str) or isinstance(right, str) else MAX_ITEMS)


def check_nested(value: Any) -> Any:
    """Gives value back, or refuses a list or dict whose text would be huge.

    One that holds another many times over is small in memory only; its text is not.
    """
    if isinstance(value, list | tuple | dict):
        num_chars, waiting = 0, [value]
        while waiting:
            inner = waiting.pop()
            num_chars += len(inner) if isinstance(inner, str) else 8
            if num_chars > MAX_CHARS:
                raise SecurityError(f"the template writes out a value of more than {MAX_CHARS} characters")
            if isinstance(inner, dict):
                waiting += [*inner.keys(), *inner.values()]
            elif isinstance(inner, list | tuple):
                waiting += inner
    return value


def check_percent(pattern: str, values: Any) -> None:
    """Refuses a % format with a field that is ten thousand or more wide, or as wide as an argument says."""
    if _WIDE_PERCENT.search(pattern):
        raise SecurityError("a format with such a wide field is not allowed in a chat template")
    check_nested(values)


def check_field(value: Any, spec: str) -> None:
    """The same for one field of str.format."""
    if _WIDE_SPEC.search(spec):
        raise SecurityError("a format with such a wide field is not allowed in a chat template")
    check_nested(value)


def check_growth(name: str, text: str, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
    """Refuses a method or filter of a string whose result could be huge.

    Args:
        name: of the method or filter.
        text: what it works on.
    """
    numbers = [arg for arg in (*args, *kwargs.values()) if isinstance(arg, int)]
    texts = [arg for arg in args if isinstance(arg, str)]
    size = max(numbers, default=0)
    if name == "replace" and len(texts) > 1:
        size = text.count(texts[0]) * len(texts[1])
    elif name == "join" and args and isinstance(args[0], str | list | tuple | dict):
        size = len(text) * len(args[0]) + sum(len(str(check_nested(item))) for item in args[0])
    elif name in ("indent", "expandtabs"):
        size = max([*numbers, *map(len, texts), 8]) * (text.count("\n") + text.count("\t") + 1)
    elif name == "wordwrap":
        size = len(text) * max(map(len, texts), default=1)
    elif name == "format":  # the filter; the method is bounded field by field
        size = 0
        check_percent(text, [*args, *kwargs.values()])
    elif name == "translate":
        raise SecurityError("translate is not allowed in a chat template")
    if size > MAX_CHARS:
        raise SecurityError(f"{name} would build a text of up to {size} characters")


def bounded_filter(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter with its result's size checked beforehand."""
    first = 1 if hasattr(function, "jinja_pass_arg") else 0  # then the context or the environment comes first

    @functools.wraps(function)
    def bounded(*args: Any, **kwargs: Any) -> Any:
        value, rest = args[first], args[first + 1 :]
        if name == "join":
            value = list(value)
            check_growth(name, str(rest[0] if rest else kwargs.get("d", "")), (value,), {})
        elif name in _SIZE_FILTERS:
            check_growth(name, value if isinstance(value, str) else "", rest, kwargs)
        elif name in _PLAIN_FILTERS:
            check_nested(value)
        return function(*args[:first], value, *rest, **kwargs)

    return bounded


def bounded_range(*args: int) -> Iterable[int]:
    """range() of at most MAX_RANGE numbers."""
    numbers = range(*args)
    if len(numbers) > MAX_RANGE:
        raise SecurityError(f"range() of {len(numbers)} numbers; at most {MAX_RANGE} are allowed")
    return numbers
