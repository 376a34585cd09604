"""What --model means: the starter model, a folder, a GGUF file, or a repository to fetch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import huggingface_hub

from engine.checkpoint.starter import STARTER, ensure_starter
from engine.errors import ConfigError

HOW_TO_PASS_A_MODEL = "pass --model DIR with a Hugging Face folder, or --model FILE.gguf"
REPO_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9_][\w.-]*)?", re.ASCII)
REPO_FILES = ["*.json", "*.safetensors", "*.jinja", "tokenizer.model", "*.tiktoken"]
# second copies of the weights in another layout; they can double the download
REPO_FILES_LEFT_OUT = ["consolidated*", "*/*.safetensors", "*/*.json"]


@dataclass(frozen=True, slots=True)
class ModelSource:
    """A model on this machine. name is what clients may call it where nothing else is said."""

    kind: Literal["folder", "gguf"]
    path: Path
    name: str


def resolve(model: str) -> ModelSource:
    """Finds the model, fetching it first if it is not here.

    In this order: "starter"; an existing folder; an existing .gguf file; a repository id (looked up in the local cache
    and, unless HF_HUB_OFFLINE is set, on the hub).

    Raises:
        ConfigError: there is no such thing, or it cannot be fetched; says how to pass a local model.
    """
    if model == "starter":
        return ModelSource("gguf", ensure_starter(), STARTER.name)
    if not model:
        raise ConfigError(f"--model is empty; {HOW_TO_PASS_A_MODEL}")
    path = Path(model).expanduser()
    try:
        path.exists()
    except OSError as error:
        raise ConfigError(f"--model {model}: no file can have this name ({error.strerror})") from error
    if path.is_dir():
        return ModelSource("folder", path, path.resolve().name)
    if path.exists():
        if path.suffix != ".gguf":
            raise ConfigError(f"--model {model}: is a file that does not end in .gguf; {HOW_TO_PASS_A_MODEL}")
        return ModelSource("gguf", path, path.stem)
    if path.suffix == ".gguf" or not REPO_ID.fullmatch(model):
        raise ConfigError(f"--model {model}: there is no such file or folder; {HOW_TO_PASS_A_MODEL}")
    return ModelSource("folder", _fetch_repo(model), model)


def _fetch_repo(repo_id: str) -> Path:
    try:
        return Path(
            huggingface_hub.snapshot_download(repo_id, allow_patterns=REPO_FILES, ignore_patterns=REPO_FILES_LEFT_OUT)
        )
    # the hub, its HTTP and its transfer library each raise kinds of their own, with no common base but this
    except Exception as error:
        first_line = str(error).strip().split("\n")[0]
        raise ConfigError(
            f"--model {repo_id}: there is no such folder, and the repository cannot be fetched "
            f"({type(error).__name__}: {first_line}); {HOW_TO_PASS_A_MODEL}"
        ) from error
