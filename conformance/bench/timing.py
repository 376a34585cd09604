"""Times on a GPU: launches in a captured graph, so that the host's time is not among them, and what the GPU can do."""

from __future__ import annotations

import statistics
import subprocess
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import numpy as np

from conformance.bench.place import Place
from conformance.bench.row import Rates

Array = Any
Calls = Sequence[Callable[[], Any]]

COLD_BYTES = 400_000_000  # that buffers rotate over: several times any cache
ROUNDS = 15  # that a time is the median of, after one that is not counted
PROBE_BYTES = 4 << 30
COPIED_BY_BLOCK = 16 << 10
PROBE_SIZE = 8192  # of a square matrix product
PROBE = r"""
extern "C" __global__ void read_all(const uint4* x, unsigned* out, unsigned long long n) {
  unsigned found = 0;
  unsigned long long step = (unsigned long long)gridDim.x * blockDim.x;
  for (unsigned long long i = (unsigned long long)blockIdx.x * blockDim.x + threadIdx.x; i < n; i += 8 * step) {
    uint4 v[8];
#pragma unroll
    for (int k = 0; k < 8; ++k) v[k] = i + k * step < n ? x[i + k * step] : uint4{0, 0, 0, 0};
#pragma unroll
    for (int k = 0; k < 8; ++k) found |= v[k].x ^ v[k].y ^ v[k].z ^ v[k].w;
  }
  if (found == 0x9E3779B9u) *out = found;
}

extern "C" __global__ void copy_all(const uint4* x, uint4* y) {  // a piece of 16 KiB a block
  unsigned long long first = 1024ull * blockIdx.x + threadIdx.x;
  uint4 v[4];
#pragma unroll
  for (int k = 0; k < 4; ++k) v[k] = __ldcs(x + first + 256 * k);
#pragma unroll
  for (int k = 0; k < 4; ++k) __stcs(y + first + 256 * k, v[k]);
}
"""
SMI = ("clocks.sm", "clocks.mem", "clocks.max.sm", "power.draw", "power.limit", "temperature.gpu")


class Timer(Protocol):
    def microseconds(self, calls: Calls) -> float:
        """Of all the calls, which are run one after the other with nothing of theirs in a cache at the start."""
        ...


class GraphTimer:
    """Times on a stream of its own, which is CuPy's current one inside `with`: there the timed arrays must be made.

    (After use() the end of any inner `with` would leave the null stream as the current one, for which this one does
    not wait.)

    Args:
        cupy: the module.
    """

    def __init__(self, cupy: Any) -> None:
        self._cupy = cupy
        self._stream = cupy.cuda.Stream(non_blocking=True)
        probes = cupy.RawModule(code=PROBE)
        self._read, self._copy = probes.get_function("read_all"), probes.get_function("copy_all")
        self._blocks = 16 * int(cupy.cuda.Device().attributes["MultiProcessorCount"])
        self._old = cupy.zeros(COLD_BYTES, cupy.uint8)  # is read in place of what a cache holds
        self._out = cupy.zeros(1, cupy.uint32)
        cupy.cuda.get_current_stream().synchronize()

    def __enter__(self) -> GraphTimer:
        self._stream.__enter__()
        return self

    def __exit__(self, *error: object) -> None:
        self._stream.__exit__(*error)

    def microseconds(self, calls: Calls) -> float:
        if self._cupy.cuda.get_current_stream().ptr != self._stream.ptr:  # what runs elsewhere is not captured
            raise RuntimeError("CuPy's current stream is not the timer's: time inside `with timer`")
        answers = []  # kept, so that each has memory of its own
        self._stream.begin_capture()
        try:
            answers += [call() for call in calls]
        finally:
            graph = self._stream.end_capture()
        graph.launch(self._stream)
        times = [self._time(lambda: graph.launch(self._stream)) for _ in range(ROUNDS)]
        return statistics.median(times)

    @property
    def stream(self) -> int:
        return int(self._stream.ptr)

    def read(self, array: Array) -> None:
        """Reads all bytes of an array of a multiple of 16."""
        arguments = (array, self._out, np.uint64(array.nbytes // 16))
        self._read((self._blocks,), (256,), arguments)

    def _time(self, go: Callable[[], None]) -> float:
        """Microseconds between two events around it."""
        self.read(self._old)
        start, end = self._cupy.cuda.Event(), self._cupy.cuda.Event()
        start.record(self._stream)
        go()
        end.record(self._stream)
        end.synchronize()
        return 1e3 * float(self._cupy.cuda.get_elapsed_time(start, end))

    def rates(self, place: Place) -> Rates:
        """What this GPU does of the plainest: reading, copying, and the vendor's matrix product."""
        first, second = (place.normal(PROBE_BYTES // 2) for _ in range(2))
        reading = self.microseconds([partial(self.read, first), partial(self.read, second)])
        pieces = PROBE_BYTES // COPIED_BY_BLOCK
        copying = min(
            self.microseconds([lambda: self._copy((pieces,), (256,), (first, second))]),
            self.microseconds([lambda: second.data.copy_from_device_async(first.data, PROBE_BYTES, self._stream)]),
        )
        x, weight = (place.normal(PROBE_SIZE, PROBE_SIZE) for _ in range(2))
        out = place.device.empty((PROBE_SIZE, PROBE_SIZE), place.dtype)
        multiplying = self.microseconds([lambda: place.device.matmul(x, weight, out)] * 16)
        return Rates(2e6 * PROBE_BYTES / reading, 2e6 * PROBE_BYTES / copying, 32e6 * PROBE_SIZE**3 / multiplying)


def clocks() -> dict[str, str]:
    """Clocks, power and temperature as nvidia-smi says them now; {} where there is none."""
    command = ["nvidia-smi", f"--query-gpu={','.join(SMI)}", "--format=csv,noheader", "--id=0"]
    try:
        said = subprocess.run(command, capture_output=True, text=True, timeout=10, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return {}
    return dict(zip(SMI, (part.strip() for part in said.split(",")), strict=False))
