"""This CPU as a device of engine.kernels: the very .cu files, built by g++ over the shim in cuda/host.

What has to be built is found by a dry run on engine.kernels.notes; then each .cu is built once, with all instances
that a run needs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from itertools import groupby
from pathlib import Path
from threading import local
from typing import Any, TypeVar

import numpy as np
from numpy.typing import NDArray

from conformance.host import MAX_SHARED_BYTES, Library, Strided
from conformance.host_build import CUDA
from engine.kernels.device import NUM_COUNTERS, Argument, Dims, Instance
from engine.kernels.notes import FEW_SMS

Array = NDArray[Any]
T = TypeVar("T")

ORDERS = (("in_step", 0), ("greedy", 0), ("random", 1), ("random", 2))  # schedules and their seeds, in turn
MAX_INSTANCES = 8  # of one build: a file with more is built in parts, so that all cores have work


class HostDevice:
    """Launches on this CPU; arrays are NumPy's, 16-bit floats those of ml_dtypes.

    Args:
        schedule: "in_step", "greedy", "random", or "" for all of ORDERS in turn by run.
        sanitizer: "address" or "thread" runs every launch in a program of its own that the sanitizer watches.
        folder: where the .cu files are.
    Raises:
        BuildError: see conformance.host_build.
    """

    has_wgmma = False  # nothing stands in for that here

    def __init__(
        self,
        schedule: str = "",
        seed: int = 0,
        sanitizer: str = "",
        folder: Path = CUDA,
        num_sms: int = FEW_SMS,
        has_fp8: bool = True,
    ) -> None:
        self.num_sms, self.max_shared_bytes, self.has_fp8 = num_sms, MAX_SHARED_BYTES, has_fp8
        self.counters = np.zeros(NUM_COUNTERS, np.uint32)
        self._orders = ((schedule, seed),) if schedule else ORDERS
        self._order = self._orders[0]
        self._sanitizer, self._folder = sanitizer, folder
        self._of_thread = local()  # rank: that of a thread, where there are ranks
        self._libraries: dict[Instance, Future[Library]] = {}

    def build(self, instances: Iterable[Instance], num_jobs: int = 2) -> None:
        """Builds what is not there yet, num_jobs compilers at once."""
        wanted = list(instances)
        with ThreadPoolExecutor(num_jobs) as team:
            self.begin_build(wanted, team)
        for instance in wanted:
            self._libraries[instance].result()

    def begin_build(self, instances: Iterable[Instance], team: Executor) -> None:
        """The same while the first are launched already, files in the order of their first kernels. A launch waits for
        its kernel, and raises BuildError in place of this."""
        kernels = [instance for instance in dict.fromkeys(instances) if instance not in self._libraries]
        places = {instance.stem: place for place, instance in reversed(list(enumerate(kernels)))}
        wanted = sorted(kernels, key=lambda instance: (places[instance.stem], instance.stem, instance.entry))
        for _, group in groupby(wanted, key=lambda instance: instance.stem):
            found = list(group)
            num_parts = -(-len(found) // MAX_INSTANCES)
            for part in (found[number::num_parts] for number in range(num_parts)):
                self._libraries |= dict.fromkeys(part, team.submit(self._library, part))

    def begin(self, run: int) -> None:
        """The order of blocks, warps and lanes from now on is that of this run."""
        self._order = self._orders[run % len(self._orders)]

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Array:
        return np.empty(shape, dtype)

    def to_device(self, array: Array, out: Array) -> None:
        out[...] = array

    def to_host(self, array: Array) -> Array:
        return np.array(array)

    def start_copy(self, array: Array) -> Callable[[], Array]:
        copy = np.array(array)
        return lambda: copy

    def launch(
        self, instance: Instance, grid: Dims, block: Dims, arguments: Sequence[Argument], shared_bytes: int = 0
    ) -> None:
        """Raises KernelFault if the kernel does what no kernel may, TypeError or ValueError for a wrong argument."""
        if instance not in self._libraries:
            self.build([instance])
        values = [Strided(value) if isinstance(value, np.ndarray) else value for value in arguments]
        rank = getattr(self._of_thread, "rank", None)
        self._libraries[instance].result().launch(instance.entry, grid, block, values, shared_bytes, *self._order, rank)

    def together(self, ranks: Sequence[Callable[[], T]]) -> list[T]:
        """What each rank gives, all running at the same time. Their kernels may wait for each other.

        Raises:
            RuntimeError: with a sanitizer, as each launch is a process of its own.
        """
        if self._sanitizer:
            raise RuntimeError("kernels of ranks share memory, which launches under a sanitizer do not")
        with ThreadPoolExecutor(len(ranks), "host-rank") as team:
            runs = [team.submit(self.as_rank, number, rank) for number, rank in enumerate(ranks)]
        return [run.result() for run in runs]

    def as_rank(self, number: int, rank: Callable[[], T]) -> T:
        """What this rank gives, in this thread; the others are threads with other numbers."""
        self._of_thread.rank = number
        return rank()

    def matmul(self, x: Array, weight: Array, out: Array) -> None:
        """Sums in float32, rounded once; of int8 exact."""
        kind: Any = np.float64 if out.dtype == np.int32 else np.float32
        out[...] = (x.astype(kind) @ weight.astype(kind).T).astype(out.dtype)

    def _library(self, instances: Sequence[Instance]) -> Library:
        source = self._folder / f"{instances[0].stem}.cu"
        return Library(source, [instance.entry for instance in instances], self._sanitizer)
