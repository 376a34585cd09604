"""Run under mpirun by test_mpi_ranks: what engine.comm.mpi_ranks does with MPI's own wire, on every rank."""

from __future__ import annotations

import sys

import numpy as np
from mpi4py import MPI

from conformance.golden_models import llama_config
from engine.comm import mpi_sums
from engine.comm.communicator import ALONE
from engine.comm.mpi_ranks import MpiRanks
from engine.comm.mpi_sums import make_sum
from engine.config import ParallelConfig
from engine.model_config.read import model_config_from_hf
from engine.ops import cpu_ops
from tests.engine.comm.test_mpi_sums import SHAPES, STEP, expected, shards

LARGE = (300, 1000)  # 1.2 MB: sent when the other side is ready


def sums() -> None:
    world = MPI.COMM_WORLD
    for one_shot_bytes in (0, 1 << 30):
        mpi_sums.ONE_SHOT_BYTES = one_shot_bytes
        for wire in ("float32", "bfloat16", "int8", "int8-plain"):
            for shape in (*SHAPES, LARGE):
                arrays = shards(world.size, shape)
                add = make_sum(world, wire)
                for which, wanted in zip(STEP, expected(wire, arrays), strict=True):
                    np.testing.assert_array_equal(add(arrays[world.rank], which), wanted, f"{wire} {shape} {which}")


def stages() -> None:
    """Two ranks a stage; the residuals of several steps are on their way before the first is taken."""
    world = MPI.COMM_WORLD
    parallel = ParallelConfig(world.rank, 2, world.size // 2)
    config = model_config_from_hf(llama_config(hidden_size=1000, vocab_size=63), {}, "here")
    comm = MpiRanks(cpu_ops(), world, parallel, config)
    assert (comm.is_first, comm.is_last) == (world.rank >= world.size - 2, world.rank < 2)
    for step in range(4):
        residual = np.full((300, 1000), step, np.float32) if comm.is_first else comm.receive(300)
        residual = comm.reduce_add(np.full((300, 1000), 1 + parallel.tp_rank, np.float32), residual, ALONE)
        if not comm.is_last:
            comm.send(residual)
            continue
        assert (residual == step + 3 * parallel.pipeline_parallel_size).all()
        part = np.arange(3 * 32, dtype=np.float32).reshape(3, 32) + 1000 * parallel.tp_rank
        logits = comm.gather_logits(part)
        if world.rank:
            assert logits is None
        else:
            assert logits is not None
            assert logits.shape == (3, 63)
            np.testing.assert_array_equal(logits[:, :32], part)
            np.testing.assert_array_equal(logits[:, 32:], part[:, :31] + 1000)
    comm.close()


if __name__ == "__main__":
    try:
        sums()
        stages()
    except BaseException as error:
        sys.stderr.write(f"rank {MPI.COMM_WORLD.rank}: {error!r}\n")
        MPI.COMM_WORLD.Abort(1)
    sys.stdout.write("ok\n")
