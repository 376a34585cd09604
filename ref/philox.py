"""Philox4x32-10: random numbers that are a pure function of a key and a counter.

Source: Salmon, Moraes, Dror, Shaw 2011, "Parallel Random Numbers: As Easy as 1, 2, 3". There is no state to carry: the
draw for one output position of one sequence is the same in whatever batch, chunk or rank it is made, and on a GPU
each thread can make its own.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import ArrayLike, NDArray

ROUNDS = 10
MULTIPLIERS = (0xD2511F53, 0xCD9E8D57)
KEY_STEPS = (0x9E3779B9, 0xBB67AE85)  # golden ratio and sqrt(3) - 1, as 32-bit fractions
_LOW_WORD = np.uint64(0xFFFFFFFF)
_WORD_BITS = np.uint64(32)


def philox4x32(counter: ArrayLike, key: ArrayLike) -> NDArray[np.uint32]:
    """Ten rounds over counter [..., 4] and key [..., 2], 32-bit words; leading axes broadcast. uint32 [..., 4].

    One round, with hi and lo the halves of the 64-bit products M0·c0 and M1·c2:
    (c0, c1, c2, c3) → (hi1 ^ c1 ^ k0, lo1, hi0 ^ c3 ^ k1, lo0); then each key word grows by its step, mod 2³².
    """
    words = np.asarray(counter, dtype=np.uint64)
    keys = np.asarray(key, dtype=np.uint64)
    c0, c1, c2, c3 = (words[..., i] for i in range(4))
    k0, k1 = (keys[..., i] for i in range(2))
    for _ in range(ROUNDS):
        product0 = c0 * np.uint64(MULTIPLIERS[0])  # 32 × 32 bits: cannot overflow
        product1 = c2 * np.uint64(MULTIPLIERS[1])
        c0 = (product1 >> _WORD_BITS) ^ c1 ^ k0
        c2 = (product0 >> _WORD_BITS) ^ c3 ^ k1
        c1 = product1 & _LOW_WORD
        c3 = product0 & _LOW_WORD
        k0 = (k0 + np.uint64(KEY_STEPS[0])) & _LOW_WORD
        k1 = (k1 + np.uint64(KEY_STEPS[1])) & _LOW_WORD
    return np.stack(np.broadcast_arrays(c0, c1, c2, c3), axis=-1).astype(np.uint32)


def uniform(seed: ArrayLike, position: ArrayLike, stream: ArrayLike = 0) -> NDArray[np.float32]:
    """Uniform float32 in [0, 1), a multiple of 2⁻²⁴. seed, position and stream are uint64 of any shape and broadcast.

    The key is the seed, the counter is (position, stream), low words first; the upper 24 bits of the first output
    word are the draw. position is the index of the token in the output, stream the index of the choice.
    """
    seeds, positions, streams = np.broadcast_arrays(
        np.asarray(seed, dtype=np.uint64), np.asarray(position, dtype=np.uint64), np.asarray(stream, dtype=np.uint64)
    )
    key = np.stack([seeds & _LOW_WORD, seeds >> _WORD_BITS], axis=-1)
    counter = np.stack(
        [positions & _LOW_WORD, positions >> _WORD_BITS, streams & _LOW_WORD, streams >> _WORD_BITS], axis=-1
    )
    word = philox4x32(counter, key)[..., 0]
    return (word >> np.uint32(8)).astype(np.float32) * np.float32(2.0**-24)
