"""The config and the weights of a model, from whatever kind of source.

First everything is planned: which tensor goes to which rows of which array. All that does not fit (missing, unexpected,
wrongly shaped or typed tensors) is reported together, before a byte of data is read. Then all arrays are allocated
once and the tensors are copied into them in the order of the files, each mapped only while it is copied. So the peak
is the weights and one mapped tensor, disks see one sequential read, and nothing holds the files once loading is done.
"""

from __future__ import annotations

import logging
import math
import time
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from engine.checkpoint.fit import check_fit, wanted_tensors
from engine.checkpoint.folder import folder_tensors, read_json
from engine.checkpoint.gguf_file import read_gguf
from engine.checkpoint.gguf_llama import hf_tensors, model_config_from_gguf
from engine.checkpoint.quantized import quantization_of
from engine.checkpoint.quantized_folder import QuantizedFolder
from engine.checkpoint.random_weights import fill_randomly
from engine.checkpoint.source import ModelSource
from engine.checkpoint.store import HostStore, Store
from engine.checkpoint.stored_tensor import StoredTensor
from engine.coded8 import DTYPES, FP8, FP8_NAN
from engine.config import ModelConfig
from engine.errors import CheckpointError, ConfigError
from engine.model_config.read import model_config_from_hf
from engine.packed4 import PACKED, PACKED_GATED
from engine.progress import Progress
from engine.weights import EMBEDDING, HEAD, LinearSpec, LinearWeight, WeightMap, Weights, order_of

Array = Any

CODES_AT_ONCE = 1 << 26  # that are looked at, for which a GPU needs twice their bytes

logger = logging.getLogger(__name__)


def load_model_config(source: ModelSource) -> ModelConfig:
    """The config of a folder (config.json, generation_config.json) or a GGUF file (its metadata).

    Raises:
        ConfigError: there is no config, or it says something that cannot be served.
        CheckpointError: a damaged GGUF file.
    """
    if source.kind == "gguf":
        return model_config_from_gguf(read_gguf(source.path))
    path = source.path / "config.json"
    if not path.exists():
        ggufs = sorted(file.name for file in source.path.glob("*.gguf"))
        hint = f"; to serve one of its GGUF files ({', '.join(ggufs)}) pass that file" if ggufs else ""
        raise ConfigError(f"{source.path}: has no config.json, so it is no model folder{hint}")
    generation_path = source.path / "generation_config.json"
    generation_config = read_json(generation_path) if generation_path.exists() else None
    config = model_config_from_hf(read_json(path), generation_config, str(path))
    if config.quantization is None:  # or in a file of its own
        config = replace(config, quantization=quantization_of(source.path))
    return config


