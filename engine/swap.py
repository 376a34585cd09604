"""Places on the host for the KV of preempted sequences, so that it is copied back, not computed again.

Only the accounting: a StepPlan says which blocks go where, and the runner copies them before it computes (see KVSwap of
engine.kv_cache). A sequence goes whole or not at all, and only one that has filled a block. That is where copying is
the cheaper way: on an H200 with Llama-3.1-8B a token's KV goes out and back in 5 µs (131 kB at 52 GB/s), and takes
25 µs to compute in a long prompt; the launches of both ways together cost as much as 13 tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from engine.batch import Int32
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.sequence import Sequence
from engine.system import available_memory


def swap_bytes(config: EngineConfig, num_ranks: int) -> int:
    """What --swap-space-gb asks for. Raises ConfigError where the host has no room for it, or nobody would copy."""
    num_bytes, available = int(config.swap_space_gb * 1e9), available_memory()
    what = f"--swap-space-gb {config.swap_space_gb:g}"
    if num_bytes and num_ranks > 1:
        raise ConfigError(f"{what}: a model on several ranks computes preempted requests again; leave it out")
    if num_bytes > available:
        raise ConfigError(f"{what}: {available / 1e9:,.1f} GB of the host's memory are free; use less")
    return num_bytes


@dataclass(frozen=True, slots=True)
class _Kept:
    num_computed: int
    places: list[int]  # of its leading blocks


class SwapSpace:
    """The places, and what waits to be copied in the next step."""

    def __init__(self, num_places: int, block_size: int) -> None:
        self.num_places = num_places
        self.num_swapped_tokens = 0  # that came back, and were not computed again
        self._block_size = block_size
        self._free = list(range(num_places - 1, -1, -1))
        self._kept: dict[Sequence, _Kept] = {}
        self._out: list[tuple[int, int]] = []
        self._in: list[tuple[int, int]] = []

    @property
    def num_free(self) -> int:
        return len(self._free)

    def put(self, seq: Sequence) -> None:
        """A sequence that is about to lose its blocks; nothing, where it is cheaper or safer to compute it again."""
        num_blocks = -(-seq.num_computed // self._block_size)
        too_short, unsafe = seq.num_computed < self._block_size, seq.suspect or seq.wants_prompt_logprobs
        if too_short or unsafe or num_blocks > len(self._free):
            return
        places = [self._free.pop() for _ in range(num_blocks)]
        self._kept[seq] = _Kept(seq.num_computed, places)
        self._out += zip(seq.block_ids[:num_blocks], places, strict=True)

    def take(self, seq: Sequence) -> None:
        """One that has blocks again, the leading num_computed tokens of them from the prefix cache."""
        kept = self._kept.pop(seq, None)
        if kept is None:
            return
        if seq.num_computed < kept.num_computed:
            first = seq.num_computed // self._block_size
            self._in += zip(kept.places[first:], seq.block_ids[first : len(kept.places)], strict=True)
            self.num_swapped_tokens += kept.num_computed - seq.num_computed
            seq.num_computed = kept.num_computed
        self._free += kept.places

    def drop(self, seqs: Iterable[Sequence]) -> None:
        """Sequences that have ended, or that no step may rely on any more."""
        for seq in seqs:
            kept = self._kept.pop(seq, None)
            if kept is not None:
                self._out = [pair for pair in self._out if pair[1] not in kept.places]
                self._free += kept.places

    def copies(self) -> tuple[Int32, Int32]:
        """(block, place) [num_out, 2] of what goes out, then (place, block) [num_in, 2] of what comes back; once."""
        out, back = (np.array(pairs, np.int32).reshape(-1, 2) for pairs in (self._out, self._in))
        self._out, self._in = [], []
        return out, back
