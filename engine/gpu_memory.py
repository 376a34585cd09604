"""Plans the memory of a GPU: what is not the KV cache is known or has been tried; the KV cache gets the rest.

Knows the GPU by numbers only.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from engine.config import EngineConfig, StepLimits
from engine.errors import ConfigError
from engine.memory_plan import ALWAYS, KV_CACHE, LOADING, WORKSPACE, Buffer, MemoryPlan
from engine.packed4 import PACKED, PACKED_GATED
from engine.weights import Weights

DRIVER_PIECE = 2 << 20  # bytes; the driver gives out memory in multiples of this
GRAPH_BYTES = 80 << 10  # of the driver's memory for a layer of a captured step; 74 KiB measured on an H200
MISMATCH_BYTES, MISMATCH_SHARE = 256 << 20, 0.02  # the larger of both may lie between what is planned and what is held
MB = 10**6


@dataclass(frozen=True, slots=True)
class GpuRoom:
    """A GPU's memory before the KV cache is there.

    Attributes:
        name: of the GPU.
        num_bytes: in all.
        buffers: what is there, or will be, beside the KV cache.
        num_caches: arrays that the KV cache consists of.
        block_bytes: of a KV block, over all layers.
    """

    name: str
    num_bytes: int
    buffers: tuple[Buffer, ...]
    num_caches: int
    block_bytes: int

    def allowed(self, config: EngineConfig) -> int:
        """Bytes that may be in use in all, by whoever."""
        share = int(self.num_bytes * config.gpu_memory_utilization)
        return min(share, self.num_bytes - config.reserve_memory_mb * MB)

    @property
    def taken(self) -> int:
        """Beside the KV cache, but with what the driver rounds its arrays up by."""
        return self.num_caches * DRIVER_PIECE + sum(one.num_bytes for one in self.buffers if one.place == "GPU")


def graph_buffer(
    tried: int,
    limits: StepLimits,
    token_sizes: Sequence[int],
    batch_sizes: Sequence[int],
    n_layers: int,
    hidden_bytes: int,
) -> Buffer:
    """What captured steps will take: the arrays of the largest, hidden states of each, and what the driver keeps.

    Args:
        tried: bytes of the arrays of a step of max_num_batched_tokens.
        token_sizes, batch_sizes: tokens of the steps that are captured, with prompts in them and without.
        hidden_bytes: of the hidden state of a token.
    """
    largest = max(*token_sizes, *batch_sizes)
    arrays = tried * largest // limits.max_num_batched_tokens + hidden_bytes * (sum(token_sizes) + sum(batch_sizes))
    num_sizes = len(token_sizes) + len(batch_sizes)
    return Buffer(
        "CUDA graphs", arrays + GRAPH_BYTES * num_sizes * n_layers, ALWAYS, note=f"of {num_sizes} sizes of step"
    )


def plan_gpu_memory(config: EngineConfig, limits: StepLimits, room: GpuRoom, num_positions: int) -> MemoryPlan:
    """The KV cache gets num_gpu_blocks_override if given, else what is left, but no more than all sequences can fill.

    Args:
        num_positions: tokens of the longest sequence.
    Raises:
        ConfigError: there is no room for a block, or for all of num_gpu_blocks_override; says what is taken by what,
            and the least change that gives room for one sequence.
    """
    left = room.allowed(config) - room.taken
    longest = -(-num_positions // config.block_size)
    num_blocks = config.num_gpu_blocks_override
    if num_blocks is None:
        num_blocks = min(limits.max_num_seqs * longest, left // room.block_bytes)
    elif num_blocks * room.block_bytes > left and left >= room.block_bytes:
        raise ConfigError(
            f"--num-gpu-blocks-override {num_blocks}: these blocks take {num_blocks * room.block_bytes / MB:,.0f} MB, "
            f"and {left / MB:,.0f} MB of {room.name} are left for them; use at most {left // room.block_bytes}"
        )
    if left < room.block_bytes:
        raise ConfigError(_too_little(config, limits, room, longest * room.block_bytes))
    cache = Buffer(KV_CACHE, num_blocks * room.block_bytes, ALWAYS)
    return MemoryPlan((*room.buffers, cache), num_blocks, config.block_size, num_positions)


def _too_little(config: EngineConfig, limits: StepLimits, room: GpuRoom, wanted: int) -> str:
    """wanted: bytes of the KV cache of one sequence at its longest."""
    allowed = room.allowed(config)
    uses = sorted((one for one in room.buffers if one.place == "GPU"), key=lambda one: -one.num_bytes)
    listed = ", ".join(f"{one.name} {one.num_bytes / MB:,.0f}" for one in uses if one.num_bytes >= MB)
    return (
        f"no memory is left for the KV cache on {room.name}: --gpu-memory-utilization {config.gpu_memory_utilization} "
        f"and --reserve-memory-mb {config.reserve_memory_mb} allow {allowed / MB:,.0f} of its "
        f"{room.num_bytes / MB:,.0f} MB, and the rest takes {room.taken / MB:,.0f} ({listed}). A sequence of "
        f"--max-model-len takes {wanted / MB:,.0f} MB more; {_least_change(config, limits, room, wanted)}"
    )


def _least_change(config: EngineConfig, limits: StepLimits, room: GpuRoom, wanted: int) -> str:
    """What would give room for these bytes, in words."""
    needed = room.taken + wanted
    if needed <= room.num_bytes - config.reserve_memory_mb * MB:
        return f"use --gpu-memory-utilization {math.ceil(100 * needed / room.num_bytes) / 100}"
    if needed <= room.num_bytes * config.gpu_memory_utilization:
        return f"use --reserve-memory-mb {(room.num_bytes - needed) // MB}"
    workspace = sum(one.num_bytes for one in room.buffers if one.name == WORKSPACE)
    tokens = limits.max_num_batched_tokens // 2
    while tokens >= limits.max_num_seqs:
        freed = workspace - workspace * tokens // limits.max_num_batched_tokens
        if needed - freed <= room.allowed(config):
            return f"use --max-num-batched-tokens {tokens}"
        tokens //= 2
    if room.taken + room.block_bytes <= room.num_bytes - config.reserve_memory_mb * MB:
        return "use a smaller --max-model-len and more of --gpu-memory-utilization"
    return f"use a smaller model, or a GPU with {needed / MB:,.0f} MB or more"


def mismatch(plan: MemoryPlan, held: int) -> str:
    """ "" if the GPU holds about what was planned for it, else what is to be said.

    Args:
        held: bytes in use on the GPU when all is there.
    """
    planned = plan.bytes_on("GPU")
    bound = max(MISMATCH_BYTES, int(MISMATCH_SHARE * planned))
    if abs(held - planned) <= bound:
        return ""
    return (
        f"{held / MB:,.0f} MB of the GPU are in use and {planned / MB:,.0f} MB were planned: more than "
        f"{bound / MB:,.0f} MB apart; another program has come or gone, or the plan is wrong"
    )


def words_as_stored(weights: Weights) -> tuple[Buffer, ...]:
    """Room for the words of a layer's packed weights, of which one or two at a time are there as stored too."""
    sizes: Counter[str] = Counter()
    for dest, weight in weights.linears.items():
        if weight.format in (PACKED, PACKED_GATED):
            sizes[dest.rpartition(".")[0]] += sum(int(tensor.nbytes) for tensor in weight.tensors.values())
    note = "at most, while it is put in order"
    return (Buffer("a layer as stored", max(sizes.values()), LOADING, note=note),) if sizes else ()
