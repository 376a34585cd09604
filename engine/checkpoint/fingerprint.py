"""What tells two checkpoints apart without reading them: small files whole, of large ones their size and pieces."""

from __future__ import annotations

import hashlib
from pathlib import Path

from engine.checkpoint.source import ModelSource

SUFFIXES = (".json", ".safetensors", ".gguf")
PIECE, NUM_PIECES = 1 << 16, 8


def fingerprint(source: ModelSource) -> str:
    """Equal for equal files, wherever they lie; a change of some weights in the middle of a file may escape it."""
    files = [source.path] if source.kind == "gguf" else sorted(source.path.iterdir())
    digest = hashlib.sha256()
    for path in files:
        if path.suffix in SUFFIXES and path.is_file():
            digest.update(f"{path.name if source.kind == 'folder' else ''} {path.stat().st_size} ".encode())
            _add_pieces(digest, path)
    return digest.hexdigest()


def _add_pieces(digest: hashlib._Hash, path: Path) -> None:
    size = path.stat().st_size
    with path.open("rb") as file:
        for number in range(NUM_PIECES):  # the first begins at the start, the last ends at the end
            file.seek(max(0, size - PIECE) * number // (NUM_PIECES - 1))
            digest.update(file.read(PIECE))
