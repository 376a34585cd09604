"""engine.checkpoint.gguf_file: the format read as the gguf package writes it; damage ends in one clear error."""

import contextlib
import os
import struct
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.checkpoint.gguf_file import TYPE_NAMES, gguf_metadata, read_gguf
from engine.errors import CheckpointError
from tests.engine.checkpoint.files import llama_gguf_tensors, write_gguf

TOKENIZER = {
    "ggml.model": "gpt2",
    "ggml.tokens": ["<s>", "é", "日本", "🙂", ""],
    "ggml.token_type": [3, 1, 1, 1, 1],
    "ggml.scores": [0.5, -1.25, 0.0, 1.0, 2.0],
    "ggml.bos_token_id": 1,
    "ggml.add_bos_token": False,
    "chat_template": "{{ messages }}\n",
}


@pytest.fixture
def sound(tmp_path: Path) -> Path:
    return write_gguf(tmp_path / "m.gguf", llama_gguf_tensors(np.random.default_rng(0)), tokenizer=TOKENIZER)


def refusal(path: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        read_gguf(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf_bytes(num_tensors: int = 0, num_pairs: int = 0, rest: bytes = b"", version: int = 3) -> bytes:
    return b"GGUF" + struct.pack("<IQQ", version, num_tensors, num_pairs) + rest


def test_metadata_are_plain_values(sound: Path):
    metadata = gguf_metadata(sound)
    for key, value in TOKENIZER.items():
        assert metadata[f"tokenizer.{key}"] == value
        assert type(metadata[f"tokenizer.{key}"]) is type(value)
    assert metadata["general.architecture"] == "llama"
    assert metadata["llama.block_count"] == 2
    assert type(metadata["llama.rope.freq_base"]) is float


def test_metadata_and_tensors_are_those_that_the_gguf_package_reads(sound: Path):
    ours, theirs = read_gguf(sound), gguf.GGUFReader(sound)
    fields = {key: field.contents() for key, field in theirs.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == fields
    assert list(ours.tensors) == [tensor.name for tensor in theirs.tensors]
    for tensor in theirs.tensors:
        found = ours.tensors[tensor.name]
        assert found.shape == tuple(reversed(tensor.shape.tolist()))
        assert (found.dtype, found.offset, found.num_bytes) == (
            tensor.tensor_type.name, tensor.data_offset, tensor.n_bytes,
        )  # fmt: skip


def test_type_numbers_are_those_of_ggml():
    known = {int(kind): kind.name for kind in gguf.GGMLQuantizationType}
    assert {number: known.get(number) for number in TYPE_NAMES} == TYPE_NAMES


@pytest.mark.parametrize("kind", [kind for kind in gguf.GGUFValueType if kind != gguf.GGUFValueType.ARRAY])
def test_every_kind_of_value(tmp_path: Path, kind: gguf.GGUFValueType):
    value: Any = {gguf.GGUFValueType.STRING: "x", gguf.GGUFValueType.BOOL: True}.get(kind, 1)
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_key_value("some.key", value, kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_ti_data_to_file()
    writer.close()
    assert gguf_metadata(tmp_path / "m.gguf")["some.key"] == value


PAIR = text("k")
HOSTILE: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "wants 4 bytes at 0 of 0"),
    "another format": (b"\x08\0\0\0\0\0\0\0{}", "is not a GGUF file"),
    "version 1": (gguf_bytes(version=1), "has GGUF version 1"),
    "big-endian": (b"GGUF" + struct.pack(">IQQ", 3, 0, 0), "is big-endian"),
    "2^64-1 pairs": (gguf_bytes(num_pairs=2**64 - 1), "wants 8 bytes at 24 of 24"),
    "2^64-1 tensors": (gguf_bytes(num_tensors=2**64 - 1), "wants 8 bytes at 24 of 24"),
    "key of 2^63": (gguf_bytes(num_pairs=1, rest=struct.pack("<Q", 2**63)), f"wants {2**63} bytes"),
    "key not UTF-8": (gguf_bytes(num_pairs=1, rest=struct.pack("<Q", 1) + b"\xff"), "is not UTF-8"),
    "key twice": (gguf_bytes(num_pairs=2, rest=(PAIR + struct.pack("<IB", 0, 1)) * 2), "has the key 'k' twice"),
    "value of type 99": (gguf_bytes(num_pairs=1, rest=PAIR + struct.pack("<I", 99)), "k has a value of type 99"),
    "array in an array": (gguf_bytes(num_pairs=1, rest=PAIR + struct.pack("<IIQ", 9, 9, 1)), "type 9, which is"),
    "2^62 numbers": (gguf_bytes(num_pairs=1, rest=PAIR + struct.pack("<IIQ", 9, 4, 2**62)), f"wants {2**64} bytes"),
    "2^62 texts": (gguf_bytes(num_pairs=1, rest=PAIR + struct.pack("<IIQ", 9, 8, 2**62)), f"k claims {2**62} texts"),
    "alignment 3": (
        gguf_bytes(num_pairs=1, rest=text("general.alignment") + struct.pack("<II", 4, 3)),
        "general.alignment is 3; it must be a power of two",
    ),
    "alignment 0": (
        gguf_bytes(num_pairs=1, rest=text("general.alignment") + struct.pack("<II", 4, 0)),
        "general.alignment is 0",
    ),
    "tensor twice": (
        gguf_bytes(2, 0, (text("t") + struct.pack("<IQIQ", 1, 1, 0, 0)) * 2), "has the tensor 't' twice",
    ),
    "5 dimensions": (gguf_bytes(1, 0, text("t") + struct.pack("<I", 5)), "tensor 't' has 5 dimensions"),
    "offset beyond the file": (
        gguf_bytes(1, 0, text("t") + struct.pack("<IQIQ", 1, 1, 0, 2**63)), "tensor 't' ends at byte",
    ),
    "size beyond the file": (
        gguf_bytes(1, 0, text("t") + struct.pack("<I4QIQ", 4, *[2**62] * 4, 0, 0)), "tensor 't' ends at byte",
    ),
    "row of no whole blocks": (
        gguf_bytes(1, 0, text("t") + struct.pack("<IQIQ", 1, 33, 8, 0)), "rows of 33, no multiple of the 32 weights",
    ),
    "scalar of blocks": (gguf_bytes(1, 0, text("t") + struct.pack("<IIQ", 0, 8, 0)), "rows of 1, no multiple"),
}  # fmt: skip


@pytest.mark.parametrize("case", HOSTILE)
def test_hostile_headers(tmp_path: Path, case: str):
    """LDR-01 for GGUF: a length is not trusted, and no fault ends in a traceback of something else."""
    content, says = HOSTILE[case]
    (tmp_path / "m.gguf").write_bytes(content)
    assert says in refusal(tmp_path / "m.gguf")


@pytest.mark.parametrize("cut", [1, 4096, None])
def test_cut_short(sound: Path, cut: int | None):
    """LDR-02 for GGUF."""
    size = sound.stat().st_size
    os.truncate(sound, size // 2 if cut is None else size - cut)
    assert "ends at byte" in refusal(sound)


def test_cut_anywhere_in_the_header(sound: Path):
    """LDR-02 for GGUF: every length up to the first tensor."""
    data_start = min(tensor.offset for tensor in read_gguf(sound).tensors.values())
    content = sound.read_bytes()
    for length in range(0, data_start, 7):
        sound.write_bytes(content[:length])
        refusal(sound)


def test_folder_and_nothing(tmp_path: Path):
    assert "is a folder" in refusal(tmp_path)
    assert "cannot be read: No such file" in refusal(tmp_path / "m.gguf")


@settings(deadline=None, max_examples=100)
@given(st.data())
def test_any_damage_is_a_checkpoint_error(tmp_path_factory: Any, data: Any):
    """Bytes of a sound header changed at random: it is read or refused, nothing else happens."""
    path = tmp_path_factory.getbasetemp() / "damaged.gguf"
    write_gguf(path, {"t": np.ones((2, 32), np.float32)}, {"a": [1, 2], "b": "text"}, tokenizer={"c": ["x", "yz"]})
    content = bytearray(path.read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        content[data.draw(st.integers(0, len(content) - 1))] = data.draw(st.integers(0, 255))
    path.write_bytes(content[: data.draw(st.integers(len(content) // 2, len(content)))])
    with contextlib.suppress(CheckpointError):
        for tensor in read_gguf(path).tensors.values():
            assert tensor.offset + tensor.num_bytes <= len(content) or not tensor.num_bytes
