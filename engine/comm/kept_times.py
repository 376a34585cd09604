"""What ways of adding up took at an earlier start on the same machine, so that they need not all be timed again."""

from __future__ import annotations

import hashlib
import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from engine.comm.ways import Trial

logger = logging.getLogger(__name__)

Facts = Mapping[str, Any]  # of the machine and of what is tried: times hold while all of them do


def load_times(folder: Path, facts: Facts) -> list[Trial] | None:
    """Those that were kept under the same facts; None where there are none, or the file is not as it was written."""
    try:
        found = json.loads(_file(folder, facts).read_text(encoding="utf-8"))
        if found["facts"] != json.loads(json.dumps(facts)):
            return None
        return [Trial(**trial) for trial in found["trials"]]
    except (OSError, ValueError, KeyError, TypeError):
        return None


def keep_times(folder: Path, facts: Facts, trials: Sequence[Trial]) -> None:
    """Writes them; a folder that cannot be written is said, and no more."""
    file = _file(folder, facts)
    part = file.with_suffix(".part")
    try:
        folder.mkdir(parents=True, exist_ok=True)
        part.write_text(json.dumps({"facts": facts, "trials": [asdict(trial) for trial in trials]}), encoding="utf-8")
        part.replace(file)
    except OSError as error:
        logger.warning("times of all-reduce are not kept in %s: %s", folder, error.strerror)


def digest_of(files: Sequence[Path]) -> str:
    """Of the text of files."""
    digest = hashlib.sha256()
    for file in sorted(files):
        digest.update(file.name.encode() + b"\0" + file.read_bytes())
    return digest.hexdigest()[:16]


def _file(folder: Path, facts: Facts) -> Path:
    name = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()[:16]
    return folder / f"{name}.json"
