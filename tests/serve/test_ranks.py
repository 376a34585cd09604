"""Ranks under mpirun, on a CPU: start, stop, death and hangs (DST-01, DST-02, DST-03, DST-04, DST-10 end to end)."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import httpx
import numpy as np
import psutil
import pytest

from tests.serve.servers import MPIRUN, ROOT, Server, running, start, text_model, until
from tests.serve.test_lifecycle import Stream, is_gone

NAMED_S = 0.3  # from a death to its name
GONE_S = 5.0  # from a death, or the naming of a hang, to the end of all
HANG_S = 2.0
SLOW = 4.0  # how much longer than that is granted to a machine that is busy with other tests


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return text_model(tmp_path_factory.mktemp("model"), max_position_embeddings=16384)


@pytest.fixture(autouse=True)
def _nothing_stays() -> Iterator[None]:
    """Neither a process nor shared memory of this test."""
    before = set(os.listdir("/dev/shm"))
    mine = psutil.Process()
    older = set(mine.children(recursive=True))  # of other tests: multiprocessing keeps a process that tracks resources

    def is_over() -> bool:
        return all(is_gone(child) for child in set(mine.children(recursive=True)) - older)

    yield
    assert until(is_over, GONE_S * SLOW)
    left = {name for name in set(os.listdir("/dev/shm")) - before if re.match("mpich|ucx|sm_segment|glint", name)}
    assert not {name for name in left if not is_mapped(name)}


def is_mapped(name: str) -> bool:
    """Whether a process has this shared memory: then it is of another job."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            if name in maps.read_text():
                return True
    return False


def family(server: Server) -> list[psutil.Process]:
    """Everything that a server consists of."""
    return [psutil.Process(server.process.pid), *psutil.Process(server.process.pid).children(recursive=True)]


def ends(server: Server, processes: list[psutil.Process]) -> None:
    """All is over in time, with an error."""
    assert server.wait(GONE_S * SLOW) != 0
    assert until(lambda: all(map(is_gone, processes)), GONE_S)


VICTIMS: dict[str, Callable[[Server], psutil.Process]] = {
    "rank 0": lambda server: server.ranks[0],
    "rank 1": lambda server: server.ranks[1],
    "launcher": lambda server: psutil.Process(server.process.pid),
}


@pytest.mark.parametrize(
    ("victim", "number"),
    [
        *((victim, signal.SIGKILL) for victim in VICTIMS),
        *((victim, signal.SIGSTOP) for victim in ("rank 0", "rank 1")),  # without the launcher ranks can go on
    ],
)
def test_dst_01_a_rank_or_the_launcher_goes(model: Path, victim: str, number: signal.Signals) -> None:
    """Killed or stopped under load: named, clients told, everything ends."""
    with running(model, num_ranks=2) as server:
        streams = [Stream(server.url, 16000) for _ in range(2)]
        assert until(lambda: server.metrics()["num_requests_running"] == 2)
        processes, process = family(server), VICTIMS[victim](server)
        process.send_signal(number)
        if victim == "rank 1":
            assert until(lambda: bool(server.errors), (NAMED_S if number is signal.SIGKILL else HANG_S) * SLOW)
            with pytest.raises(httpx.HTTPError):
                httpx.get(f"{server.url}/health").raise_for_status()
        ends(server, processes)
        for stream in streams:
            stream.join(10)
            assert stream.error is None
            assert '"error"' in stream.events[-2]
            assert victim != "rank 1" or victim in stream.events[-2]  # else rank 0 may have been killed before it spoke
    if victim != "launcher":
        (named,) = server.errors
        how = "killed by SIGKILL" if number is signal.SIGKILL else "has been stopped for"
        assert f"{victim} (pid {process.pid})" in named
        assert how in named or "is gone" in named
        assert "step" in named


