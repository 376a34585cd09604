"""Which layers of a folder can stay 4-bit integers, and where their words are; only scales and zeros are looked at."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.quantized_cuts import SPREAD, cut_tensor, is_between, spread_groups
from engine.checkpoint.stored_tensor import StoredTensor, map_bytes, pieces
from engine.checkpoint.stored_words import TYPES, StoredPart, StoredWords, integers_of
from engine.packed4 import SYMMETRIC_ZERO, Layout, word_shapes
from engine.weights import LinearSpec, StoredModule, WeightMap
from ref.quant.awq import AwqConfig
from ref.quant.compressed_tensors_config import CtScheme
from ref.quant.gptq import GptqConfig
from ref.quant.scheme_config import Scheme, module_scheme

NAMES: dict[Layout, tuple[str, str, str, str]] = {  # of words, scales, zeros, and the groups of columns
    "gptq": ("qweight", "scales", "qzeros", "g_idx"),
    "awq": ("qweight", "scales", "qzeros", "g_idx"),
    "rows": ("weight_packed", "weight_scale", "weight_zero_point", "weight_g_idx"),
}
KINDS = (("I32",), ("F16", "BF16", "F32"), ("I32",))  # of words, scales and zeros
INTEGERS: dict[str, np.dtype[Any]] = {"I32": np.dtype(np.int32), "I64": np.dtype(np.int64)}
MOST_SPREAD = 2  # times the columns that there are; what is decoded takes four times
INFINITE = {"F16": 0x7C00, "BF16": 0x7F80, "F32": 0x7F800000}  # bits
EXACT_BF16 = 0x3700, 0x477F  # bits of 2⁻¹⁷ and 65280: all bfloat16 between them are float16 too


Look = tuple[str, Callable[[], bool]]  # a module, and what raises ValueError if its numbers make no sense


def stored_words(
    spec: LinearSpec, scheme: Scheme, tensors: Mapping[str, StoredTensor], later: list[Look], any_rows: bool = False
) -> StoredWords | None:
    """A layer that keep_packed calls packed; None where it must be decoded: a module is in floating point after all,
    has scales that float16 does not hold, groups that are not all of one size, or another order than its neighbours.

    later: gets a look at the numbers of each module whose scales are float16 as they are.
    any_rows: which rows a rank has may be changed once it is known what the layer after wants, so all are there.

    Raises:
        ValueError: names the module, and the tensor that is missing, misshapen or wrong.
    """
    assert spec.packed is not None
    layout = _layout(scheme)
    offset = int(isinstance(scheme, GptqConfig) and scheme.checkpoint_format == "gptq")
    parts, orders = [], []
    for module in spec.stored():
        if f"{module.name}.weight" in tensors:
            return None
        if any_rows:
            module = replace(module, rows=range(module.shape[0]))
        try:
            order = _order(module, spec, scheme, layout, tensors)
            if order is None:
                return None
            part = _part(module, spec, scheme, layout, tensors, order)
            one = StoredWords(layout, (part,), order.width, order.group_size, offset, False, order.columns)
            one = replace(one, groups=order.groups)
            look = partial(_fits, one, not spec.packed.zeros, offset)
            if part.scales.dtype == "F16":  # they fit, unless the file is damaged
                later.append((module.name, look))
            elif not look():
                return None
            if not spec.packed.zeros:
                part = replace(part, zeros=None)
        except ValueError as error:
            raise ValueError(f"module {module.name}: {error}") from None
        parts.append(part)
        orders.append(order)
    first = orders[0]
    if any(not _is_same(order.columns, first.columns) for order in orders):
        return None
    row_order = np.array(next(spec.stored()).rows, np.int32) if any_rows else None
    sizes = first.width, first.group_size
    return StoredWords(layout, tuple(parts), *sizes, offset, spec.gated, first.columns, row_order, first.groups)


@dataclass(frozen=True, slots=True)
class _Order:
    """Which columns of its modules a layer has at each place; None where they are those that are read, as they are."""

    width: int
    group_size: int
    columns: NDArray[np.int32] | None = None  # [width]
    groups: NDArray[np.int32] | None = None  # see StoredWords


def _is_same(one: NDArray[np.int32] | None, other: NDArray[np.int32] | None) -> bool:
    return one is other if one is None or other is None else np.array_equal(one, other)


def layer_layout(spec: LinearSpec, weight_map: WeightMap) -> Layout:
    """Of a layer that keep_packed calls packed."""
    return _layout(module_scheme(weight_map.quantization, spec.parts[0][0]))


def _layout(scheme: Scheme | None) -> Layout:
    if isinstance(scheme, AwqConfig):
        return "awq"
    return "gptq" if isinstance(scheme, GptqConfig) else "rows"


def _part(
    module: StoredModule,
    spec: LinearSpec,
    scheme: Scheme,
    layout: Layout,
    tensors: Mapping[str, StoredTensor],
    order: _Order,
) -> StoredPart:
    """With zeros if they are there. Of words there are all columns where these are in an order, and all groups where
    some columns of each are the layer's."""
    assert spec.packed is not None
    names, (rows, columns) = NAMES[layout][:3], module.shape
    groups = columns // _group_size(scheme, columns)
    shapes = word_shapes(layout, rows, columns, groups)
    found = [tensors.get(f"{module.name}.{name}") for name in names]
    optional = layout == "rows" and not spec.packed.zeros
    for name, tensor, shape, kinds in zip(names, found, shapes, KINDS, strict=True):
        if tensor is None:
            if name == names[2] and optional:
                continue
            raise ValueError(f"a module of this config needs {', '.join(names)}; {name} is missing")
        if tensor.shape != shape or tensor.dtype not in kinds:
            raise ValueError(
                f"{name} is {tensor.dtype} {list(tensor.shape)}; a weight {[rows, columns]} in groups of "
                f"{columns // groups} needs {' or '.join(kinds)} {list(shape)}"
            )
    sizes = tensors.get(f"{module.name}.weight_shape")
    if layout == "rows" and (sizes is None or _integers(sizes).tolist() != [rows, columns]):
        said = "missing" if sizes is None else _integers(sizes).tolist()
        raise ValueError(f"weight_shape is {said}; the config asks for {[rows, columns]}")
    of_words = module.columns if order.columns is None else range(columns)
    of_groups = module.columns if order.groups is None else range(columns)
    words, scales, zeros = (
        None if tensor is None else cut_tensor(name, tensor, scheme, module.rows, part)
        for name, tensor, part in zip(names, found, (of_words, of_groups, of_groups), strict=True)
    )
    assert words is not None
    assert scales is not None
    return StoredPart(len(module.rows), words, scales, zeros)


