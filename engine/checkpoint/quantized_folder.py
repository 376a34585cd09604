"""The quantized modules of a folder: which tensors they have, and what these become.

What is decoded is decoded once and exactly as ref defines it, and rounded to the type that the engine computes in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.quantized import fold_orders
from engine.checkpoint.quantized_cuts import (
    WORD_BITS,
    cut_tensor,
    first_group,
    group_size_of,
    is_between,
    num_groups,
    part_of_groups,
)
from engine.checkpoint.quantized_words import Look, stored_words
from engine.checkpoint.stored_tensor import StoredTensor, map_bytes
from engine.checkpoint.stored_words import StoredWords
from engine.errors import CheckpointError
from engine.system import usable_cores
from engine.weights import Coded, LinearSpec, Packed, StoredModule, WeightMap
from ref.checkpoint import QUANTIZED, STORED, widen
from ref.quant.awq import AwqConfig
from ref.quant.coded import CodedWeight, dequantize_weight
from ref.quant.gptq import GptqConfig
from ref.quant.groups import GroupedInt
from ref.quant.scheme import SUFFIXES, module_shape, unpack_module
from ref.quant.scheme_config import QuantConfig, module_scheme

Array = NDArray[Any]

LOOKERS = 4
TYPES = {name: np.dtype(kind) for name, kind in (STORED | QUANTIZED).items()}


class _Views(Mapping[str, Array]):
    """Tensors of a folder as they lie in its files, mapped when they are asked for."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Array:
        tensor = self._tensors[name]
        if tensor.dtype not in TYPES:
            raise ValueError(f"{tensor.file.name}: tensor {name} is {tensor.dtype}; known are {', '.join(TYPES)}")
        return map_bytes(tensor).view(TYPES[tensor.dtype]).reshape(tensor.shape)

    def __contains__(self, name: object) -> bool:
        return name in self._tensors  # whatever its type

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def _without_orphan(spec: LinearSpec, folded: set[str]) -> LinearSpec:
    """Decoded where a rank's columns were to be those of a layer before, which now turns out not to be packed."""
    is_orphan = spec.column_cut is not None and spec.packed is not None and spec.packed.order == "gathered"
    return replace(spec, packed=None) if is_orphan and spec.dest in folded else spec


