"""Which cores and memory of a host are near a GPU, on hosts that are of several parts (NUMA nodes)."""

from __future__ import annotations

import os
from pathlib import Path

SYSFS, TASKS = Path("/sys"), Path("/proc/self/task")


def bind_near(pci_bus_id: str, sysfs: Path = SYSFS) -> str:
    """From now on this process runs on those of its cores that are near a PCI device, where there is a choice; memory
    that it is the first to write to is near them too.

    Returns:
        What was done, in words; "" where there is nothing to choose, or nothing is known.
    """
    if len(_numbers(sysfs / "devices/system/node/online")) < 2:
        return ""
    node = _node_of(pci_bus_id, sysfs)
    allowed = os.sched_getaffinity(0)
    near = _numbers(sysfs / f"devices/system/node/node{node}/cpulist")
    if not near or allowed <= near:
        return ""
    if not near & allowed:
        return f"the GPU is on NUMA node {node}, of which this process may use no core"
    for task in TASKS.iterdir():
        os.sched_setaffinity(int(task.name), near & allowed)
    return f"bound to {len(near & allowed)} of {len(allowed)} cores: those of NUMA node {node}, as its GPU"


def _node_of(pci_bus_id: str, sysfs: Path) -> int:
    """−1 where the system does not say."""
    try:
        return int((sysfs / "bus/pci/devices" / pci_bus_id.lower() / "numa_node").read_text())
    except (OSError, ValueError):
        return -1


def _numbers(path: Path) -> set[int]:
    """Of a list such as "0-3,8"; none where there is no such file."""
    found: set[int] = set()
    try:
        for part in path.read_text().strip().split(","):
            first, _, last = part.partition("-")
            found.update(range(int(first), int(last or first) + 1))
    except (OSError, ValueError):
        return set()
    return found
