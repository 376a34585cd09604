"""How benchmarks read their arguments: what is wrong is found before anything is measured."""

from __future__ import annotations

import argparse
from pathlib import Path


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