def load_weights(
    source: ModelSource,
    weight_map: WeightMap,
    store: Store | None = None,
    seed: int = 0,
    progress: bool = True,
    load_format: Literal["auto", "dummy", "dummy-small"] = "auto",
) -> Weights:
    """Exactly the tensors of weight_map, in what a store holds: float32 in memory if none is given.

    F32, F16, BF16 and the GGUF blocks of DECODERS are converted to float32, each exactly (Q4_1: rounded once), and
    from there to the type of the store. If weight_map is tied, linears["lm_head"] shares the buffer of
    arrays["embed_tokens"], and an lm_head.weight in the checkpoint is ignored whatever it holds, as transformers does.

    Args:
        store: where weights go, and in which type.
        load_format: dummy and dummy-small: random weights (see fill_randomly); then no weight file is opened.
        seed: of these.
        progress: say on standard error how far it is.

    Raises:
        CheckpointError: a file is missing or damaged, or its tensors are not those of weight_map; names them all.
        ConfigError: there is no memory for them.
    """
    store = HostStore() if store is None else store
    if load_format != "auto":
        weights, _ = _allocate(weight_map, store)
        weights = fill_randomly(weights, weight_map, seed, store, is_small=load_format == "dummy-small")
        logger.info("made %d MB of random weights from seed %d", weights.num_bytes // 10**6, seed)
        return weights
    started = time.perf_counter()
    if source.kind == "gguf":
        tensors = hf_tensors(read_gguf(source.path))
    else:
        tensors = folder_tensors(source.path)
    quantization = weight_map.quantization
    quantized = None if quantization is None else QuantizedFolder(source.path, quantization, tensors)
    if quantized is not None:
        weight_map = quantized.as_stored(weight_map)
    modules = set() if quantized is None else set(quantized.modules(weight_map))
    num_ignored = check_fit(source.path, tensors, weight_map.whole or weight_map, quantized, modules)
    weights, copies = _allocate(weight_map, store)
    copies = [copy for copy in copies if copy.as_it_is or copy.name.removesuffix(".weight") not in modules]
    reads = [(copy.stored(tensors[copy.name]), copy.target) for copy in copies]
    reads.sort(key=lambda read: (read[0].file, read[0].offset))
    num_bytes = sum(tensor.num_bytes for tensor, _ in reads)
    with Progress(num_bytes, "loading", "B", hidden=not progress) as bar:
        for tensor, target in reads:
            store.read(tensor, target)
            bar.update(tensor.num_bytes)
    store.flush()
    if quantized is not None:
        with quantized.looking():
            weights = _fill_quantized(weights, weight_map, quantized, modules, store, progress)
            store.flush()
    logger.info(
        "loaded %d tensors from %s: %d MB read in %.1f s, %d MB of weights, %d tensors ignored",
        *(len(copies), source.path, num_bytes // 10**6, time.perf_counter() - started),
        *(weights.num_bytes // 10**6, num_ignored),
    )
    return weights


@dataclass(frozen=True, slots=True)
class _Copy:
    """The tensor of this name fills target, a C-contiguous part of an array, or such a part seen transposed."""

    name: str
    target: Array
    as_it_is: bool = False  # codes
    rows: range | None = None  # of the tensor, where it is not read whole
    columns: range | None = None

    def stored(self, tensor: StoredTensor) -> StoredTensor:
        """What is read of it."""
        tensor = tensor if self.rows is None else tensor.rows(self.rows)
        return tensor if self.columns is None else tensor.columns(self.columns)


def _allocate(weight_map: WeightMap, store: Store) -> tuple[Weights, list[_Copy]]:
    """Uninitialized weights, and which tensor fills which part of them. Parts are stacked along out.

    Raises:
        ConfigError: there is no memory for them.
    """
    try:
        return _allocate_all(weight_map, store)
    except MemoryError as error:
        num_bytes = sum(store.itemsize * math.prod(shape) for _, shape in wanted_tensors(weight_map))
        raise ConfigError(
            f"no memory for the weights: the config asks for {num_bytes / 1e6:,.0f} MB"
            f"{', and ' * bool(str(error))}{error}; use a smaller model"
        ) from error


def _allocate_all(weight_map: WeightMap, store: Store) -> tuple[Weights, list[_Copy]]:
    copies: list[_Copy] = []
    arrays: dict[str, Array] = {}
    for array in weight_map.arrays:
        arrays[array.dest] = store.empty(array.shape)
        kept = None if array.cut is None else array.cut.part(array.shape[array.axis])
        if array.axis:
            copies.append(_Copy(array.name, arrays[array.dest], columns=kept))
        else:
            copies.append(_Copy(array.name, _fit(arrays[array.dest], kept), rows=kept))
    linears: dict[str, LinearWeight] = {}
    for linear in weight_map.linears:
        stack = (linear.n_experts,) if linear.n_experts else ()
        packed, coded = linear.packed is not None, linear.coded  # a packed one takes its place when it has been read
        shape = (*stack, *((0, 0) if packed else (linear.out_features, linear.in_features)))
        weight = store.empty(shape) if coded is None else store.empty(shape, DTYPES[coded.kind])
        bias = store.empty((*stack, linear.out_features)) if linear.bias else None
        for module in linear.stored():
            place = (module.place,) if module.expert is None else (module.expert, module.place)
            if not packed:
                target, cuts = _fit(weight[place], module.rows), (module.rows, module.columns)
                if linear.transposed and coded is None:
                    target, cuts = target.T, cuts[::-1]
                copies.append(_Copy(f"{module.name}.weight", target, coded is not None, *cuts))
            if bias is not None:
                copies.append(_Copy(f"{module.name}.bias", _fit(bias[place], module.rows), rows=module.rows))
        linears[linear.dest] = _dense(weight, bias)
    if weight_map.tied:
        linears[HEAD] = _dense(arrays[EMBEDDING], None)
    return Weights(linears, arrays), copies


def _fit(target: Array, kept: range | None) -> Array:
    """The first rows, as many as there are to be read; the others become zeros."""
    if kept is None or len(kept) == len(target):
        return target
    target[len(kept) :] = 0
    return target[: len(kept)]


def _fill_quantized(
    weights: Weights,
    weight_map: WeightMap,
    quantized: QuantizedFolder,
    modules: set[str],
    store: Store,
    progress: bool,
) -> Weights:
    """The quantized modules, layer by layer: decoded into their places, or packed, or scales beside codes.

    Raises:
        CheckpointError: names the module that is damaged.
    """
    linears, arrays, lost = dict(weights.linears), dict(weights.arrays), {}
    with Progress(len(weight_map.linears), "unpacking", "linear layers", hidden=not progress) as bar:
        for spec in weight_map.linears:
            bar.update()
            weight = linears[spec.dest]
            if spec.packed is not None:
                words = quantized.words(spec)
                tensors = store.repack(words)
                if words.order is not None and spec.packed.order == "gathered":
                    first = 0 if spec.column_cut is None else spec.column_cut.first
                    tensors["order"] = store.put(np.maximum(words.order - np.int32(first), 0))
                elif words.order is not None and spec.packed.order == "normed":
                    arrays[order_of(spec.norm)] = store.put(words.order.astype(np.uint16))
                linears[spec.dest] = _packed(spec, words.in_features, tensors, weight.bias)
                continue
            if spec.coded is not None:
                codes = weight.tensors["weight"]
                if spec.coded.kind == FP8:
                    flat = codes.reshape(-1)
                    parts = (flat[first : first + CODES_AT_ONCE] for first in range(0, flat.size, CODES_AT_ONCE))
                    lost[spec] = [((part & FP8_NAN) == FP8_NAN).any() for part in parts]  # known when the GPU is so far
                scales = {name: store.put(array) for name, array in quantized.coded(spec).items()}
                linears[spec.dest] = replace(weight, format=spec.coded.kind, tensors={"weight": codes} | scales)
                continue
            for module in spec.stored():
                if module.name in modules:
                    place = (module.place,) if module.expert is None else (module.expert, module.place)
                    target = _fit(weight.tensors["weight"][place], module.rows)
                    store.write(quantized.dense(module, spec.transposed), target)
    if damaged := [module for spec, found in lost.items() if any(map(bool, found)) for module, _ in spec.parts]:
        raise CheckpointError(f"{', '.join(damaged)}: codes that are no numbers; fetch the files again")
    return replace(weights, linears=linears, arrays=arrays)


def _dense(weight: Array, bias: Array | None) -> LinearWeight:
    out_features, in_features = weight.shape[-2:]
    return LinearWeight("dense", out_features, in_features, {"weight": weight}, bias)


def _packed(spec: LinearSpec, in_features: int, tensors: dict[str, Array], bias: Array | None) -> LinearWeight:
    return LinearWeight(PACKED_GATED if spec.gated else PACKED, spec.out_features, in_features, tensors, bias)