class QuantizedFolder:
    """The quantized modules of a folder."""

    def __init__(self, folder: Path, quantization: QuantConfig, tensors: Mapping[str, StoredTensor]) -> None:
        self._folder, self._config, self._tensors = folder, quantization, _Views(tensors)
        self._stored = tensors
        self._words: dict[str, StoredWords] = {}  # of layers that stay packed, by dest
        self._later: list[Look] = []  # at what as_stored has left for looking
        self._folded: set[str] = set()  # those whose columns the layer before has in order
        self._any_rows: set[str] = set()  # those of which a rank may have any rows, if the layer after wants them so

    def modules(self, weight_map: WeightMap) -> Iterator[str]:
        """Names of the linear modules of a model that the config calls quantized."""
        return filter(self.holds, _module_names(weight_map))

    def as_stored(self, weight_map: WeightMap) -> WeightMap:
        """Without `packed` or `coded` where the files have what only a decoded weight can be: floating point after all,
        modules of a layer with groups in different orders, scales that float16 does not hold, modules of a layer whose
        activations have different scales.

        Raises:
            CheckpointError: as dense, of layers with `packed` or `coded`.
        """
        folded = {spec.dest for spec in weight_map.linears if spec.packed is not None and spec.packed.order == "folded"}
        self._any_rows = {spec.dest for spec in weight_map.linears if spec.row_cuts and spec.feeds in folded}
        with ThreadPoolExecutor(usable_cores()) as team:
            stored = fold_orders(replace(weight_map, linears=tuple(team.map(self._as_stored, weight_map.linears))))
        places = {name: place for place, name in enumerate(_module_names(weight_map))}
        self._later.sort(key=lambda look: places[look[0]])  # of several that are wrong the same one is named each time
        stored = replace(stored, linears=tuple(_without_orphan(spec, folded) for spec in stored.linears))
        packed = {spec.dest: spec.packed for spec in stored.linears if spec.packed is not None}
        self._folded = {dest for dest, facts in packed.items() if facts.order == "folded"}
        return stored

    @contextmanager
    def looking(self) -> Iterator[None]:
        """Meanwhile several threads look at numbers that are likely to be sound.

        Raises:
            CheckpointError: at the end, if some are not.
        """
        with ThreadPoolExecutor(min(LOOKERS, usable_cores())) as team:
            looks = [(name, team.submit(look)) for name, look in self._later]
            yield
            for name, found in looks:
                try:
                    found.result()
                except ValueError as error:
                    raise CheckpointError(f"{self._folder}: module {name}: {error}") from error

    def _as_stored(self, spec: LinearSpec) -> LinearSpec:
        if spec.packed is not None:
            return replace(spec, packed=self._packed(spec, spec.packed))
        return spec if spec.coded is None else replace(spec, coded=self._coded(spec, spec.coded))

    def _packed(self, spec: LinearSpec, packed: Packed) -> Packed | None:
        scheme = module_scheme(self._config, spec.parts[0][0])
        assert scheme is not None
        try:
            words = stored_words(spec, scheme, self._stored, self._later, spec.dest in self._any_rows)
        except ValueError as error:
            raise CheckpointError(f"{self._folder}: {error}") from error
        if words is None:
            return None
        self._words[spec.dest] = words
        return replace(packed, group_size=words.group_size, order="stored" if words.order is None else "gathered")

    def _coded(self, spec: LinearSpec, coded: Coded) -> Coded | None:
        parts = self._parts(spec)
        if not all(isinstance(part, CodedWeight) for part in parts):
            return None
        if coded.static and len({float(part.input_scale.item()) for part in parts}) > 1:
            return None
        return replace(coded, scale="channel") if coded.scale == "tensor" and parts[0].scale.ndim else coded

    def holds(self, module: str) -> bool:
        return module_scheme(self._config, module) is not None

    def tensor_names(self, module: str, is_here: bool = True) -> list[str]:
        """Those of the checkpoint that the module's weight is made of, and a bias of zeros, which some writers add.

        is_here: else another rank reads it, and looks whether the bias is one of zeros.

        Raises:
            CheckpointError: the bias is of a type that is not known.
        """
        bias = f"{module}.bias"
        names = [name for suffix in SUFFIXES if (name := f"{module}.{suffix}") in self._tensors]
        if bias not in self._tensors:
            return names
        try:
            return names if is_here and widen(self._tensors[bias]).any() else [*names, bias]
        except ValueError as error:
            raise CheckpointError(f"{self._folder}: {error}") from error

    def dense(self, module: StoredModule, transposed: bool = False) -> NDArray[np.float32]:
        """The rows and columns of a module that are read, decoded, [out_features, in_features].

        transposed: where it is in floating point after all, the file has [in_features, out_features].

        Raises:
            CheckpointError: names the module, and the tensor that is missing or wrong; or a scale is 0 for numbers that
                are not 0.
        """
        value = self._unpacked(module, transposed)
        self._refuse_lost_numbers(module.name, value)
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                decoded = np.asarray(dequantize_weight(value, np.float32))
        except (ValueError, MemoryError) as error:
            raise CheckpointError(f"{self._folder}: module {module.name}: {error}") from error
        if not np.isfinite(decoded).all():
            raise CheckpointError(
                f"{self._folder}: module {module.name} decodes to numbers that are not finite; fetch its files again"
            )
        return decoded

    def coded(self, spec: LinearSpec) -> dict[str, Array]:
        """The tensors of a layer that stays codes, but these themselves: see engine.coded8.

        Raises:
            CheckpointError: as dense.
        """
        assert spec.coded is not None
        parts, scales = self._parts(spec), []
        for (name, _, _), part in zip(spec.modules(), parts, strict=True):
            scale = np.asarray(part.scale, np.float32)
            self._refuse_lost_numbers(name, part)
            if spec.coded.scale == "channel":
                scale = np.broadcast_to(scale, part.shape[:1])
            scales.append(scale.reshape(1) if spec.coded.scale == "tensor" else scale)
        tensors = {"scale": np.concatenate(scales)}
        if spec.coded.static:
            tensors["input_scale"] = np.array(parts[0].input_scale, np.float32).reshape(1)
        return tensors

    def _refuse_lost_numbers(self, module: str, value: Any) -> None:
        """Raises CheckpointError where a scale is 0 and what it is for is not."""
        if isinstance(value, GroupedInt) and not value.scales.all():
            is_lost = (value.scales == 0)[:, value.g_idx] & (value.q != value.zeros[:, value.g_idx])
        elif isinstance(value, CodedWeight) and not np.asarray(value.scale).all():
            codes = value.codes & 0x7F if value.codes.dtype == np.uint8 else value.codes
            one = np.asarray(dequantize_weight(replace(value, codes=np.where(codes == 0, 0, 1).astype(codes.dtype))))
            is_lost = (one == 0) & (codes != 0)
        else:
            return
        if is_lost.any():
            raise CheckpointError(
                f"{self._folder}: module {module} has a scale of 0 for numbers that are not 0; fetch its files again"
            )

    def _parts(self, spec: LinearSpec) -> list[Any]:
        """As values of ref.quant, in order."""
        return [self._unpacked(module, spec.transposed) for module in spec.stored()]

    def words(self, spec: LinearSpec) -> StoredWords:
        """A layer that stays 4-bit integers, of the map that as_stored gave."""
        stored, after = self._words[spec.dest], self._words.get(spec.feeds)
        if after is None or spec.feeds not in self._folded:
            return stored
        return replace(stored, row_order=after.order)

    def _unpacked(self, module: StoredModule, transposed: bool = False) -> Any:
        """What is read of a module, as a value of ref.quant."""
        try:
            weight = self._stored.get(f"{module.name}.weight") if transposed else None
            turned = weight is not None and weight.dtype in STORED
            wanted = module.shape[::-1] if turned else module.shape
            stored = self._shape(module.name)
            if tuple(stored) != wanted:
                raise CheckpointError(
                    f"{self._folder}: module {module.name} is {list(stored)}, wanted {list(wanted)} by the config"
                )
            value = self._part(module, turned)
        except (ValueError, IndexError) as error:
            raise CheckpointError(f"{self._folder}: {error}") from error
        return widen(value).T if turned and isinstance(value, np.ndarray) else value

    def _shape(self, name: str) -> tuple[int, ...]:
        """[out, in] of a whole module as stored, of which nothing is read."""
        scheme = module_scheme(self._config, name)
        weight, words = self._stored.get(f"{name}.weight"), self._stored.get(f"{name}.qweight")
        if weight is not None:
            return weight.shape
        if words is not None and len(words.shape) == 2 and isinstance(scheme, GptqConfig | AwqConfig):
            per_word = WORD_BITS // getattr(scheme, "bits", 4)
            first, second = words.shape
            return (second, first * per_word) if isinstance(scheme, GptqConfig) else (second * per_word, first)
        return module_shape(self._tensors, self._config, name)

    def _part(self, module: StoredModule, turned: bool) -> Any:
        """What is read of a module that has the right shape. turned: it is stored as [in, out]."""
        name, rows, columns = module.name, module.rows, module.columns
        if module.is_whole:
            return unpack_module(self._tensors, self._config, name)
        scheme = module_scheme(self._config, name)
        if f"{name}.weight" not in self._stored and not is_between(module, group_size_of(scheme)):
            return self._part_of_groups(module)
        place = (columns, rows) if turned else (rows, columns)
        held = {
            key: cut_tensor(suffix, self._stored[key], scheme, *place)
            for suffix in SUFFIXES
            if (key := f"{name}.{suffix}") in self._stored
        }
        tensors = dict(_Views(held))
        if f"{name}.weight_shape" in tensors:
            tensors[f"{name}.weight_shape"] = np.array(module.part_shape)
        for suffix in ("g_idx", "weight_g_idx"):
            if scheme is not None and len(columns) < module.shape[1] and f"{name}.{suffix}" in tensors:
                groups = tensors[f"{name}.{suffix}"] - first_group(scheme, columns)
                if groups.min(initial=0) < 0 or groups.max(initial=0) >= num_groups(scheme, columns):
                    return self._part_of_groups(module)
                tensors[f"{name}.{suffix}"] = groups
        return unpack_module(tensors, self._config, name)

    def _part_of_groups(self, module: StoredModule) -> GroupedInt:
        """What is read of a module whose groups are on several ranks, each with the scales."""
        whole = unpack_module(self._tensors, self._config, module.name)
        assert isinstance(whole, GroupedInt)
        return part_of_groups(whole, module.rows, module.columns)


def _module_names(weight_map: WeightMap) -> Iterator[str]:
    """Of all linear modules, in order."""
    return (name for spec in weight_map.linears for name, _, _ in spec.modules())
