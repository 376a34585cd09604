"""A checkpoint that is written tensor by tensor, in any order, and can be taken up again after a kill.

All names, types and shapes are known before the first byte, so each file gets its header and its full size at once: a
disk that is too small is noticed in the first second. Tensors then go to their places. A unit is what is quantized
together; once its bytes are on the disk, a line in the journal says so, and a later run does not make it again. To
wait for the disk takes longer than to quantize a small weight, so that is done every few seconds.

While a file is not complete its name ends in .part. config.json comes last: a folder without it is no model.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import shutil
import time
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import IO, Any, BinaryIO

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.folder import INDEX, SINGLE
from engine.errors import ConfigError
from engine.quantize.encode import Layout
from engine.quantize.files import Unit, cut, headers, num_bytes
from ref.checkpoint import QUANTIZED, STORED

Array = NDArray[Any]

JOURNAL = "quantize.journal"
SYNC_S = 2.0  # between two waits for the disk: as much work is lost by a kill
TYPES = {name: np.dtype(kind) for name, kind in (STORED | QUANTIZED).items()}


class Output:
    """The folder that is being written. Use as a context: it holds a lock on the folder."""

    def __init__(self, folder: Path, units: Sequence[Unit], fingerprint: str, shard_bytes: int) -> None:
        """
        Args:
            fingerprint: of everything that decides what is written; an unfinished folder of another is refused.
            shard_bytes: a file is closed once it has as much.
        """
        self.folder, self._units, self._fingerprint = folder, units, fingerprint
        self._shard_of = cut(units, shard_bytes)
        self._headers, self._places = headers(units, self._shard_of, fingerprint)
        self._done: set[str] = set()
        self._unsaid: list[str] = []  # units that are written, but not in the journal yet
        self._files: dict[int, BinaryIO] = {}
        self._journal: IO[str] | None = None
        self._last_sync = time.monotonic()

    @property
    def is_finished(self) -> bool:
        """Whether the folder holds all of this already. Raises ConfigError where one may not even look."""
        try:
            if not (self.folder / "config.json").exists() or (self.folder / JOURNAL).exists():
                return False
            return all(self._holds(self._path(shard), shard) for shard in range(len(self._headers)))
        except OSError as error:
            raise self.trouble(error) from error

    def __enter__(self) -> Output:
        """
        Raises:
            ConfigError: the folder is something else, another run writes there, or the disk is too small.
        """
        try:
            self._open()
        except BaseException as error:
            self._close()
            if isinstance(error, OSError):
                raise self.trouble(error) from error
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        try:
            with contextlib.suppress(*([] if kind is None else [OSError])):  # the first trouble is told
                self._sync()
        finally:
            self._close()

    def _close(self) -> None:
        with contextlib.suppress(OSError):
            for file in self._files.values():
                file.close()
        if self._journal is not None:
            self._journal.close()

    def trouble(self, error: OSError) -> ConfigError:
        """What to tell the user of a write that failed."""
        wanted = sum(_size(header, self._layouts(shard)) for shard, header in enumerate(self._headers))
        return ConfigError(
            f"--out {self.folder}: cannot be written: {error.strerror or error} ({wanted / 1e6:,.0f} MB are needed in "
            "all). What is there stays; the same command goes on from it"
        )

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        journal = self.folder / JOURNAL
        if not journal.exists() and (found := sorted(path.name for path in self.folder.iterdir())):
            raise ConfigError(
                f"--out {self.folder}: holds {found[0]}, and is nothing that this command with these settings has "
                "begun; give an empty folder, or a new name"
            )
        self._journal = open(journal, "a+", encoding="utf-8", errors="surrogateescape")  # noqa: SIM115 (by __exit__)
        try:
            fcntl.flock(self._journal, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise ConfigError(f"--out {self.folder}: another run is writing there") from error
        self._journal.seek(0)
        text = self._journal.read()
        lines = text.split("\n")
        is_ours = lines[0] == self._fingerprint if len(lines) > 1 else self._fingerprint.startswith(text)
        if not is_ours:
            raise ConfigError(
                f"--out {self.folder}: holds an unfinished run with other settings, another model or another text; "
                "repeat that, remove the folder, or give a new name"
            )
        if len(lines) > 1:
            self._done = set(lines[1:-1])
            cut = "".join(f"{line}\n" for line in lines[:-1])  # without a line that was cut short
            self._journal.truncate(len(cut.encode(errors="surrogateescape")))
        self._make_files()
        if len(lines) == 1:
            self._journal.truncate(0)
            self._note(f"{self._fingerprint}\n")

    def _make_files(self) -> None:
        for shard, header in enumerate(self._headers):
            size = _size(header, self._layouts(shard))
            self._close_if_complete(shard)  # a kill may have come between the last line and this
            if self._holds(self._path(shard), shard) or self._holds(self._part(shard), shard):
                continue
            if any(unit.name in self._done for unit in self._units if self._shard_of[unit.name] == shard):
                raise ConfigError(
                    f"--out {self.folder}: {self._path(shard).name} is gone or has been changed since the run that is "
                    "to go on; remove the folder, or give a new name"
                )
            if size > (free := shutil.disk_usage(self.folder).free):
                raise ConfigError(
                    f"--out {self.folder}: {self._path(shard).name} takes {size / 1e6:,.0f} MB, and {free / 1e6:,.0f} "
                    "MB are free; make room and repeat the command"
                )
            with open(self._part(shard), "wb") as file:
                os.posix_fallocate(file.fileno(), 0, size)
                file.write(header)

    def is_done(self, unit: str) -> bool:
        return unit in self._done

    def write(self, name: str, pieces: Iterable[Array]) -> None:
        """A tensor, in pieces that follow each other, of its stored type or of its bytes."""
        place = self._places[name]
        if place.shard not in self._files:
            self._files[place.shard] = open(self._part(place.shard), "r+b")  # noqa: SIM115 (closed by __exit__)
        file = self._files[place.shard]
        file.seek(place.offset)
        for piece in pieces:
            file.write(np.ascontiguousarray(piece).data.cast("B") if piece.size else b"")
        written = file.tell() - place.offset
        assert written == num_bytes(place.layout), f"{name}: {written} bytes, planned are {place.layout}"

    def commit(self, unit: str) -> None:
        """All tensors of a unit are written."""
        self._unsaid.append(unit)
        self._done.add(unit)
        if time.monotonic() - self._last_sync > SYNC_S:
            self._sync()

    def _sync(self) -> None:
        """Waits until what is written is on the disk, and says so in the journal; files that are whole get names."""
        for file in self._files.values():
            file.flush()
            os.fdatasync(file.fileno())
        self._note("".join(f"{unit}\n" for unit in self._unsaid))
        for shard in {self._shard_of[unit] for unit in self._unsaid}:
            self._close_if_complete(shard)
        self._unsaid.clear()
        self._last_sync = time.monotonic()

    def _close_if_complete(self, shard: int) -> None:
        """Gives a file its name once all that belongs into it is there."""
        is_complete = all(unit.name in self._done for unit in self._units if self._shard_of[unit.name] == shard)
        if is_complete and self._part(shard).exists():
            if shard in self._files:
                self._files.pop(shard).close()
            os.replace(self._part(shard), self._path(shard))

    def read(self, name: str) -> Array:
        """A tensor that has been written, as ref.checkpoint reads it from a file."""
        place = self._places[name]
        if place.shard in self._files:
            self._files[place.shard].flush()
        path = self._path(place.shard)
        with open(path if path.exists() else self._part(place.shard), "rb") as file:
            file.seek(place.offset)
            raw = file.read(num_bytes(place.layout))
        return np.frombuffer(raw, TYPES[place.layout.dtype]).reshape(place.layout.shape)

    def finish(self, files: Iterable[tuple[str, bytes]], config: Mapping[str, Any]) -> None:
        """What belongs beside the weights, config.json last."""
        self._sync()
        for name, content in files:
            self._put(name, content)
        if len(self._headers) > 1:
            self._put(INDEX, _json({"metadata": {"total_size": self._total()}, "weight_map": self._weight_map()}))
        self._put("config.json", _json(config))
        (self.folder / JOURNAL).unlink()  # the lock is on what is open, and ends with it

    def _put(self, name: str, content: bytes) -> None:
        part = self.folder / f"{name}.part"
        with open(part, "wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, self.folder / name)

    def _note(self, lines: str) -> None:
        assert self._journal is not None, "the folder is open"
        self._journal.write(lines)
        self._journal.flush()
        os.fsync(self._journal.fileno())

    def _path(self, shard: int) -> Path:
        count = len(self._headers)
        return self.folder / (SINGLE if count == 1 else f"model-{shard + 1:05d}-of-{count:05d}.safetensors")

    def _part(self, shard: int) -> Path:
        return self._path(shard).with_suffix(".safetensors.part")

    def _holds(self, path: Path, shard: int) -> bool:
        """Whether there is a file with this header, and as large."""
        header = self._headers[shard]
        if not path.exists() or path.stat().st_size != _size(header, self._layouts(shard)):
            return False
        with open(path, "rb") as file:
            return file.read(len(header)) == header

    def _layouts(self, shard: int) -> list[Layout]:
        return [place.layout for place in self._places.values() if place.shard == shard]

    def _total(self) -> int:
        return sum(num_bytes(place.layout) for place in self._places.values())

    def _weight_map(self) -> dict[str, str]:
        return {name: self._path(place.shard).name for name, place in sorted(self._places.items())}


def _size(header: bytes, layouts: Sequence[Layout]) -> int:
    return len(header) + sum(map(num_bytes, layouts))


def _json(content: Mapping[str, Any]) -> bytes:
    return (json.dumps(content, indent=2, ensure_ascii=False) + "\n").encode()
