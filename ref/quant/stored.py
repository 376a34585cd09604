"""Weights that stay as stored until a layer uses them, and how a layer does: some outputs at a time.

A linear layer of ROWS outputs or fewer is decoded as a whole, and a wider one, such as the head, ROWS at a time; what
was decoded is dropped after its product. So a model needs memory for its activations and one slice; the rest stays in
the files. Decoding anew at each use costs time: `ref.quant.scheme.read_weights` decodes small checkpoints once.
Source: a product of rows needs those rows alone; what is decoded, and how, stands in ref/quant/coded.py.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ref.checkpoint import widen
from ref.embedding import embedding
from ref.linear import linear
from ref.quant.coded import CodedWeight, QuantWeight, dequantize_weight, quantized_linear, weight_rows

Array = NDArray[Any]

ROWS = 4096


@dataclass(frozen=True, slots=True)
class StoredWeight:
    """A weight in its files."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]  # of the arithmetic
    as_format: bool  # multiply as its format does, or decode first
    unpack: Callable[[], QuantWeight]  # the value; views of the files as far as the format allows


Weight = QuantWeight | StoredWeight


def unpacked(weight: Weight) -> QuantWeight:
    """The value of a weight: shape and dtype as stored."""
    return weight.unpack() if isinstance(weight, StoredWeight) else weight


def decoded(weight: Weight, dtype: DTypeLike) -> Array:
    """The whole weight in floating point: its shape, in dtype."""
    return dequantize_weight(unpacked(weight), dtype)


def in_memory(weight: StoredWeight) -> QuantWeight:
    """The weight apart from its files: decoded to its dtype, or, to be multiplied as its format does, its codes and
    integers. Its shape stays."""
    value = weight.unpack()
    if isinstance(value, np.ndarray) or not weight.as_format:
        return np.array(dequantize_weight(value, weight.dtype))
    return copy.deepcopy(value)


def weight_embedding(token_ids: NDArray[np.integer[Any]], weight: Weight, dtype: DTypeLike) -> Array:
    """ref.embedding.embedding, of which only the rows that are asked for are read.

    Args:
        token_ids: [num_tokens].
        weight: [vocab_size, hidden_size] of any kind.
    Returns:
        [num_tokens, hidden_size] in dtype.
    Raises:
        ValueError: an id outside the table.
    """
    table = unpacked(weight)
    if isinstance(table, np.ndarray):
        return widen(embedding(token_ids, table), dtype)
    return embedding(token_ids, dequantize_weight(table, dtype))


def weight_linear(x: Array, weight: Weight, bias: Array | None = None, *, storage: str | None = None) -> Array:
    """y = x Wᵀ + b, in slices of outputs.

    Args:
        x: [num_tokens, in], floating.
        weight: [out, in] of any kind.
        bias: [out] or None.
        storage: see ref.quant.coded.quantized_linear.
    Returns:
        [num_tokens, out], dtype of x.
    Raises:
        ValueError: as quantized_linear; a stored weight whose tensors contradict each other or the config.

    Numerics: as quantized_linear, or as linear of the decoded weight; slices do not touch each other's sums.
    """
    value = unpacked(weight)
    if isinstance(value, np.ndarray) and value.dtype == x.dtype:  # nothing to decode
        return linear(x, value, bias)
    decode_first = isinstance(weight, StoredWeight) and not weight.as_format
    parts = []
    for rows in row_slices(value):
        part = weight_rows(value, rows)
        if decode_first:
            part = dequantize_weight(part, x.dtype)
        parts.append(quantized_linear(x, part, storage=storage))
    y: Array = np.concatenate(parts, axis=-1)
    return y if bias is None else y + bias.astype(x.dtype)


def row_slices(weight: QuantWeight) -> list[slice]:
    """ROWS outputs of a weight [out, in] each, the last fewer; whole tiles, at least one, if the weight has tiles."""
    tile = weight.block[0] if isinstance(weight, CodedWeight) and weight.block is not None else 1
    step, out = max(ROWS // tile, 1) * tile, weight.shape[0]
    return [slice(start, min(start + step, out)) for start in range(0, out, step)]


def arithmetic_dtype(weights: Iterable[Weight]) -> np.dtype[Any]:
    """The dtype in which a model with these weights computes: that of the first that says one; integers say none."""
    return next((weight.dtype for weight in weights if isinstance(weight, np.ndarray | StoredWeight)), np.dtype(float))
