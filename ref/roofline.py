"""The roofline: how long a piece of work takes at least, from what it computes and what it moves.

A processor does `flops` operations a second and moves `bandwidth` bytes a second, both at once. A piece of work so
takes at least max(FLOPs / flops, bytes / bandwidth). Its intensity is FLOPs / bytes; the intensity at which both terms
are equal, flops / bandwidth, is the ridge: work below it waits for memory, work above it for arithmetic.

A product of [t, in] and [out, in] is 2 t in out FLOPs and reads the weight once, whatever t is. With 2 bytes a weight
its intensity is near t, the number of tokens, as long as t is small: decode of a few sequences waits for memory,
prefill for arithmetic.

Source: Williams, Waterman, Patterson 2009, "Roofline". Everything here is a lower limit: no launch, no cache miss.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ref.model.fields import ModelConfig
from ref.model.llama import LlamaConfig, read_llama, weight_shapes


@dataclass(frozen=True, slots=True)
class Hardware:
    """One GPU by its data sheet. Units: bytes, bytes a second, dense bfloat16 operations a second."""

    name: str
    memory: float
    bandwidth: float
    flops: float
    link: float  # to the others, each way

    @property
    def ridge(self) -> float:
        """FLOPs a byte at which arithmetic and memory take the same time."""
        return self.flops / self.bandwidth


def pcie_bandwidth(generation: int, lanes: int = 16) -> float:
    """Bytes a second each way: lanes · transfers · 128/130 / 8; 16 · 10⁹ transfers a second in generation 4.

    Args:
        generation: 3, 4 or 5; each doubles the one before.
    Raises:
        ValueError: another generation, which codes its bits otherwise.
    """
    if generation not in (3, 4, 5):
        raise ValueError(f"PCIe generation is {generation}; 3, 4 and 5 are known here")
    return 2.0 ** (generation - 4) * 16e9 * lanes * 128 / 130 / 8


H200 = Hardware("H200", 141e9, 4.8e12, 989e12, 450e9)  # NVLink 4: 900 GB/s both ways together
RTX_4090 = Hardware("RTX 4090", 24e9, 1.01e12, 165e12, pcie_bandwidth(4))


def _llama_3_1(layers: int, heads: int, hidden: int, intermediate: int) -> LlamaConfig:
    config: Mapping[str, Any] = {
        "architectures": ["LlamaForCausalLM"],
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "hidden_size": hidden,
        "intermediate_size": intermediate,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rope_theta": 500000.0,
        "torch_dtype": "bfloat16",
    }
    return read_llama(config)


LLAMA_3_1_8B = _llama_3_1(32, 32, 4096, 14336)
LLAMA_3_1_70B = _llama_3_1(80, 64, 8192, 28672)


def num_parameters(config: LlamaConfig) -> int:
    """Numbers in all tensors of the checkpoint."""
    return sum(math.prod(shape) for shape in weight_shapes(config).values())


def num_read_parameters(config: LlamaConfig) -> int:
    """Numbers that every pass reads: all but the embedding, of which a token reads one row."""
    return num_parameters(config) - (0 if config.tie_word_embeddings else config.vocab_size * config.hidden_size)


def kv_bytes_per_token(config: ModelConfig, itemsize: float = 2) -> float:
    """Bytes that a token takes in the cache: a key and a value for each KV head of each layer.

    2 · n_layers · n_kv_heads · head_dim · itemsize.
    """
    return 2 * config.n_layers * config.n_kv_heads * config.head_dim * itemsize


def latent_bytes_per_token(n_layers: int, kv_lora_rank: int, qk_rope_head_dim: int, itemsize: float = 2) -> float:
    """The same with latent attention (ref/mla.py): n_layers · (kv_lora_rank + qk_rope_head_dim) · itemsize."""
    return n_layers * (kv_lora_rank + qk_rope_head_dim) * itemsize


def linear_flops(num_tokens: int, in_features: int, out_features: int) -> float:
    """A product and a sum for each token and weight: 2 · num_tokens · in_features · out_features."""
    return 2.0 * num_tokens * in_features * out_features


def linear_bytes(
    num_tokens: int, in_features: int, out_features: int, weight_itemsize: float = 2, itemsize: float = 2
) -> float:
    """The weight read once, the activations read and written once.

    weight_itemsize: bytes a weight; 0.5 for 4 bits.
    """
    activations = num_tokens * (in_features + out_features)
    return weight_itemsize * in_features * out_features + itemsize * activations


def attention_flops(q_len: int, kv_len: int, n_heads: int, head_dim: int) -> float:
    """Causal attention of the last q_len of kv_len tokens in one layer: scores and sums, 2 · head_dim FLOPs each.

    4 · n_heads · head_dim · pairs, with q_len · kv_len − q_len (q_len − 1) / 2 pairs of a query and a visible key.
    """
    pairs = q_len * kv_len - q_len * (q_len - 1) / 2
    return 4.0 * n_heads * head_dim * pairs


def limit_seconds(flops: float, num_bytes: float, hardware: Hardware) -> float:
    """max(flops / hardware.flops, num_bytes / hardware.bandwidth)."""
    return max(flops / hardware.flops, num_bytes / hardware.bandwidth)


def decode_work(config: LlamaConfig, num_seqs: int, context: int, weight_itemsize: float = 2) -> tuple[float, float]:
    """(FLOPs, bytes) of one step that adds a token to each of num_seqs sequences, all with `context` tokens.

    Every weight is read once for all, every sequence reads its own cache. Activations are left out: they are a few
    hundred kilobytes a token.
    """
    attention = attention_flops(1, context, config.n_heads, config.head_dim) * config.n_layers
    flops = num_seqs * (2.0 * num_read_parameters(config) + attention)
    return flops, weight_itemsize * num_read_parameters(config) + num_seqs * context * kv_bytes_per_token(config)


def prefill_work(config: LlamaConfig, num_tokens: int, weight_itemsize: float = 2) -> tuple[float, float]:
    """(FLOPs, bytes) of one prompt that is computed in one pass; the head sees its last token alone."""
    head = config.vocab_size * config.hidden_size
    attention = attention_flops(num_tokens, num_tokens, config.n_heads, config.head_dim) * config.n_layers
    flops = 2.0 * num_tokens * (num_read_parameters(config) - head) + 2.0 * head + attention
    return flops, weight_itemsize * num_read_parameters(config) + num_tokens * kv_bytes_per_token(config)


def activation_bytes(config: ModelConfig, num_tokens: int, num_logits: int, itemsize: float = 2) -> float:
    """What a pass needs besides weights and cache, at its widest place.

    In the MLP residual, normed input, gate and up and their product are alive: 2 hidden_size + 3 intermediate_size
    numbers a token. At the end num_logits rows of float32 logits: 4 · vocab_size bytes each. They never meet.
    """
    layer = num_tokens * (2 * config.hidden_size + 3 * config.intermediate_size) * itemsize
    return max(layer, 4.0 * num_logits * config.vocab_size + num_tokens * config.hidden_size * itemsize)
