"""Arguments that several commands have in common: the folder of a checkpoint, token ids.

Source: the layout of model folders of Hugging Face, config.json beside *.safetensors.
"""

from __future__ import annotations

from pathlib import Path


def check_checkpoint(option: str, folder: Path, config: Path | None = None) -> None:
    """Refuses what cannot be a checkpoint, before it is opened.

    Args:
        option: what the message calls it, such as "--model".
        folder: of the config.json and the weights.
        config: a config.json that is read instead of the folder's own.

    Raises:
        ValueError: no folder, or one without config.json.
    """
    wanted = f"{option} must be a folder with config.json and *.safetensors"
    if not folder.is_dir():
        raise ValueError(f"{wanted}; {folder} is none")
    if config is None and not (folder / "config.json").exists():
        raise ValueError(f"{wanted}; {folder} has no config.json")


def parse_ids(text: str, vocab_size: int) -> list[int]:
    """Token ids as they are written, "1,2,3".

    Raises:
        ValueError: no such list, or an id outside the vocabulary.
    """
    try:
        token_ids = [int(piece) for piece in text.split(",")]
    except ValueError:
        raise ValueError(f"--ids must be integers separated by commas, such as 1,2,3; found {text!r}") from None
    for token_id in token_ids:
        if not 0 <= token_id < vocab_size:
            raise ValueError(f"--ids has {token_id}; ids of this model are 0 to {vocab_size - 1}")
    return token_ids
