"""Every golden split over ranks: all ranks run the same steps, and rank 0's logits are held to those of one rank.

What a rank of each split has, and what it gives the others, is thus seen for every family.
"""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.end_to_end import CHUNKS, SOFT_PROMPT, VARIANTS, make_model, model_prompts
from conformance.engine_run import WHOLE, Prompts, make_runner, run_chunks
from conformance.golden_families import FAMILY_GOLDENS
from conformance.golden_models import GOLDENS
from conformance.whole_engine.cases import TOLERANCES
from engine.checkpoint.loader import load_model_config
from engine.checkpoint.source import resolve
from engine.comm.mpi_ranks import MpiRanks
from engine.comm.mpi_sums import MpiComm
from engine.config import ParallelConfig
from engine.halves import Halving
from engine.ops import cpu_ops
from ref.sampling import log_softmax

Array = NDArray[Any]

SPLITS = {  # tensor_parallel_size and pipeline_parallel_size
    "TP2": (2, 1),
    "PP2": (1, 2),
    "TP3": (3, 1),
    "TP4": (4, 1),
    "TP2xPP2": (2, 2),
}
MODELS = (*GOLDENS, *FAMILY_GOLDENS, *VARIANTS)


def split_model(world: MpiComm, name: str, tp: int, pp: int, halving: Halving = WHOLE) -> list[str]:
    """What is wrong with a model of MODELS over all ranks of world, in words; ranks but rank 0 say nothing.

    halving: of the steps of ranks; those of the one that they are held to are whole.
    """
    prompts, chunks = _prompts(name)
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(scratch, name)
        found = logits_of(folder, world, ParallelConfig(world.rank, tp, pp), prompts, chunks, halving)
        if world.rank:
            return []
        one = run_chunks(make_runner(folder, cpu_ops(), prompts), prompts, chunks)
    worst = max(float(np.abs(log_softmax(a) - log_softmax(b)).max()) for a, b in zip(found, one, strict=True))
    return [] if worst <= TOLERANCES["float32"] else [f"logprobs differ from those of one rank by {worst:.3g}"]


def logits_of(
    folder: Path,
    world: MpiComm,
    parallel: ParallelConfig,
    prompts: Prompts,
    chunks: tuple[int, ...],
    halving: Halving = WHOLE,
) -> list[Array]:
    """See run_chunks."""
    config = load_model_config(resolve(str(folder)))
    runner = make_runner(
        folder, cpu_ops(), prompts, lambda ops: MpiRanks(ops, world, parallel, config), parallel=parallel
    )
    return run_chunks(runner, prompts, chunks, halving)


def _prompts(name: str) -> tuple[Prompts, tuple[int, ...]]:
    """Prompts, and how many tokens a step has of each."""
    prompts = model_prompts(name)
    if not name.startswith("cpm_ant"):
        return prompts, CHUNKS["chunks"]
    whole = [[*SOFT_PROMPT, *prompt] for prompt in prompts]
    return whole, tuple(len(ids) - 2 for ids in whole)
