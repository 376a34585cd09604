"""From the logits of a step to its token ids: the sampling state of every slot, and nothing of scheduling.

A step packs what its rows want into small arrays and calls at most three ops: edits of the logits (penalties,
logit_bias, masks), then temperature, top_k, top_p, min_p and one draw, then logprobs. The formulas are in ref.sampling.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.api import MIN_TEMPERATURE, SamplingParams, TokenLogprob
from engine.errors import RequestError, RequestFailedError
from engine.logit_edits import (
    BAN_BIAS,
    NOT_FINITE,
    NOTHING_LEFT,
    SAMPLED,
    LogitEdits,
    SlotEdits,
    needs_edits,
    pack_edits,
)
from engine.ops import SamplingOps

Array = Any  # logits: of the target
Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]

NO_TOKEN = -1  # token id of a row that could not be sampled
_SEED_MASK = 2**64 - 1
_ERRORS = {
    NOT_FINITE: "the model gave logits that are NaN or infinite",
    NOTHING_LEFT: "logit_bias, allowed_token_ids, bad_words, min_tokens and penalties leave no token to sample",
}

_EDITS, _LOGPROBS = 1, 2  # what a slot needs beyond a draw, as bits


@dataclass(frozen=True, slots=True)
class SampleResult:
    """One step's tokens. A bad row has token id NO_TOKEN, no logprob, and a line in errors."""

    token_ids: Int32  # [num_rows]
    logprobs: list[TokenLogprob | None]  # [num_rows], None where not asked for
    bad_rows: NDArray[np.bool_]  # [num_rows]
    errors: dict[int, str]  # row → why it is bad


@dataclass(frozen=True, slots=True)
class Draw:
    """A step's draw that has been launched; token ids are known when copy has been called."""

    slots: Int32  # [num_rows]
    needs: NDArray[np.uint8]  # [num_rows]
    logits: Array  # [num_rows, vocab], edited
    sampled: Array  # [2, num_rows], where the logits are: token ids, and whether they are any
    copy: Callable[[], NDArray[Any]]  # the same on the host, waited for
    raw_rows: Int32  # rows whose logits as the model gave them are kept, in raw
    raw: Array | None


def check_tokens_left(sampling: SamplingParams, vocab_size: int, eos_token_ids: Sequence[int]) -> None:
    """Refuses masks that together leave no token for the first step.

    Raises:
        RequestError: names the masks that took everything.
    """
    banned = {token_id for token_id, bias in sampling.logit_bias.items() if bias <= BAN_BIAS}
    banned |= {word[0] for word in sampling.bad_words_ids if len(word) == 1}
    if sampling.min_tokens > 0:
        banned |= {*eos_token_ids, *sampling.stop_token_ids}
    allowed = sampling.allowed_token_ids
    num_left = vocab_size - len(banned) if allowed is None else len(set(allowed) - banned)
    if num_left > 0:
        return
    masks = [
        name for name in ("allowed_token_ids", "logit_bias", "bad_words_ids", "min_tokens") if getattr(sampling, name)
    ]
    names = " and ".join(masks).replace("bad_words_ids", "bad_words")
    raise RequestError(f"no token is left to sample by {names}", masks[0].replace("bad_words_ids", "bad_words"))


def needs_tokens(sampling: SamplingParams) -> bool:
    """Whether the next draw of a sequence must know its tokens so far, or its logits be looked at, on the host."""
    return needs_edits(sampling) or sampling.logprobs is not None or sampling.prompt_logprobs is not None


