"""StepPlan → ForwardBatch: from what the scheduler decided to the arrays that the layers read.

A StepPlan is integers only, so that it can reach every rank; a rank makes the ForwardBatch from it alone.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = Any
Int32 = NDArray[np.int32]


def no_swaps() -> Int32:
    return np.zeros((0, 2), np.int32)


@dataclass(frozen=True, slots=True)
class StepPlan:
    """One step: which tokens of which sequences are computed. Decoding sequences come first."""

    step: int
    slots: Int32  # [num_seqs] row of each sequence's state in the runner and the sampler
    starts: Int32  # [num_seqs] position of its first token in this step
    cu_seqlens_q: Int32  # [num_seqs+1] tokens of sequence i are cu_seqlens_q[i] … cu_seqlens_q[i+1]
    token_ids: Int32  # [num_tokens]
    block_table: Int32  # [num_seqs, max_blocks_per_seq], -1 = none
    num_logits: Int32  # [num_seqs] how many of its last tokens need logits
    samples: NDArray[np.bool_]  # [num_seqs] whether its last token gives a new one
    rope_lens: Int32  # [num_seqs] see Sequence.rope_len
    two_way_lens: Int32  # [num_seqs] see Sequence.two_way_len
    num_decodes: int  # leading sequences with one token each
    swaps_out: Int32 = field(default_factory=no_swaps)  # [num_out, 2] a block, and where to on the host: done first
    swaps_in: Int32 = field(default_factory=no_swaps)  # [num_in, 2] where on the host, and to which block: done next

    @property
    def num_seqs(self) -> int:
        return len(self.slots)

    @property
    def num_tokens(self) -> int:
        return len(self.token_ids)


@dataclass(frozen=True, slots=True)
class ForwardBatch:
    """The arrays of one forward pass, an explicit argument of every piece."""

    token_ids: Array  # [num_tokens] int32
    positions: Array  # [num_tokens] int32
    cu_seqlens_q: Array  # [num_seqs+1] int32
    seq_lens: Array  # [num_seqs] int32, KV length including this step's tokens
    slot_mapping: Array  # [num_tokens] int32, block·block_size + offset of each token's KV
    block_table: Array  # [num_seqs, max_blocks_per_seq] int32, -1 = none
    logits_indices: Array  # [num_logits] int32, rows whose logits are wanted
    rope_cos_sin: Array  # [num_tokens, rotary_dim] float32, cosines then sines (see ref.rope)
    two_way_lens: Array  # [num_seqs] int32, leading tokens that all tokens see, also those before; 0 = causal
    num_decodes: int  # leading sequences (and so tokens) with one token each
    halves: tuple[ForwardBatch, ForwardBatch] | None = None  # of a step that is computed in two (engine.halves)

    @property
    def num_tokens(self) -> int:
        return int(self.token_ids.shape[0])


def unknown_id(slot: int) -> int:
    """Stands for the id that the step before samples in a slot, until it is known: −1, −2, …"""
    return -1 - slot


def token_positions(plan: StepPlan) -> Int32:
    """Position of every token of the step in its sequence, [num_tokens]."""
    counts = np.diff(plan.cu_seqlens_q)
    shift = np.repeat(plan.starts - plan.cu_seqlens_q[:-1], counts)
    return np.arange(plan.num_tokens, dtype=np.int32) + shift


def token_sequences(plan: StepPlan) -> Int32:
    """Row of the sequence that every token belongs to, [num_tokens]."""
    return np.repeat(np.arange(plan.num_seqs, dtype=np.int32), np.diff(plan.cu_seqlens_q))


def build_batch(plan: StepPlan, block_size: int, rope_cos_sin: Array) -> ForwardBatch:
    """Derives the arrays of a step; rope_cos_sin [num_tokens, rotary_dim] comes from the model's tables."""
    positions = token_positions(plan)
    blocks = plan.block_table[token_sequences(plan), positions // block_size]
    ends = np.repeat(plan.cu_seqlens_q[1:], plan.num_logits)
    first_of_run = np.cumsum(plan.num_logits) - plan.num_logits
    place = np.arange(len(ends), dtype=np.int32) - np.repeat(first_of_run + plan.num_logits, plan.num_logits)
    return ForwardBatch(
        token_ids=plan.token_ids,
        positions=positions,
        cu_seqlens_q=plan.cu_seqlens_q,
        seq_lens=plan.starts + np.diff(plan.cu_seqlens_q),
        slot_mapping=blocks * np.int32(block_size) + positions % block_size,
        block_table=plan.block_table,
        logits_indices=(ends + place).astype(np.int32),
        rope_cos_sin=rope_cos_sin,
        two_way_lens=plan.two_way_lens,
        num_decodes=plan.num_decodes,
    )


def first_step(num_tokens: int, vocab_size: int) -> StepPlan:
    """The first tokens of one sequence in slot 0 and block 0."""
    one, zero = np.ones(1, np.int32), np.zeros(1, np.int32)
    return StepPlan(
        step=0,
        slots=zero,
        starts=zero,
        cu_seqlens_q=np.array([0, num_tokens], np.int32),
        token_ids=np.arange(num_tokens, dtype=np.int32) % vocab_size,
        block_table=np.zeros((1, 1), np.int32),
        num_logits=one,
        samples=np.ones(1, np.bool_),
        rope_lens=zero,
        two_way_lens=zero,
        num_decodes=int(num_tokens == 1),
    )