def test_dst_01_an_idle_rank_goes(model: Path) -> None:
    with running(model, num_ranks=2) as server:
        processes, process = family(server), server.ranks[1]
        process.kill()
        ends(server, processes)
    (named,) = server.errors
    assert f"rank 1 (pid {process.pid}) was killed by SIGKILL" in named or "is gone" in named


def faulty(model: Path, fault: str, rank: str = "1") -> Server:
    return start(model, num_ranks=2, module=("tests.serve.faulty_rank", fault, rank))


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("find", "PlantedError: while looking"),
        ("load", "PlantedError: while loading"),
        ("memory", "MemoryError: no room for the KV cache"),
    ],
)
def test_dst_02_an_exception_in_one_rank_before_it_serves(model: Path, fault: str, says: str) -> None:
    """Its traceback is in the log with its rank; rank 0 names it; all end."""
    server = faulty(model, fault)
    assert server.wait(30) != 0
    log = "".join(server.lines)
    assert not server.url
    assert "rank 1 ERROR" in log
    assert "Traceback" in log
    assert f"has failed, before the first step: {says}" in log


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("step", "PlantedError: in a step"),
        ("exit", "it called sys.exit(3)"),
        ("thread", "PlantedError in thread helper: in a thread"),
        ("death", "ended with exit code 3"),
    ],
)
def test_dst_02_one_rank_fails_in_a_step(model: Path, fault: str, says: str) -> None:
    """Also in a helper thread, and where it only ends its process."""
    server = faulty(model, fault).wait_until_ready()
    processes = family(server)
    stream = Stream(server.url, 16000)
    ends(server, processes)
    stream.join(10)
    assert '"error"' in stream.events[-2]
    log = "".join(server.lines)
    assert says in log or (fault == "death" and "is gone" in log)
    assert ("Traceback" in log) == (fault != "death")
    assert "in step " in log or (fault == "thread" and "idle after step " in log)  # which the thread may outlast


def test_a_hang_is_named_with_its_step_and_collective(model: Path) -> None:
    server = faulty(model, "hang").wait_until_ready()
    processes, pid = family(server), server.ranks[1].pid
    stream = Stream(server.url, 16000)
    ends(server, processes)
    stream.join(10)
    (named,) = server.errors
    assert f"rank 1 (pid {pid}) hangs in step 5, collective 0: rank 0 has waited for" in named
    assert "in step 5, collective 1 " in named


def test_dst_03_what_one_rank_says_of_its_checkpoint_is_said_once(model: Path) -> None:
    server = faulty(model, "checkpoint")
    assert server.wait(30) != 0
    assert sum("model.safetensors is damaged" in line for line in server.lines) == 1
    assert "Traceback" not in "".join(server.lines)


@pytest.mark.parametrize(
    ("fault", "says"),
    [
        ("flags", "rank 1: --block-size is 8, and 16 on rank 0: start all ranks with the same flags"),
        ("model=other", "is another model than that of rank 0"),
        ("model=none.gguf", "there is no such file or folder"),
        ("versions", "rank 1: it runs Python 2.7, and rank 0 Python 3."),
    ],
)
def test_dst_03_what_differs_between_ranks_is_refused(model: Path, tmp_path: Path, fault: str, says: str) -> None:
    if fault == "model=other":
        text_model(tmp_path / "other", max_position_embeddings=16384, seed=5)
    if fault.startswith("model="):
        fault = f"model={tmp_path / fault.removeprefix('model=')}"
    server = faulty(model, fault)
    assert server.wait(15) == 1
    log = "".join(server.lines)
    assert log.count(says) == 1
    assert "rank 1: " in log
    assert "loaded" not in log
    assert "Traceback" not in log


def test_shared_memory_that_is_too_small_is_said_once(model: Path) -> None:
    server = faulty(model, "no memory", "all")
    assert server.wait(15) == 1
    assert sum("docker run --shm-size=1g" in line for line in server.lines) == 1


