"""What a chat template may cost: a budget for each render, and a size that no single value may pass.

A sandbox limits what a template can reach, not how much it computes; a line such as {{ 'z' * 1000000000 }} would
stall the server. Sizes are worked out before a value is built. A list that holds another many times over is small in
memory only: its size is counted as if it were written out, before it is compared, sorted, hashed or printed.

Not bounded exactly:
- The clock is looked at every STEPS_PER_LOOK steps and never inside one operation, so a render may outlast MAX_SECONDS
  by what so many operations on values of the largest size take: some seconds.
- Memory: every value alone is bounded, and what operators build in all; lists that filters and literals make count
  for nothing but the steps that make them.
- Reading and compiling a template, once at start, is not limited at all.
"""

from __future__ import annotations

import functools
import re
import time
from collections.abc import Callable, ItemsView, Iterable, KeysView, Mapping, ValuesView
from typing import Any

from jinja2 import pass_context
from jinja2.exceptions import SecurityError
from jinja2.runtime import Context
from jinja2.utils import Namespace

MAX_CHARS = 8_000_000  # of a rendered prompt and of every string on the way
MAX_ITEMS = 1_000_000  # of a list built by an operator
MAX_BUILT = 1_000_000_000  # characters and items of all values that the operators of one render build
MAX_STEPS = 2_000_000  # loop iterations and calls of one render
MAX_SECONDS = 10.0  # of one render
MAX_RANGE = 100_000
MAX_INT_BITS = 4096
MAX_DEPTH = 200  # lists within lists; Python hashes tuples on its own stack, without a limit
MAX_DECIMALS = 300  # of round()
STEPS_PER_LOOK = 64  # at the clock
ITEMS_PER_STEP = 64  # of a value that is compared, sorted or written out
BUDGET = "budget of this render"  # its name in the context; not an identifier, so no template can name it

REMOVED_FILTERS = frozenset(("pprint", "random", "striptags", "urlize", "wordwrap", "xmlattr"))
_SIZE_FILTERS = frozenset(("batch", "center", "format", "indent", "replace", "slice", "truncate"))
_WHOLE_FILTERS = frozenset(("groupby", "join", "max", "min", "sort", "sum", "unique"))  # want all items at once
_SHALLOW_FILTERS = frozenset(  # do not look into the items of a list
    ("abs", "batch", "count", "d", "default", "first", "float", "int", "items", "last", "length", "list", "map")
) | frozenset(("reject", "rejectattr", "reverse", "select", "selectattr", "slice"))
COMPARING_TESTS = frozenset(
    ("==", "!=", "<", "<=", ">", ">=", "eq", "equalto", "ne", "lt", "lessthan", "le", "gt", "greaterthan", "ge", "in")
)
_CONTAINERS = (list, tuple, dict, set, frozenset, KeysView, ValuesView, ItemsView, Namespace)
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
    """Raises SecurityError if left operator right (one of * ** + - %) is too large to be built."""
    if operator == "%":
        if isinstance(left, str):
            check_percent(left, right)
    elif operator == "-":  # of views of dicts too, which gives a set
        budget.step(count_nested(left, right) // ITEMS_PER_STEP)
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
    count_nested(value)
    return value


def count_nested(*values: Any) -> int:
    """Items in lists, dicts and the like, each counted as often as it would be written out; 0 for plain values.

    Raises:
        SecurityError: the text of all of them would be huge.
    """
    level = [value for value in values if isinstance(value, _CONTAINERS)]
    num_items = num_chars = depth = 0
    while level:
        depth += 1
        deeper: list[Any] = []
        for inner in level:
            num_items += 1
            num_chars += len(inner) if isinstance(inner, str) else 8
            if num_chars > MAX_CHARS or depth > MAX_DEPTH:
                raise SecurityError(
                    f"the template uses a nested value of more than {MAX_CHARS} characters or {MAX_DEPTH} levels"
                )
            if isinstance(inner, Namespace):
                inner = inner._Namespace__attrs
            if isinstance(inner, dict):
                deeper += [*inner.keys(), *inner.values()]
            elif isinstance(inner, _CONTAINERS):
                deeper += inner
        level = deeper
    return num_items


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
        check_nested(args[0])
        size = len(text) * len(args[0]) + sum(len(str(item)) for item in args[0])
    elif name in ("indent", "expandtabs"):
        size = max([*numbers, *map(len, texts), 8]) * (text.count("\n") + text.count("\t") + 1)
    elif name == "format":  # the filter; the method is bounded field by field
        size = 0
        check_percent(text, [*args, *kwargs.values()])
    elif name == "translate":
        raise SecurityError("translate is not allowed in a chat template")
    if size > MAX_CHARS:
        raise SecurityError(f"{name} would build a text of up to {size} characters")


def budget_of(context: Context) -> Budget:
    """The budget of the render that context belongs to."""
    budget: Budget = context.parent[BUDGET]
    return budget


def bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """The filter or test, with the sizes of its arguments and result checked beforehand and its steps counted."""
    wanted = getattr(getattr(function, "jinja_pass_arg", None), "name", None)  # what comes before the value

    @functools.wraps(function)
    def checked(context: Context, value: Any, *args: Any, **kwargs: Any) -> Any:
        if name in _WHOLE_FILTERS:
            value = list(value)
        num_items = 0 if name in _SHALLOW_FILTERS else count_nested(value, *args, *kwargs.values())
        budget_of(context).step(1 + num_items // ITEMS_PER_STEP)
        if name == "join":
            check_growth(name, str(args[0] if args else kwargs.get("d", "")), (value,), {})
        elif name in _SIZE_FILTERS:
            check_growth(name, value if isinstance(value, str) else "", args, kwargs)
        elif name == "round" and any(isinstance(arg, int) and arg > MAX_DECIMALS for arg in (*args, *kwargs.values())):
            raise SecurityError(f"round takes at most {MAX_DECIMALS} decimals in a chat template")
        elif name == "sum" and not isinstance(args[1] if len(args) > 1 else kwargs.get("start", 0), int | float):
            raise SecurityError("sum adds up numbers only in a chat template")
        first = {
            "context": (context,),
            "eval_context": (context.eval_ctx,),
            "environment": (context.environment,),
        }.get(wanted or "", ())
        return function(*first, value, *args, **kwargs)

    return pass_context(checked)


def check_call(function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any], budget: Budget) -> None:
    """Refuses a call of a built-in method whose result could be huge or whose work is out of proportion."""
    budget.step()
    owner, name = getattr(function, "__self__", None), getattr(function, "__name__", "")
    if isinstance(owner, str):
        budget.step(len(owner) // 64)
        check_growth(name, owner, args, kwargs)
    elif isinstance(owner, bytes | bytearray) or name == "to_bytes":
        raise SecurityError("bytes are not allowed in a chat template")
    elif name in ("index", "count", "changed"):  # they compare
        budget.step(count_nested(owner, *args) // ITEMS_PER_STEP)
    elif isinstance(owner, dict):  # the key is hashed
        budget.step(count_nested(*args) // ITEMS_PER_STEP)


def bounded_range(*args: int) -> Iterable[int]:
    """range() of at most MAX_RANGE numbers."""
    numbers = range(*args)
    if len(numbers) > MAX_RANGE:
        raise SecurityError(f"range() of {len(numbers)} numbers; at most {MAX_RANGE} are allowed")
    return numbers
