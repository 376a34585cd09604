"""Shared memory that dead jobs of MPI have left, with folders in place of /dev/shm and /proc."""

from __future__ import annotations

import os
import time
from pathlib import Path

import pytest

from engine.comm.leftovers import FIRST_NAMESPACE, OLD_S, names_of, sweep


class Machine:
    def __init__(self, folder: Path, namespace: str = FIRST_NAMESPACE) -> None:
        self.shared, self.proc = folder / "shm", folder / "proc"
        self.shared.mkdir()
        (self.proc / "self/ns").mkdir(parents=True)
        (self.proc / "self/ns/pid").symlink_to(namespace)

    def file(self, name: str, age_s: float = 2 * OLD_S) -> str:
        path = self.shared / name
        path.write_bytes(b"0")
        then = time.time() - age_s
        os.utime(path, (then, then))
        return str(path)

    def process(self, pid: int, *names: str) -> Path:
        (self.proc / str(pid)).mkdir()
        maps = self.proc / str(pid) / "maps"
        lines = [f"7f00-7f80 rw-s 00000000 00:19 47 {name}\n" for name in ("/usr/lib/libmpi.so.12", *names)]
        maps.write_text("".join(lines))
        return maps

    def sweep(self) -> set[str]:
        """What is there afterwards."""
        sweep(self.shared, self.proc)
        return set(os.listdir(self.shared))


def test_what_nobody_has_mapped_goes(tmp_path: Path) -> None:
    machine = Machine(tmp_path)
    machine.file("mpich_shm_1_0")
    machine.process(7, machine.file("mpich_shm_2_0"))
    machine.process(8, machine.file("sm_segment.host.0.1"))
    machine.file("mpich_shm_3_0", age_s=OLD_S / 2)  # a job that starts just now
    machine.file("glint-data")
    (machine.proc / "9").mkdir()  # it has ended meanwhile
    machine.process(1, machine.file("mpich_shm_4_0"))
    assert machine.sweep() == {"mpich_shm_2_0", "sm_segment.host.0.1", "mpich_shm_3_0", "glint-data"}


def test_in_a_container_nothing_goes(tmp_path: Path) -> None:
    machine = Machine(tmp_path, "pid:[4026532000]")
    machine.file("mpich_shm_1_0")
    assert machine.sweep() == {"mpich_shm_1_0"}


def test_of_another_user_nothing_goes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path)
    machine.file("mpich_shm_1_0")
    user = os.getuid() + 1
    monkeypatch.setattr(os, "getuid", lambda: user)
    assert machine.sweep() == {"mpich_shm_1_0"}


def test_a_process_that_hides_what_it_has_mapped_keeps_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    machine = Machine(tmp_path)
    machine.file("mpich_shm_1_0")
    hidden, read_text = machine.process(7), Path.read_text

    def read(path: Path) -> str:
        if path == hidden:
            raise PermissionError
        return read_text(path)

    monkeypatch.setattr(Path, "read_text", read)
    assert machine.sweep() == {"mpich_shm_1_0"}


def test_names_are_those_of_mpi() -> None:
    maps = "1-2 rw-s 0 0:1 7 /dev/shm/mpich_shm_a_0\n1-2 rw-s 0 0:1 7 /dev/shm/other\n1-2 r--p 0 0:1 7 /lib/x\n"
    assert names_of(maps) == {"/dev/shm/mpich_shm_a_0"}
