"""What no kernel may do ends its launch, with the kernel, the block, the thread and the place in the message."""

from __future__ import annotations

import numpy as np
import pytest

from conformance.host import KernelFault, Library
from tests.cuda.test_shim import KERNELS

FAULTS = {  # kernel: what the message must say
    "exits_before_barrier": "threads wait at a barrier that others have passed by and exited\n"
    "  threads 0 to 36 wait at __syncthreads, faults.cu:7\n  threads 37 to 37 have exited\n  threads 38 to 63 wait at",
    "two_barriers": "threads of one block wait at different barriers",
    "not_in_mask": "lane 16 is not in its own mask 0x0000ffff",
    "reads_outside_mask": "reads a shuffle from lane 20, which is not in mask 0x0000ffff",
    "lane_has_exited": "mask 0xffffffff names lanes 0x00000020, which have exited",
    "meets_elsewhere": "lanes of one warp meet at different places",
    "deadlocks": "deadlock: every thread waits\n  threads 0 to 15 wait at __syncwarp, mask 0xffffffff, faults.cu:",
    "misaligned": "load16: address",
    "misaligned_vector": "is not aligned for",
    "misaligned_copy": "cp.async target: address",
    "index_past_end": "index 64 is outside its array at faults.cu:",
    "sum_overflows": "a signed sum overflows at faults.cu:",
    "product_overflows": "a signed product overflows at faults.cu:",
    "divides_by_zero": "a division by zero or overflow at faults.cu:",
    "writes_past_dynamic": "byte 256 was written of 256 bytes of dynamic shared memory",
    "overflows_stack": "needs more than 36864 bytes of stack",
    "half_a_warp_at_barrier": "48 threads are not whole warps",
    "other_count_at_barrier": "threads where others expect",
}
WATCHED = ("reads_past_global", "reads_past_dynamic", "races", "races_in_warp", "does_not_race")


@pytest.fixture(scope="module")
def library() -> Library:
    return Library(KERNELS / "faults.cu", [*FAULTS, "lane_does_not_exist"])


def arguments(library: Library, kernel: str) -> list[np.ndarray]:
    """Ones for every pointer of the kernel."""
    dtypes = {"float": np.float32, "int": np.int32}
    return [np.ones(320, dtypes.get(p.type, np.float32)) for p in library.parameters[kernel]]


@pytest.mark.parametrize(
    ("kernel", "schedule"),
    [
        (kernel, schedule)
        for schedule in ("in_step", "greedy", "random")
        for kernel, message in FAULTS.items()
        if schedule == "in_step" or "lane" not in message  # which lane comes first depends on the schedule
    ],
)
def test_fault(library: Library, kernel: str, schedule: str) -> None:
    with pytest.raises(KernelFault) as caught:
        library.launch(kernel, (2,), (64,), arguments(library, kernel), 256, schedule)
    message = str(caught.value)
    assert message.startswith(f"kernel {kernel}, block (")
    assert FAULTS[kernel] in message


def test_a_lane_that_no_block_has(library: Library) -> None:
    with pytest.raises(KernelFault, match="mask 0xffffffff names lanes 0xffff0000, which do not exist"):
        library.launch("lane_does_not_exist", (1,), (48,), [])
    library.launch("lane_does_not_exist", (1,), (64,), [])


def test_a_launch_after_a_fault_begins_anew(library: Library) -> None:
    """Threads that a fault has left in the middle of a kernel do not go on in the next one."""
    for _ in range(2):
        with pytest.raises(KernelFault):
            library.launch("exits_before_barrier", (1,), (64,), [])
        library.launch("lane_does_not_exist", (1,), (32,), [])
        library.launch("lane_does_not_exist", (1,), (1024,), [])


@pytest.mark.parametrize(
    ("sanitizer", "kernel", "report"),
    [
        ("address", "reads_past_global", "heap-buffer-overflow"),
        ("address", "reads_past_dynamic", "heap-buffer-overflow"),
        ("address", "does_not_race", ""),
        ("thread", "races", "data race"),
        ("thread", "races_in_warp", "data race"),
        ("thread", "does_not_race", ""),
    ],
)
def test_sanitizers(sanitizer: str, kernel: str, report: str) -> None:
    watched = Library(KERNELS / "faults.cu", WATCHED, sanitizer)
    x, y = np.ones(63, np.float32), np.zeros(64, np.float32)
    values = [x, y, np.int32(63)] if kernel == "reads_past_global" else [y]
    if report:
        with pytest.raises(KernelFault, match=report) as caught:
            watched.launch(kernel, (1,), (64,), values, shared_bytes=256)
        assert "faults.cu" in str(caught.value)
    else:
        watched.launch(kernel, (2,), (64,), values, shared_bytes=256)
        assert (y == 3).all(), "what a watched kernel has written comes back"
