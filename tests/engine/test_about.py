"""What a server says of itself: the flags that were changed, and no secret."""

from __future__ import annotations

import json
from dataclasses import fields
from pathlib import Path

import pytest

from engine import system
from engine.about import UNSAID, about, changed_flags
from engine.config import EngineConfig, ParallelConfig
from engine.system import nvidia_driver

DRIVER = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  580.159.04  Release Build\nGCC version: gcc 12.3.0\n"


def test_flags_that_are_not_at_their_default() -> None:
    assert changed_flags(EngineConfig()) == {}
    assert changed_flags(EngineConfig(seed=3, max_model_len=64)) == {"seed": 3, "max_model_len": 64}


def test_no_secret_and_no_path() -> None:
    secret = EngineConfig(model="folder/s3cret", api_key=("s3cret",), chat_template="s3cret", root_path="/s3cret")
    assert changed_flags(secret) == {}
    assert "s3cret" not in json.dumps(about(secret, ParallelConfig(), "cpu"))
    assert {*UNSAID} < {field.name for field in fields(EngineConfig)}, "a flag that is no more"


def test_about(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "version").write_text(DRIVER)
    monkeypatch.setattr(system, "DRIVER_FILE", tmp_path / "version")
    monkeypatch.setenv("NCCL_P2P_DISABLE", "1")
    said = about(EngineConfig(dual_stream="on"), ParallelConfig(0, 2, 3), "abacus")
    assert said.pop("versions").startswith("Python 3.")
    assert said == {
        "device": "abacus",
        "driver": "580.159.04",
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 3,
        "flags": {"dual_stream": "on"},
        "environment": {"NCCL_P2P_DISABLE": "1"},
    }


def test_no_driver(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(system, "DRIVER_FILE", tmp_path / "version")
    assert nvidia_driver() == ""
    (tmp_path / "version").write_text("a module of another kind")
    assert nvidia_driver() == ""