def _group_size(scheme: Scheme, columns: int) -> int:
    """Of a module with so many columns."""
    is_whole = isinstance(scheme, CtScheme) and scheme.strategy != "group"
    return columns if is_whole or scheme.group_size == -1 else scheme.group_size


def _order(
    module: StoredModule, spec: LinearSpec, scheme: Scheme, layout: Layout, tensors: Mapping[str, StoredTensor]
) -> _Order | None:
    """None where groups are not all of one size, or a rank has too few columns of each."""
    assert spec.packed is not None
    name, columns, part = NAMES[layout][3], module.shape[1], module.columns
    size = _group_size(scheme, columns)
    plain = _Order(len(part), min(size, len(part)))
    tensor, regular = tensors.get(f"{module.name}.{name}"), np.arange(columns) // size
    must = scheme.desc_act if isinstance(scheme, GptqConfig) else getattr(scheme, "act_order", False)
    is_cut = not is_between(module, size)
    if is_cut and tensor is None and not must:
        return _spread(regular, part)
    if tensor is None or layout == "awq":
        if must:
            raise ValueError(f"the config says act-order, but {name} is missing: the groups of its inputs are unknown")
        return plain
    g_idx = _integers(tensor)
    if g_idx.shape != regular.shape or g_idx.min() < 0 or g_idx.max() > regular[-1]:
        raise ValueError(
            f"{name} must hold {regular.size} numbers from 0 to {regular[-1]}; found {g_idx.size}, "
            f"from {g_idx.min(initial=0)} to {g_idx.max(initial=0)}"
        )
    if layout == "rows" and not must and not np.array_equal(g_idx, regular):
        raise ValueError(f"{name} is stored in another order than neighbours, but the config has no actorder")
    if np.array_equal(g_idx, regular):
        return _spread(regular, part) if is_cut else plain
    order = np.argsort(g_idx, kind="stable").astype(np.int32)
    if not np.array_equal(g_idx[order], regular):
        return None
    if len(part) == columns or spec.packed.order == "folded":
        return replace(plain, columns=order[part.start : part.stop])
    return _spread(g_idx, part)


