"""The vocabulary on several ranks: each holds an equal run of rows of the embedding and of the head.

Sizes that do not divide are padded with rows of zeros at the end. The embedding is a sum over ranks of which all but
one are zero; the logits are gathered. Source: Shoeybi et al. 2019, "Megatron-LM".
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ref.embedding import embedding
from ref.linear import linear

Array = NDArray[Any]


def padded_vocab_size(vocab_size: int, world_size: int, multiple: int = 1) -> int:
    """The next size that divides by world_size and by multiple, which a kernel may want: 1003 on 4 ranks is 1004."""
    step = math.lcm(world_size, multiple)
    return -(-vocab_size // step) * step


def shard_vocab(table: Array, rank: int, world_size: int, multiple: int = 1) -> tuple[Array, int]:
    """One rank's rows of an embedding or head, zeros where the vocabulary is padded.

    Args:
        table: [vocab_size, hidden_size].
    Returns:
        [padded / world_size, hidden_size], dtype of table, and the id of its first row.
    """
    num_rows = padded_vocab_size(len(table), world_size, multiple) // world_size
    rows = table[rank * num_rows : (rank + 1) * num_rows]
    shard = np.zeros((num_rows, *table.shape[1:]), table.dtype)
    shard[: len(rows)] = rows
    return shard, rank * num_rows


def vocab_embedding(token_ids: NDArray[np.integer[Any]], shard: Array, first: int) -> Array:
    """What this rank adds to the embedding: its own rows, zeros for ids of others.

    The sum over ranks has one term that is not zero, so it is exact. Ids outside the vocabulary are the caller's to
    refuse (see ref.embedding): no rank would answer for them.

    Args:
        token_ids: [num_tokens].
        shard, first: [padded / world_size, hidden_size] and the id of its first row, see shard_vocab.
    Returns:
        [num_tokens, hidden_size], dtype of shard.
    Raises:
        ValueError: see ref.embedding; for no id, as `first` is given.
    """
    return embedding(token_ids, shard, first)


def vocab_logits(hidden: Array, shard: Array, first: int, vocab_size: int) -> Array:
    """This rank's logits, −inf for ids that only pad: a zero row would have logit 0 and beat every negative one.

    all_gather along the last axis, then [..., :vocab_size], gives the logits of the whole.

    Args:
        hidden: [num_tokens, hidden_size].
        shard, first: [padded / world_size, hidden_size] and the id of its first row, see shard_vocab.
    Returns:
        [num_tokens, padded / world_size], dtype of hidden.
    """
    logits = linear(hidden, shard)
    logits[..., max(0, vocab_size - first) :] = -np.inf
    return logits
