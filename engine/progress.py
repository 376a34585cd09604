"""How far something long is: a bar where standard error is a terminal, elsewhere a line now and then."""

from __future__ import annotations

import sys
import time
from types import TracebackType

from tqdm import tqdm

LINE_S = 10.0  # between lines


class Progress:
    """Of `total` units; "B" stands for bytes. Nothing is said of what takes less than LINE_S without a terminal."""

    def __init__(self, total: int, what: str, unit: str = "", done: int = 0, hidden: bool = False) -> None:
        self.done = done
        self._total, self._what, self._unit = total, what, unit
        is_terminal = sys.stderr.isatty()
        units = {"unit": unit or "it", "unit_scale": unit == "B"}
        self._bar = tqdm(total=total, initial=done, desc=what, disable=hidden or not is_terminal, **units)
        self._next = float("inf") if is_terminal or hidden else time.monotonic() + LINE_S

    def __enter__(self) -> Progress:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._bar.close()

    def update(self, count: int = 1) -> None:
        self.done += count
        self._bar.update(count)
        if time.monotonic() >= self._next:
            self._next = time.monotonic() + LINE_S
            sys.stderr.write(f"{self._line()}\n")

    def _line(self) -> str:
        if self._unit == "B":
            return f"{self._what}: {self.done / 1e6:,.0f} of {self._total / 1e6:,.0f} MB"
        return f"{self._what}: {self.done:,} of {self._total:,} {self._unit}".rstrip()
