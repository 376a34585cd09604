"""Hostile inputs: views with NaN all around them, caches with NaN in every slot that nobody owns, shuffled tables."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

import numpy as np
from numpy.typing import NDArray

from ref.kv_cache import kv_cache_slots

Array = NDArray[Any]
Int32 = NDArray[np.int32]

GARBAGE = np.float32(1e30)  # in unused memory, instead of NaN: finite, but it drowns whatever it is added to


def normal(rng: np.random.Generator, *shape: int, scale: float = 1.0) -> NDArray[np.float32]:
    """Normally distributed float32."""
    return rng.standard_normal(shape, np.float32) * np.float32(scale)


def guarded(array: Array, num_axes: int | None = None, last: int | None = None) -> Array:
    """An equal view into a larger array that is poison elsewhere: a border of 1 along the first num_axes axes.

    With all axes (None) no two rows are neighbours in memory; with 1 the view is contiguous, as a kernel that
    computes addresses by itself may ask for. last: the border along the last axis, if it has one. By default it is 8
    for rows of a multiple of 8, which are then aligned to 16 bytes in any type, as a model's are, and 1 for others.
    """
    num_axes = array.ndim if num_axes is None else num_axes
    if last is None:
        last = 1 if array.ndim == 0 or array.shape[-1] % 8 else 8
    borders = [(last if axis == array.ndim - 1 else 1) if axis < num_axes else 0 for axis in range(array.ndim)]
    whole = poison(np.zeros([n + 2 * border for n, border in zip(array.shape, borders, strict=True)], array.dtype))
    view: Array = whole[tuple(slice(border, border + n) for n, border in zip(array.shape, borders, strict=True))]
    view[...] = array
    return view


def other_tokens(
    inputs: dict[str, Any], rng: np.random.Generator, make: Callable[[np.random.Generator, int], Array]
) -> dict[str, Any]:
    """The disturb of a Case whose tokens do not meet: new rows of x for all but one; that one's row of y must stay.

    make: (generator, num_tokens) → rows of x.
    """
    x = inputs["x"]
    keep = int(rng.integers(len(x))) if len(x) else 0
    others = np.arange(len(x)) != keep
    x[others] = make(rng, int(others.sum()))
    return {"y": slice(keep, keep + 1)}


def poison(array: Array) -> Array:
    """Fills an array with what no computation should meet: NaN, the lowest integer, True."""
    if np.issubdtype(array.dtype, np.floating):
        array[...] = np.nan
    elif np.issubdtype(array.dtype, np.integer):
        array[...] = np.iinfo(array.dtype).min
    elif array.dtype == np.bool_:
        array[...] = True
    return array


@contextmanager
def poisoned_allocations() -> Iterator[None]:
    """numpy.empty and empty_like give poison, so that an element which is never written cannot look right by luck."""

    def poisoned(allocate: Callable[..., Array]) -> Callable[..., Array]:
        return lambda *args, **kwargs: poison(allocate(*args, **kwargs))

    with patch.multiple(np, empty=poisoned(np.empty), empty_like=poisoned(np.empty_like)):
        yield


def paged_kv(
    rng: np.random.Generator, seq_lens: Sequence[int], block_size: int, n_kv_heads: int, head_dim: int
) -> dict[str, Array]:
    """k_cache, v_cache [num_blocks, block_size, n_kv_heads, head_dim] and block_table [num_seqs, longest + 1].

    Blocks lie in random order. All slots that no sequence owns are NaN, those behind seq_len in a last block too.
    The first and the last block belong to nobody: they are what −1 reads when it is clamped, or wraps around.
    """
    counts = [-(-seq_len // block_size) for seq_len in seq_lens]
    num_blocks = sum(counts) + 3
    shuffled = iter((1 + rng.permutation(num_blocks - 2)).tolist())
    block_table = np.full((len(seq_lens), max(counts, default=0) + 1), -1, np.int32)
    shape = (num_blocks, block_size, n_kv_heads, head_dim)
    k_cache, v_cache = (guarded(np.full(shape, np.nan, np.float32), num_axes=1) for _ in range(2))
    for row, (seq_len, count) in enumerate(zip(seq_lens, counts, strict=True)):
        block_table[row, :count] = [next(shuffled) for _ in range(count)]
        slots = kv_cache_slots(block_table[row], np.arange(seq_len), block_size)
        for cache in (k_cache, v_cache):
            cache[slots // block_size, slots % block_size] = normal(rng, seq_len, n_kv_heads, head_dim)
    return {"k_cache": k_cache, "v_cache": v_cache, "block_table": guarded(block_table)}


def disturb_paged_kv(
    rng: np.random.Generator,
    k_cache: Array,
    v_cache: Array,
    block_table: Int32,
    seq_lens: Int32,
    keep: int,
    first_visible: int = 0,
) -> None:
    """Other content everywhere but in the slots of sequence `keep` from position first_visible on.

    Slots of others, and what `keep` has before first_visible, get new numbers; slots of nobody get GARBAGE.
    """
    block_size = k_cache.shape[1]
    for cache in (k_cache, v_cache):
        unowned = np.ones(cache.shape[:2], np.bool_)
        for row, seq_len in enumerate(seq_lens.tolist()):
            slots = kv_cache_slots(block_table[row], np.arange(seq_len), block_size)
            unowned[slots // block_size, slots % block_size] = False
            changed = slots[:first_visible] if row == keep else slots
            cache[changed // block_size, changed % block_size] = normal(rng, len(changed), *cache.shape[2:])
        cache[unowned] = GARBAGE
