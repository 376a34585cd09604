"""From the logits of a step to its token ids: the sampling state of every slot, and nothing of scheduling.

Order of operations: penalties, logit_bias, masks (allowed_token_ids, bad words, min_tokens), temperature, top_k,
top_p, min_p, one draw. The formulas are in ref.sampling.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from engine.api import MIN_TEMPERATURE, SamplingParams, TokenLogprob
from engine.errors import RequestError, RequestFailedError
from engine.ops import SamplingOps

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]
Float64 = NDArray[np.float64]

BAN_BIAS = -100.0  # a logit_bias of this much or lower takes the token out
NO_TOKEN = -1  # token id of a row that could not be sampled
_SEED_MASK = 2**64 - 1
_NOT_FINITE = "the model gave logits that are NaN or infinite"
_NOTHING_LEFT = "logit_bias, allowed_token_ids, bad_words, min_tokens and penalties leave no token to sample"

_DRAWS, _EDITS, _LOGPROBS = 1, 2, 4  # what a slot needs beyond an argmax, as bits


@dataclass(frozen=True, slots=True)
class SampleResult:
    """One step's tokens. A bad row has token id NO_TOKEN, no logprob, and a line in errors."""

    token_ids: Int32  # [num_rows]
    logprobs: list[TokenLogprob | None]  # [num_rows], None where not asked for
    bad_rows: NDArray[np.bool_]  # [num_rows]
    errors: dict[int, str]  # row → why it is bad


class _SeenTokens:
    """Distinct ids of prompt and output and how often each is in the output; memory grows with the text only.

    Ids outside the vocabulary are passed over: they have no logit.
    """

    def __init__(self, prompt_ids: Sequence[int], output_ids: Sequence[int], vocab_size: int) -> None:
        output = np.asarray(output_ids, dtype=np.int64)
        seen = np.unique(np.concatenate([np.asarray(prompt_ids, dtype=np.int64), output]))
        seen = seen[(seen >= 0) & (seen < vocab_size)]
        output = output[(output >= 0) & (output < vocab_size)]
        counts = np.bincount(np.searchsorted(seen, output), minlength=len(seen))
        self._size = len(seen)
        self._ids = np.concatenate([seen, np.zeros(64, dtype=np.int64)])
        self._counts = np.concatenate([counts, np.zeros(64, dtype=np.int64)])
        self._index = dict(zip(seen.tolist(), range(len(seen)), strict=True))

    @property
    def ids(self) -> Int64:
        return self._ids[: self._size]

    @property
    def output_counts(self) -> Int64:
        return self._counts[: self._size]

    def add(self, token_id: int) -> None:
        """One more output token."""
        position = self._index.setdefault(token_id, self._size)
        if position == len(self._ids):
            self._ids = np.concatenate([self._ids, np.zeros_like(self._ids)])
            self._counts = np.concatenate([self._counts, np.zeros_like(self._counts)])
        self._size = max(self._size, position + 1)
        self._ids[position] = token_id
        self._counts[position] += 1


class _LogitEdits:
    """What one slot does to its logits before the temperature."""

    def __init__(
        self,
        sampling: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        eos_token_ids: Sequence[int],
        vocab_size: int,
        ops: SamplingOps,
    ) -> None:
        self._sampling = sampling
        self._ops = ops
        biased = {i: bias for i, bias in sampling.logit_bias.items() if bias > BAN_BIAS}
        self._bias_ids = np.array(list(biased), dtype=np.int64)
        self._bias = np.array(list(biased.values()), dtype=np.float32)
        single = [word[0] for word in sampling.bad_words_ids if len(word) == 1]
        self._banned_ids = np.array([*(sampling.logit_bias.keys() - biased.keys()), *single], dtype=np.int64)
        self._allowed_ids = None
        if sampling.allowed_token_ids is not None:
            self._allowed_ids = np.array(sampling.allowed_token_ids, dtype=np.int64)
        self._end_ids = np.array([*eos_token_ids, *sampling.stop_token_ids], dtype=np.int64)
        self._bad_phrases = [word for word in sampling.bad_words_ids if len(word) > 1]
        longest = max((len(word) - 1 for word in self._bad_phrases), default=0)
        self._recent_ids = deque(output_ids, maxlen=longest)
        self._seen = _SeenTokens(prompt_ids, output_ids, vocab_size) if _has_penalty(sampling) else None

    def apply(self, logits: Float32, num_output: int) -> None:
        """Edits logits [vocab] in place, for the output token of index num_output."""
        sampling = self._sampling
        if self._seen is not None:
            self._ops.apply_penalties(
                logits,
                self._seen.ids,
                self._seen.output_counts,
                sampling.repetition_penalty,
                sampling.presence_penalty,
                sampling.frequency_penalty,
            )
        logits[self._bias_ids] += self._bias
        if self._allowed_ids is not None:
            allowed = logits[self._allowed_ids]
            logits.fill(-np.inf)
            logits[self._allowed_ids] = allowed
        logits[self._banned_ids] = -np.inf
        recent = tuple(self._recent_ids)
        for phrase in self._bad_phrases:
            if recent[len(recent) - len(phrase) + 1 :] == phrase[:-1]:
                logits[phrase[-1]] = -np.inf
        if num_output < sampling.min_tokens:
            logits[self._end_ids] = -np.inf

    def record(self, token_id: int) -> None:
        self._recent_ids.append(token_id)
        if self._seen is not None:
            self._seen.add(token_id)


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


