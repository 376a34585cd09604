"""How benchmarks read their arguments: what is wrong is found before anything is measured."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from urllib.parse import urlsplit


def positive_list(text: str) -> tuple[int, ...]:
    """From 1 on, with commas between them."""
    try:
        return tuple(positive(part) for part in text.split(",") if part)
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers from 1 on, such as 1,8") from None


def positive(text: str) -> int:
    """From 1 on."""
    value = int(text)
    if value < 1:
        raise argparse.ArgumentTypeError(f"{value} is below 1")
    return value


def not_negative(text: str) -> int:
    """From 0 on."""
    value = int(text)
    if value < 0:
        raise argparse.ArgumentTypeError(f"{value} is below 0")
    return value


def above_zero(text: str) -> float:
    """A finite number above 0."""
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text} is not above 0")
    return value


def above_zero_list(text: str) -> tuple[float, ...]:
    """Different numbers above 0, with commas between them."""
    try:
        values = tuple(above_zero(part) for part in text.split(","))
    except (ValueError, argparse.ArgumentTypeError):
        raise argparse.ArgumentTypeError(f"{text!r} is no list of numbers above 0, such as 0.25,0.5,1") from None
    if len(set(values)) < len(values):
        raise argparse.ArgumentTypeError(f"{text!r} has a number twice")
    return values


def http_url(text: str) -> str:
    """http://HOST:PORT, without a path."""
    try:
        parts = urlsplit(text)
        is_good = parts.scheme == "http" and parts.hostname and parts.port != 0 and parts.path in ("", "/")
    except ValueError:  # a port that is no number
        is_good = False
    if not is_good:
        raise argparse.ArgumentTypeError(f"{text!r} is not of the form http://HOST:PORT")
    return text.rstrip("/")


def report_file(text: str) -> str:
    """A name that can be written."""
    try:
        Path(text).open("a").close()
    except OSError as error:
        raise argparse.ArgumentTypeError(f"{text} cannot be written: {error.strerror}") from None
    return text


def report_file_or_output(text: str) -> str:
    """The same, or - for standard output."""
    return text if text == "-" else report_file(text)
