"""Hand-made weight files, right and wrong: safetensors from a header, GGUF from a table of tensors."""

import json
from pathlib import Path
from typing import Any

import gguf
import numpy as np

from engine.checkpoint.loader import load_model_config, load_weights
from engine.checkpoint.source import resolve
from engine.models.registry import ARCHITECTURES
from engine.weights import Weights

LLAMA_KEYS = {
    "block_count": 2,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "embedding_length": 64,
    "feed_forward_length": 96,
    "context_length": 128,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 10000.0,
}
GGUF_VOCAB = 40


def load(model: Path) -> Weights:
    """What a start does with --model: find it, read its config, load exactly its tensors."""
    source = resolve(str(model))
    config = load_model_config(source)
    return load_weights(source, ARCHITECTURES[config.architecture].weight_map(config))


def safetensors_bytes(header: Any, data: bytes = b"") -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + data


def entry(dtype: str, shape: list[int], begin: int, end: int) -> dict[str, Any]:
    return {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}


def edit_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def llama_gguf_tensors(rng: np.random.Generator) -> dict[str, np.ndarray]:
    """Random float32 tensors by their GGUF names for LLAMA_KEYS, the head tied; rows are those of llama.cpp."""
    shapes = {"token_embd": (GGUF_VOCAB, 64), "output_norm": (64,)}
    for layer in range(2):
        shapes |= {
            f"blk.{layer}.{name}": shape
            for name, shape in {
                "attn_norm": (64,), "attn_q": (64, 64), "attn_k": (32, 64), "attn_v": (32, 64),
                "attn_output": (64, 64), "ffn_norm": (64,), "ffn_gate": (96, 64), "ffn_up": (96, 64),
                "ffn_down": (64, 96),
            }.items()
        }  # fmt: skip
    return {f"{name}.weight": rng.standard_normal(shape, dtype=np.float32) for name, shape in shapes.items()}


def write_gguf(
    path: Path,
    tensors: dict[str, np.ndarray],
    keys: dict[str, Any] | None = None,
    quantize: dict[str, gguf.GGMLQuantizationType] | None = None,
    tokenizer: dict[str, Any] | None = None,
    architecture: str = "llama",
) -> Path:
    """Writes with the gguf package, an implementation that is not ours."""
    writer = gguf.GGUFWriter(path, architecture)
    for key, value in (LLAMA_KEYS if keys is None else keys).items():
        add = {int: writer.add_uint32, float: writer.add_float32, str: writer.add_string, list: writer.add_array}
        add[type(value)](f"llama.{key}", value)
    for key, value in (tokenizer or {}).items():
        add = {int: writer.add_uint32, bool: writer.add_bool, str: writer.add_string, list: writer.add_array}
        add[type(value)](f"tokenizer.{key}", value)
    for name, tensor in tensors.items():
        kind = (quantize or {}).get(name)
        if kind is None:
            writer.add_tensor(name, tensor)
        else:
            writer.add_tensor(name, gguf.quants.quantize(tensor, kind), raw_dtype=kind)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path
