"""MPI's launcher: to start it, which processes it consists of, and how to keep it from being too quick.

MPICH's launcher kills all ranks as soon as the connections of one are closed, some milliseconds after its death: before
anybody could say which rank it was. So ranks hold each other's connections: it notices when they end all themselves.
"""

from __future__ import annotations

import importlib.util
import logging
import os
import secrets
import shutil
import socket
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from engine.errors import ConfigError

logger = logging.getLogger(__name__)

RELAUNCHED = "GLINT_LAUNCHER"  # set for ranks that were not started by the user's own mpirun
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


def relaunch(num_ranks: int, arguments: Sequence[str]) -> NoReturn:
    """This process becomes MPI's launcher of so many ranks of the same Python with these arguments.

    Raises:
        ConfigError: there is no launcher, or no mpi4py; or a launcher has started this process, but does not say so.
    """
    if os.environ.get(RELAUNCHED):
        raise ConfigError(f"{os.environ[RELAUNCHED]} does not say how many ranks it has started; use another MPI")
    if importlib.util.find_spec("mpi4py") is None:
        raise ConfigError(f"{num_ranks} ranks need mpi4py and MPI; pip install 'glint-llm[mpi]' brings both")
    command = _find_launcher()
    if command is None:
        raise ConfigError(
            f"{num_ranks} ranks need MPI's launcher, and there is no mpiexec; pip install 'glint-llm[mpi]' brings one"
        )
    environ = {**os.environ, RELAUNCHED: command}
    flags: list[str] = []
    if "open" in _version(command):  # Open MPI, whose mpirun minds root, and more ranks than cores
        flags = ["--bind-to", "none", "--map-by", ":OVERSUBSCRIBE"]
        environ |= {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    logger.info("%s starts %d ranks", command, num_ranks)
    os.execve(command, [command, *flags, "-n", str(num_ranks), sys.executable, *arguments], environ)


def _find_launcher() -> str | None:
    """That of the MPI beside this Python, which the wheel brings, before any other."""
    beside = str(Path(sys.executable).parent)
    return shutil.which("mpiexec", path=beside) or shutil.which("mpiexec") or shutil.which("mpirun")


def _version(command: str) -> str:
    """What a launcher says of itself, in lower case."""
    run = subprocess.run([command, "--version"], capture_output=True, text=True, check=False)
    return (run.stdout + run.stderr).lower()
