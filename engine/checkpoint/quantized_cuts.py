"""A part of the rows and columns of a quantized module, as tensors of a smaller one; nothing is read.

Where the parts lie follows from the layouts in ref.quant: words hold several numbers of a row or of a column, scales
belong to rows and to groups of columns. Cuts are between words and groups (engine.split_sizes).
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.stored_tensor import StoredTensor
from engine.weights import StoredModule
from ref.quant.awq import AwqConfig
from ref.quant.gptq import GptqConfig
from ref.quant.groups import GroupedInt
from ref.quant.scheme_config import Scheme

WORD_BITS = 32
SPREAD = 32  # columns of a group of a layer that has some columns of each group of its module


def cut_tensor(suffix: str, tensor: StoredTensor, scheme: Scheme | None, rows: range, columns: range) -> StoredTensor:
    """The part of one of a module's tensors that belongs to these rows and columns of its weight.

    Raises:
        CheckpointError: the tensor has no such part.
    """
    if isinstance(scheme, GptqConfig | AwqConfig):
        return _words_first(suffix, tensor, scheme, rows, columns)
    if suffix == "weight":
        return tensor.rows(rows).columns(columns)
    if suffix == "weight_g_idx":
        return tensor.rows(columns)
    if scheme is None or suffix not in ("weight_packed", "weight_scale", "weight_zero_point", "weight_scale_inv"):
        return tensor
    if suffix == "weight_packed":
        return tensor.rows(rows).columns(_units(columns, WORD_BITS // scheme.bits))
    if scheme.strategy == "block":
        return tensor.rows(_units(rows, scheme.block[0])).columns(_units(columns, scheme.block[1]))
    groups = _units(columns, scheme.group_size) if scheme.strategy == "group" else range(1)
    if suffix == "weight_zero_point":
        return tensor.rows(_units(rows, WORD_BITS // scheme.bits)).columns(groups)
    if tensor.shape in ((), (1,), (1, 1)):  # one for all
        return tensor
    return tensor.rows(rows) if len(tensor.shape) == 1 else tensor.rows(rows).columns(groups)


def _words_first(
    suffix: str, tensor: StoredTensor, scheme: GptqConfig | AwqConfig, rows: range, columns: range
) -> StoredTensor:
    """Of GPTQ and AWQ, whose tensors have columns of the weight first."""
    per_word = WORD_BITS // (scheme.bits if isinstance(scheme, GptqConfig) else 4)
    groups = range(1) if scheme.group_size < 1 else _units(columns, scheme.group_size)
    if suffix == "weight":
        return tensor.rows(rows).columns(columns)
    if suffix == "qweight":
        if isinstance(scheme, AwqConfig):
            return tensor.rows(columns).columns(_units(rows, per_word))
        return tensor.rows(_units(columns, per_word)).columns(rows)
    if suffix == "qzeros":
        return tensor.rows(groups).columns(_units(rows, per_word))
    if suffix == "scales":
        return tensor.rows(groups).columns(rows)
    return tensor.rows(columns) if suffix == "g_idx" else tensor


def group_size_of(scheme: Scheme | None) -> int:
    """In columns; -1: all are a group."""
    grouped = isinstance(scheme, GptqConfig | AwqConfig) or (scheme is not None and scheme.strategy == "group")
    return scheme.group_size if scheme is not None and grouped else -1


def first_group(scheme: Scheme, columns: range) -> int:
    """That these columns belong to, where groups are neighbours."""
    size = group_size_of(scheme)
    return columns.start // size if size > 0 else 0


def is_between(module: StoredModule, group_size: int) -> bool:
    """Whether the columns that are read begin and end between groups of neighbours; -1: there is one group."""
    whole, columns = module.shape[1], module.columns
    return group_size == -1 or (
        columns.start % group_size == 0 and (columns.stop % group_size == 0 or columns.stop == whole)
    )


def num_groups(scheme: Scheme, columns: range) -> int:
    """That these columns are in, where groups are neighbours."""
    size = group_size_of(scheme)
    return len(_units(columns, size)) if size > 0 else 1


def part_of_groups(weight: GroupedInt, rows: range, columns: range) -> GroupedInt:
    """Where columns of a group may lie anywhere: all scales of the rows."""
    own, some = slice(rows.start, rows.stop), slice(columns.start, columns.stop)
    return GroupedInt(weight.bits, weight.q[own, some], weight.scales[own], weight.zeros[own], weight.g_idx[some])


def spread_groups(g_idx: NDArray[np.int64], part: range) -> tuple[NDArray[np.int32], NDArray[np.int32]]:
    """A rank's columns in smaller groups, where it has some of every group: those of a group after one another, filled
    up to whole groups of SPREAD.

    Args:
        g_idx: [in_features], the group of each column of the module.
        part: the columns of the rank.
    Returns:
        Which column of the module is at each place, -1 for none; and which group of the module each group is of.
    """
    own = g_idx[part.start : part.stop]
    counts = np.bincount(own)
    num_groups = -(-counts // SPREAD)
    firsts = SPREAD * (np.cumsum(num_groups) - num_groups)  # the place of the first column of each group
    within = np.arange(len(own)) - np.repeat(np.cumsum(counts) - counts, counts)
    columns = np.full(SPREAD * num_groups.sum(), -1, np.int32)
    columns[np.repeat(firsts, counts) + within] = part.start + np.argsort(own, kind="stable")
    return columns, np.repeat(np.arange(len(counts)), num_groups).astype(np.int32)


def _units(part: range, unit: int) -> range:
    """The words, groups or tiles that these places are in."""
    return range(part.start // unit, -(-part.stop // unit))
