"""engine.progress: lines where there is no terminal, and not too many; a bar where there is one."""

from __future__ import annotations

import sys

import pytest

from engine import progress
from engine.progress import Progress


@pytest.fixture
def now(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    clock = [0.0]
    monkeypatch.setattr(progress.time, "monotonic", lambda: clock[0])
    return clock


def test_a_line_now_and_then(now: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    """Each second a unit: after 10 s the first line, after 20 s the second."""
    with Progress(30, "kernels") as bar:
        for second in range(1, 26):
            now[0] = second
            bar.update()
    assert capsys.readouterr().err == "kernels: 10 of 30\nkernels: 20 of 30\n"


def test_what_is_quick_says_nothing(now: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(30, "kernels") as bar:
        now[0] = 9.9
        bar.update(30)
    assert bar.done == 30
    assert not capsys.readouterr().err


def test_bytes_and_what_was_done_before(now: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(3_000_000_000, "loading", "B", done=1_000_000_000) as bar:
        now[0] = 11
        bar.update(500_000_000)
    assert capsys.readouterr().err == "loading: 1,500 of 3,000 MB\n"


def test_hidden(now: list[float], capsys: pytest.CaptureFixture[str]) -> None:
    with Progress(3, "loading", "unit", hidden=True) as bar:
        now[0] = 100
        bar.update()
    assert not capsys.readouterr().err


def test_a_terminal_has_a_bar(
    now: list[float], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True, raising=False)
    with Progress(4, "loading", "unit") as bar:
        now[0] = 100
        bar.update(4)
    said = capsys.readouterr().err
    assert "4/4" in said
    assert "4 of 4" not in said
