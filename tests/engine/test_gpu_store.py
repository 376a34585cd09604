"""engine.kernels.store over a stand-in for CuPy: weights arrive whole, in the order in which they are read.

KVM-06: an array that another stream copies into may be read, or its memory given away, before the copy has come. The
engine has one stream on a GPU, for copies too; KVM-08: so nothing that clears or fills memory can come at a wrong time.
"""

from __future__ import annotations

import ast
import importlib
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import engine
from conformance.golden_formats import FORMAT_FAMILIES, format_folder, format_model
from conformance.golden_models import write_safetensors
from conformance.host_device import HostDevice
from engine.checkpoint.folder import folder_tensors
from engine.checkpoint.loader import load_model_config, load_weights
from engine.checkpoint.quantized import keep_packed
from engine.checkpoint.source import resolve
from engine.config import ParallelConfig
from engine.errors import CheckpointError
from engine.kernels.device import Argument, Dims, Instance
from engine.models.registry import ARCHITECTURES
from engine.split import rank_weights
from tests.engine import gpu_stand_in as stand_in

BF16 = np.dtype(ml_dtypes.bfloat16)
SHAPES = {"first": (40, 33), "second": (7, 5), "third": (64,), "last": (40, 33)}
EVEN = {"hidden_size": 256, "intermediate_size": 384, "head_dim": 128}  # which two ranks can share in tiles of 128


class LazyDevice:
    """The kernels of the host shim, run when somebody waits."""

    def __init__(self) -> None:
        self._host = HostDevice()

    def empty(self, shape: tuple[int, ...], dtype: Any) -> Any:
        return stand_in.empty(shape, dtype)

    def launch(
        self, instance: Instance, grid: Dims, block: Dims, arguments: Sequence[Argument], shared_bytes: int = 0
    ) -> None:
        stand_in.launch(lambda *given: self._host.launch(instance, grid, block, given, shared_bytes), *arguments)