def _has_penalty(sampling: SamplingParams) -> bool:
    neutral = (1.0, 0.0, 0.0)
    return (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != neutral


def _needs_edits(sampling: SamplingParams) -> bool:
    masks = sampling.allowed_token_ids is not None or bool(sampling.bad_words_ids) or sampling.min_tokens > 0
    return masks or bool(sampling.logit_bias) or _has_penalty(sampling)


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
        self._edits: dict[int, _LogitEdits] = {}
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
            needs |= _DRAWS
            self._temperature[slot] = max(sampling.temperature, MIN_TEMPERATURE)
            self._top_k[slot] = min(sampling.top_k, self._vocab_size)
            self._top_p[slot] = sampling.top_p
            self._min_p[slot] = sampling.min_p
        if _needs_edits(sampling):
            needs |= _EDITS
            self._edits[slot] = _LogitEdits(
                sampling, prompt_ids, output_ids, eos_token_ids, self._vocab_size, self._ops
            )
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

    def sample(self, logits: Float32, slots: Int32) -> SampleResult:
        """The next token of every row, which counts as output from then on.

        logits [num_rows, vocab] as the model gave them; rows that have penalties, bias or masks are overwritten.
        slots [num_rows], each at most once. A row with NaN or +inf, and one in which nothing is left to sample, is
        bad: it gets NO_TOKEN, does not count as output, and no other row is touched by it.
        """
        needs = self._needs[slots]
        if not needs.any():
            token_ids = self._ops.greedy(logits)
            return self._finish(logits, slots, token_ids, {}, {})
        raw_rows = {row: logits[row] for row in np.flatnonzero(needs & _LOGPROBS).tolist()}
        errors = {}
        for row in np.flatnonzero(needs & _EDITS).tolist():
            if not np.isfinite(logits[row].max()):
                errors[row] = _NOT_FINITE
                continue
            if row in raw_rows:
                raw_rows[row] = logits[row].copy()
            slot = int(slots[row])
            with np.errstate(all="ignore"):  # extreme penalties may reach ±inf, which ends as a bad row
                self._edits[slot].apply(logits[row], int(self._num_output[slot]))
            if not np.isfinite(logits[row].max()):
                errors[row] = _NOTHING_LEFT
        token_ids = self._ops.sample(
            logits,
            self._temperature[slots],
            self._top_k[slots],
            self._top_p[slots],
            self._min_p[slots],
            self._uniforms(slots, needs),
        )
        return self._finish(logits, slots, token_ids, raw_rows, errors)

    def _uniforms(self, slots: Int32, needs: NDArray[np.uint8]) -> Float32:
        uniforms = np.zeros(len(slots), dtype=np.float32)
        draws = np.flatnonzero(needs & _DRAWS)
        drawing = slots[draws]
        if len(draws):
            uniforms[draws] = self._ops.uniform(self._seed[drawing], self._num_output[drawing], self._stream[drawing])
        return uniforms

    def _finish(
        self, logits: Float32, slots: Int32, token_ids: Int32, raw_rows: dict[int, Float32], errors: dict[int, str]
    ) -> SampleResult:
        """Finds the bad rows, records the tokens of the others and makes their logprobs."""
        bad_rows = ~np.isfinite(logits[np.arange(len(slots)), token_ids])
        for row in np.flatnonzero(bad_rows).tolist():
            errors.setdefault(row, _NOT_FINITE)
        logprobs: list[TokenLogprob | None] = [None] * len(slots)
        if errors:
            bad_rows[list(errors)] = True
        self._num_output[slots] += ~bad_rows
        if self._edits:
            for row, slot in enumerate(slots.tolist()):
                if slot in self._edits and not bad_rows[row]:
                    self._edits[slot].record(int(token_ids[row]))
        for row, raw in raw_rows.items():
            if not bad_rows[row]:
                k = self._num_logprobs[int(slots[row])]
                logprobs[row] = _row_logprobs(self._ops, [raw], token_ids[row : row + 1], k)[0]
        token_ids = np.where(bad_rows, NO_TOKEN, token_ids).astype(np.int32)
        return SampleResult(token_ids, logprobs, bad_rows, errors)


def prompt_logprobs(logits: Float32, next_ids: Int32, k: int, ops: SamplingOps) -> list[TokenLogprob]:
    """What the model thought of each prompt token: row i of logits [n, vocab] against next_ids[i], and the k best.

    Needs little memory beyond the logits, of which the caller makes no more rows at a time than it can hold.

    Raises:
        RequestFailedError: a row is NaN or infinite.
    """
    if not np.isfinite(logits.max(axis=-1)).all():
        raise RequestFailedError(f"{_NOT_FINITE} at the prompt")
    return _row_logprobs(ops, logits, next_ids, k)


def _row_logprobs(ops: SamplingOps, rows: Sequence[Float32] | Float32, token_ids: Int32, k: int) -> list[TokenLogprob]:
    own, top_ids, top = ops.token_logprobs(rows, token_ids, k)
    return [
        TokenLogprob(token_id, logprob, tuple(zip(ids, best, strict=True)))
        for token_id, logprob, ids, best in zip(
            token_ids.tolist(), own.tolist(), top_ids.tolist(), top.tolist(), strict=True
        )
    ]