def _spread(g_idx: NDArray[np.int64], part: range) -> _Order | None:
    """Of columns of groups that are on several ranks; None where a rank has too few of each."""
    columns, groups = spread_groups(g_idx, part)
    if len(columns) > MOST_SPREAD * len(part):
        return None
    return _Order(len(columns), SPREAD, None if np.array_equal(columns, part) else columns, groups)


def _fits(one: StoredWords, is_symmetric: bool, offset: int) -> bool:
    """See _scales_fit; of a module."""
    if is_symmetric:
        _require_symmetric(one.parts[0], offset)
    return _scales_fit(one)


def _require_symmetric(part: StoredPart, offset: int) -> None:
    word = np.uint32(0x11111111 * (SYMMETRIC_ZERO - offset))
    if part.zeros is not None and any(np.any(piece.view(np.uint32) != word) for piece in pieces(part.zeros)):
        suffix = part.zeros.name.rpartition(".")[2]
        raise ValueError(f"the config says symmetric, but {suffix} holds other zeros than {SYMMETRIC_ZERO}")


def _scales_fit(one: StoredWords) -> bool:
    """Whether float16 holds the scales of a module. Raises ValueError for those that make no sense."""
    (part,) = one.parts
    dtype, suffix = part.scales.dtype, part.scales.name.rpartition(".")[2]
    fit, has_zero = True, False
    for piece in pieces(part.scales):
        scales = piece.view(TYPES[dtype])
        bits: NDArray[Any] = scales.view(f"u{scales.itemsize}")
        least, most = int(bits.min()), int(bits.max())
        if most >= INFINITE[dtype]:
            bits = bits & bits.dtype.type(np.iinfo(bits.dtype).max >> 1)  # without signs
            least, most = int(bits.min()), int(bits.max())
        if most >= INFINITE[dtype]:
            raise ValueError(f"{suffix} must be finite, found {scales[~np.isfinite(scales)][0]}")
        has_zero = has_zero or not least
        is_exact = dtype == "F16" or (dtype == "BF16" and EXACT_BF16[0] <= least and most <= EXACT_BF16[1])
        fit = fit and (is_exact or _are_float16(scales))
    if has_zero:
        _require_nothing_lost(one, suffix)
    return fit


def _are_float16(values: NDArray[Any]) -> bool:
    with np.errstate(over="ignore"):
        return bool(np.array_equal(values.astype(np.float16).astype(np.float32), values.astype(np.float32)))


def _require_nothing_lost(one: StoredWords, suffix: str) -> None:
    """Raises ValueError where a scale is 0 and a number is not."""
    q, scales, zeros = integers_of(one)
    steps = q != np.repeat(zeros, one.group_size, axis=1)
    if np.any(steps & (np.repeat(scales, one.group_size, axis=1) == 0)):
        raise ValueError(f"{suffix} has a 0 for numbers that are not 0; fetch its files again")


def _integers(tensor: StoredTensor) -> NDArray[np.int64]:
    if tensor.dtype not in INTEGERS:
        raise ValueError(f"{tensor.name} is {tensor.dtype}; expected {' or '.join(INTEGERS)}")
    if len(tensor.shape) != 1:
        raise ValueError(f"{tensor.name} has shape {list(tensor.shape)}; expected a list")
    found: NDArray[Any] = map_bytes(tensor).view(INTEGERS[tensor.dtype])
    return found.astype(np.int64)
