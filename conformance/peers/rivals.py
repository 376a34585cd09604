"""What others have for the ops of the benchmark: PyTorch's own kernels, cuDNN and FlashAttention 2 by PyTorch, Triton.

For `python -m conformance.bench --peers`. Attention gets its keys side by side in memory, not in blocks.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from conformance.peers.torch_ops import ACTIVATIONS, tensor

Launch = Callable[[], Any]

TRITON = importlib.import_module("conformance.peers.triton_ops") if importlib.util.find_spec("triton") else None
BACKENDS = {"cuDNN": SDPBackend.CUDNN_ATTENTION, "FlashAttention 2": SDPBackend.FLASH_ATTENTION}


def rivals(op: str, inputs: Mapping[str, Any], stream: int) -> dict[str, Launch]:
    """Launches that do the same work on the same inputs, by the name of who does it.

    Args:
        inputs: by the parameters of ref.
        stream: address of the one to launch on.
    """
    torch.cuda.set_stream(torch.cuda.ExternalStream(stream))
    if op in ("attention_prefill", "attention_decode"):
        return _attention(**inputs)
    if op == "sampling":
        return {"torch": partial(_sampling, **{**inputs, "logits": tensor(inputs["logits"])})}
    if op not in TORCH or not inputs:
        return {}
    arguments = {name: tensor(value) if hasattr(value, "dtype") else value for name, value in inputs.items()}
    found: dict[str, Launch] = {"torch": partial(TORCH[op], **arguments)}
    if op == "rmsnorm" and TRITON is not None:
        found["Triton"] = partial(TRITON.rmsnorm, **inputs)
    return found


def _rmsnorm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return functional.rms_norm(x, weight.shape, weight, eps)


def _add_rmsnorm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    residual += x
    return functional.rms_norm(residual, weight.shape, weight, eps)


def _layernorm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    return functional.layer_norm(x, weight.shape, weight, bias, eps)


def _gate_up_act(gate_up: torch.Tensor) -> torch.Tensor:
    gate, up = gate_up.chunk(2, dim=-1)
    return ACTIVATIONS["silu"](gate) * up


def _embedding(token_ids: torch.Tensor, table: torch.Tensor) -> torch.Tensor:
    return functional.embedding(token_ids, table)


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return functional.linear(x, weight, bias)


TORCH: dict[str, Callable[..., torch.Tensor]] = {
    "rmsnorm": _rmsnorm,
    "add_rmsnorm": _add_rmsnorm,
    "layernorm": _layernorm,
    "gate_up_act": _gate_up_act,
    "embedding": _embedding,
    "linear": _linear,
}


def _attention(
    q: Any, k_cache: Any, v_cache: Any, block_table: Any, seq_lens: Any, cu_seqlens_q: Any = None
) -> dict[str, Launch]:
    """Sequences of equal length, decoded a token each, or one prompt."""
    seq_len = int(seq_lens[0])
    blocks = tensor(block_table)[:, : -(-seq_len // k_cache.shape[1])].long()
    keys, values = (
        tensor(cache)[blocks].flatten(1, 2)[:, :seq_len].transpose(1, 2).contiguous() for cache in (k_cache, v_cache)
    )
    queries = tensor(q)[:, :, None] if cu_seqlens_q is None else tensor(q).transpose(0, 1)[None].contiguous()

    def launch(backend: SDPBackend) -> torch.Tensor:
        with sdpa_kernel(backend):
            return functional.scaled_dot_product_attention(
                queries, keys, values, is_causal=cu_seqlens_q is not None, enable_gqa=True
            )

    names = BACKENDS if cu_seqlens_q is not None else ("FlashAttention 2",)
    return {name: partial(launch, BACKENDS[name]) for name in names}


def _sampling(
    logits: torch.Tensor, heat: float, top_k: int = 0, top_p: float = 1.0, num_top: int = 0
) -> torch.Tensor | tuple[torch.Tensor, ...]:
    """By the usual sorts; the draw is by the same noise every time, which costs what a new one would but to make it."""
    if num_top:
        return logits.log_softmax(-1).topk(num_top)
    if not heat:
        return logits.argmax(-1)
    if top_k:
        logits, ids = logits.topk(top_k)
        return ids.gather(-1, _draw(logits.softmax(-1)))
    if top_p < 1:
        ranked, ids = logits.sort(-1, descending=True)
        probs = ranked.softmax(-1)
        probs = probs.masked_fill(probs.cumsum(-1) - probs > top_p, 0.0)
        return ids.gather(-1, _draw(probs))
    return _draw(logits.softmax(-1))


def _draw(probs: torch.Tensor) -> torch.Tensor:
    return (probs / probs.new_full(probs.shape, 0.5)).argmax(-1, keepdim=True)