class Sampler:
    """Holds the sampling state of num_slots slots as arrays, so that a plain greedy row costs only its argmax."""

    def __init__(self, vocab_size: int, num_slots: int, ops: SamplingOps) -> None:
        self._vocab_size = vocab_size
        self._ops = ops
        self._needs = np.zeros(num_slots, dtype=np.uint8)
        self._num_output = np.zeros(num_slots, dtype=np.int64)
        self._seed = np.zeros(num_slots, dtype=np.uint64)
        self._stream = np.zeros(num_slots, dtype=np.int64)
        self._temperature = np.zeros(num_slots, dtype=np.float64)
        self._top_k = np.zeros(num_slots, dtype=np.int64)
        self._top_p = np.ones(num_slots, dtype=np.float64)
        self._min_p = np.zeros(num_slots, dtype=np.float64)
        self._edits: dict[int, SlotEdits] = {}
        self._num_logprobs: dict[int, int] = {}

    def add(
        self,
        slot: int,
        sampling: SamplingParams,
        seed: int,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int] = (),
        eos_token_ids: Sequence[int] = (),
        choice: int = 0,
    ) -> None:
        """Starts or, after a preemption with the output_ids so far, resumes a sequence in a slot.

        The draw for output position p is a function of (seed, choice, p) alone. seed is any 64-bit integer, that
        of the request or one that the engine drew for it. Positive temperatures below MIN_TEMPERATURE that
        are not greedy are raised to it. sampling must have passed validate().
        """
        self.remove(slot)
        needs = 0
        if not sampling.is_greedy:
            self._temperature[slot] = max(sampling.temperature, MIN_TEMPERATURE)
            self._top_k[slot] = min(sampling.top_k, self._vocab_size)
            self._top_p[slot] = sampling.top_p
            self._min_p[slot] = sampling.min_p
        if needs_edits(sampling):
            needs |= _EDITS
            self._edits[slot] = SlotEdits(sampling, prompt_ids, output_ids, eos_token_ids, self._vocab_size)
        if sampling.logprobs is not None:
            needs |= _LOGPROBS
            self._num_logprobs[slot] = sampling.logprobs
        self._needs[slot] = needs
        self._seed[slot] = seed & _SEED_MASK
        self._stream[slot] = choice
        self._num_output[slot] = len(output_ids)

    def remove(self, slot: int) -> None:
        """Forgets a slot; one that is empty already may be removed too."""
        self._needs[slot] = 0
        self._temperature[slot] = 0.0
        self._edits.pop(slot, None)
        self._num_logprobs.pop(slot, None)

    def sample(self, logits: Array, slots: Int32) -> SampleResult:
        """The next token of every row that is not bad, which counts as output from then on; see start and finish."""
        result = self.finish(self.start(logits, slots))
        self._num_output[slots[result.bad_rows]] -= 1
        return result

    def start(self, logits: Array, slots: Int32) -> Draw:
        """Launches the edits and the draw of every row, and counts it as output, also one that turns out bad.

        Nothing is waited for.

        logits [num_rows, vocab] as the model gave them; rows that have penalties, bias or masks are overwritten.
        slots [num_rows], each at most once.
        """
        needs = self._needs[slots]
        raw_rows, reasons, raw = np.zeros(0, dtype=np.int32), None, None
        if (needs & _EDITS).any():
            edits = self._pack_edits(slots, needs)
            raw_rows = edits.rows[edits.keeps_raw]
            reasons, raw = self._ops.edit_logits(logits, edits)
        sampled = self._ops.sample_rows(
            logits,
            self._temperature[slots],
            self._top_k[slots],
            self._top_p[slots],
            self._min_p[slots],
            self._seed[slots],
            self._num_output[slots],
            self._stream[slots],
            reasons,
        )
        self._num_output[slots] += 1
        return Draw(slots, needs, logits, sampled, self._ops.start_copy(sampled), raw_rows, raw)

    def finish(self, draw: Draw) -> SampleResult:
        """Waits for a draw: its tokens, and the logprobs of those that want them.

        A row with NaN or +inf, and one in which nothing is left to sample, is bad: it gets NO_TOKEN, and no other row
        is touched by it.
        """
        slots, needs = draw.slots, draw.needs
        token_ids, status = draw.copy()
        bad_rows = status != SAMPLED
        self._record(slots, token_ids, bad_rows)
        logprobs: list[TokenLogprob | None] = [None] * len(slots)
        rows = np.flatnonzero((needs & _LOGPROBS != 0) & ~bad_rows)
        if len(rows):
            num_top = [self._num_logprobs[slot] for slot in slots[rows].tolist()]
            raw_rows = draw.raw_rows
            sources = np.where(np.isin(rows, raw_rows), ~np.searchsorted(raw_rows, rows), rows).astype(np.int32)
            found = self._ops.token_logprobs(draw.logits, token_ids[rows], max(num_top), sources, draw.raw)
            for row, k, entry in zip(rows.tolist(), num_top, _entries(token_ids[rows], *found), strict=True):
                logprobs[row] = replace(entry, top=entry.top[:k])
        errors = {row: _ERRORS[int(status[row])] for row in np.flatnonzero(bad_rows).tolist()}
        return SampleResult(np.where(bad_rows, np.int32(NO_TOKEN), token_ids), logprobs, bad_rows, errors)

    def _pack_edits(self, slots: Int32, needs: NDArray[np.uint8]) -> LogitEdits:
        rows = np.flatnonzero(needs & _EDITS)
        edited = slots[rows]
        edits = [self._edits[slot] for slot in edited.tolist()]
        return pack_edits(rows, edits, self._num_output[edited], needs[rows] & _LOGPROBS != 0)

    def _record(self, slots: Int32, token_ids: Int32, bad_rows: NDArray[np.bool_]) -> None:
        """Tells the tokens of rows that are not bad to the edits of their slots."""
        if self._edits:
            for row, slot in enumerate(slots.tolist()):
                if slot in self._edits and not bad_rows[row]:
                    self._edits[slot].record(int(token_ids[row]))


def prompt_logprobs(logits: Array, next_ids: Int32, k: int, ops: SamplingOps) -> list[TokenLogprob]:
    """What the model thought of each prompt token: row i of logits [n, vocab] against next_ids[i], and the k best.

    Needs little memory beyond the logits, of which the caller makes no more rows at a time than it can hold.

    Raises:
        RequestFailedError: a row is NaN or infinite.
    """
    none, neutral = np.zeros(len(next_ids), dtype=np.int64), np.ones(len(next_ids))
    greedy = ops.sample_rows(logits, none * 0.0, none, neutral, none * 0.0, none.astype(np.uint64), none, none)
    if (ops.start_copy(greedy)()[1] != SAMPLED).any():
        raise RequestFailedError(f"{_ERRORS[NOT_FINITE]} at the prompt")
    return _entries(next_ids, *ops.token_logprobs(logits, next_ids, k))


def _entries(token_ids: Int32, own: Float32, top_ids: NDArray[np.int64], top: Float32) -> list[TokenLogprob]:
    return [
        TokenLogprob(token_id, logprob, tuple(zip(ids, best, strict=True)))
        for token_id, logprob, ids, best in zip(
            token_ids.tolist(), own.tolist(), top_ids.tolist(), top.tolist(), strict=True
        )
    ]
