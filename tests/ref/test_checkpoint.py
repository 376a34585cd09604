"""ref.checkpoint: what was written comes back, and every damage is named."""

import json
import struct
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.numpy

from conformance.golden_models import llama_config, llama_tensors, rand_model, write_safetensors
from ref.checkpoint import BF16, is_float, read_checkpoint, read_safetensors, widen
from ref.numerics import round_to

SMALL: dict[str, Any] = {"vocab_size": 16, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_come_back(tmp_path: Path, dtype: str) -> None:
    expected = llama_tensors(llama_config(**SMALL), seed=3)
    found = read_checkpoint(rand_model(tmp_path, 3, dtype=dtype, **SMALL))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        assert found[name].dtype == np.float32
        np.testing.assert_array_equal(found[name], round_to(tensor, dtype))


def test_float64_is_exact(tmp_path: Path) -> None:
    x = np.array([1.1, np.pi])
    safetensors.numpy.save_file({"x": x}, tmp_path / "model.safetensors")
    np.testing.assert_array_equal(read_checkpoint(tmp_path, np.float64)["x"], x)


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_tensors_as_stored_are_views_of_the_file(tmp_path: Path, dtype: str) -> None:
    folder = rand_model(tmp_path, dtype=dtype, **SMALL)
    stored, read = read_checkpoint(folder, None), read_checkpoint(folder, np.float64)
    for name, tensor in stored.items():
        assert tensor.dtype == (BF16 if dtype == "bfloat16" else np.dtype(dtype))
        assert is_float(tensor)
        assert not tensor.flags.owndata
        assert not tensor.flags.writeable
        np.testing.assert_array_equal(widen(tensor, np.float64), read[name])
        assert widen(tensor).dtype == (np.float32 if dtype == "bfloat16" else tensor.dtype)
    assert not is_float(np.zeros(1, np.uint8))


def test_shards_hold_the_same_as_one_file(tmp_path: Path) -> None:
    one = read_checkpoint(rand_model(tmp_path / "one", **SMALL))
    many = read_checkpoint(rand_model(tmp_path / "many", num_shards=3, **SMALL))
    assert one.keys() == many.keys()
    for name in one:
        np.testing.assert_array_equal(one[name], many[name])


def test_the_safetensors_package_reads_what_we_write(tmp_path: Path) -> None:
    x = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.ones(1, np.float32)}
    write_safetensors(tmp_path / "x.safetensors", x)
    found = safetensors.numpy.load_file(tmp_path / "x.safetensors")
    assert {name: tensor.tolist() for name, tensor in found.items()} == {n: t.tolist() for n, t in x.items()}


@pytest.mark.parametrize("size", [0, 7, 8, 40, -1])
def test_a_truncated_file_is_named(tmp_path: Path, size: int) -> None:
    file = rand_model(tmp_path, **SMALL) / "model.safetensors"
    file.write_bytes(file.read_bytes()[:size])
    with pytest.raises(ValueError, match=r"model\.safetensors is damaged"):
        read_checkpoint(tmp_path)


def test_a_header_that_is_no_json_is_named(tmp_path: Path) -> None:
    file = tmp_path / "x.safetensors"
    file.write_bytes(struct.pack("<Q", 3) + b"{x}")
    with pytest.raises(ValueError, match=r"x\.safetensors is damaged: its header is no JSON"):
        read_safetensors(file)
    file.write_bytes(struct.pack("<Q", 3) + b"[1]")
    with pytest.raises(ValueError, match=r"x\.safetensors is damaged: its header is a list"):
        read_safetensors(file)


@pytest.mark.parametrize(
    ("entry", "message"),
    [
        ({"dtype": "I64", "shape": [1], "data_offsets": [0, 8]}, "tensor w is I64; ref reads F64, F32, F16, BF16"),
        ({"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}, r"tensor w of shape \[3\] needs 12 bytes"),
        ({"dtype": "F32", "shape": [1], "data_offsets": [0, 8]}, r"tensor w of shape \[1\] needs 4 bytes"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [4, 12]}, "stands at bytes 4 to 12 of 8"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}, "stands at bytes -8 to 0"),
        (
            {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]},
            r"tensor w is described as \{'dtype': 'F32', 'sh",
        ),
        ({"dtype": "F32", "shape": 2, "data_offsets": [0, 8]}, "tensor w is described as"),
        ({"dtype": "F32", "shape": [2], "data_offsets": [8]}, "tensor w is described as"),
        ({"dtype": "F32", "shape": [2]}, "tensor w is described as"),
        ("F32", "tensor w is described as 'F32'"),
    ],
)
def test_a_wrong_entry_is_named(tmp_path: Path, entry: Any, message: str) -> None:
    file = tmp_path / "x.safetensors"
    header = json.dumps({"w": entry}).encode()
    file.write_bytes(struct.pack("<Q", len(header)) + header + bytes(8))
    with pytest.raises(ValueError, match=message):
        read_safetensors(file)


@pytest.mark.parametrize("place", ["../model.safetensors", "/etc/model.safetensors", "..", ""])
def test_an_index_may_not_point_outside_the_folder(tmp_path: Path, place: str) -> None:
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": place}}))
    with pytest.raises(ValueError, match="only files beside the index are read"):
        read_checkpoint(tmp_path)


def test_an_index_that_lies_is_named(tmp_path: Path) -> None:
    index = rand_model(tmp_path, num_shards=2, **SMALL) / "model.safetensors.index.json"
    content = json.loads(index.read_text())
    content["weight_map"]["extra.weight"] = "model-00001-of-00002.safetensors"
    index.write_text(json.dumps(content))
    with pytest.raises(ValueError, match=r"holds the tensor extra\.weight, but it does not"):
        read_checkpoint(tmp_path)
    for text in ("{}", "[]", '{"weight_map": ["w"]}', "{"):
        index.write_text(text)
        with pytest.raises(ValueError, match="no valid index"):
            read_checkpoint(tmp_path)
    index.write_text('{"weight_map": {"w": 1}}')
    with pytest.raises(ValueError, match="names the file 1; only files beside the index are read"):
        read_checkpoint(tmp_path)


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError, match=r"neither model\.safetensors nor model\.safetensors\.index\.json"):
        read_checkpoint(tmp_path)
    rand_model(tmp_path, num_shards=2, **SMALL)
    (tmp_path / "model-00002-of-00002.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match="model-00002-of-00002"):
        read_checkpoint(tmp_path)
