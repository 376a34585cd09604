"""MPI's launcher: which processes it consists of, and how to keep it from being quicker than who names a dead rank.

MPICH's launcher kills all ranks as soon as the connections of one are closed, some milliseconds after its death: before
anybody could say which rank it was. So ranks hold each other's connections: it notices when they end all themselves.
"""

from __future__ import annotations

import os
import secrets
import socket
from collections.abc import Callable, Mapping
from pathlib import Path

NAMES = ("mpiexec", "mpirun", "mpiexec.hydra", "hydra_pmi_proxy", "prterun", "prted", "orted", "srun")
TIMEOUT_S = 30.0


def launchers() -> list[tuple[int, str]]:
    """(pid, name) of the parent, and of its parents as far as they belong to MPI's launcher."""
    found: list[tuple[int, str]] = []
    pid = os.getppid()
    while pid > 1:
        text = Path(f"/proc/{pid}/stat").read_text()
        name, fields = text.partition("(")[2].rpartition(")")[0], text.rpartition(")")[2].split()
        if found and name not in NAMES:
            break
        found.append((pid, name))
        pid = int(fields[1])
    return found


def hold_connections(
    environ: Mapping[str, str], host_rank: int, host_size: int, exchange: Callable[[str], list[str]]
) -> None:
    """The first rank of a host holds what connects the others to the launcher, and each of them holds the first's.

    Args:
        exchange: gives what every rank of this host brings, in order.
    """
    mine = [1, 2, *(int(environ[name]) for name in ("PMI_FD",) if environ.get(name, "").isdigit())]
    if len(mine) < 3 or host_size == 1:  # another launcher
        exchange("")
        return
    if host_rank > 0:
        address = exchange("")[0]
        with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
            sock.settimeout(TIMEOUT_S)
            sock.connect("\0" + address)
            socket.send_fds(sock, [b"."], mine)
            socket.recv_fds(sock, 1, len(mine))
        return
    address = f"glint-{os.getpid()}-{secrets.token_hex(16)}"
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as listener:
        listener.bind("\0" + address)  # a name in no folder
        listener.listen(host_size)
        listener.settimeout(TIMEOUT_S)
        exchange(address)
        for _ in range(host_size - 1):
            sock, _ = listener.accept()
            with sock:
                socket.recv_fds(sock, 1, len(mine))
                socket.send_fds(sock, [b"."], mine)
