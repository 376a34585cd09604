"""How the value of a flag is read, from the text of a command line or the value of a config file.

Each function raises ValueError with what the value must be.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from fractions import Fraction
from typing import Any

Convert = Callable[[object], Any]


def text(value: object) -> str:
    if not isinstance(value, str):
        raise ValueError("it must be a text")
    return value


def texts(value: object) -> tuple[str, ...]:
    """One text or a list of them."""
    return tuple(text(entry) for entry in (value if isinstance(value, list) else [value]))


_SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "K": 2**10, "M": 2**20, "G": 2**30}


def integer(value: object) -> int:
    """An int, or its text, which may end in k, m, g (powers of 1000) or K, M, G (powers of 1024)."""
    if isinstance(value, int) and not isinstance(value, bool):
        return value
    match = (
        re.fullmatch(r"(-?[0-9]{1,20}(?:\.[0-9]{1,9})?)([kmgKMG]?)", value.strip()) if isinstance(value, str) else None
    )
    if match is not None:
        number = Fraction(match[1]) * _SUFFIXES[match[2]]
        if number.denominator == 1:
            return int(number)
    raise ValueError("it must be an integer such as 4096, 4k (4000) or 4K (4096)")


def number(value: object) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        raise ValueError("it must be a number")
    try:
        return float(value)
    except ValueError:
        raise ValueError("it must be a number") from None


def switch(value: object) -> bool:
    if not isinstance(value, bool):
        raise ValueError("it must be true or false")
    return value
