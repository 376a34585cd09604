"""What is said where CUDA does not start."""

from __future__ import annotations

import pytest

from engine.kernels.driver_errors import HELP, explain


@pytest.mark.parametrize(
    ("status", "what_helps"),
    [
        (2, "end what else runs on it"),
        (3, "if it was forked from one that had used CUDA (multiprocessing with 'fork'"),  # DST-09
        (35, "(CUDA 13 needs 580, CUDA 12 needs 525 or later), or install 'glint-llm[cuda12]'"),
        (100, "no GPU is visible: check CUDA_VISIBLE_DEVICES"),
        (222, "the driver is older than the compiler: update the driver, or install an NVRTC"),
        (803, "libcuda and the loaded kernel module are of different versions: reboot"),
    ],
)
def test_what_was_found_and_what_helps(status: int, what_helps: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    message = explain(status, "words of CUDA", "driver CUDA 12.4, packages CUDA 13.0")
    assert message.startswith("words of CUDA (driver CUDA 12.4, packages CUDA 13.0); ")
    assert what_helps in message


def test_the_environment_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "7")
    assert explain(100, "no device").startswith("no device (CUDA_VISIBLE_DEVICES=7); no GPU is visible")


def test_an_error_that_nobody_knows(monkeypatch: pytest.MonkeyPatch) -> None:
    """CUDA's words alone."""
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert 999 not in HELP
    assert explain(999, "unknown error") == "unknown error"