def test_without_mpirun_it_starts_its_ranks_itself(model: Path) -> None:
    with running(model, "-tp", "2") as server:
        assert len(server.ranks) == 2
        assert "tensor parallel 2, pipeline parallel 1: as asked for" in "".join(server.lines)
        assert server.stop() == 0


def test_dst_04_all_that_hinders_ranks_is_said_once_before_weights_are_read(model: Path) -> None:
    """The port is taken, and the model cannot be cut so."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = str(taken.getsockname()[1])
        server = start(model, "--port", port, "-tp", "2", "-pp", "3", num_ranks=2)
        assert server.wait(15) == 1
    log = "".join(server.lines)
    assert log.count(f"port {port}") == 1
    assert log.count("--tensor-parallel-size 2 × --pipeline-parallel-size 3") == 1
    assert "mpirun -n 6" in log
    assert "loaded" not in log
    assert "Traceback" not in log


def test_a_wrong_flag_is_said_once(model: Path) -> None:
    server = start(model, "--prot", "1", num_ranks=2)
    assert server.wait(15) == 1
    assert sum("did you mean --port" in line for line in server.lines) == 1


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (("--allreduce", "nccl"), "--allreduce nccl: is for GPUs"),
        (("--swap-space-gb", "0.1"), "a model on several ranks computes preempted requests again"),
    ],
)
def test_flags_that_are_not_for_these_ranks_are_refused_before_weights_are_read(
    model: Path, flags: tuple[str, ...], says: str
) -> None:
    server = start(model, *flags, num_ranks=2)
    assert server.wait(30) == 1
    (line,) = server.errors
    assert says in line
    assert "memory:" not in "".join(server.lines)


def test_dst_10_a_rank_that_never_comes(model: Path) -> None:
    """The others wait for a while, not for ever; the limit of this test is 5 s. MPICH's memory has a name so long."""
    before = set(Path("/dev/shm").glob("mpich_*"))
    server = faulty(model, "late")
    assert until(lambda: len(family(server)) == 4, 10)
    processes = family(server)
    assert until(lambda: "Timeout" in "".join(server.lines), 20)
    with contextlib.suppress(psutil.NoSuchProcess):  # the launcher may have been quicker
        processes[-1].kill()  # the one that sleeps
    assert server.wait(10) != 0
    assert "all of its 2 ranks must come within 5 s" in "".join(server.lines)
    for path in set(Path("/dev/shm").glob("mpich_*")) - before:
        path.unlink()


def test_dst_10_a_rank_that_hangs_while_ranks_join(model: Path) -> None:
    """Nobody waits for ever, and the log says where each waits."""
    server = faulty(model, "join")
    assert server.wait(30) != 0
    log = "".join(server.lines)
    assert "joining the ranks took longer than 5 s" in log
    assert "in make_comm" in log


def test_mpi_that_is_missing_is_said_once(model: Path) -> None:
    server = faulty(model, "no mpi", "all")
    assert server.wait(15) == 1
    assert sum("pip install 'glint-llm[mpi]'" in line for line in server.lines) == 1


def test_sigterm_drains_on_rank_0_and_ends_all(model: Path) -> None:
    with running(model, "--shutdown-grace-s", "1", num_ranks=2) as server:
        processes = family(server)
        stream = Stream(server.url, 16000)
        assert until(lambda: server.metrics()["num_requests_running"] == 1)
        server.process.send_signal(signal.SIGTERM)
        assert server.wait(20) == 0
        stream.join(10)
        assert "shutting down" in stream.events[-2]
        assert until(lambda: all(map(is_gone, processes)), GONE_S)
    assert not server.errors


