"""engine.gpu_memory: who gets which part of a GPU, and what is said where there is too little of it."""

from dataclasses import replace
from typing import Any

import pytest

from engine.config import EngineConfig, StepLimits
from engine.errors import ConfigError
from engine.gpu_memory import (
    DRIVER_PIECE,
    GRAPH_BYTES,
    MB,
    MISMATCH_BYTES,
    MISMATCH_SHARE,
    GpuRoom,
    graph_buffer,
    mismatch,
    plan_gpu_memory,
)
from engine.memory_plan import ALWAYS, LOADING, STEP, WEIGHTS, WORKSPACE, Buffer, MemoryPlan

LIMITS = StepLimits(max_num_seqs=256, max_num_batched_tokens=8192)
CONFIG = EngineConfig()
BLOCK = 2 * MB
LONGEST = 16384  # tokens: 1024 blocks
BUFFERS = (
    Buffer("CUDA, code, other programs", 1000 * MB, ALWAYS),
    Buffer(WEIGHTS, 16_000 * MB, ALWAYS),
    Buffer(WORKSPACE, 1600 * MB, STEP),
    Buffer("staging of weights", 128 * MB, LOADING, "host"),
)
CACHES = 64


def room(total_mb: int, *more: Buffer) -> GpuRoom:
    return GpuRoom("Card", total_mb * MB, (*BUFFERS, *more), CACHES, BLOCK)


def plan(total_mb: int, **settings: Any) -> MemoryPlan:
    return plan_gpu_memory(replace(CONFIG, **settings), LIMITS, room(total_mb), LONGEST)


def refusal(total_mb: int, **settings: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        plan(total_mb, **settings)
    return str(caught.value)


@pytest.mark.parametrize(
    ("settings", "allowed_mb"),
    [
        ({}, 90_000),
        ({"gpu_memory_utilization": 0.5}, 50_000),
        ({"gpu_memory_utilization": 1}, 99_488),  # 512 MB stay free
        ({"gpu_memory_utilization": 1, "reserve_memory_mb": 0}, 100_000),
        ({"reserve_memory_mb": 30_000}, 70_000),  # more than the share leaves
    ],
)
def test_the_cache_gets_what_is_left(settings: dict[str, Any], allowed_mb: int) -> None:
    found = plan(100_000, **settings)
    taken = (1000 + 16_000 + 1600) * MB + CACHES * DRIVER_PIECE
    assert found.num_blocks == (allowed_mb * MB - taken) // BLOCK
    assert found.kv_pool == found.num_blocks * BLOCK
    assert found.bytes_on("GPU") <= allowed_mb * MB
    assert found.bytes_on("host") == 0, "what only loading needs is not held"
    assert found.workspace == 1600 * MB


def test_no_more_than_all_sequences_can_fill_and_what_is_asked_for() -> None:
    assert plan_gpu_memory(CONFIG, replace(LIMITS, max_num_seqs=3), room(100_000), LONGEST).num_blocks == 3 * 1024
    assert plan(100_000, num_gpu_blocks_override=77).num_blocks == 77
    left = int(0.9 * 100_000) * MB - room(100_000).taken
    asked = left // BLOCK + 1
    said = refusal(100_000, num_gpu_blocks_override=asked)
    assert said.startswith(f"--num-gpu-blocks-override {asked}: ")
    assert said.endswith(f"use at most {left // BLOCK}")
    assert plan(100_000, num_gpu_blocks_override=left // BLOCK).num_blocks == left // BLOCK


@pytest.mark.parametrize(
    ("total_mb", "settings", "advice"),
    [
        (
            22_000,
            {"gpu_memory_utilization": 0.8},
            "use --gpu-memory-utilization 0.95",
        ),  # 20,782 of 22,000 MB are needed
        (21_500, {"gpu_memory_utilization": 1.0, "reserve_memory_mb": 3000}, "use --reserve-memory-mb 717"),
        (
            20_400,
            {"gpu_memory_utilization": 0.85},
            "use a smaller --max-model-len and more of --gpu-memory-utilization",
        ),
        (16_000, {}, "use a smaller model, or a GPU with 20,782 MB or more"),
    ],
)
def test_too_little_memory_says_what_was_found_and_the_least_change(
    total_mb: int, settings: dict[str, Any], advice: str
) -> None:
    said = refusal(total_mb, **settings)
    assert said.endswith(advice)
    assert f"of its {total_mb:,} MB" in said
    assert "weights 16,000, activations, logits 1,600, CUDA, code, other programs 1,000" in said
    assert "A sequence of --max-model-len takes 2,048 MB more" in said


@pytest.mark.parametrize(
    ("total_mb", "settings"),
    [(22_000, {"gpu_memory_utilization": 0.95}), (21_500, {"gpu_memory_utilization": 1.0, "reserve_memory_mb": 717})],
)
def test_the_advice_helps(total_mb: int, settings: dict[str, Any]) -> None:
    """One sequence at its longest fits then."""
    assert plan(total_mb, **settings).num_kv_tokens >= LONGEST


def test_a_smaller_step_helps_where_the_gpu_is_too_small() -> None:
    """19,246 MB are needed with 512 MB for a sequence, 19,188 are there at most, half a step takes 800 less."""
    with pytest.raises(ConfigError, match=r"use --max-num-batched-tokens 4096$"):
        plan_gpu_memory(replace(CONFIG, gpu_memory_utilization=0.95), LIMITS, room(19_700), 4096)


def test_what_graphs_will_take() -> None:
    """Steps of 512 and 1024 tokens and of 8 sequences, 3 layers: an eighth of the largest step's arrays, hidden states
    of 1544 tokens, and what the driver keeps for nine layers."""
    buffer = graph_buffer(8 * MB, LIMITS, (512, 1024), (8,), n_layers=3, hidden_bytes=100)
    assert buffer.num_bytes == MB + 1544 * 100 + 9 * GRAPH_BYTES


def test_what_is_held_is_compared_with_the_plan() -> None:
    found = plan(100_000)
    planned = found.bytes_on("GPU")
    bound = int(MISMATCH_SHARE * planned)
    assert bound > MISMATCH_BYTES
    assert mismatch(found, planned) == ""
    assert mismatch(found, planned + bound) == ""
    assert mismatch(found, planned - bound) == ""
    said = mismatch(found, planned + bound + 1)
    assert f"{planned / MB:,.0f} MB were planned" in said
    assert mismatch(found, planned - bound - 1)
