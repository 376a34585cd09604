"""--target gpu without a GPU: CuPy and the device are stood in for by arrays of a kind of their own."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import numpy as np
import pytest

from conformance import __main__ as command
from conformance import machines
from conformance.host_device import HostDevice


class Pointer:
    def __init__(self, array: np.ndarray, offset: int = 0) -> None:
        self.array, self.offset = array, offset

    def __add__(self, offset: int) -> Pointer:
        return Pointer(self.array, self.offset + offset)


class DeviceArray(np.ndarray):
    """With cupy.ndarray's constructor and `data`."""

    def __new__(cls, shape: tuple[int, ...], dtype: Any, memptr: Pointer, strides: tuple[int, ...]) -> DeviceArray:
        data = np.asarray(memptr.array).reshape(-1).view(np.uint8)
        if not data.size:
            return super().__new__(cls, shape, dtype)
        return super().__new__(cls, shape, dtype, data, memptr.offset, strides)

    @property
    def data(self) -> Pointer:  # type: ignore[override]
        return Pointer(self)


DeviceArray.__module__ = "cupy"


def asarray(array: np.ndarray) -> DeviceArray:
    assert not isinstance(array, DeviceArray)
    return np.array(array).view(DeviceArray)


class Gpu(HostDevice):
    """Refuses arrays that are not its own."""

    def __init__(self, cache: Path, arch: str | None) -> None:
        super().__init__("in_step")
        self.arch = arch or "sm_90"
        self.counters = self.counters.view(DeviceArray)

    def prepare(self, instances: Any) -> None:
        self.build(instances)

    def empty(self, shape: tuple[int, ...], dtype: Any) -> DeviceArray:
        return np.empty(shape, dtype).view(DeviceArray)

    def launch(self, instance: Any, grid: Any, block: Any, arguments: Any, shared_bytes: int = 0) -> None:
        assert all(isinstance(value, DeviceArray | np.generic) or value is None for value in arguments)
        super().launch(instance, grid, block, arguments, shared_bytes)

    def matmul(self, x: Any, weight: Any, out: Any) -> None:
        assert all(isinstance(array, DeviceArray) for array in (x, weight, out))
        super().matmul(x, weight, out)


@pytest.fixture
def gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    properties = {"name": b"Some GPU"}
    runtime = SimpleNamespace(
        CUDARuntimeError=RuntimeError,
        getDeviceCount=lambda: 1,
        getDeviceProperties=lambda number: properties,
        driverGetVersion=lambda: 13000,
        runtimeGetVersion=lambda: 13000,
    )
    cupy: Any = ModuleType("cupy")
    cupy.ndarray, cupy.asarray, cupy.asnumpy, cupy.__version__ = DeviceArray, asarray, np.array, "14.2.0"
    cupy.empty = lambda shape, dtype: np.empty(shape, dtype).view(DeviceArray)
    cupy.cuda = SimpleNamespace(runtime=runtime, Device=lambda: SimpleNamespace(id=0))
    compiler = SimpleNamespace(nvrtc_version=lambda: "13.0")
    modules = {"cupy": cupy, "engine.kernels.compile": compiler, "engine.kernels.gpu": SimpleNamespace(Gpu=Gpu)}
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.setattr(machines.importlib, "import_module", modules.__getitem__)


@pytest.mark.usefixtures("gpu")
@pytest.mark.parametrize(
    ("op", "case"),
    [
        ("rope", "qk-norm-gqa-bfloat16"),
        ("attention", "prefill-chunks-bfloat16"),
        ("attention", "decode-splits-float16"),
        ("linear", "odd-bias-bfloat16"),
        ("linear", "no-tokens-bfloat16"),
        ("llama", "forward-qwen2-chunks-bfloat16"),
        ("sampling", "sample-all-spread-float32"),
    ],
)
def test_a_case(capsys: pytest.CaptureFixture[str], tmp_path: Path, op: str, case: str) -> None:
    """Inputs go there and outputs come back, whole models too; the report says where it ran."""
    file = tmp_path / "results.json"
    status = command.main(["--target", "gpu", "--op", op, "--case", case, "--json", str(file)])
    assert status == 0, capsys.readouterr().out
    report = json.loads(file.read_text())
    assert (report["gpu"], report["cupy"], report["cases"][0]["status"]) == ("Some GPU", "14.2.0", "ok")
    assert report["driver"]
    assert report["cuda"] == "runtime 13000, NVRTC 13.0"
    assert report["arch"] == "sm_90"