@pytest.fixture
def store_module(monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    cupy = ModuleType("cupy")
    cuda = SimpleNamespace(
        alloc_pinned_memory=bytearray,
        Event=stand_in.Event,
        get_current_stream=lambda: stand_in.STREAM,
        memory=SimpleNamespace(OutOfMemoryError=MemoryError),
        Device=lambda: SimpleNamespace(id=0),
        runtime=SimpleNamespace(setDevice=lambda number: None),
    )
    cupy.__dict__.update(cuda=cuda, empty=stand_in.empty)
    monkeypatch.setitem(sys.modules, "cupy", cupy)
    monkeypatch.delitem(sys.modules, "engine.kernels.store", raising=False)
    module = importlib.import_module("engine.kernels.store")
    sizes = {
        "PIECE_BYTES": 96,
        "JOB_BYTES": 480,
        "CHUNK_BYTES": 1000,
        "LATER_BYTES": 3000,
    }  # so that each buffer is filled many times
    for name, size in sizes.items():
        monkeypatch.setattr(module, name, size)
    yield module
    stand_in.STREAM.__init__()  # type: ignore[misc]
    sys.modules.pop("engine.kernels.store", None)


@pytest.fixture(params=["bfloat16", "float32"])
def tensors(request: pytest.FixtureRequest, tmp_path: Path) -> dict[str, np.ndarray]:
    """As stored, in the store's type and in one that must be converted."""
    rng = np.random.default_rng(0)
    made = {name: rng.standard_normal(shape, np.float32) for name, shape in SHAPES.items()}
    write_safetensors(tmp_path / "model.safetensors", made, request.param)
    return {name: values.astype(BF16) for name, values in made.items()}


def read_all(store: Any, folder: Path) -> dict[str, Any]:
    """Matrices go to arrays that are seen transposed, as those of CPM-1 do."""
    stored = folder_tensors(folder)
    targets = {}
    for name, shape in SHAPES.items():
        targets[name] = store.empty(shape[::-1])
        store.read(stored[name], targets[name].T)
    return targets


def test_kvm_06_weights_arrive(store_module: ModuleType, tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
    store = store_module.GpuStore(BF16, LazyDevice())
    targets = read_all(store, tmp_path)
    store.finish()
    for name, values in tensors.items():
        np.testing.assert_array_equal(stand_in.raw(targets[name]).T, values)


def test_kvm_06_can_fail(store_module: ModuleType, tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
    """With copies over a stream of their own."""
    store = store_module.GpuStore(BF16, LazyDevice())
    store._stream = stand_in.Stream()
    targets = read_all(store, tmp_path)
    stand_in.STREAM.synchronize()
    store._stream.synchronize()
    assert any((values != stand_in.raw(targets[name]).T).any() for name, values in tensors.items())


def test_kvm_08_a_gpu_has_one_stream() -> None:
    """Made by the backend, which makes it the current one; nobody names another, or the default one, but the side on
    which ranks add up (ordered by events: test_side_stream), what copies for it (copies.py, ordered likewise), and the
    benchmark of sums, which has no backend."""
    found = []
    for file in sorted(Path(engine.__file__).parent.rglob("*.py")):
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            if isinstance(node, ast.Attribute) and node.attr in ("Stream", "ExternalStream", "null", "ptds"):
                found.append((file.name, ast.unparse(node)))
    assert {name for _, name in found} == {"cupy.cuda.Stream"}
    assert sorted(file for file, _ in found) == ["bench_ways.py", "copies.py", "cuda.py", "side_stream.py"]


@pytest.mark.parametrize("dtype", [np.uint32, np.float16, np.uint8])
def test_arrays_go_up_as_they_are(store_module: ModuleType, dtype: Any) -> None:
    """The words, scales and zeros of 4-bit weights, in several pieces of the staging buffers; transposed ones too."""
    store = store_module.GpuStore(BF16, LazyDevice())
    made = np.random.default_rng(0).integers(0, 200, (37, 11, 3)).astype(dtype)
    places = [store.put(made), store.put(made.transpose(2, 0, 1))]
    store.finish()
    np.testing.assert_array_equal(stand_in.raw(places[0]), made)
    np.testing.assert_array_equal(stand_in.raw(places[1]), made.transpose(2, 0, 1))
    assert stand_in.raw(places[0]).dtype == dtype


@pytest.mark.parametrize("name", ["gptq_act_order", "awq", "ct_int4", "ct_int8"])
def test_a_quantized_folder(store_module: ModuleType, name: str, tmp_path: Path) -> None:
    """What arrives is what NumPy makes of it; of the GPU's memory it takes the weights and one layer more."""
    source = resolve(str(format_model(tmp_path, "llama", name)))
    config = load_model_config(source)
    weight_map = keep_packed(ARCHITECTURES[config.architecture].weight_map(config))
    wanted = load_weights(source, weight_map, progress=False)
    pool = stand_in.MemoryPool()
    with stand_in.using_allocator(pool.malloc):
        store = store_module.GpuStore(BF16, LazyDevice())
        found = load_weights(source, weight_map, store, progress=False)
        store.finish()
    for dest, weight in wanted.linears.items():
        assert found.linears[dest].format == weight.format
        assert found.linears[dest].tensors.keys() == weight.tensors.keys()
        for key, tensor in weight.tensors.items():
            values = tensor.astype(BF16) if weight.format == "dense" else tensor
            np.testing.assert_array_equal(
                stand_in.raw(found.linears[dest].tensors[key]), values, err_msg=f"{dest} {key}"
            )
    layer = sum(
        tensor.nbytes
        for dest, weight in found.linears.items()
        if dest.startswith("layers.0.")
        for tensor in weight.tensors.values()
    )
    num_arrays = sum(len(weight.tensors) for weight in found.linears.values()) + len(found.arrays)
    assert pool.num_bytes <= found.num_bytes + layer + 512 * num_arrays


@pytest.mark.parametrize("name", ["gptq_act_order", "gptq", "awq", "ct_int4", "ct_int8"])
def test_a_rank_of_a_quantized_folder(store_module: ModuleType, name: str, tmp_path: Path) -> None:
    """Columns come up row by row; with act-order those rows and columns alone that the rank has."""
    source = resolve(str(format_folder(tmp_path, FORMAT_FAMILIES["llama"] | EVEN, name)))
    config = load_model_config(source)
    whole = ARCHITECTURES[config.architecture].weight_map(config)
    for rank in range(2):
        weight_map = keep_packed(rank_weights(whole, config, ParallelConfig(rank, 2, 1)))
        wanted = load_weights(source, weight_map, progress=False)
        store = store_module.GpuStore(BF16, LazyDevice())
        found = load_weights(source, weight_map, store, progress=False)
        store.finish()
        for dest, weight in wanted.linears.items():
            assert found.linears[dest].tensors.keys() == weight.tensors.keys()
            for key, tensor in weight.tensors.items():
                values = tensor.astype(BF16) if weight.format == "dense" else tensor
                arrived = stand_in.raw(found.linears[dest].tensors[key])
                np.testing.assert_array_equal(arrived, values, err_msg=f"{dest} {key}")


def test_a_file_that_became_shorter(store_module: ModuleType, tensors: dict[str, np.ndarray], tmp_path: Path) -> None:
    stored = folder_tensors(tmp_path)
    path = tmp_path / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-100])
    store = store_module.GpuStore(BF16, LazyDevice())
    last = max(stored.values(), key=lambda tensor: tensor.offset)
    store.read(last, store.empty(last.shape))
    with pytest.raises(CheckpointError, match=f"cannot read {last.name}, the file has changed since the start"):
        store.finish()
