"""What requests do to their logits before the temperature, as lists that any target can apply.

Order of operations: penalties, logit_bias, masks (allowed_token_ids, then bans: bad words, min_tokens, a bias of −100).
The formulas are in ref.sampling.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import ArrayLike, NDArray

from engine.api import SamplingParams

Float32 = NDArray[np.float32]
Int32 = NDArray[np.int32]
Int64 = NDArray[np.int64]

BAN_BIAS = -100.0  # a logit_bias of this much or lower takes the token out
PENALTY, BIAS, ALLOWED, BANNED = range(4)  # kinds of edits, in the order in which they apply
NUM_KINDS = 4
SAMPLED, NOT_FINITE, NOTHING_LEFT = range(3)  # what came of a row


@dataclass(frozen=True, slots=True)
class LogitEdits:
    """The edits of one step, by rows of its logits; rows without edits are not there.

    Edits [bounds[i, kind], bounds[i, kind + 1]) are those of one kind of row rows[i]; an id is there once a kind.
    values mean: PENALTY, what is taken off after repetition_penalty[i] (l / r where l > 0, l · r elsewhere); BIAS, what
    is added; 0 otherwise. A row with ids of kind ALLOWED loses all others.
    """

    rows: Int32  # [num_edited_rows], ascending
    bounds: Int32  # [num_edited_rows, NUM_KINDS + 1]
    token_ids: Int32  # [num_edits]
    values: Float32  # [num_edits]
    repetition_penalty: Float32  # [num_edited_rows]
    keeps_raw: NDArray[np.bool_]  # [num_edited_rows]: the row is wanted as it was, too


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
        self._ids = np.concatenate([seen, np.zeros(64, dtype=np.int64)]).astype(np.int32)
        self._counts = np.concatenate([counts, np.zeros(64, dtype=np.int64)])
        self._index = dict(zip(seen.tolist(), range(len(seen)), strict=True))

    @property
    def ids(self) -> Int32:
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


class SlotEdits:
    """What one sequence does to its logits, and what it must remember for that."""

    def __init__(
        self,
        sampling: SamplingParams,
        prompt_ids: Sequence[int],
        output_ids: Sequence[int],
        eos_token_ids: Sequence[int],
        vocab_size: int,
    ) -> None:
        self._sampling = sampling
        self.repetition_penalty = sampling.repetition_penalty
        biased = {i: bias for i, bias in sampling.logit_bias.items() if bias > BAN_BIAS}
        self._bias_ids = _ids(list(biased))
        self._bias = np.array(list(biased.values()), dtype=np.float32)
        single = [word[0] for word in sampling.bad_words_ids if len(word) == 1]
        self._banned = {*(sampling.logit_bias.keys() - biased.keys()), *single}
        self._ends = {*eos_token_ids, *sampling.stop_token_ids}
        self._banned_ids, self._banned_at_first = _ids(self._banned), _ids(self._banned | self._ends)
        self._allowed_ids = _ids(set(sampling.allowed_token_ids or ()))
        self._bad_phrases = [word for word in sampling.bad_words_ids if len(word) > 1]
        longest = max((len(word) - 1 for word in self._bad_phrases), default=0)
        self._recent_ids = deque(output_ids, maxlen=longest)
        self._seen = _SeenTokens(prompt_ids, output_ids, vocab_size) if _has_penalty(sampling) else None

    def lists(self, num_output: int) -> list[tuple[Int32, Float32]]:
        """Ids and values of every kind, in order, for the output token of index num_output."""
        return [
            self._penalties(),
            (self._bias_ids, self._bias),
            (self._allowed_ids, np.zeros(len(self._allowed_ids), dtype=np.float32)),
            self._bans(num_output),
        ]

    def _penalties(self) -> tuple[Int32, Float32]:
        if self._seen is None:
            return _NONE
        counts = self._seen.output_counts
        presence, frequency = self._sampling.presence_penalty, self._sampling.frequency_penalty
        penalties = frequency * counts + presence * (counts > 0)
        return self._seen.ids, penalties.astype(np.float32)

    def _bans(self, num_output: int) -> tuple[Int32, Float32]:
        at_first = num_output < self._sampling.min_tokens
        banned_ids = self._banned_at_first if at_first else self._banned_ids
        recent = tuple(self._recent_ids)
        ended = {p[-1] for p in self._bad_phrases if recent[len(recent) - len(p) + 1 :] == p[:-1]}
        if ended:
            banned_ids = _ids(self._banned | (self._ends if at_first else set()) | ended)
        return banned_ids, np.zeros(len(banned_ids), dtype=np.float32)

    def record(self, token_id: int) -> None:
        """One more output token."""
        self._recent_ids.append(token_id)
        if self._seen is not None:
            self._seen.add(token_id)


def _ids(token_ids: set[int] | list[int]) -> Int32:
    return np.array(list(token_ids), dtype=np.int32)


_NONE = (np.zeros(0, dtype=np.int32), np.zeros(0, dtype=np.float32))


def _has_penalty(sampling: SamplingParams) -> bool:
    neutral = (1.0, 0.0, 0.0)
    return (sampling.repetition_penalty, sampling.presence_penalty, sampling.frequency_penalty) != neutral


def needs_edits(sampling: SamplingParams) -> bool:
    """Whether a request does anything to its logits before the temperature."""
    masks = sampling.allowed_token_ids is not None or bool(sampling.bad_words_ids) or sampling.min_tokens > 0
    return masks or bool(sampling.logit_bias) or _has_penalty(sampling)


def pack_edits(rows: ArrayLike, edits: Sequence[SlotEdits], num_output: Int64, keeps_raw: ArrayLike) -> LogitEdits:
    """The lists of several rows one behind the other.

    Args:
        rows, num_output, keeps_raw: [num_edited_rows]; see LogitEdits and SlotEdits.lists.
    """
    lists = [one.lists(count) for one, count in zip(edits, num_output.tolist(), strict=True)]
    sizes = np.array([[len(ids) for ids, _ in row] for row in lists], dtype=np.int64)
    starts = np.cumsum(sizes) - sizes.ravel()
    ends = starts.reshape(sizes.shape)[:, -1:] + sizes[:, -1:]
    return LogitEdits(
        rows=np.asarray(rows, dtype=np.int32),
        bounds=np.concatenate([starts.reshape(sizes.shape), ends], axis=1).astype(np.int32),
        token_ids=np.concatenate([ids for row in lists for ids, _ in row]),
        values=np.concatenate([values for row in lists for _, values in row]),
        repetition_penalty=np.array([one.repetition_penalty for one in edits], dtype=np.float32),
        keeps_raw=np.asarray(keeps_raw, dtype=np.bool_),
    )
