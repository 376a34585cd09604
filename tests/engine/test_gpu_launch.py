"""The layer between wrappers and the driver, without a GPU: what may be an argument, and what a GPU is refused for."""

from __future__ import annotations

import importlib
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from engine.errors import KernelError


class Error(RuntimeError):
    """As CuPy raises it."""

    def __init__(self, status: int, words: str) -> None:
        super().__init__(words)
        self.status = status


class Array:
    """As far as a launch looks at it."""

    data = SimpleNamespace(ptr=0x7F0000001000)


class Gpu:
    """What CuPy says of the GPU that is there, or raises."""

    def __init__(self) -> None:
        self.compute_capability, self.driver_version, self.error = "90", 13000, None
        self.id = 0

    def __call__(self) -> Gpu:
        if self.error:
            raise self.error
        return self

    @property
    def attributes(self) -> dict[str, int]:
        return {"MultiProcessorCount": 132, "MaxSharedMemoryPerBlockOptin": 227 << 10}


@pytest.fixture
def there() -> Gpu:
    return Gpu()


@pytest.fixture
def module(there: Gpu, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """engine.kernels.gpu over a CuPy that is not there."""
    cupy: Any = ModuleType("cupy")
    runtime = SimpleNamespace(
        CUDARuntimeError=Error, driverGetVersion=lambda: there.driver_version, runtimeGetVersion=lambda: 13020
    )
    cuda: Any = ModuleType("cupy.cuda")
    cuda.device, cuda.runtime, cuda.Device = ModuleType("cupy.cuda.device"), runtime, there
    cupy.cuda, cupy.ndarray, cupy.zeros = cuda, Array, np.zeros
    for name, part in (("cupy", cupy), ("cupy.cuda", cuda), ("cupy.cuda.device", cuda.device)):
        monkeypatch.setitem(sys.modules, name, part)
    for name in ("engine.kernels.gpu", "engine.kernels.cublas"):
        monkeypatch.delitem(sys.modules, name, raising=False)
    found = importlib.import_module("engine.kernels.gpu")
    monkeypatch.setattr(found, "Cublas", object)
    yield found
    for name in ("engine.kernels.gpu", "engine.kernels.cublas"):
        sys.modules.pop(name, None)


def kernel_of(module: Any) -> Any:
    """A kernel of which only the name is known."""
    kernel = object.__new__(module.Kernel)
    kernel.name = "rmsnorm<bf16, 1>"
    return kernel


@pytest.mark.parametrize(
    ("argument", "bits"),
    [
        (None, 0),
        (Array(), 0x7F0000001000),
        (np.int32(7), 7),
        (np.uint64(2**63), 2**63),
        (np.bool_(True), 1),
        (np.float32(1.0), 0x3F800000),
        (np.float64(-0.0), 0x8000000000000000),
    ],
)
def test_the_bits_of_an_argument(module: Any, argument: Any, bits: int) -> None:
    assert kernel_of(module)._word(0, argument) == bits


@pytest.mark.parametrize("argument", [3, 3.0, True, "x", np.zeros(2), np.float16(1), np.int16(1)])
def test_an_argument_without_a_size_of_its_own(module: Any, argument: Any) -> None:
    """A bare Python number would be passed in as many bytes as somebody guesses."""
    with pytest.raises(KernelError, match=r"^rmsnorm<bf16, 1>: argument 2 is .*expected a CuPy array, a NumPy scalar"):
        kernel_of(module)._word(2, argument)


@pytest.mark.parametrize(
    ("arch", "target", "max_shared_bytes", "has_wgmma"),
    [
        (None, "sm_90", 227 << 10, True),
        ("sm_90", "sm_90", 227 << 10, True),
        ("sm_80", "compute_80", 163 << 10, False),
        ("sm_86", "compute_86", 99 << 10, False),
    ],
)
def test_the_kernels_of_an_older_gpu(
    module: Any, arch: str | None, target: str, max_shared_bytes: int, has_wgmma: bool
) -> None:
    """Its code, its shared memory, nothing that it lacks."""
    gpu = module.Gpu(Path(), arch)
    assert (gpu._target, gpu.max_shared_bytes, gpu.has_wgmma) == (target, max_shared_bytes, has_wgmma)


@pytest.mark.parametrize("arch", ["sm_100", "sm_120", "sm_75", "Hopper"])
def test_kernels_that_this_gpu_cannot_run(module: Any, arch: str) -> None:
    with pytest.raises(KernelError, match=f"this GPU is sm_90 and cannot run code for {arch}; it can for sm_80, sm_86"):
        module.Gpu(Path(), arch)


def test_a_gpu_that_is_too_old(module: Any, there: Gpu) -> None:
    there.compute_capability = "75"
    with pytest.raises(KernelError, match=r"compute capability 7.5; the kernels need 8.0 \(Ampere\) or later"):
        module.Gpu(Path())


@pytest.mark.parametrize(
    ("status", "driver_version", "message"),
    [
        (
            35,
            12040,
            r"^too old \(driver CUDA 12.4, packages CUDA 13.2\); .*update it .*or install 'glint-llm\[cuda12\]'",
        ),
        (35, 0, r"^too old \(no driver, packages CUDA 13.2\); there is no NVIDIA driver, or"),
        (100, 13000, r"no GPU is visible"),
        (803, 13000, r"reboot after a driver update"),
    ],
)
def test_cuda_that_does_not_start(
    module: Any, there: Gpu, status: int, driver_version: int, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    there.error, there.driver_version = Error(status, "too old"), driver_version
    with pytest.raises(KernelError, match=message):
        module.Gpu(Path())
