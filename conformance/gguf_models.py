"""A small Llama as a GGUF file, with float32 tensors: by hand, as the format's own package is an extra of the tests.

Source: the GGUF specification, version 3. Rows of q and k lie as llama.cpp turns them, in pairs (2i, 2i + 1).
"""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.golden_models import Config, Tensors

ALIGNMENT = 32
UINT32, FLOAT32, STRING = 4, 6, 8  # kinds of values
F32 = 0  # kind of a tensor
_NAMES = {
    "input_layernorm": "attn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "post_attention_layernorm": "ffn_norm",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}
_OUTER = {"model.embed_tokens.weight": "token_embd", "model.norm.weight": "output_norm", "lm_head.weight": "output"}


def write_gguf(path: Path, config: Config, tensors: Tensors) -> Path:
    """A Llama without biases or rope scaling, given as for golden_models.write_checkpoint."""
    keys: dict[str, Any] = {
        "general.architecture": "llama",
        "llama.block_count": config["num_hidden_layers"],
        "llama.attention.head_count": config["num_attention_heads"],
        "llama.attention.head_count_kv": config["num_key_value_heads"],
        "llama.embedding_length": config["hidden_size"],
        "llama.feed_forward_length": config["intermediate_size"],
        "llama.context_length": config["max_position_embeddings"],
        "llama.attention.layer_norm_rms_epsilon": config["rms_norm_eps"],
        "llama.rope.freq_base": config["rope_theta"],
    }
    stored = {_gguf_name(name): _as_llama_cpp(name, config, tensor) for name, tensor in tensors.items()}
    header = [b"GGUF", struct.pack("<IQQ", 3, len(stored), len(keys)), *map(_pair, keys.items())]
    offset = 0
    for name, tensor in stored.items():
        sizes = tensor.shape[::-1]  # the axis without gaps first
        header.append(_text(name) + struct.pack(f"<I{len(sizes)}QIQ", len(sizes), *sizes, F32, offset))
        offset += _padded(tensor.nbytes)
    text = b"".join(header)
    data = b"".join(tensor.tobytes().ljust(_padded(tensor.nbytes), b"\0") for tensor in stored.values())
    path.write_bytes(text.ljust(_padded(len(text)), b"\0") + data)
    return path


def _gguf_name(name: str) -> str:
    if name in _OUTER:
        return f"{_OUTER[name]}.weight"
    _, _, layer, rest = name.split(".", 3)
    return f"blk.{layer}.{_NAMES[rest.removesuffix('.weight')]}.weight"


def _as_llama_cpp(name: str, config: Config, tensor: NDArray[np.float32]) -> NDArray[np.float32]:
    """Rows of q and k in pairs of neighbours; all else as it is."""
    heads = {"q_proj": config["num_attention_heads"], "k_proj": config["num_key_value_heads"]}
    n_heads = next((count for part, count in heads.items() if part in name), 0)
    if not n_heads:
        return tensor
    halves = tensor.reshape(n_heads, 2, -1, tensor.shape[-1])
    return np.ascontiguousarray(halves.swapaxes(1, 2)).reshape(tensor.shape)


def _pair(pair: tuple[str, Any]) -> bytes:
    key, value = pair
    if isinstance(value, str):
        return _text(key) + struct.pack("<I", STRING) + _text(value)
    kind, form = (FLOAT32, "<If") if isinstance(value, float) else (UINT32, "<II")
    return _text(key) + struct.pack(form, kind, value)


def _text(text: str) -> bytes:
    return struct.pack("<Q", len(text)) + text.encode()


def _padded(size: int) -> int:
    return -(-size // ALIGNMENT) * ALIGNMENT
