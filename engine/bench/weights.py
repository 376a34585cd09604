"""How quick weights come from files into a GPU's memory, put in the order of the kernels, beside a bare copy.

The files are made first: a model's shapes with some of its layers and a small vocabulary, integers at random. They are
read several times, of which the first does not count: after it the system has them in memory, and it is this program
that is measured, not a disk. The time is the median of the others.
"""

from __future__ import annotations

import argparse
import importlib
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from engine.bench.arguments import positive, report_file
from engine.bench.model_shapes import QUANTS, SHAPES
from engine.checkpoint.loader import load_model_config, load_weights
from engine.checkpoint.quantized import keep_packed
from engine.checkpoint.safetensors_file import ITEM_BITS
from engine.checkpoint.source import resolve
from engine.coded8 import INT8, TILE
from engine.errors import ConfigError
from engine.models.registry import ARCHITECTURES
from engine.packed4 import Layout, word_shapes
from engine.system import cache_dir
from engine.weights import LinearSpec, WeightMap

Array = NDArray[Any]

VOCAB_SIZE = 1024
POOL_BYTES = 64 << 20  # of random bytes, which are written again and again
GOAL = 0.7  # of the rate of a copy
COPY_BYTES, NUM_COPIES = 64 << 20, 32
NUM_LOADS = 3
STORED = {"bfloat16": "BF16", "float16": "F16"}  # types of files by the config's
MASKS = {"I32": 0xFF, "I8": 0xFF, "F8_E4M3": 0xBF, "F16": 0xBF, "BF16": 0xBF}  # below 2: nothing is NaN


@dataclass(frozen=True, slots=True)
class Report:
    shape: str
    layers: int
    file_gb: float
    load_s: float
    load_gb_s: float
    copy_gb_s: float
    weights_gb: float
    peak_gb: float  # that CuPy had taken of the GPU, at most
    layer_gb: float

    @property
    def share(self) -> float:
        return self.load_gb_s / self.copy_gb_s


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--model-shape", choices=SHAPES, default="qwen2-72b")
    parser.add_argument("--quant", choices=("", *QUANTS), default="gptq-int4")
    parser.add_argument("--layers", type=positive, default=8)
    parser.add_argument("--folder", default=None, help="where there is room for the files")
    parser.add_argument("--json", type=report_file, help="file to write the report to")
    parser.set_defaults(run=run)


def run(arguments: argparse.Namespace) -> None:
    report = measure(arguments.model_shape, arguments.quant, arguments.layers, arguments.folder)
    print(table(report))
    if arguments.json is not None:
        Path(arguments.json).write_text(as_json(report) + "\n", encoding="utf-8")


def measure(shape: str, quant: str, layers: int, folder: str | None = None) -> Report:
    """Files go into a temporary folder beneath `folder`.

    Raises:
        ConfigError: no GPU here, or no room for the files.
    """
    try:
        cupy = importlib.import_module("cupy")
        gpu = importlib.import_module("engine.kernels.gpu").Gpu(cache_dir() / "kernels")
        store_module = importlib.import_module("engine.kernels.store")
    except ImportError as error:
        raise ConfigError(f"this benchmark needs a GPU and the extra cuda12 or cuda13: {error}") from error
    with tempfile.TemporaryDirectory(dir=folder) as made:
        num_bytes = write_folder(Path(made), shape, quant, layers)
        source = resolve(made)
        config = load_model_config(source)
        weight_map = keep_packed(ARCHITECTURES[config.architecture].weight_map(config))
        dtype = np.dtype(ml_dtypes.bfloat16 if config.dtype == "bfloat16" else np.float16)
        stream = cupy.cuda.get_current_stream()
        times: list[float] = []
        for _ in range(1 + NUM_LOADS):
            cupy.get_default_memory_pool().free_all_blocks()
            started = time.perf_counter()
            store = store_module.GpuStore(dtype, gpu)
            weights = load_weights(source, weight_map, store, progress=False)
            store.finish()
            times.append(time.perf_counter() - started)
            peak, held = cupy.get_default_memory_pool().total_bytes(), weights.num_bytes
            layer = sum(
                tensor.nbytes
                for dest, weight in weights.linears.items()
                if dest.startswith("layers.0.")
                for tensor in weight.tensors.values()
            )
            del weights
        copy = _copy_rate(cupy, stream)
    seconds = statistics.median(times[1:])
    return Report(
        shape=f"{shape} {quant}".strip(),
        layers=layers,
        file_gb=num_bytes / 1e9,
        load_s=seconds,
        load_gb_s=num_bytes / seconds / 1e9,
        copy_gb_s=copy / 1e9,
        weights_gb=held / 1e9,
        peak_gb=peak / 1e9,
        layer_gb=layer / 1e9,
    )


