"""A step in two halves: the sums over ranks of one go on while the other is computed (dual streams).

Where a step is cut is a token; a sequence may be cut there. Its second half attends to the keys of its first, which are
written before, as the halves are computed in order, piece by piece. A sequence that is read both ways is never cut.
Defined by ref.dual_stream, as far as time goes.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from engine.batch import ForwardBatch, Int32, StepPlan

Array = Any

NEVER = 1 << 62
PER_TOKEN = ("token_ids", "positions", "slot_mapping", "rope_cos_sin")


@dataclass(frozen=True, slots=True)
class Halving:
    """Which steps are halved: from so many tokens on; where all of them decode, from so many sequences on.

    row_multiple: of the rows of the first half, so that neither half has a tile of a kernel that is not full.
    """

    min_tokens: int = NEVER
    min_decodes: int = NEVER
    row_multiple: int = 1

    def num_first(self, plan: StepPlan) -> int:
        """Tokens of the first half; 0: the step is not cut."""
        if plan.num_decodes == plan.num_tokens:
            return self.num_first_decodes(plan.num_tokens)
        half = self.num_first_prompts(plan.num_tokens)
        row = int(np.searchsorted(plan.cu_seqlens_q, half, side="right")) - 1  # whose is the token at half
        if half and plan.two_way_lens[row]:
            ends: list[int] = plan.cu_seqlens_q[row : row + 2].tolist()
            half = min(ends, key=lambda end: abs(end - half))
        return half % plan.num_tokens

    def num_first_prompts(self, num_tokens: int) -> int:
        """Of a step of so many tokens with prompts in it, none of which is read both ways."""
        return self.half(num_tokens) if num_tokens >= self.min_tokens else 0

    def num_first_decodes(self, num_seqs: int) -> int:
        """Of a step of so many sequences that decode."""
        return self.half(num_seqs) if num_seqs >= self.min_decodes else 0

    def half(self, num_tokens: int) -> int:
        """About half of so many, and a multiple of row_multiple; 0: there are too few."""
        return self.row_multiple * round(num_tokens / 2 / self.row_multiple) % max(num_tokens, 1)


def first_that_pays(sizes: Sequence[int], times: Callable[[int], tuple[float, float]]) -> int:
    """The first size at which a step in halves takes less time than one that is whole; NEVER if there is none.

    times: seconds (whole, in halves) of a step of so many tokens; larger ones than what is found are not asked for.
    """
    for size in sizes:
        whole, halved = times(size)
        if halved < whole:
            return size
    return NEVER


def in_halves(batch: ForwardBatch, num_first: int) -> ForwardBatch:
    """The batch with its halves, the first of so many tokens; as it is with 0."""
    return replace(batch, halves=split_batch(batch, num_first)) if num_first else batch


def split_batch(batch: ForwardBatch, num_first: int) -> tuple[ForwardBatch, ForwardBatch]:
    """The first num_first tokens of a step, and the others, each a step of its own if done in this order.

    A sequence that goes on in the second half is in both. Arrays of the second half count its tokens from 0.

    Args:
        batch: whose cu_seqlens_q, seq_lens, logits_indices and two_way_lens are NumPy's; the others may be any arrays,
            and the halves have views of them.
        num_first: 0 to num_tokens, within no sequence that is read both ways.
    """
    ends: Int32 = batch.cu_seqlens_q
    num_tokens, num_seqs = batch.num_tokens, len(ends) - 1
    num_in_first = int(np.searchsorted(ends[:-1], num_first))  # sequences that begin before it
    num_done = int(np.searchsorted(ends[1:], num_first, side="right"))  # … and that end there at the latest
    first_ends = np.minimum(ends[: num_in_first + 1], num_first)
    second_ends = np.maximum(ends[num_done:] - np.int32(num_first), 0)
    first_lens = batch.seq_lens[:num_in_first] - (ends[1 : num_in_first + 1] - first_ends[1:])
    is_first = batch.logits_indices < num_first
    return (
        replace(
            _rows(batch, slice(0, num_first), slice(0, num_in_first)),
            cu_seqlens_q=first_ends,
            seq_lens=first_lens,
            logits_indices=batch.logits_indices[is_first],
            num_decodes=min(batch.num_decodes, num_first),
        ),
        replace(
            _rows(batch, slice(num_first, num_tokens), slice(num_done, num_seqs)),
            cu_seqlens_q=second_ends,
            seq_lens=batch.seq_lens[num_done:],
            logits_indices=batch.logits_indices[~is_first] - np.int32(num_first),
            num_decodes=max(batch.num_decodes - num_first, 0),
        ),
    )


def _rows(batch: ForwardBatch, tokens: slice, seqs: slice) -> ForwardBatch:
    """With the arrays that are cut, not counted anew."""
    per_token = {name: getattr(batch, name)[tokens] for name in PER_TOKEN}
    per_seq = {name: getattr(batch, name)[seqs] for name in ("block_table", "two_way_lens")}
    return replace(batch, **per_token, **per_seq, halves=None)
