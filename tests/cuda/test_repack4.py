"""cuda/repack4.cu against what NumPy packs, for every layout of files, on the host shim."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.golden_models import as_stored, write_stored
from conformance.host_device import HostDevice
from conformance.memory import BorderedDevice
from engine.checkpoint.safetensors_file import read_header
from engine.checkpoint.stored_words import StoredPart, StoredWords, mapped, pack_words
from engine.errors import KernelError
from engine.kernels.repack import Part, repack4
from engine.packed4 import Layout, pack4
from ref.quant.awq import awq_pack
from ref.quant.compressed_tensors import ct_pack
from ref.quant.gptq import gptq_pack
from ref.quant.groups import GroupedInt

PACKS: dict[str, tuple[Layout, int, Callable[[GroupedInt], dict[str, Any]]]] = {  # layout, offset of zeros
    "gptq": ("gptq", 1, gptq_pack),
    "gptq_v2": ("gptq", 0, lambda weight: gptq_pack(weight, "gptq_v2")),
    "awq": ("awq", 0, awq_pack),
    "ct": ("rows", 0, lambda weight: ct_pack(weight, symmetric=False)),
}


@dataclass(frozen=True, slots=True)
class Shape:
    rows: tuple[int, ...]
    in_features: int
    group_size: int
    zeros: bool = True
    gated: bool = False
    order: bool = False
    row_order: bool = False
    scales: str = "float16"


SHAPES = {
    "one": Shape((64,), 128, 128),
    "symmetric": Shape((64,), 128, 64, zeros=False),
    "ends-within-a-tile": Shape((72,), 328, 328),
    "three-modules": Shape((72, 24, 40), 192, 32),
    "bfloat16": Shape((136, 8), 256, 128, scales="bfloat16"),
    "float32": Shape((8,), 136, 136, scales="float32"),
    "gated": Shape((72, 72), 160, 32, gated=True),
    "order": Shape((64, 16, 16), 320, 64, order=True),
    "gated-orders": Shape((40, 40), 256, 64, gated=True, order=True, row_order=True),
}
FEW = [  # that together need every layout, gated and not, and each way of a row or a column
    *(("gptq", shape) for shape in ("three-modules", "gated-orders", "order")),
    *(("awq", shape) for shape in ("three-modules", "gated", "ends-within-a-tile")),
    *(("ct", shape) for shape in ("three-modules", "gated", "symmetric")),
]


@pytest.fixture(scope="module")
def host() -> HostDevice:
    return HostDevice()


def stored_layer(name: str, shape: Shape, folder: Path) -> tuple[StoredWords, dict[str, Any]]:
    """A layer in a file, and the packed tensors that are made of its numbers."""
    layout, offset, pack = PACKS[name]
    rng = np.random.default_rng(0)
    groups = shape.in_features // shape.group_size
    parts, qs, scales, zeros = [], [], [], []
    for number, rows in enumerate(shape.rows):
        q = rng.integers(0, 16, (rows, shape.in_features)).astype(np.uint8)
        scale = np.exp2(rng.integers(-8, 0, (rows, groups))).astype(np.float32)  # of any type
        zero = rng.integers(0, 16, (rows, groups)).astype(np.uint8) if shape.zeros else np.full((rows, groups), 8)
        g_idx = np.arange(shape.in_features) // shape.group_size
        tensors = pack(GroupedInt(4, q, scale, zero.astype(np.uint8), g_idx))
        named = {"scales": tensors.get("scales", tensors.get("weight_scale"))}
        named["words"] = tensors.get("qweight", tensors.get("weight_packed"))
        named["zeros"] = tensors.get("qzeros", tensors.get("weight_zero_point"))
        named["scales"] = as_stored(np.ascontiguousarray(named["scales"]).astype(np.float32), shape.scales)
        path = folder / f"{number}.safetensors"
        write_stored(path, {key: np.ascontiguousarray(value) for key, value in named.items()})
        found = read_header(path)
        parts.append(StoredPart(rows, found["words"], found["scales"], found["zeros"] if shape.zeros else None))
        qs.append(q)
        scales.append(scale)
        zeros.append(zero)
    order = rng.permutation(shape.in_features).astype(np.int32) if shape.order else None
    row_order = rng.permutation(shape.rows[0]).astype(np.int32) if shape.row_order else None
    stored = StoredWords(
        layout, tuple(parts), shape.in_features, shape.group_size, offset, shape.gated, order, row_order
    )
    q, scale, zero = np.concatenate(qs), np.concatenate(scales), np.concatenate(zeros)
    q = q if order is None else q[:, order]
    if row_order is not None:
        rows = np.concatenate([row_order, row_order + shape.rows[0]])
        q, scale, zero = q[rows], scale[rows], zero[rows]
    return stored, pack4(q, scale.astype(np.float16), zero if shape.zeros else None, gated=shape.gated)


def packed_by_kernel(stored: StoredWords, host: HostDevice, **changed: Any) -> tuple[dict[str, Any], list[str]]:
    device = BorderedDevice(host)
    parts = [
        Part(
            part.rows,
            np.array(mapped(part.words)),
            np.array(mapped(part.scales)),
            None if part.zeros is None else np.array(mapped(part.zeros)),
        )
        for part in stored.parts
    ]
    given = {"zero_offset": stored.zero_offset, "gated": stored.gated} | changed
    orders = {"order": stored.order, "row_order": stored.row_order} | changed
    tensors = repack4(stored.layout, parts, stored.in_features, stored.group_size, device=device, **(given | orders))
    return tensors, device.overrun()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", PACKS)
def test_qnt_04_what_is_packed(name: str, shape: str, host: HostDevice, tmp_path: Path) -> None:
    """By NumPy and by the kernel: the same bits, also beyond the rows and columns, and QNT-03: zeros of v1 wrap."""
    stored, wanted = stored_layer(name, SHAPES[shape], tmp_path)
    by_kernel, overrun = packed_by_kernel(stored, host)
    for found in (pack_words(stored), by_kernel):
        assert found.keys() == wanted.keys()
        for key, value in wanted.items():
            np.testing.assert_array_equal(found[key], value, err_msg=key)
    assert not overrun


@pytest.mark.parametrize("change", ["zero_offset", "order", "row_order"])
def test_it_can_fail(change: str, host: HostDevice, tmp_path: Path) -> None:
    stored, wanted = stored_layer("gptq", SHAPES["gated-orders"], tmp_path)
    found, _ = packed_by_kernel(stored, host, **{change: 0 if change == "zero_offset" else None})
    assert any((found[key] != value).any() for key, value in wanted.items())


def test_parts_that_do_not_fit_are_refused(host: HostDevice) -> None:
    def part(rows: int, columns: int) -> Part:
        words = np.zeros((columns // 8, rows), np.int32)
        return Part(rows, words, np.zeros((1, rows), np.float16), None)

    with pytest.raises(KernelError, match=r"repack4: parts of \[8, 16\] rows; expected 1 to 3, or 2 alike if gated"):
        repack4("gptq", [part(8, 64), part(16, 64)], 64, 64, device=host, gated=True)
    with pytest.raises(KernelError, match=r"repack4: a weight \[4, 64\]; expected multiples of 8"):
        repack4("gptq", [part(4, 64)], 64, 64, device=host)
    with pytest.raises(KernelError, match=r"repack4: words has shape \[8, 8\]; expected \[64, 1\]"):
        repack4("awq", [part(8, 64)], 64, 64, device=host)
