"""Run under mpirun by test_rank_engines: ranks that pretend to be GPUs of two kinds, with other memories.

Two stages of two ranks, one of which has thrice the memory, answer as one rank does; then the same with the kinds mixed
within a stage is refused.
"""

from __future__ import annotations

import os
import sys
import tempfile
from pathlib import Path
from typing import Any

from conformance.golden_models import rand_model
from engine import build
from engine.backends import cpu
from engine.backends.backend import Place
from engine.backends.cpu import CpuBackend
from engine.build import build_engine
from engine.comm.failure import AgreedError, Followed
from engine.config import EngineConfig, ParallelConfig
from engine.env import launched_rank
from engine.weights import WeightMap
from tests.engine.engines_over_mpi import SETTINGS, compare

MB = 10**6
FREE = (1000 * MB, 3000 * MB, 3000 * MB, 3500 * MB)  # for layers; of each stage the least counts
KINDS = "small", "small", "large", "large"
LAYERS = 4
SPLIT: dict[str, Any] = {"split": "memory", "tensor_parallel_size": 2, "pipeline_parallel_size": 2}


class Pretending(CpuBackend):
    kinds = KINDS

    def __init__(self, config: EngineConfig, place: Place) -> None:
        super().__init__(config, place)
        self.kind = self.kinds[launched_rank(os.environ)]

    def free_beside(self, weight_map: WeightMap) -> int:
        assert weight_map.linears or weight_map.arrays, "embedding or head"
        assert not any(spec.dest.startswith("layers.") for spec in (*weight_map.linears, *weight_map.arrays))
        return FREE[launched_rank(os.environ)]


def refusal(folder: Path) -> str:
    """What rank 0 says; the others follow."""
    try:
        build_engine(EngineConfig(model=str(folder), **SETTINGS, **SPLIT), progress=False)
    except AgreedError as error:
        return str(error)
    except Followed:
        return ""
    return "it is accepted"


def main() -> None:
    rank = launched_rank(os.environ)
    cpu.CpuBackend = Pretending  # type: ignore[misc]
    shared: list[ParallelConfig] = []
    usual = build.share_layers

    def share_layers(*args: Any) -> ParallelConfig:
        shared.append(usual(*args))
        return shared[-1]

    build.share_layers = share_layers
    with tempfile.TemporaryDirectory() as scratch:
        folder = rand_model(Path(scratch), num_hidden_layers=LAYERS)
        compare(folder, False, 1, **SPLIT)
        assert [one.layers_of_stages for one in shared] == [(3, 1)]
        Pretending.kinds = "small", "large", "large", "large"
        said = refusal(folder)
    assert (said == "") == (rank != 0), said
    if rank == 0:
        assert said.startswith("rank 1: it computes with large, and rank 0 with small: sums of ranks must have"), said
        assert said.endswith("--split memory --tensor-parallel-size 1 --pipeline-parallel-size 4"), said
    sys.stdout.write("ok\n")


if __name__ == "__main__":
    main()
