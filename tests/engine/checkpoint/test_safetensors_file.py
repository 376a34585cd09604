"""engine.checkpoint.safetensors_file: hostile and damaged files end in one clear error (LDR-01, LDR-02)."""

import contextlib
import os
import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import save, save_file

from conformance.golden_models import rand_model
from engine.checkpoint.safetensors_file import read_header
from engine.checkpoint.stored_tensor import read_into
from engine.errors import CheckpointError
from tests.engine.checkpoint.files import entry, load, safetensors_bytes


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_header(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


HOSTILE: dict[str, tuple[bytes, str]] = {
    "0 bytes": (b"", "has 0 bytes, too few"),
    "7 bytes": (b"1234567", "has 7 bytes, too few"),
    "length 0": (bytes(8) + b"{}", "the header's length is 0"),
    "length = file size": ((24).to_bytes(8, "little") + b"{}" + bytes(14), "the header's length is 24"),
    "length 2^63": ((2**63).to_bytes(8, "little") + b"{}", f"the header's length is {2**63}"),
    "length 2^64-1": ((2**64 - 1).to_bytes(8, "little") + b"{}", f"the header's length is {2**64 - 1}"),
    "not JSON": (safetensors_bytes(b"{nonsense}"), "the header cannot be read"),
    "deeply nested": (safetensors_bytes(b"[" * 100_000), "the header cannot be read"),
    "a number of many digits": (safetensors_bytes(b'{"t": ' + b"9" * 10_000 + b"}"), "the header cannot be read"),
    "not UTF-8": (safetensors_bytes(b'{"\xff": 1}'), "the header cannot be read"),
    "a list": (safetensors_bytes([]), "must be a JSON object, found list"),
    "name twice": (safetensors_bytes(b'{"t": {}, "t": {}}'), "the name 't' stands there twice"),
    "metadata of numbers": (safetensors_bytes({"__metadata__": {"a": 1}}), "__metadata__ must be"),
    "entry without shape": (safetensors_bytes({"t": {"dtype": "F32"}}), "tensor 't' must have dtype, shape"),
    "unknown dtype": (safetensors_bytes({"t": entry("F99", [1], 0, 4)}, bytes(4)), "'t' has the unknown dtype 'F99'"),
    "dtype no text": (safetensors_bytes({"t": entry([], [1], 0, 4)}, bytes(4)), "'t' has the unknown dtype []"),  # type: ignore[arg-type]
    "negative shape": (safetensors_bytes({"t": entry("F32", [-1], 0, 4)}, bytes(4)), "'t': shape must be"),
    "shape of floats": (safetensors_bytes({"t": entry("F32", [1.0], 0, 4)}, bytes(4)), "'t': shape must be"),  # type: ignore[list-item]
    "shape of ten thousand": (
        safetensors_bytes({"t": entry("F32", [2**62] * 10**4, 0, 4)}, bytes(4)),
        "'t': shape must",
    ),
    "product over 2^64": (
        safetensors_bytes({"t": entry("F32", [2**32, 2**32, 1], 0, 0)}),
        f"'t' has 0 bytes; F32 [{2**32}, {2**32}, 1] takes {2**66}",
    ),
    "begin > end": (safetensors_bytes({"t": entry("F32", [1], 4, 0)}, bytes(4)), "'t': data_offsets [4, 0] must be"),
    "end beyond file": (safetensors_bytes({"t": entry("F32", [2], 0, 8)}, bytes(4)), "within the 4 bytes of data"),
    "size unlike shape": (safetensors_bytes({"t": entry("F32", [1], 0, 8)}, bytes(8)), "has 8 bytes; F32 [1] takes 4"),
    "overlap": (
        safetensors_bytes({"a": entry("F32", [2], 0, 8), "b": entry("F32", [1], 4, 8)}, bytes(8)),
        "the bytes before 'b' overlap: it begins at 4, the tensor before it ends at 8",
    ),
    "hole": (
        safetensors_bytes({"a": entry("F32", [1], 0, 4), "b": entry("F32", [1], 8, 12)}, bytes(12)),
        "the bytes before 'b' leave a hole",
    ),
}


@pytest.mark.parametrize("case", HOSTILE)
def test_ldr_01_hostile_header(tmp_path: Path, case: str):
    """LDR-01: each gives an error that names file and tensor, and memory does not jump."""
    content, says = HOSTILE[case]
    path = tmp_path / "model.safetensors"
    path.write_bytes(content)
    tracemalloc.start()
    assert says in refusal(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20 + 40 * len(content)  # parsed JSON takes up to 36 bytes an element


@pytest.mark.parametrize("case", HOSTILE)
def test_ldr_01_stops_a_start(tmp_path: Path, case: str):
    """LDR-01: the same through --model."""
    folder = rand_model(tmp_path / "model")
    (folder / "model.safetensors").write_bytes(HOSTILE[case][0])
    with pytest.raises(CheckpointError, match=r"model\.safetensors"):
        load(folder)


def test_ldr_01_header_over_the_cap(tmp_path: Path):
    """LDR-01: 100 MB and a byte, in a file that is really that long (sparse), is refused before it is read."""
    path = tmp_path / "model.safetensors"
    with open(path, "wb") as file:
        file.write((100_000_001).to_bytes(8, "little"))
        file.truncate(100_000_100)
    tracemalloc.start()
    assert "the header's length is 100000001; expected 2 to 100000000" in refusal(path)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 2**20


@pytest.mark.parametrize("cut", [1, 4096, None])
def test_ldr_02_cut_short(tmp_path: Path, cut: int | None):
    """LDR-02: the last byte, the last 4096 bytes, half of the file are missing."""
    folder = rand_model(tmp_path / "model")
    path = folder / "model.safetensors"
    size = path.stat().st_size
    os.truncate(path, size // 2 if cut is None else size - cut)
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor .* must be a begin and an end within"):
        load(folder)


def test_ldr_02_one_byte_too_many(tmp_path: Path):
    """LDR-02: trailing bytes are refused, as the format demands."""
    folder = rand_model(tmp_path / "model")
    with open(folder / "model.safetensors", "ab") as file:
        file.write(b"\0")
    with pytest.raises(CheckpointError, match="has 1 bytes after the last tensor"):
        load(folder)


@pytest.mark.parametrize("length", [4096, 65536, 100_000])
def test_ldr_02_header_of_a_read_ahead_size(tmp_path: Path, length: int):
    """LDR-02: a header of exactly a buffer's size is read whole."""
    path = tmp_path / "model.safetensors"
    text = str(entry("F32", [1], 0, 4)).replace("'", '"')
    header = f'{{"t": {text}}}'.encode().ljust(length)
    path.write_bytes(safetensors_bytes(header, np.float32(7).tobytes()))
    assert _values(path)["t"].tolist() == [7.0]


def test_ldr_02_lfs_pointer_folder_unreadable(tmp_path: Path):
    """LDR-02: what stands in the place of a shard without being one."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(b"version https://git-lfs.example/spec/v1\noid sha256:00\nsize 123\n")
    assert "is a Git LFS pointer" in refusal(path)
    path.unlink()
    path.mkdir()
    assert "is a folder" in refusal(path)
    path.rmdir()
    path.symlink_to(path)
    assert "cannot be read" in refusal(path)
    path.unlink()
    os.mkfifo(path)
    assert "is no regular file" in refusal(path)


@pytest.mark.skipif(os.geteuid() == 0, reason="root may read everything")
def test_ldr_02_no_permission(tmp_path: Path):
    """LDR-02: made unreadable."""
    path = tmp_path / "model.safetensors"
    path.write_bytes(safetensors_bytes({}))
    path.chmod(0)
    assert "cannot be read: Permission denied" in refusal(path)


def test_ldr_02_cut_after_the_header_was_read(tmp_path: Path):
    """LDR-02: a file that shrinks between the check and the copy gives an error, not a bus error."""
    path = tmp_path / "model.safetensors"
    save_file({"t": np.ones((1000, 1000), np.float32)}, path)
    tensor = read_header(path)["t"]
    os.truncate(path, 1000)
    with pytest.raises(CheckpointError, match="cannot read t, the file has changed since the start"):
        read_into(tensor, np.empty((1000, 1000), np.float32))


def test_ldr_02_cut_after_loading(tmp_path: Path):
    """LDR-02: loaded weights do not live in the file any more."""
    folder = rand_model(tmp_path / "model")
    weights = load(folder)
    before = weights.arrays["embed_tokens"].copy()
    os.truncate(folder / "model.safetensors", 0)
    assert np.array_equal(weights.arrays["embed_tokens"], before)


def _values(path: Path) -> dict[str, np.ndarray]:
    values = {}
    for name, tensor in read_header(path).items():
        values[name] = np.empty(tensor.shape, np.float32)
        read_into(tensor, values[name])
    return values


SHAPES = st.lists(st.integers(0, 5), max_size=4)


@settings(deadline=None)
@given(st.dictionaries(st.text(min_size=1).filter(lambda name: name != "__metadata__"), SHAPES, max_size=6), st.data())
def test_reads_what_the_formats_own_library_writes(tmp_path_factory: Any, shapes: dict[str, list[int]], data: Any):
    """Any names and shapes, empty tensors and scalars too; float32 and float16."""
    dtype = data.draw(st.sampled_from([np.float32, np.float16]))
    rng = np.random.default_rng(0)
    tensors = {name: np.asarray(rng.standard_normal(shape), dtype) for name, shape in shapes.items()}
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(save(tensors))
    found = _values(path)
    assert found.keys() == tensors.keys()
    for name, tensor in tensors.items():
        assert found[name].shape == tensor.shape
        assert np.array_equal(found[name], tensor.astype(np.float32))


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_ldr_01_any_damage_is_a_checkpoint_error(tmp_path_factory: Any, data: Any):
    """LDR-01: bytes of a sound file changed at random: it is read or refused, nothing else happens."""
    content = bytearray(save({"a": np.ones((2, 3), np.float32), "b": np.zeros(4, np.float16)}))
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path = tmp_path_factory.getbasetemp() / "any.safetensors"
    path.write_bytes(content[: data.draw(st.integers(0, len(content)))])
    with contextlib.suppress(CheckpointError):
        assert sum(tensor.num_bytes for tensor in read_header(path).values()) < len(content)
