"""Token ids to vectors: the first thing a language model does, and the only place where it sees ids.

Source: Bengio et al. 2003, "A Neural Probabilistic Language Model" (there it is the matrix C).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def embedding(token_ids: NDArray[np.integer[Any]], table: Array, first: int | None = None) -> Array:
    """out[t] = table[token_ids[t]].

    Args:
        token_ids: [num_tokens], integers from 0 to vocab_size − 1.
        table: [vocab_size, hidden_size].
        first: set where the table is one rank's rows of a larger one, of ids from `first` on: ids of other ranks give
            zeros, so that the sum over ranks is the embedding (see ref.tensor_parallel_vocab).
    Returns:
        [num_tokens, hidden_size], dtype of table.
    Raises:
        ValueError: an id outside a table that is whole. NumPy alone would read id −1 as the last row.

    Numerics: a copy; exact.
    Edge cases: no tokens gives [0, hidden_size].
    """
    token_ids = np.asarray(token_ids)
    if first is not None:
        local = token_ids.astype(np.int64) - first
        is_own = (local >= 0) & (local < len(table))
        return np.where(is_own[:, None], table[np.where(is_own, local, 0)], table.dtype.type(0))
    vocab_size = table.shape[0]
    outside = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
    if outside.size:
        raise ValueError(f"token id {outside[0]} is outside the vocabulary: ids are 0 to {vocab_size - 1}")
    return table[token_ids.astype(np.int64)]


def position_embedding(
    token_ids: NDArray[np.integer[Any]],
    positions: NDArray[np.integer[Any]],
    table: Array,
    position_table: Array,
    first: int | None = None,
) -> Array:
    """out[t] = table[token_ids[t]] + position_table[positions[t]]: positions that were learned.

    Source: Gehring et al. 2017, "Convolutional Sequence to Sequence Learning"; Radford et al. 2018 (GPT).

    Args:
        token_ids: [num_tokens], integers from 0 to vocab_size − 1.
        positions: [num_tokens], from 0 to the last that was learned.
        table: [vocab_size, hidden_size].
        position_table: [num_positions, hidden_size].
        first: of table, as in embedding; the vector of the position is added to zeros too, so one rank alone may do so.
    Returns:
        [num_tokens, hidden_size], dtype of table.
    Raises:
        ValueError: an id or a position outside its table.

    Numerics: one rounding, of the sum.
    """
    positions = np.asarray(positions)
    num_positions = len(position_table)
    outside = positions[(positions < 0) | (positions >= num_positions)]
    if outside.size:
        raise ValueError(f"position {outside[0]} has no vector: they were learned for 0 to {num_positions - 1}")
    return embedding(token_ids, table, first) + embedding(positions, position_table)
