"""What a source of the user's own includes from its own folder: compilers find it there, and a cache must know it."""

from __future__ import annotations

import re
from pathlib import Path

INCLUDE = re.compile(r'^[ \t]*#[ \t]*include[ \t]*"([^"\n]+)"', re.MULTILINE)


def own_headers(folder: Path, source: str) -> tuple[str, ...]:
    """The text of each header below or beside the folder of a source that it includes, by itself or through others."""
    found: dict[Path, str] = {}
    pending = [(folder, source)]
    while pending:
        place, text = pending.pop()
        for name in INCLUDE.findall(text):
            file = next((file for file in (place / name, folder / name) if file.is_file()), None)
            if file is not None and file not in found:
                found[file] = file.read_text(encoding="utf-8", errors="replace")
                pending.append((file.parent, found[file]))
    return tuple(found.values())
