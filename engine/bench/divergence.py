"""How far one model's logits are from another's, over a text.

p is the model before, q the one that is judged, t the token that stands there:

    nll = Σ −log q(t)      kl = Σ Σ p log(p / q)      same = how often argmax p = argmax q

The logits before are kept in a file while the other models are run: num_tokens · vocab_size · 4 bytes.
"""

from __future__ import annotations

import math
import os
import tempfile
from collections import deque
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from types import TracebackType

import numpy as np
from numpy.typing import NDArray

from engine.errors import ConfigError
from engine.system import usable_cores

Float32 = NDArray[np.float32]
Ids = NDArray[np.int32]


@dataclass(frozen=True, slots=True)
class Sums:
    """Over some tokens; nll and kl in nats."""

    num_tokens: int = 0
    nll: float = 0.0
    kl: float = 0.0
    same: int = 0

    def __add__(self, other: Sums) -> Sums:
        return Sums(
            self.num_tokens + other.num_tokens, self.nll + other.nll, self.kl + other.kl, self.same + other.same
        )


class Divergence:
    """Judges models by the first that it is given. Use as a context: it has a file."""

    def __init__(self, windows: Ids, vocab_size: int) -> None:
        """windows: token ids [num_windows, length]; the first token of each is foretold by nobody."""
        self._windows = windows
        self._shape = (windows.size, vocab_size)
        self._before: Float32 | None = None

    def __enter__(self) -> Divergence:
        """
        Raises:
            ConfigError: the temporary folder has no room for the file.
        """
        try:
            self._file = tempfile.TemporaryFile(prefix="logits-")
            os.posix_fallocate(self._file.fileno(), 0, 4 * math.prod(self._shape))  # else a full disk is a crash later
            self._kept = np.memmap(self._file, np.float32, "w+", shape=self._shape)
        except OSError as error:
            size = self._shape[0] * self._shape[1] * 4 / 1e6
            raise ConfigError(
                f"--tokens {self._shape[0]}: the logits before take {size:,.0f} MB in {tempfile.gettempdir()}, which "
                f"cannot be had: {error.strerror or error}; set TMPDIR, or read fewer tokens"
            ) from error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._before = None
        del self._kept
        self._file.close()

    def judge(self, parts: Iterator[Float32]) -> Sums:
        """A model; the first one is what all are judged by.

        Args:
            parts: logits [num_rows, vocab_size] of the tokens in order, cut at the end of each window.
        """
        is_first = self._before is None
        self._before = self._kept
        total, waiting, cores = Sums(), deque[Future[Sums]](), usable_cores()
        place = 0
        with ThreadPoolExecutor(cores) as pool:
            for part in parts:
                if is_first:
                    self._kept[place : place + len(part)] = part
                waiting.append(pool.submit(self._score, np.array(part), place))
                place += len(part)
                while len(waiting) > 2 * cores:
                    total += waiting.popleft().result()
            for future in waiting:
                total += future.result()
        assert place == self._windows.size, f"{place} rows of logits for {self._windows.size} tokens"
        return total

    def _score(self, logits: Float32, place: int) -> Sums:
        """Some rows, the first of which is that of token `place` of the text."""
        window, first = divmod(place, self._windows.shape[1])
        next_ids = self._windows[window, first + 1 : first + 1 + len(logits)]  # a window's last token foretells none
        rows = np.arange(len(next_ids))
        before = log_softmax(np.array(self._kept[place : place + len(rows)]))
        found = log_softmax(logits[: len(rows)])
        return Sums(
            len(rows),
            -float(found[rows, next_ids].sum(dtype=np.float64)),
            float((np.exp(before) * (before - found)).sum(dtype=np.float64)),
            int((found.argmax(axis=1) == before.argmax(axis=1)).sum()),
        )


def log_softmax(logits: Float32) -> Float32:
    """Along the last axis, the sum in float64."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    total = np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)
    result: Float32 = shifted - np.log(total).astype(np.float32)
    return result
