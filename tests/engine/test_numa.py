"""Binding to the cores near a GPU, with a folder in place of /sys."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine import numa
from engine.numa import bind_near

GPU = "0000:AB:00.0"


class Cores:
    """In place of the system's affinity: what this process may run on, and what its threads were bound to."""

    def __init__(self, allowed: set[int]) -> None:
        self.allowed = allowed
        self.bound: dict[int, set[int]] = {}

    def bind(self, task: int, cores: set[int]) -> None:
        self.bound[task] = cores


@pytest.fixture
def cores(monkeypatch: pytest.MonkeyPatch) -> Cores:
    found = Cores(set(range(16)))
    monkeypatch.setattr(numa.os, "sched_getaffinity", lambda task: found.allowed)
    monkeypatch.setattr(numa.os, "sched_setaffinity", found.bind)
    return found


def sysfs(folder: Path, *nodes: str, of_gpu: str | None = "1") -> Path:
    """nodes: the list of cores of each."""
    (folder / "devices/system/node").mkdir(parents=True)
    (folder / "devices/system/node/online").write_text(f"0-{len(nodes) - 1}\n" if len(nodes) > 1 else "0\n")
    for number, cores in enumerate(nodes):
        (folder / f"devices/system/node/node{number}").mkdir()
        (folder / f"devices/system/node/node{number}/cpulist").write_text(cores + "\n")
    device = folder / "bus/pci/devices" / GPU.lower()
    device.mkdir(parents=True)
    if of_gpu is not None:
        (device / "numa_node").write_text(of_gpu + "\n")
    return folder


def test_a_rank_is_bound_to_the_node_of_its_gpu(tmp_path: Path, cores: Cores) -> None:
    """All threads that it has already, too."""
    said = bind_near(GPU, sysfs(tmp_path, "0-3,8-11", "4-7,12-15"))
    assert said == "bound to 8 of 16 cores: those of NUMA node 1, as its GPU"
    assert cores.bound.keys() == {int(task.name) for task in Path("/proc/self/task").iterdir()}
    assert os.getpid() in cores.bound
    assert cores.bound[os.getpid()] == {4, 5, 6, 7, 12, 13, 14, 15}


def test_a_rank_gets_no_core_that_it_did_not_have(tmp_path: Path, cores: Cores) -> None:
    cores.allowed = {0, 1, 6}
    assert "bound to 1 of 3 cores" in bind_near(GPU, sysfs(tmp_path, "0-3", "4-7"))
    assert cores.bound[os.getpid()] == {6}


def test_a_rank_that_the_user_has_bound_elsewhere_stays_there(tmp_path: Path, cores: Cores) -> None:
    cores.allowed = {0, 1}
    assert bind_near(GPU, sysfs(tmp_path, "0-3", "4-7")) == (
        "the GPU is on NUMA node 1, of which this process may use no core"
    )
    assert not cores.bound


@pytest.mark.parametrize(
    ("nodes", "of_gpu"),
    [
        (("0-15",), "0"),  # one node
        (("0-15",), "-1"),
        (("0-3", "4-7"), "-1"),  # a virtual machine that does not say
        (("0-3", "4-7"), None),
        (("0-3", "4-7"), "x"),
        (("0-3", "0-15"), "1"),  # all that it has is near already
        (("0-3", ""), "1"),  # memory alone
    ],
)
def test_where_there_is_nothing_to_choose_nothing_is_said(
    tmp_path: Path, cores: Cores, nodes: tuple[str, ...], of_gpu: str | None
) -> None:
    assert bind_near(GPU, sysfs(tmp_path, *nodes, of_gpu=of_gpu)) == ""
    assert not cores.bound


def test_a_system_without_such_a_folder_is_left_alone(tmp_path: Path, cores: Cores) -> None:
    assert bind_near(GPU, tmp_path) == ""
    assert not cores.bound