def table(report: Report) -> str:
    """For people."""
    verdict = "met" if report.share >= GOAL else "missed"
    return "\n".join(
        (
            f"{report.shape}, {report.layers} layers, {report.file_gb:.2f} GB of files in the system's memory",
            f"load and repack {report.load_s:.2f} s, {report.load_gb_s:.1f} GB/s; a copy from pinned memory "
            f"{report.copy_gb_s:.1f} GB/s: {report.share:.2f} of it, goal {GOAL}: {verdict}",
            f"GPU memory: {report.weights_gb:.2f} GB of weights, {report.peak_gb:.2f} GB at most, a layer "
            f"{report.layer_gb:.2f} GB",
        )
    )


def as_json(report: Report) -> str:
    return json.dumps({**asdict(report), "share": report.share})


def write_folder(folder: Path, shape: str, quant: str, layers: int) -> int:
    """config.json and model.safetensors; the bytes of the tensors."""
    config = SHAPES[shape] | {"num_hidden_layers": layers, "vocab_size": VOCAB_SIZE}
    config |= {"quantization_config": QUANTS[quant]} if quant else {}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    model_config = load_model_config(resolve(str(folder)))
    weight_map = ARCHITECTURES[model_config.architecture].weight_map(model_config)
    tensors = dict(_tensors(weight_map, quant, STORED[model_config.dtype]))
    header, offset = {}, 0
    for name, (dtype, sizes, _) in tensors.items():
        size = math.prod(sizes) * ITEM_BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": list(sizes), "data_offsets": [offset, offset + size]}
        offset += size
    text = json.dumps(header).encode()
    pool = np.random.default_rng(0).integers(0, 256, POOL_BYTES, np.uint8)
    pools = {mask: (pool & mask).tobytes() for mask in set(MASKS.values())}
    with open(folder / "model.safetensors", "wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for dtype, sizes, values in tensors.values():
            left = math.prod(sizes) * ITEM_BITS[dtype] // 8
            if values is not None:
                file.write(np.ascontiguousarray(np.broadcast_to(values, sizes)).tobytes())
                continue
            while left:
                left -= file.write(memoryview(pools[MASKS[dtype]])[: min(left, POOL_BYTES)])
    return offset


def _tensors(
    weight_map: WeightMap, quant: str, dtype: str
) -> Iterator[tuple[str, tuple[str, tuple[int, ...], Array | None]]]:
    """(name, (dtype, shape, values; None = random)) of a checkpoint."""
    for array in weight_map.arrays:
        yield array.name, (dtype, array.shape, None)
    for spec in weight_map.linears:
        for module, _, rows in spec.modules():
            num_rows = rows.stop - rows.start
            if spec.bias:
                yield f"{module}.bias", (dtype, (num_rows,), None)
            kept = keep_packed(WeightMap((spec,), (), quantization=weight_map.quantization)).linears[0]
            if kept.packed is None and kept.coded is None:
                yield f"{module}.weight", (dtype, (num_rows, spec.in_features), None)
                continue
            for suffix, tensor in _module(kept, num_rows, quant).items():
                yield f"{module}.{suffix}", tensor


def _module(spec: LinearSpec, rows: int, quant: str) -> dict[str, tuple[str, tuple[int, ...], Array | None]]:
    columns = spec.in_features
    if spec.packed is not None:
        layout: Layout = "awq" if quant.startswith("awq") else "gptq"
        words, of_scales, of_zeros = word_shapes(layout, rows, columns, columns // spec.packed.group_size)
        zeros = None if spec.packed.zeros else np.array(0x77777777, np.int32)
        tensors: dict[str, tuple[str, tuple[int, ...], Array | None]] = {
            "qweight": ("I32", words, None),
            "qzeros": ("I32", of_zeros, zeros),
            "scales": ("F16", of_scales, np.array(0.01, np.float16)),
        }
        if spec.packed.order != "stored":
            g_idx = np.random.default_rng(columns).permutation(columns) // spec.packed.group_size
            tensors["g_idx"] = ("I32", (columns,), g_idx.astype(np.int32))
        return tensors
    assert spec.coded is not None
    one = np.array(1e-4, np.float32)
    if spec.coded.scale == "block":
        scale = {"weight_scale_inv": ("F32", (-(-rows // TILE), -(-columns // TILE)), one)}
    else:
        scale = {"weight_scale": ("F32", (rows, 1), one)}
    return {"weight": ("I8" if spec.coded.kind == INT8 else "F8_E4M3", (rows, columns), None), **scale}


def _copy_rate(cupy: Any, stream: Any) -> float:
    """Bytes a second from pinned memory, in large pieces."""
    pinned = [cupy.cuda.alloc_pinned_memory(COPY_BYTES) for _ in range(2)]
    target = cupy.empty(COPY_BYTES, np.uint8)
    for count in (2, NUM_COPIES):
        started = time.perf_counter()
        for number in range(count):
            target.data.copy_from_host_async(pinned[number % 2].ptr, COPY_BYTES, stream)
        stream.synchronize()
    return NUM_COPIES * COPY_BYTES / (time.perf_counter() - started)
