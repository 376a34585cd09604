"""A Hugging Face folder: which of its files belong to the checkpoint, and the tensors in them.

The rule: with model.safetensors.index.json exactly the files that it names; otherwise model.safetensors; otherwise
all *.safetensors of the folder. Nothing else is opened, so a .bin twin, an adapter or a consolidated file beside the
named ones changes nothing. A tensor that two files hold is an error: there is no telling which one is meant.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from engine.checkpoint.safetensors_file import read_header
from engine.checkpoint.stored_tensor import StoredTensor
from engine.errors import CheckpointError, ConfigError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
MAX_LISTED = 50  # names in one message
MAX_NAME_BYTES = 255  # of a file, in every usual file system


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file.

    Raises:
        ConfigError: the file cannot be read, is not JSON, or holds something else than an object.
    """
    try:
        values = json.loads(path.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: cannot be read as JSON: {error}") from error
    if not isinstance(values, dict):
        raise ConfigError(f"{path}: must hold a JSON object, found {type(values).__name__}")
    return values


def folder_tensors(folder: Path) -> dict[str, StoredTensor]:
    """All tensors of the checkpoint by name.

    Raises:
        CheckpointError: files are missing or damaged, the index points elsewhere, a name occurs twice.
    """
    index_path = folder / INDEX
    weight_map = _read_index(index_path) if index_path.exists() else {}
    tensors: dict[str, StoredTensor] = {}
    for path in _files(folder, weight_map):
        for name, tensor in read_header(path).items():
            if name in tensors:
                raise CheckpointError(
                    f"{folder}: tensor {name!r} is in both {tensors[name].file.name} and {path.name}; "
                    "remove the file that does not belong to the model"
                )
            tensors[name] = tensor
    elsewhere = [name for name, file in weight_map.items() if name not in tensors or tensors[name].file.name != file]
    if elsewhere:
        listed = ", ".join(f"{name} ({weight_map[name]})" for name in elsewhere[:MAX_LISTED])
        raise CheckpointError(
            f"{index_path}: names {len(elsewhere)} tensors that are missing from the file it says: {listed}"
        )
    return tensors


def _files(folder: Path, weight_map: dict[str, str]) -> list[Path]:
    if weight_map:
        files = sorted(set(weight_map.values()))
        if missing := [file for file in files if not (folder / file).exists()]:
            raise CheckpointError(
                f"{folder}: {len(missing)} of the {len(files)} weight files in {INDEX} are missing: "
                f"{', '.join(missing)}; fetch them again"
            )
        return [folder / file for file in files]
    if (folder / SINGLE).exists():
        return [folder / SINGLE]
    found = sorted(path for path in folder.glob("*.safetensors"))
    if not found:
        other = sorted(path.name for path in folder.iterdir() if path.suffix in (".bin", ".pt", ".pth", ".gguf"))
        hint = f" It has {', '.join(other)}, which is not read from a folder." if other else ""
        raise CheckpointError(f"{folder}: has no weights: neither {INDEX} nor a *.safetensors file.{hint}")
    return found


def _read_index(path: Path) -> dict[str, str]:
    """weight_map of the index: tensor name to the plain name of a file beside the index."""
    try:
        weight_map = read_json(path).get("weight_map")
    except ConfigError as error:
        raise CheckpointError(str(error)) from error
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{path}: weight_map must be an object with at least one tensor, found {weight_map!r}")
    for name, file in weight_map.items():
        if not isinstance(file, str) or not _is_plain_name(file):
            raise CheckpointError(
                f"{path}: tensor {name!r} is said to be in {file!r}; it must be the plain name of a .safetensors "
                "file in the same folder"
            )
    return weight_map


def _is_plain_name(file: str) -> bool:
    """Whether a file system can have it as the name of a file."""
    is_short = len(file.encode("utf-8", "surrogatepass")) <= MAX_NAME_BYTES
    is_text = not any("\ud800" <= character <= "\udfff" for character in file)
    return is_short and is_text and file.endswith(".safetensors") and not any(mark in file for mark in "/\\:\0")
