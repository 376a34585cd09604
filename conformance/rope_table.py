"""Cases of the tables of angles, cosines and sines that the engine makes on the host."""

from __future__ import annotations

from dataclasses import asdict, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import Case, Inputs, Outputs
from engine.config import RopeConfig
from engine.ops import OpTable
from engine.rope_table import RopeTable, inv_freq
from ref.model.qwen1 import ntk_alpha
from ref.rope import rope_cos_sin, rope_inv_freq

Array = NDArray[Any]

ROPES = {
    "default": RopeConfig(),
    "base-1e6": RopeConfig(theta=1e6),
    "linear": RopeConfig("linear", factor=4.0),
    "dynamic": RopeConfig("dynamic", factor=2.0, original_max_position_embeddings=100),
    "ntk_alpha": RopeConfig("ntk_alpha", original_max_position_embeddings=100),
    "llama3": RopeConfig("llama3", 5e5, 8.0, 1.0, 4.0, 8192),
    "llama3-factor32": RopeConfig("llama3", 5e5, 32.0, 1.0, 4.0, 8192),
    "yarn-qwen": RopeConfig("yarn", 1e6, 4.0, original_max_position_embeddings=32768, attention_factor=1.1386),
    "yarn-deepseek": RopeConfig("yarn", factor=40.0, original_max_position_embeddings=4096, beta_fast=24, beta_slow=2),
    "yarn-untruncated": RopeConfig("yarn", factor=8.0, original_max_position_embeddings=2048, truncate=False),
    "yarn-past-the-last": RopeConfig("yarn", 100.0, 8.0, original_max_position_embeddings=4096),
    "yarn-step": RopeConfig("yarn", factor=8.0, original_max_position_embeddings=6),
    "longrope": RopeConfig(
        "longrope",
        original_max_position_embeddings=100,
        short_factor=tuple(1 + i / 64 for i in range(32)),
        long_factor=tuple(1.5 + i for i in range(32)),
        attention_factor=1.19,
    ),
}
HEAD_DIMS = {"default": (2, 10, 64, 128), "llama3": (64, 128), "yarn-deepseek": (8, 64, 128)}
SEQ_LENS = {  # up to where scaling begins, and beyond
    **dict.fromkeys(("dynamic", "longrope"), (1, 100, 101, 1000)),
    "ntk_alpha": (1, 100, 101, 200, 201),
}
MAX_MODEL_LEN = 4096


def frequency_arguments(rope: RopeConfig) -> dict[str, Any]:
    """The arguments of ref.rope.rope_inv_freq; attention_factor is one of rope_cos_sin."""
    return {key: value for key, value in asdict(rope).items() if key != "attention_factor"}


def frequencies(rope: RopeConfig, head_dim: int, seq_len: int) -> NDArray[np.float64]:
    """inv_freq by ref, where Qwen 1 brings a rule of its own for the base."""
    if rope.kind == "ntk_alpha":
        growth = ntk_alpha(seq_len, rope.original_max_position_embeddings) ** (head_dim / (head_dim - 2))
        rope = replace(rope, kind="default", theta=rope.theta * growth)
    return rope_inv_freq(**frequency_arguments(rope), head_dim=head_dim, seq_len=seq_len)


def cases() -> list[Case]:
    angles = [
        _angles(name, rope, head_dim, seq_len)
        for name, rope in ROPES.items()
        for head_dim in HEAD_DIMS.get(name, (64,))
        for seq_len in SEQ_LENS.get(name, (0,))
    ]
    return angles + [_rows(name, rope) for name, rope in ROPES.items()]


def _angles(name: str, rope: RopeConfig, head_dim: int, seq_len: int) -> Case:
    """inv_freq in float64: both sides compute in it, so nothing but a few roundings may differ."""
    axes = {"rope": rope, "head_dim": head_dim, "seq_len": seq_len}
    return Case(
        stem="rope_table",
        name=f"angles-{name}-dim{head_dim}" + (f"-len{seq_len}" if seq_len else ""),
        axes=axes,
        make_inputs=lambda seed: dict(axes),
        reference=lambda rope, head_dim, seq_len: {"inv_freq": frequencies(rope, head_dim, seq_len)},
        candidate=lambda ops, rope, head_dim, seq_len: {"inv_freq": inv_freq(rope, head_dim, seq_len)},
        storage="float64",
    )


def _rows(name: str, rope: RopeConfig) -> Case:
    axes: dict[str, Any] = {"rope": rope, "head_dim": 64, "num_tokens": 300}
    return Case(
        stem="rope_table",
        name=f"rows-{name}",
        axes=axes,
        make_inputs=partial(_row_inputs, **axes),
        reference=_row_reference,
        candidate=_row_candidate,
    )


def _row_inputs(seed: int, rope: RopeConfig, head_dim: int, num_tokens: int) -> Inputs:
    """Tokens of prompts of 3, 150 and 400 tokens in one step, the last position of the table among them."""
    rng = np.random.default_rng(seed)
    positions = rng.integers(0, MAX_MODEL_LEN, num_tokens).astype(np.int32)
    positions[:2] = [0, MAX_MODEL_LEN - 1]
    num_prompts = rng.choice([3, 150, 400], num_tokens).astype(np.int32)
    return {"rope": rope, "head_dim": head_dim, "positions": positions, "num_prompts": num_prompts}


def _row_reference(rope: RopeConfig, head_dim: int, positions: Array, num_prompts: Array) -> Outputs:
    """Every token by itself, with the table that its sequence's prompt chose."""
    rows = []
    for i, n in enumerate(num_prompts):
        freq = frequencies(rope, head_dim, int(n))
        rows.append(rope_cos_sin(freq, positions[i : i + 1], rope.attention_factor))
    return {"cos_sin": np.concatenate(rows)}


def _row_candidate(ops: OpTable, rope: RopeConfig, head_dim: int, positions: Array, num_prompts: Array) -> Outputs:
    table = RopeTable(rope, head_dim, MAX_MODEL_LEN)
    rope_lens = np.array([table.rope_len(int(n)) for n in num_prompts], np.int32)
    return {"cos_sin": table.rows(positions, rope_lens)}