def test_the_answers_of_ranks_are_those_of_one(model: Path) -> None:
    """Two that share layers, and two stages, which the log names."""
    body = {"prompt": "Hello there", "max_tokens": 20, "temperature": 0, "ignore_eos": True}
    texts = []
    for flags, num_ranks in (((), 0), ((), 2), (("-pp", "2"), 2)):
        with running(model, *flags, num_ranks=num_ranks) as server:
            texts.append(httpx.post(f"{server.url}/v1/completions", json=body, timeout=60).json()["choices"][0]["text"])
            log = "".join(server.lines)
    assert texts[0] == texts[1] == texts[2]
    assert "2 ranks: tensor parallel 1, pipeline parallel 2" in log


def test_the_bench_of_ranks_prints_its_figures() -> None:
    command = [MPIRUN, "-n", "2", sys.executable, "-m", "engine.bench", "ranks", "--plans", "5", "--idle-s", "1"]
    run = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert run.returncode == 0, run.stderr
    assert len(run.stdout.splitlines()) == 4
    assert "idle: 1 ranks use" in run.stdout


def test_dst_07_ranks_agree_bit_for_bit_under_random_traffic(model: Path) -> None:
    """Sampling, aborts, preemption, prompt logprobs; each process has hash seeds of its own."""
    flags = (
        "--check-ranks",
        "--num-gpu-blocks-override",
        "40",
        "--max-num-batched-tokens",
        "64",
        "--max-model-len",
        "300",
    )
    random = np.random.default_rng(7)
    with running(model, *flags, num_ranks=2) as server:
        url = f"{server.url}/v1/completions"
        leaving = [Stream(server.url, 250) for _ in range(3)]  # more than the pool holds together
        for number in range(12):
            prompt = random.integers(3, 300, int(random.integers(1, 90))).tolist()
            body = {"prompt": prompt, "max_tokens": int(random.integers(1, 12)), "temperature": 1.5, "seed": number}
            reply = httpx.post(url, json=body | ({"logprobs": 2, "echo": True} if number % 3 == 0 else {}), timeout=60)
            assert reply.status_code == 200
            with contextlib.suppress(httpx.ReadTimeout):  # aborted
                httpx.post(url, json={**body, "max_tokens": 200, "ignore_eos": True}, timeout=0.3)
        for stream in leaving:
            stream.join(60)
        assert not server.errors
        assert server.stop() == 0


def test_dst_07_ranks_that_disagree_are_found(model: Path) -> None:
    server = start(model, "--check-ranks", num_ranks=2, module=("tests.serve.faulty_rank", "disagree", "1"))
    server.wait_until_ready()
    processes = family(server)
    stream = Stream(server.url, 16000)
    ends(server, processes)
    stream.join(10)
    assert "ranks 0 and 1 have computed different numbers in step 5" in "".join(server.lines)


OFFLINE = """
import sys
from engine.llm import LLM, SamplingParams
print("begins")
llm = LLM(model=sys.argv[1], device="cpu", num_threads=1)
print(llm.generate([[5, 6, 7]], SamplingParams(temperature=0, max_tokens=8, ignore_eos=True))[0].token_ids)
if sys.argv[2:] == ["again"]:
    LLM(model=sys.argv[1])
if sys.argv[2:]:
    raise ValueError("of the script")
"""


def test_a_script_runs_to_its_end_on_rank_0_alone(model: Path) -> None:
    """LLM() returns there; the other ranks follow in it, and end with rank 0."""
    command = [sys.executable, "-c", OFFLINE, str(model)]
    alone = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    ranks = subprocess.run([MPIRUN, "-n", "2", *command], capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert alone.returncode == ranks.returncode == 0, ranks.stderr
    assert sorted(ranks.stdout.splitlines()) == sorted(["begins", *alone.stdout.splitlines()])
    failing = [MPIRUN, "-n", "2", *command, "fail"]
    ended = subprocess.run(failing, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert ended.returncode != 0
    assert "ValueError: of the script" in ended.stderr
    again = [MPIRUN, "-n", "2", *command, "again"]
    ended = subprocess.run(again, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert ended.returncode != 0
    assert "the other ranks follow the engine that there is already" in ended.stderr
