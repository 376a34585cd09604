"""engine.checkpoint.folder: exactly the files that belong to the checkpoint are read (LDR-03, LDR-05)."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors.numpy import save_file

from conformance.golden_models import rand_model
from engine.checkpoint.folder import INDEX, folder_tensors
from engine.errors import CheckpointError, ConfigError
from tests.engine.checkpoint.files import load

SHARDS = [f"model-0000{shard}-of-00003.safetensors" for shard in (1, 2, 3)]


@pytest.fixture
def sharded(tmp_path: Path) -> Path:
    return rand_model(tmp_path / "model", num_shards=3)


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert str(folder) in str(caught.value)
    return str(caught.value)


def edit_index(folder: Path, **weight_map: Any) -> None:
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"] |= weight_map
    (folder / INDEX).write_text(json.dumps(index))


def test_shards_hold_the_same_weights_as_one_file(sharded: Path, tmp_path: Path):
    whole, parts = load(rand_model(tmp_path / "whole")), load(sharded)
    for dest, weight in whole.linears.items():
        assert np.array_equal(weight.tensors["weight"], parts.linears[dest].tensors["weight"])
    for dest, array in whole.arrays.items():
        assert np.array_equal(array, parts.arrays[dest])


def test_ldr_03_missing_shards_are_listed_at_once(sharded: Path):
    """LDR-03: the index lists it, the file is absent."""
    (sharded / SHARDS[1]).unlink()
    assert f"1 of the 3 weight files in {INDEX} are missing: {SHARDS[1]}" in refusal(sharded)
    (sharded / SHARDS[0]).unlink()
    assert f"2 of the 3 weight files in {INDEX} are missing: {SHARDS[0]}, {SHARDS[1]}" in refusal(sharded)


def test_ldr_03_missing_shard_without_an_index(sharded: Path):
    """LDR-03: with no index to tell, the tensors that are not there do."""
    (sharded / INDEX).unlink()
    (sharded / SHARDS[1]).unlink()
    assert "tensors are missing: model." in refusal(sharded)


def test_ldr_03_only_the_index(sharded: Path):
    """LDR-03: only the index is present."""
    for shard in SHARDS:
        (sharded / shard).unlink()
    assert f"3 of the 3 weight files in {INDEX} are missing" in refusal(sharded)


@pytest.mark.parametrize("content", ['{"weight_map": {}}', "{}", '{"weight_map": []}', "[]", "{", "\xff"])
def test_ldr_03_empty_or_broken_index(sharded: Path, content: str):
    """LDR-03: weight_map empty; not an index at all."""
    (sharded / INDEX).write_bytes(content.encode("latin-1"))
    assert INDEX in refusal(sharded)


def test_ldr_03_empty_folder(tmp_path: Path):
    """LDR-03: no config, then no weights."""
    with pytest.raises(ConfigError, match=r"has no config\.json, so it is no model folder"):
        load(tmp_path)
    folder = rand_model(tmp_path / "model")
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    assert "has no weights: neither" in refusal(folder)
    assert "It has pytorch_model.bin, which is not read from a folder." in refusal(folder)


def test_a_folder_of_gguf_files_says_what_to_do(tmp_path: Path):
    (tmp_path / "small.gguf").touch()
    with pytest.raises(ConfigError, match=r"GGUF files \(small\.gguf\) pass that file"):
        load(tmp_path)


@pytest.mark.parametrize(
    "file",
    ["../model.safetensors", "/etc/model.safetensors", "..", "sub/model.safetensors", "sub\\model.safetensors",
     "C:model.safetensors", "model.bin", "", 7, None, "model\0.safetensors"],
)  # fmt: skip
def test_an_index_that_points_outside_the_folder(sharded: Path, file: Any):
    """The target exists, so that only the rule can refuse it."""
    save_file({"x": np.zeros(1, np.float32)}, sharded.parent / "model.safetensors")
    edit_index(sharded, x=file)
    assert "it must be the plain name of a .safetensors file in the same folder" in refusal(sharded)


def test_index_and_file_disagree(sharded: Path):
    """LDR-04: all tensors that are not where the index says are named."""
    edit_index(sharded, **{"model.norm.weight": SHARDS[0], "lm_head.weight": SHARDS[0], "new": SHARDS[0]})
    held = set(folder_names(sharded / SHARDS[0]))
    text = refusal(sharded)
    for name in {"model.norm.weight", "lm_head.weight", "new"} - held:
        assert f"{name} ({SHARDS[0]})" in text
    assert "new (" in text


def folder_names(path: Path) -> list[str]:
    return [
        name
        for name in json.loads(path.read_bytes()[8 : 8 + int.from_bytes(path.read_bytes()[:8], "little")])
        if name != "__metadata__"
    ]


def test_ldr_05_stray_files_beside_an_index_are_not_opened(sharded: Path):
    """LDR-05: consolidated, single, adapter and .bin files, and a folder named like a shard."""
    before = folder_tensors(sharded)
    for stray in ("consolidated.safetensors", "model.safetensors", "adapter_model.safetensors", "pytorch_model.bin"):
        (sharded / stray).write_bytes(b"damaged")
    (sharded / "other.safetensors").mkdir()
    assert folder_tensors(sharded) == before
    load(sharded)


def test_ldr_05_without_an_index_the_single_file_is_it(tmp_path: Path):
    """LDR-05: documented rule: model.safetensors alone."""
    folder = rand_model(tmp_path / "model")
    for stray in ("consolidated.safetensors", "adapter_model.safetensors"):
        (folder / stray).write_bytes(b"damaged")
    load(folder)


def test_ldr_05_with_neither_all_files_count_and_no_name_twice(sharded: Path):
    """LDR-05: documented rule: all *.safetensors; a tensor in two of them is an error."""
    (sharded / INDEX).unlink()
    load(sharded)
    name = folder_names(sharded / SHARDS[0])[0]
    save_file({name: np.zeros(1, np.float32)}, sharded / "twin.safetensors")
    assert f"tensor {name!r} is in both {SHARDS[0]} and twin.safetensors" in refusal(sharded)


def test_links_into_another_folder_are_fine(sharded: Path, tmp_path: Path):
    """The hub's cache is made of links; the rule is about what the index may say, not about where a file lives."""
    cache = tmp_path / "cache"
    cache.mkdir()
    for file in sharded.iterdir():
        (cache / file.name).symlink_to(file)
    load(cache)


@pytest.mark.parametrize("file", ["x" * 300 + ".safetensors", "\u00e9" * 130 + ".safetensors", "\ud800.safetensors"])
def test_an_index_with_a_name_that_no_file_can_have_is_refused(sharded: Path, file: str):
    edit_index(sharded, **{"model.norm.weight": file})
    assert "'model.norm.weight' is said to be in" in refusal(sharded)


def test_a_byte_order_mark_in_the_json_files_changes_nothing(sharded: Path):
    plain = load(sharded)
    for name in (INDEX, "config.json"):
        (sharded / name).write_bytes(b"\xef\xbb\xbf" + (sharded / name).read_bytes())
    assert load(sharded).num_bytes == plain.num_bytes
