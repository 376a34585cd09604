"""config.json of a checkpoint, in the form of transformers 4 or 5, as the small record of its family.

What is read for which family stands at the head of that family's file in ref/model; the common keys are in
ref/model/fields.py. Source: the config classes of transformers.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ref.model.fields import ModelConfig
from ref.model.registry import family_of
from ref.quant.scheme_config import parse_quantization_config


def read_config(path: str | Path) -> ModelConfig:
    """Reads a config.json, or the one of a folder.

    Raises:
        FileNotFoundError: no such file.
        ValueError: names the key that is missing or cannot be honoured.
    """
    path = Path(path)
    file = path / "config.json" if path.is_dir() else path
    try:
        config = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise ValueError(f"{file} is no valid JSON: {error}") from None
    if not isinstance(config, dict):
        raise ValueError(f"{file} must hold a JSON object, found {type(config).__name__}")
    return parse_config(config)


def parse_config(config: Mapping[str, Any]) -> ModelConfig:
    """A loaded config.json as its family's record. Where a key is missing the default is that of transformers.

    Raises:
        ValueError: names the key that is missing or cannot be honoured.
    """
    architectures = config.get("architectures")
    if not isinstance(architectures, list) or len(architectures) != 1:
        raise ValueError(f"config.json: architectures must be a list of one name, found {architectures!r}")
    family = family_of(str(architectures[0]))
    if config.get("quantization_config") is not None:
        parse_quantization_config(config["quantization_config"])  # refuses what cannot be read, before it is read
    return family.read(config)
