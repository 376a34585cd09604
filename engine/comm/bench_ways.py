"""What engine.bench times: every way of adding up between the GPUs of a job, out of any model."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from functools import partial
from typing import Any

import cupy
import ml_dtypes
import numpy as np

from engine.comm.islands import largest_island
from engine.comm.links import Links
from engine.comm.nccl import Nccl
from engine.comm.planner import measure
from engine.comm.ranks import Ranks
from engine.comm.ways import Trial, kernels_of, ways_of
from engine.errors import ConfigError
from engine.kernels.gpu import Gpu
from engine.system import cache_dir


def time_ways(ranks: Ranks, sizes: Sequence[int]) -> tuple[dict[str, Any], list[Trial]]:
    """(the machine, trials of every way with arrays of so many bytes of bfloat16). Called by all ranks.

    Raises:
        ConfigError: more ranks on this host than GPUs, ranks of several hosts, or no window of the host.
    """
    num_gpus = cupy.cuda.runtime.getDeviceCount()
    if len(ranks.host_ranks) > num_gpus:
        raise ConfigError(f"{len(ranks.host_ranks)} ranks on this host, which has {num_gpus} GPUs")
    if len(ranks.host_ranks) < ranks.size:
        raise ConfigError(f"{ranks.size} ranks, of which {len(ranks.host_ranks)} on this host: start all on one")
    cupy.cuda.Device(ranks.host_rank).use()
    cupy.cuda.Stream(non_blocking=True).use()
    gpu = Gpu(cache_dir() / "kernels")
    meeting: Any = ranks.world
    links = Links(meeting, largest_island=largest_island(os.environ), max_blocks=min(64, gpu.num_sms))
    nccl, why, dtype = None, "", np.dtype(ml_dtypes.bfloat16)
    try:
        nccl = Nccl(meeting)
    except ConfigError as error:
        nccl, why = None, str(error)
    assert links.copies is not None, "as is usual"
    add_up = None if nccl is None else nccl.all_reduce
    gather = partial(links.copies.gather, device=gpu)
    ways = ways_of(links.channels, links.exchanges, add_up, gpu, gather=gather, islands=links.islands)
    gpu.prepare(kernels_of(links.channels, links.exchanges, dtype, islands=links.islands), progress=False)
    begin = time.perf_counter()
    trials = measure(links, ways, dtype, sizes)
    seconds = time.perf_counter() - begin
    if nccl is not None:
        nccl.close()
    links.close()
    about = {
        "ranks": ranks.size,
        "gpu": cupy.cuda.runtime.getDeviceProperties(cupy.cuda.Device().id)["name"].decode(),
        "cuda": cupy.cuda.runtime.driverGetVersion(),
        "has_peer": len(links.channels) > 1,
        "island_size": 0 if links.islands is None else links.islands.island_size,
        "nccl": why,  # is missing
        "seconds": seconds,
    }
    return about, trials
