"""Shared memory of MPI whose job is gone: killed while MPI starts, it leaves its files to nobody."""

from __future__ import annotations

import contextlib
import logging
import os
import re
import time
from pathlib import Path

logger = logging.getLogger(__name__)

SHARED_MEMORY, PROC = Path("/dev/shm"), Path("/proc")
MPI_NAMES = "mpich_|sm_segment|vader_segment"  # MPICH's, Open MPI's, that of an older one
OLD_S = 120.0  # ranks that start have seen each other's by then
FIRST_NAMESPACE = "pid:[4026531836]"  # Linux's number of it; its processes see all others


def names_of(maps: str, folder: Path = SHARED_MEMORY) -> set[str]:
    """Files of MPI in the text of /proc/…/maps."""
    return set(re.findall(rf"{re.escape(str(folder))}/(?:{MPI_NAMES})\S+", maps))


def sweep(folder: Path = SHARED_MEMORY, proc: Path = PROC) -> None:
    """Removes such files of this user that are old and that no process has mapped. They have no owner's number in
    them, so nothing is done where there may be processes that this one does not see: in a container."""
    old = time.time() - OLD_S
    found = set()
    for path in folder.glob("*"):
        with contextlib.suppress(OSError):
            status = path.stat()
            if re.match(MPI_NAMES, path.name) and status.st_uid == os.getuid() and status.st_mtime < old:
                found.add(str(path))
    if not found or os.readlink(proc / "self/ns/pid") != FIRST_NAMESPACE:
        return
    for process in proc.glob("[0-9]*"):
        if process.name == "1":  # init, which nobody may look into everywhere, is no rank
            continue
        try:
            found -= names_of((process / "maps").read_text(), folder)
        except PermissionError:
            if process.stat().st_uid == os.getuid():
                return  # it may have mapped any
        except OSError:  # it is over
            pass
    for name in found:
        with contextlib.suppress(OSError):  # another rank was quicker
            os.unlink(name)
            logger.info("removed %s, which a job of MPI has left that is gone", name)
