"""A model that looks for a needle: wherever one of ten value tokens stands in the prompt, it is the answer to ASK.

One layer, made by hand. Hidden axis t is token t. A value's key and ASK's query lie in the slowest pair of rope's
dimensions, which turns by 1e-6 in a million tokens, so their score is NEEDLE_SCORE at any distance, and all others are
0: a million of those weigh 1e6 · e^−32 = 1e-8 against the needle.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from conformance.golden_models import llama_config, write_checkpoint

VOCAB = 256
HEAD_DIM = 64
VALUES = range(4, 14)
ASK = 14
FILLERS = range(20, VOCAB)
NEEDLE_SCORE = 32.0
_NORMED = VOCAB**0.5  # of the one in a normed one-hot row


def needle_model(folder: str | Path, max_position_embeddings: int, dtype: str) -> Path:
    """The checkpoint. dtype: of the stored tensors."""
    config = llama_config(
        vocab_size=VOCAB,
        hidden_size=VOCAB,
        intermediate_size=64,
        num_hidden_layers=1,
        num_attention_heads=2,
        num_key_value_heads=1,
        head_dim=HEAD_DIM,
        max_position_embeddings=max_position_embeddings,
        rope_theta=1e12,
        torch_dtype=dtype,
    )
    slowest = HEAD_DIM // 2 - 1
    scale = (NEEDLE_SCORE * HEAD_DIM**0.5) ** 0.5 / _NORMED
    q_proj = np.zeros((2 * HEAD_DIM, VOCAB), np.float32)
    k_proj, v_proj = np.zeros((2, HEAD_DIM, VOCAB), np.float32)
    o_proj = np.zeros((VOCAB, 2 * HEAD_DIM), np.float32)
    q_proj[[slowest, HEAD_DIM + slowest], ASK] = scale
    for place, value in enumerate(VALUES):
        k_proj[slowest, value] = scale
        v_proj[place, value] = o_proj[value, place] = 1.0
    attention, mlp = "model.layers.0.self_attn", "model.layers.0.mlp"
    tensors = {
        "model.embed_tokens.weight": np.eye(VOCAB, dtype=np.float32),
        f"{attention}.q_proj.weight": q_proj,
        f"{attention}.k_proj.weight": k_proj,
        f"{attention}.v_proj.weight": v_proj,
        f"{attention}.o_proj.weight": o_proj,
        f"{mlp}.gate_proj.weight": np.zeros((64, VOCAB), np.float32),
        f"{mlp}.up_proj.weight": np.zeros((64, VOCAB), np.float32),
        f"{mlp}.down_proj.weight": np.zeros((VOCAB, 64), np.float32),
        "lm_head.weight": 2 * np.eye(VOCAB, dtype=np.float32),
    }
    norms = ("model.norm", "model.layers.0.input_layernorm", "model.layers.0.post_attention_layernorm")
    tensors |= {f"{name}.weight": np.ones(VOCAB, np.float32) for name in norms}
    return write_checkpoint(folder, config, tensors)


def needle_prompt(length: int, share: float, value: int, seed: int = 0) -> list[int]:
    """Fillers with the value after this share of them, and ASK at the end."""
    ids = np.random.default_rng(seed).integers(FILLERS.start, FILLERS.stop, length)
    ids[int(share * (length - 2))] = value
    ids[-1] = ASK
    found: list[int] = ids.tolist()
    return found
