"""Checkpoints whose linear layers are quantized: which tensors they have, and what becomes of them.

ref.quant knows the formats: which modules a quantization_config speaks of, and how each is decoded. A layer of 4-bit
integers in groups, every module of it alike, can stay so (engine.packed4); all others are decoded when they are loaded,
each weight once and exactly as ref defines it, and rounded to the type that the engine computes in.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.folder import read_json
from engine.checkpoint.stored_tensor import StoredTensor, map_bytes
from engine.errors import CheckpointError, ConfigError
from engine.packed4 import SYMMETRIC_ZERO, is_group_size, pack4
from engine.weights import HEAD, LinearSpec, Packed, WeightMap
from ref.checkpoint import QUANTIZED, STORED, widen
from ref.quant.awq import AwqConfig
from ref.quant.coded import dequantize_weight
from ref.quant.compressed_tensors_config import CtScheme
from ref.quant.gptq import GptqConfig
from ref.quant.groups import GroupedInt
from ref.quant.scheme import SCALES, SUFFIXES, module_shape, unpack_module
from ref.quant.scheme_config import QuantConfig, Scheme, module_scheme, parse_quantization_config

Array = NDArray[Any]

BITS = 4
TYPES = {name: np.dtype(kind) for name, kind in (STORED | QUANTIZED).items()}
OWN_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


def quantization_of(folder: Path) -> QuantConfig | None:
    """What old quantizers' own files beside config.json say of the weights; None: there is no such file.

    Raises:
        ConfigError: a method or a setting that is not known; says which are.
    """
    for name, method in OWN_FILES.items():
        path = folder / name
        if path.exists():
            try:
                return parse_quantization_config({"quant_method": method} | read_json(path))
            except ValueError as error:
                raise ConfigError(f"{path}: {error}") from error
    return None


def keep_packed(weight_map: WeightMap) -> WeightMap:
    """With `packed` set for the layers that stay 4-bit integers."""
    quantization = weight_map.quantization
    if quantization is None:
        return weight_map
    linears = tuple(replace(spec, packed=_packed(spec, quantization)) for spec in weight_map.linears)
    return replace(weight_map, linears=linears)


def _packed(spec: LinearSpec, quantization: QuantConfig) -> Packed | None:
    schemes = {module_scheme(quantization, name) for name, _, _ in spec.modules()}
    if spec.dest == HEAD or spec.n_experts or spec.latent or len(schemes) > 1 or spec.in_features % 8:
        return None
    if (spec.gated and spec.out_features % 16) or any(rows % 8 for _, rows in spec.parts):
        return None
    facts = _group_facts(schemes.pop())
    if facts is None:
        return None
    group_size, zeros = facts
    size = spec.in_features if group_size == -1 else group_size
    return Packed(size, zeros) if is_group_size(size, spec.in_features) else None


def _group_facts(scheme: Scheme | None) -> tuple[int, bool] | None:
    """Size of groups, and whether they have zeros, of 4-bit integers in groups of neighbouring columns."""
    if isinstance(scheme, AwqConfig):
        return scheme.group_size, True
    if isinstance(scheme, GptqConfig) and scheme.bits == BITS and not scheme.desc_act:
        return scheme.group_size, not scheme.symmetric
    if isinstance(scheme, CtScheme) and scheme.format == "pack-quantized" and scheme.bits == BITS:
        if scheme.act_order or scheme.strategy == "tensor":
            return None
        return (scheme.group_size if scheme.strategy == "group" else -1), not scheme.symmetric
    return None


class _Views(Mapping[str, Array]):
    """Tensors of a folder as they lie in its files, mapped when they are asked for."""

    def __init__(self, tensors: Mapping[str, StoredTensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> Array:
        tensor = self._tensors[name]
        if tensor.dtype not in TYPES:
            raise ValueError(f"{tensor.file.name}: tensor {name} is {tensor.dtype}; known are {', '.join(TYPES)}")
        return map_bytes(tensor).view(TYPES[tensor.dtype]).reshape(tensor.shape)

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


class QuantizedFolder:
    """The quantized modules of a folder."""

    def __init__(self, folder: Path, quantization: QuantConfig, tensors: Mapping[str, StoredTensor]) -> None:
        self._folder, self._config, self._tensors = folder, quantization, _Views(tensors)

    def modules(self, weight_map: WeightMap) -> Iterator[str]:
        """Names of the linear modules of a model that the config calls quantized."""
        for spec in weight_map.linears:
            for name, _, _ in spec.modules():
                if self.holds(name):
                    yield name

    def as_stored(self, weight_map: WeightMap) -> WeightMap:
        """Without `packed` where the files have what only a decoded weight can be: floating point after all, groups of
        inputs in another order than that of neighbours, scales that float16 does not hold."""
        linears = tuple(
            replace(spec, packed=None) if spec.packed is not None and not self._can_stay(spec, spec.packed) else spec
            for spec in weight_map.linears
        )
        return replace(weight_map, linears=linears)

    def _can_stay(self, spec: LinearSpec, packed: Packed) -> bool:
        for name, _, _ in spec.modules():
            if f"{name}.weight" in self._tensors:
                return False
            order = self._tensors.get(f"{name}.g_idx")
            if order is not None and not np.array_equal(order, np.arange(spec.in_features) // packed.group_size):
                return False
            for suffix in SCALES:
                stored = self._tensors.get(f"{name}.{suffix}")
                if stored is None or stored.dtype == np.float16:
                    continue
                scales = widen(stored)
                with np.errstate(over="ignore"):
                    if not np.array_equal(scales.astype(np.float16).astype(scales.dtype), scales):
                        return False
        return True

    def holds(self, module: str) -> bool:
        return module_scheme(self._config, module) is not None

    def tensor_names(self, module: str) -> list[str]:
        """Those of the checkpoint that the module's weight is made of, and a bias of zeros, which some writers add."""
        bias = f"{module}.bias"
        names = [name for suffix in SUFFIXES if (name := f"{module}.{suffix}") in self._tensors]
        return [*names, bias] if bias in self._tensors and not widen(self._tensors[bias]).any() else names

    def dense(self, module: str, shape: tuple[int, int], transposed: bool = False) -> NDArray[np.float32]:
        """The weight of a module, decoded, [out_features, in_features].

        transposed: where it is in floating point after all, the file has [in_features, out_features].

        Raises:
            CheckpointError: names the module, and the tensor that is missing or wrong.
        """
        value = self._unpacked(module, shape, transposed)
        try:
            with np.errstate(over="ignore", invalid="ignore"):
                decoded = np.asarray(dequantize_weight(value, np.float32))
        except (ValueError, MemoryError) as error:
            raise CheckpointError(f"{self._folder}: module {module}: {error}") from error
        if not np.isfinite(decoded).all():
            raise CheckpointError(
                f"{self._folder}: module {module} decodes to numbers that are not finite; fetch its files again"
            )
        return decoded

    def packed(self, spec: LinearSpec) -> dict[str, Array]:
        """The tensors of a layer that stays 4-bit integers: see engine.packed4.

        Raises:
            CheckpointError: as dense; or the modules are not what their config says.
        """
        assert spec.packed is not None
        parts = []
        for name, _, rows in spec.modules():
            part = self._unpacked(name, (rows.stop - rows.start, spec.in_features))
            if not isinstance(part, GroupedInt) or part.bits != BITS:
                raise CheckpointError(f"{self._folder}: module {name} is not stored as {BITS}-bit integers")
            if not spec.packed.zeros and not (part.zeros == SYMMETRIC_ZERO).all():
                raise CheckpointError(
                    f"{self._folder}: the config calls module {name} symmetric, but it has zeros other than "
                    f"{SYMMETRIC_ZERO}"
                )
            parts.append(part)
        zeros = np.concatenate([part.zeros for part in parts]) if spec.packed.zeros else None
        return pack4(
            np.concatenate([part.q for part in parts]),
            np.concatenate([part.scales for part in parts]),
            zeros,
            gated=spec.gated,
        )

    def _unpacked(self, module: str, shape: tuple[int, int], transposed: bool = False) -> Any:
        try:
            stored = module_shape(self._tensors, self._config, module)
            is_float = transposed and f"{module}.weight" in self._tensors
            wanted = shape[::-1] if is_float else shape
            if tuple(stored) != wanted:
                raise CheckpointError(
                    f"{self._folder}: module {module} is {list(stored)}, wanted {list(wanted)} by the config"
                )
            value = unpack_module(self._tensors, self._config, module)
        except (ValueError, IndexError) as error:
            raise CheckpointError(f"{self._folder}: {error}") from error
        return widen(value).T if is_float and isinstance(value, np.ndarray) else value
