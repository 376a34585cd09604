"""ref.quant.stored: weights that are decoded when used, slice by slice, say what whole ones say."""

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from ref.checkpoint import BF16
from ref.linear import linear
from ref.numerics import bf16_bits, round_to
from ref.quant import stored
from ref.quant.coded import CodedWeight, QuantWeight, dequantize_weight, quantized_linear, weight_rows
from ref.quant.fp8 import fp8_quantize
from ref.quant.fp8_block import fp8_block_quantize
from ref.quant.gptq import gptq_pack
from ref.quant.groups import GroupedInt, grouped_quantize
from ref.quant.int8 import int8_quantize
from ref.quant.scheme import read_weights
from ref.quant.stored import StoredWeight, arithmetic_dtype, decoded, row_slices, weight_embedding, weight_linear
from tests.ref.quant.test_scheme import GPTQ, named, write_folder

SHAPE = (300, 192)


def dense(seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).standard_normal(SHAPE)


def as_bf16(x: np.ndarray) -> np.ndarray:
    return bf16_bits(x).view(BF16)


KINDS: dict[str, Callable[[], QuantWeight]] = {
    "float32": lambda: dense().astype(np.float32),
    "bfloat16": lambda: as_bf16(dense()),
    "grouped": lambda: grouped_quantize(dense(), 4, 64, symmetric=False),
    "int8": lambda: CodedWeight(*int8_quantize(dense()), activations="token"),
    "int8 static": lambda: CodedWeight(*int8_quantize(dense()), activations="static", input_scale=np.array([0.02])),
    "fp8 tensor": lambda: CodedWeight(*fp8_quantize(dense(), axis=None), activations="token"),
    "fp8 channel": lambda: CodedWeight(*fp8_quantize(dense())),
    "fp8 tiles": lambda: CodedWeight(*fp8_block_quantize(dense()), block=(128, 128), activations="group"),
    "fp8 low tiles": lambda: CodedWeight(*fp8_block_quantize(dense(), (50, 64)), block=(50, 64), activations="group"),
}


def in_files(weight: QuantWeight, *, as_format: bool) -> StoredWeight:
    return StoredWeight(weight.shape, np.dtype(np.float64), as_format, lambda: weight)


