"""Token ids to vectors: the first thing a language model does, and the only place where it sees ids.

Source: Bengio et al. 2003, "A Neural Probabilistic Language Model" (there it is the matrix C).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]


def embedding(token_ids: NDArray[np.integer[Any]], table: Array) -> Array:
    """out[t] = table[token_ids[t]].

    Args:
        token_ids: [num_tokens], integers from 0 to vocab_size − 1.
        table: [vocab_size, hidden_size].
    Returns:
        [num_tokens, hidden_size], dtype of table.
    Raises:
        ValueError: an id outside the table. NumPy alone would read id −1 as the last row.

    Numerics: a copy; exact.
    Edge cases: no tokens gives [0, hidden_size].
    """
    token_ids = np.asarray(token_ids)
    vocab_size = table.shape[0]
    outside = token_ids[(token_ids < 0) | (token_ids >= vocab_size)]
    if outside.size:
        raise ValueError(f"token id {outside[0]} is outside the vocabulary: ids are 0 to {vocab_size - 1}")
    return table[token_ids.astype(np.int64)]
