"""From a checkpoint's tensors to the weight of a module, whatever its format.

A module that is stored in floating point is taken as it is. Tensors come as
`ref.checkpoint.read_checkpoint(folder, None)` gives them: integers as stored, codes of e4m3 as uint8; their shapes are
those that each format's own file names. Source: as there.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

from ref.checkpoint import is_float, read_checkpoint, widen
from ref.quant.awq import BITS, AwqConfig, awq_unpack
from ref.quant.coded import QuantWeight, dequantize_weight
from ref.quant.compressed_tensors import ct_coded, ct_unpack
from ref.quant.gptq import GptqConfig, gptq_unpack
from ref.quant.groups import WORD_BITS
from ref.quant.scheme_config import QuantConfig, module_scheme, read_quantization_config
from ref.quant.stored import StoredWeight, Weight, decoded, in_memory

Array = NDArray[Any]

ACTIVATIONS = ("float", "format")
KEEP_BYTES = 2 << 30
SUFFIXES = (
    *("weight", "qweight", "qzeros", "scales", "g_idx"),
    *("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    *("weight_scale_inv", "input_scale"),
)
WORDS = ("qweight", "qzeros", "weight_packed", "weight_zero_point")  # of 32 bits, in rows and columns
SCALES = ("scales", "weight_scale", "weight_scale_inv")  # input_scale has a check of its own
INTEGERS = ("g_idx", "weight_g_idx", "weight_shape")


def unpack_module(tensors: Mapping[str, Array], config: QuantConfig | None, module: str) -> QuantWeight:
    """The weight [out, in] of a linear module as a value: an array if stored in floating point, else its integers.

    Args:
        tensors: the whole checkpoint, as stored. Codes of 8 bits and floating point are not read, only viewed.
        module: such as "model.layers.0.mlp.down_proj".
    Raises:
        ValueError: names the module, and what is missing, misshapen, of another type, not finite or contradicts the
            config.
    """
    held = {suffix: tensors[f"{module}.{suffix}"] for suffix in SUFFIXES if f"{module}.{suffix}" in tensors}
    if "weight" in held and is_float(held["weight"]):
        if scales := [name for name in SCALES if name in held]:
            raise ValueError(f"module {module}: its weight is in floating point, but {', '.join(scales)} is there too")
        return held["weight"]
    held = {suffix: widen(tensor) for suffix, tensor in held.items()}
    scheme = module_scheme(config, module)
    try:
        _check_kinds(held)
        if scheme is None:
            kinds = ", ".join(f"{suffix} {tensor.dtype}" for suffix, tensor in held.items())
            raise ValueError(f"the config leaves it in floating point, but it is stored as {kinds or 'nothing'}")
        if isinstance(scheme, GptqConfig):
            return gptq_unpack(held, scheme)
        if isinstance(scheme, AwqConfig):
            return awq_unpack(held, scheme)
        if scheme.format == "pack-quantized":
            return ct_unpack(held, scheme)
        if "weight_scale_inv" in held:
            if "weight_scale" in held:
                raise ValueError("weight_scale and weight_scale_inv are both stored; which of them counts is not known")
            held["weight_scale"] = held["weight_scale_inv"]
        return ct_coded(held, scheme)
    except ValueError as error:
        raise ValueError(f"module {module}: {error}") from None


def _check_kinds(held: Mapping[str, Array]) -> None:
    """Raises ValueError for tensors of a module that no format stores so, whatever the config says."""
    for name, tensor in held.items():
        if name in WORDS and (tensor.dtype != np.int32 or tensor.ndim != 2):
            raise ValueError(f"{name} must be a matrix of int32, found {tensor.dtype} {list(tensor.shape)}")
        if name in INTEGERS and (not np.issubdtype(tensor.dtype, np.integer) or tensor.ndim != 1):
            raise ValueError(f"{name} must be a list of integers, found {tensor.dtype} {list(tensor.shape)}")
        if name == "weight_shape" and tensor.size != 2:
            raise ValueError(f"weight_shape must hold the rows and the columns, found {tensor.tolist()}")
        if name in SCALES and not np.issubdtype(tensor.dtype, np.floating):
            raise ValueError(f"{name} must be floating point, found {tensor.dtype}")
        if name in SCALES and not np.isfinite(tensor).all():
            raise ValueError(f"{name} must be finite, found {tensor[~np.isfinite(tensor)][0]}")
        if name == "weight" and tensor.ndim != 2:
            raise ValueError(f"weight must be a matrix, found shape {list(tensor.shape)}")


def module_shape(tensors: Mapping[str, Array], config: QuantConfig | None, module: str) -> tuple[int, ...]:
    """[out, in] of a linear module, without unpacking 4 or 8 bits a weight.

    Raises:
        ValueError: see unpack_module.
    """
    scheme = module_scheme(config, module)
    words, shape = tensors.get(f"{module}.qweight"), tensors.get(f"{module}.weight_shape")
    if words is not None and words.ndim == 2 and isinstance(scheme, GptqConfig):  # along in
        return words.shape[1], words.shape[0] * WORD_BITS // scheme.bits
    if words is not None and words.ndim == 2 and isinstance(scheme, AwqConfig):  # along out
        return words.shape[1] * WORD_BITS // BITS, words.shape[0]
    if shape is not None and shape.shape == (2,):
        return int(shape[0]), int(shape[1])
    return unpack_module(tensors, config, module).shape


def dequantize_module(
    tensors: Mapping[str, Array], config: QuantConfig, module: str, dtype: DTypeLike = np.float64
) -> Array:
    """The weight of a linear module in floating point: [out, in] in dtype.

    Raises:
        ValueError: see unpack_module.
    """
    return dequantize_weight(unpack_module(tensors, config, module), dtype)


def stored_weights(
    tensors: Mapping[str, Array], config: QuantConfig | None, dtype: DTypeLike, *, activations: str = "float"
) -> dict[str, StoredWeight]:
    """A whole checkpoint as weights that nobody has decoded yet: each module's `weight`, and whatever else is there.

    Args:
        tensors: as stored.
        config: None, where nothing is quantized.
        dtype, activations: see read_weights.
    Raises:
        ValueError: see unpack_module; or names a tensor of integers that no quantized module uses.
    """
    modules: dict[str, set[str]] = {}
    for name in tensors:
        module, _, suffix = name.rpartition(".")
        modules.setdefault(module, set()).add(suffix)
    as_format, dtype = activations == "format", np.dtype(dtype)
    weights: dict[str, StoredWeight] = {}
    for module, suffixes in modules.items():
        if suffixes & {"weight", "qweight", "weight_packed"}:
            shape, unpack = module_shape(tensors, config, module), partial(unpack_module, tensors, config, module)
            weights[f"{module}.weight"] = StoredWeight(shape, dtype, as_format, unpack)
        for suffix in suffixes - set(SUFFIXES):
            name = f"{module}.{suffix}"
            if not is_float(tensors[name]):
                raise ValueError(f"tensor {name} is {tensors[name].dtype}, and no quantized module uses it")
            weights[name] = StoredWeight(tensors[name].shape, dtype, as_format, partial(tensors.__getitem__, name))
    return weights


def dequantize_checkpoint(
    tensors: Mapping[str, Array], config: QuantConfig, dtype: DTypeLike = np.float64
) -> dict[str, Array]:
    """A whole checkpoint in floating point: each quantized module becomes its `weight`, the rest is converted.

    Raises:
        ValueError: see stored_weights.
    """
    return {name: decoded(weight, dtype) for name, weight in stored_weights(tensors, config, dtype).items()}


def read_weights(
    folder: str | Path,
    dtype: DTypeLike = np.float32,
    *,
    activations: str = "float",
    keep_bytes: int = KEEP_BYTES,
) -> dict[str, Weight]:
    """All weights of a folder, quantized or not, for ref.model.registry.forward.

    Args:
        dtype: of all arithmetic; norms, biases and what is stored in floating point become this.
        activations: "float": a quantized weight means its decoded numbers; "format": it is multiplied as its format's
            kernel does, with 8-bit activations where the format has them (ref.quant.coded.quantized_linear).
        keep_bytes: if all weights take no more bytes than this once decoded to dtype, they are decoded here, for
            good; of a larger checkpoint each is decoded whenever a layer uses it.
    Raises:
        FileNotFoundError, ValueError: see read_checkpoint, parse_quantization_config and stored_weights.
    """
    if activations not in ACTIVATIONS:
        raise ValueError(f"activations is {activations!r}; known are {', '.join(ACTIVATIONS)}")
    config = read_quantization_config(folder)
    weights = stored_weights(read_checkpoint(folder, None), config, dtype, activations=activations)
    num_bytes = sum(math.prod(weight.shape) * weight.dtype.itemsize for weight in weights.values())
    if num_bytes > keep_bytes:
        return dict(weights)
    return {name: in_memory(weight) for name, weight in weights.items()}
