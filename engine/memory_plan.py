"""What memory is for: every buffer by name, with its size, its place and its lifetime. A value, made before anything
large is allocated; see engine.memory for a CPU and engine.gpu_memory for a GPU.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

Place = Literal["GPU", "host"]

ALWAYS = "from start to end"
LOADING = "while weights are read"
STEP = "during a step"

WEIGHTS, KV_CACHE, WORKSPACE = "weights", "KV cache", "activations, logits"
SWAP_SPACE = "KV of preempted sequences"


@dataclass(frozen=True, slots=True)
class Buffer:
    """Memory of one use. On a machine with a GPU, what lies on the host is pinned."""

    name: str
    num_bytes: int
    lifetime: str  # in words: what of the above
    place: Place = "GPU"
    note: str = ""  # for people


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """All buffers, and the pool of KV blocks that their sizes leave room for."""

    buffers: tuple[Buffer, ...]
    num_blocks: int
    block_size: int
    max_model_len: int

    def with_swap_space(self, num_bytes: int) -> MemoryPlan:
        """With so much of the host's memory, in whole blocks, for what the pool cannot hold."""
        if not num_bytes:
            return self
        block_bytes = self.kv_pool // self.num_blocks
        room = Buffer(SWAP_SPACE, num_bytes // block_bytes * block_bytes, ALWAYS, "host")
        return replace(self, buffers=(*self.buffers, room))

    @property
    def num_swap_places(self) -> int:
        """Blocks that fit there."""
        return self.bytes_of(SWAP_SPACE) // (self.kv_pool // self.num_blocks)

    def bytes_of(self, name: str) -> int:
        """Of all buffers of this name."""
        return sum(buffer.num_bytes for buffer in self.buffers if buffer.name == name)

    def with_blocks(self, num_blocks: int) -> MemoryPlan:
        """The plan of a pool with so many blocks: those that the rank with the least room has."""
        if num_blocks == self.num_blocks:
            return self
        buffers = tuple(
            replace(buffer, num_bytes=buffer.num_bytes // self.num_blocks * num_blocks)
            if buffer.name == KV_CACHE
            else buffer
            for buffer in self.buffers
        )
        return replace(self, buffers=buffers, num_blocks=num_blocks)

    def bytes_on(self, place: Place) -> int:
        """Of what is held in a place once everything is loaded."""
        return sum(buffer.num_bytes for buffer in self.buffers if buffer.place == place and buffer.lifetime != LOADING)

    @property
    def weights(self) -> int:
        return self.bytes_of(WEIGHTS)

    @property
    def kv_pool(self) -> int:
        return self.bytes_of(KV_CACHE)

    @property
    def workspace(self) -> int:
        """The largest step's temporary arrays, as an upper estimate."""
        return self.bytes_of(WORKSPACE)

    @property
    def num_kv_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def table(self) -> str:
        """The plan for people: a line a buffer, then what the KV cache holds."""
        width = max(len(buffer.name) for buffer in self.buffers)
        lines = []
        for buffer in self.buffers:
            where = f"{buffer.num_bytes / 1e6:>11,.1f} MB  {buffer.place:<4}  {buffer.lifetime:<22}"
            lines.append(f"  {buffer.name:<{width}}{where}  {buffer.note}".rstrip())
        whole = self.num_kv_tokens / self.max_model_len
        lines.append(
            f"  the KV cache holds {self.num_kv_tokens:,} tokens in {self.num_blocks:,} blocks: {whole:,.1f} sequences "
            f"of {self.max_model_len:,} tokens at once"
        )
        return "\n".join(lines)
