"""What a server says of itself to those who measure it: versions, device, driver, split, flags. Never a secret."""

from __future__ import annotations

import os
from dataclasses import fields
from typing import Any

from engine.config import EngineConfig, ParallelConfig
from engine.system import nvidia_driver, versions

# where it listens, and texts and folders of its machine: no time depends on them (keys have repr=False)
UNSAID = ("model", "served_model_name", "host", "port", "root_path", "allowed_origins", "chat_template")
ENVIRONMENT = ("NCCL_P2P_DISABLE", "GLINT_ISLAND_SIZE")  # variables that decide how ranks add up


def about(config: EngineConfig, parallel: ParallelConfig, device: str) -> dict[str, Any]:
    """As GET /version answers it; device: what computes, in words."""
    return {
        "versions": versions(),
        "device": device,
        "driver": nvidia_driver(),
        "tensor_parallel_size": parallel.tensor_parallel_size,
        "pipeline_parallel_size": parallel.pipeline_parallel_size,
        "flags": changed_flags(config),
        "environment": {name: os.environ[name] for name in ENVIRONMENT if name in os.environ},
    }


def changed_flags(config: EngineConfig) -> dict[str, Any]:
    """Those that are not at their default, by name; without UNSAID and what is kept out of logs."""
    said = [field for field in fields(config) if field.repr and field.name not in UNSAID]
    return {field.name: getattr(config, field.name) for field in said if getattr(config, field.name) != field.default}
