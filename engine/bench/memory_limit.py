"""How fast this machine reads memory: the bound of a decode step, which reads every weight once."""

from __future__ import annotations

import statistics
import time
from concurrent.futures import ThreadPoolExecutor

import numpy as np

from engine.system import usable_cores

MEGABYTES = 512  # far more than any cache


def read_gb_per_s(num_threads: int | None = None) -> float:
    """10⁹ bytes a second, median of 5, each thread reading a part of its own with a product that needs no storing."""
    count = num_threads or usable_cores()
    parts = np.array_split(np.ones(MEGABYTES * 250_000, np.float32), count)
    rates = []
    with ThreadPoolExecutor(count) as pool:
        for _ in range(5):
            started = time.perf_counter()
            list(pool.map(lambda part: part @ part, parts))
            rates.append(sum(part.nbytes for part in parts) / (time.perf_counter() - started) / 1e9)
    return statistics.median(rates)
