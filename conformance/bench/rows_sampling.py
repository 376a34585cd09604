"""Rows of the sampler: 128 rows of 128 256 logits, random ones (the hardest to rank) or like those of a model."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.bench.place import Place, spread
from conformance.bench.row import Call, Goal, Row, Sample, Work
from engine.cpu.sampling import sample_rows

Array = Any
Numbers = NDArray[Any]

ROWS, VOCAB = 128, 128256
LIKELY = 400  # tokens that stand out of the rest
NUM_TOP = 20  # logprobs a row
RANDOM, MODEL = "random", "model"


@dataclass(frozen=True, slots=True)
class Settings:
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0

    def filters(self, num_rows: int) -> dict[str, Numbers]:
        """As the op table takes them, a row each."""
        rows = np.arange(num_rows)
        return {
            "temperature": np.full(num_rows, self.temperature),
            "top_k": np.full(num_rows, self.top_k),
            "top_p": np.full(num_rows, self.top_p),
            "min_p": np.zeros(num_rows),
            "seed": rows.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15),
            "position": rows,
            "stream": np.zeros(num_rows, np.int64),
        }


SETTINGS: Mapping[str, tuple[Settings, Goal | None]] = {
    "greedy": (Settings(temperature=0.0), Goal(microseconds=60)),
    "temperature": (Settings(), None),
    "top_k": (Settings(top_k=50), None),
    "top_p": (Settings(top_p=0.9), Goal(microseconds=250)),
    "top_p_99": (Settings(top_p=0.99), Goal(microseconds=250)),
}


def rows(num_rows: int = ROWS, vocab_size: int = VOCAB) -> list[Row]:
    found = [
        Row(
            op="sampling",
            name=f"{name}-{kind}-{num_rows}x{vocab_size}",
            work=Work(4 * num_rows * vocab_size, 8 * num_rows),
            make=partial(_sample, settings=settings, kind=kind, shape=(num_rows, vocab_size)),
            goal=goal,
        )
        for name, (settings, goal) in SETTINGS.items()
        for kind in ((MODEL,) if name in ("greedy", "temperature") else (RANDOM, MODEL))
    ]
    found.append(
        Row(
            op="sampling",
            name=f"logprobs-{NUM_TOP}-{MODEL}-{num_rows}x{vocab_size}",
            work=Work(4 * num_rows * vocab_size, 8 * num_rows * NUM_TOP),
            make=partial(_logprobs, shape=(num_rows, vocab_size)),
        )
    )
    return found


def _logits(place: Place, kind: str, shape: tuple[int, int]) -> Array:
    """A model's: a few likely tokens, each less so than the one before, over a wide bulk."""
    if kind == RANDOM:
        return place.normal(*shape, dtype=np.float32)

    def likely() -> Array:
        rng = np.random.default_rng(2)
        vocab_size = shape[1]
        rows = 2 * rng.standard_normal((16, vocab_size), np.float32)
        count = min(LIKELY, vocab_size // 2)
        ids = rng.permuted(np.tile(np.arange(vocab_size), (16, 1)), axis=1)[:, :count]
        peaks = 14 - 2 * np.log1p(np.arange(count)) + 0.5 * rng.standard_normal(ids.shape)
        np.put_along_axis(rows, ids, peaks.astype(np.float32), axis=1)
        return place.put(rows.reshape(-1))

    return place.repeated(place.shared(f"likely-{shape[1]}", likely), *shape)


def _sample(place: Place, settings: Settings, kind: str, shape: tuple[int, int]) -> Call:
    logits, filters = _logits(place, kind, shape), settings.filters(shape[0])
    rows = spread(shape[0])

    def watch() -> Callable[[Array], list[Sample]]:
        seen = place.get_rows(logits, rows)
        mine = {name: value[rows] for name, value in filters.items()}

        def truth(dtype: Any, storage: str | None) -> Numbers:
            return sample_rows(seen, **mine)

        return lambda sampled: [Sample("sampled", place.get(sampled)[:, rows], truth, "float32")]

    return Call(
        run=lambda: place.ops.sampling.sample_rows(logits, **filters),
        watch=watch,
        inputs={"logits": logits, "top_k": settings.top_k, "top_p": settings.top_p, "heat": settings.temperature},
    )


def _logprobs(place: Place, shape: tuple[int, int]) -> Call:
    logits, rows = _logits(place, MODEL, shape), spread(shape[0])
    ids = place.rng.integers(0, shape[1], shape[0]).astype(np.int32)

    def watch() -> Callable[[tuple[Numbers, Numbers, Numbers]], list[Sample]]:
        seen = place.get_rows(logits, rows)

        def all_logprobs(dtype: Any) -> Numbers:
            above = seen.astype(dtype) - seen.max(-1, keepdims=True)
            found: Numbers = above - np.log(np.exp(above).sum(-1, keepdims=True))
            return found

        def own(dtype: Any, storage: str | None) -> Numbers:
            return np.take_along_axis(all_logprobs(dtype), ids[rows][:, None], axis=1)

        def top(dtype: Any, storage: str | None) -> Numbers:
            return -np.sort(-all_logprobs(dtype), axis=1)[:, :NUM_TOP]

        return lambda answer: [
            Sample("logprobs", answer[0][rows][:, None], own, "float32"),
            Sample("top logprobs", answer[2][rows], top, "float32"),
        ]

    return Call(
        run=lambda: place.ops.sampling.token_logprobs(logits, ids, NUM_TOP),
        watch=watch,
        inputs={"logits": logits, "num_top": NUM_TOP, "heat": 1.0, "top_k": 0, "top_p": 1.0},
    )
