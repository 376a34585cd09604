"""A Llama of two layers whose weights are set by hand: it goes on with a text that repeats itself.

    vocabulary  ^ g l i n t     (^ begins every text)
    ^glintgl  →  i

The hidden state has three fields as wide as the vocabulary: the token itself, the token before it, and the guess.

    layer 0, head 0   looks one token back, by rope alone: query and key are the same whatever the token is, and the
                      query is turned by one position less, so q·k = Σ_i cos((distance − 1) · inv_freq_i) is largest
                      at distance 1. It copies that token into the second field.
    layer 0, head 1   has q = k = 0: all scores are equal, and it looks at everything alike. It writes nothing.
    layer 1, head 0   the induction head: its query is this token, its keys are the tokens before. So it finds the
                      place after the last time this token stood here, and copies what stands there into the guess.
    layer 1, head 1   looks at earlier copies of the token itself. It writes nothing.

Positions use the fast pairs of a head (they tell neighbours apart), tokens the slow ones (they hardly turn). MLPs are
zero. Trained models learn such pairs of heads by themselves.

Source: Elhage et al. 2021, "A Mathematical Framework for Transformer Circuits"; Olsson et al. 2022, "In-context
Learning and Induction Heads".
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.model.llama import LlamaConfig, read_llama, weight_shapes
from ref.rope import rope_inv_freq

Array = NDArray[Any]

VOCABULARY = "^glint"
HEAD_DIM = 32
NUM_FAST = 4  # pairs that carry the position
SLOW = 8  # from this pair on they carry the token
POSITION_GAIN, TOKEN_GAIN = 8.0, 3.0  # of queries and keys each: how sharply a head looks


def induction_config() -> LlamaConfig:
    """Two layers, two heads of 32, a hidden state of 18."""
    return read_llama(
        {
            "architectures": ["LlamaForCausalLM"],
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
            "head_dim": HEAD_DIM,
            "hidden_size": 3 * len(VOCABULARY),
            "intermediate_size": 1,
            "vocab_size": len(VOCABULARY),
        }
    )


def encode(text: str) -> list[int]:
    """One id a letter.

    Raises:
        ValueError: a letter that the vocabulary has not.
    """
    unknown = sorted(set(text) - set(VOCABULARY))
    if unknown:
        raise ValueError(f"{unknown[0]!r} is not in the vocabulary; letters are {VOCABULARY}")
    return [VOCABULARY.index(letter) for letter in text]


def induction_weights() -> dict[str, Array]:
    """All tensors by their checkpoint names, float64.

    Raises: nothing; the ValueError of rope_inv_freq cannot occur, as HEAD_DIM is even.
    """
    config, size = induction_config(), len(VOCABULARY)
    shapes = weight_shapes(config)
    weights = {name: np.ones(shape) if "norm" in name else np.zeros(shape) for name, shape in shapes.items()}
    this, before, guess = (slice(at * size, (at + 1) * size) for at in range(3))
    slow = np.arange(SLOW, SLOW + size)  # the first element of one slow pair a token
    first, second = slice(0, HEAD_DIM), slice(HEAD_DIM, 2 * HEAD_DIM)  # the rows of head 0 and of head 1

    weights["model.embed_tokens.weight"][:, this] = np.eye(size)
    weights["lm_head.weight"][:, guess] = np.eye(size)

    q, k, v, o = (weights[f"model.layers.0.self_attn.{name}_proj.weight"] for name in "qkvo")
    angles = -rope_inv_freq("default", config.rope.theta, HEAD_DIM)[:NUM_FAST]  # one position back
    q[:NUM_FAST, this] = POSITION_GAIN * np.cos(angles)[:, None]
    q[HEAD_DIM // 2 : HEAD_DIM // 2 + NUM_FAST, this] = POSITION_GAIN * np.sin(angles)[:, None]
    k[:NUM_FAST, this] = POSITION_GAIN
    v[first][:size, this] = np.eye(size)
    o[before, :size] = np.eye(size)

    q, k, v, o = (weights[f"model.layers.1.self_attn.{name}_proj.weight"] for name in "qkvo")
    q[first][slow, this] = TOKEN_GAIN * np.eye(size)
    k[first][slow, before] = TOKEN_GAIN * np.eye(size)
    v[first][:size, this] = np.eye(size)
    o[guess, :size] = np.eye(size)
    q[second][slow, this] = k[second][slow, this] = TOKEN_GAIN * np.eye(size)
    return weights