@pytest.mark.parametrize("rows", [4096, 130, 7])
@pytest.mark.parametrize("kind", KINDS)
def test_slices_give_what_the_whole_gives(kind: str, rows: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel's sums are in float64 here, in which BLAS may order 192 products anew."""
    monkeypatch.setattr(stored, "ROWS", rows)
    weight, x = KINDS[kind](), np.random.default_rng(1).standard_normal((5, SHAPE[1]))
    bias = np.arange(SHAPE[0], dtype=np.float32)
    whole = quantized_linear(x, weight, bias)
    for held in (weight, in_files(weight, as_format=True)):
        np.testing.assert_allclose(weight_linear(x, held, bias), whole, rtol=0, atol=1e-11)
    plain = linear(x, dequantize_weight(weight), bias)
    np.testing.assert_allclose(weight_linear(x, in_files(weight, as_format=False), bias), plain, rtol=0, atol=1e-11)
    assert weight_linear(x[:0], in_files(weight, as_format=True)).shape == (0, SHAPE[0])


@pytest.mark.parametrize("kind", KINDS)
def test_rows_of_a_weight_are_rows_of_its_numbers(kind: str) -> None:
    weight = KINDS[kind]()
    part = weight_rows(weight, slice(250, 300)) if kind == "fp8 low tiles" else weight_rows(weight, slice(256, 300))
    assert part.shape == (300 - (250 if kind == "fp8 low tiles" else 256), SHAPE[1])
    np.testing.assert_array_equal(dequantize_weight(part), dequantize_weight(weight)[-part.shape[0] :])


def test_slices_are_whole_tiles(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stored, "ROWS", 130)
    assert row_slices(KINDS["fp8 tiles"]()) == [slice(0, 128), slice(128, 256), slice(256, 300)]
    assert row_slices(KINDS["fp8 low tiles"]()) == [slice(0, 100), slice(100, 200), slice(200, 300)]
    assert row_slices(KINDS["int8"]()) == [slice(0, 130), slice(130, 260), slice(260, 300)]
    monkeypatch.setattr(stored, "ROWS", 7)  # less than a tile
    assert len(row_slices(KINDS["fp8 tiles"]())) == 3


def test_a_decoded_weight_is_rounded_to_storage_as_a_kernel_rounds_it() -> None:
    weight, x = KINDS["grouped"](), np.eye(SHAPE[1])
    kernel = weight_linear(x, in_files(weight, as_format=True), storage="bfloat16")
    np.testing.assert_array_equal(kernel.T, round_to(dequantize_weight(weight), "bfloat16"))
    exact = weight_linear(x, in_files(weight, as_format=False), storage="bfloat16")
    np.testing.assert_array_equal(exact.T, dequantize_weight(weight))


def test_embedding_takes_rows_and_widens_them() -> None:
    table, ids = dense(), np.array([299, 0, 0])
    rows = weight_embedding(ids, in_files(as_bf16(table), as_format=False), np.float64)
    assert rows.dtype == np.float64
    np.testing.assert_array_equal(rows, round_to(table[ids], "bfloat16"))
    with pytest.raises(ValueError, match="token id 300 is outside the vocabulary"):
        weight_embedding(np.array([300]), as_bf16(table), np.float64)
    coded = KINDS["int8"]()
    np.testing.assert_array_equal(weight_embedding(ids, coded, np.float64), dequantize_weight(coded)[ids])


def test_the_arithmetic_is_that_of_the_first_floating_weight() -> None:
    grouped = KINDS["grouped"]()
    assert arithmetic_dtype([grouped, np.ones(1, np.float32), np.ones(1)]) == np.float32
    assert arithmetic_dtype([StoredWeight((1,), np.dtype(np.float32), True, lambda: grouped)]) == np.float32


def test_small_checkpoints_are_decoded_once_and_large_ones_when_used(tmp_path: Path) -> None:
    """16 × 192 weights and a norm of 16 in float64: 24704 bytes."""
    packed = grouped_quantize(dense()[:16].astype(np.float32), 4, 32, symmetric=False)
    tensors = {**named("a", gptq_pack(packed)), "norm.weight": np.ones(16, np.float16)}
    folder = write_folder(tmp_path, tensors, config={"quantization_config": GPTQ})
    kept = read_weights(folder, np.float64, keep_bytes=24704)
    left = read_weights(folder, np.float64, keep_bytes=24703)
    assert isinstance(kept["a.weight"], np.ndarray)
    assert isinstance(left["a.weight"], StoredWeight)
    assert left["a.weight"].shape == (16, 192)
    assert isinstance(left["a.weight"].unpack(), GroupedInt)
    for name in ("a.weight", "norm.weight"):
        np.testing.assert_array_equal(decoded(left[name], np.float64), kept[name])
    assert isinstance(read_weights(folder, np.float64, activations="format")["a.weight"], GroupedInt)
    with pytest.raises(ValueError, match="activations is 'int8'; known are float, format"):
        read_weights(folder, activations="int8")


def test_what_was_decoded_once_no_longer_needs_its_file(tmp_path: Path) -> None:
    codes, scale = fp8_quantize(dense())
    config = {"quant_method": "fp8", "activation_scheme": "dynamic"}
    tensors = named("a", {"weight": codes, "weight_scale": scale[:, None].astype(np.float32)})
    folder = write_folder(tmp_path, tensors, config={"quantization_config": config})
    weight = read_weights(folder, activations="format")["a.weight"]
    with open(folder / "model.safetensors", "r+b") as file:
        file.write(bytes((folder / "model.safetensors").stat().st_size))
    assert isinstance(weight, CodedWeight)
    np.testing.assert_array_equal(weight.codes, codes)
