"""Whether the tensors of a checkpoint are those that a model asks for; nothing is read but headers and spare biases."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from engine.checkpoint.quantized_folder import QuantizedFolder
from engine.checkpoint.stored_tensor import DECODERS, StoredTensor
from engine.errors import CheckpointError
from engine.weights import HEAD, WeightMap

MAX_LISTED = 50  # names of one kind in a message


def wanted_tensors(weight_map: WeightMap) -> Iterator[tuple[str, tuple[int, ...]]]:
    """Name and shape of every tensor that is read."""
    for array in weight_map.arrays:
        yield array.name, array.shape
    for linear in weight_map.linears:
        for module, _, rows in linear.modules():
            shape = (rows.stop - rows.start, linear.in_features)
            yield f"{module}.weight", shape[::-1] if linear.transposed else shape
            if linear.bias:
                yield f"{module}.bias", (rows.stop - rows.start,)


def check_fit(
    path: Path,
    tensors: Mapping[str, StoredTensor],
    weight_map: WeightMap,
    quantized: QuantizedFolder | None,
    modules: set[str],
) -> int:
    """The number of ignored tensors. Raises CheckpointError with all that does not fit.

    weight_map: of the whole model. modules: the quantized ones of this rank, which are checked when they are decoded.
    """
    everywhere = set() if quantized is None else set(quantized.modules(weight_map))
    wanted = {
        name: shape for name, shape in wanted_tensors(weight_map) if name.removesuffix(".weight") not in everywhere
    }
    used: set[str] = set()
    if quantized is not None:
        used = {name for module in everywhere for name in quantized.tensor_names(module, module in modules)}
    ignored = [re.compile(pattern) for pattern in weight_map.ignored]
    if weight_map.tied:
        ignored.append(re.compile(re.escape(f"{HEAD}.weight")))
    spare = [name for name in tensors if name not in wanted and name not in used]
    unexpected = [name for name in spare if not any(pattern.fullmatch(name) for pattern in ignored)]
    missing = [name for name in wanted if name not in tensors]
    present = [(tensors[name], shape) for name, shape in wanted.items() if name in tensors]
    shapes = [
        f"{tensor.name} is {list(tensor.shape)}, wanted {list(shape)}"
        for tensor, shape in present
        if tensor.shape != shape
    ]
    dtypes = [f"{tensor.name} is {tensor.dtype}" for tensor, _ in present if tensor.dtype not in DECODERS]
    problems = [
        f"  {title}: {', '.join(names[:MAX_LISTED])}"
        + (f" and {len(names) - MAX_LISTED} more" if len(names) > MAX_LISTED else "")
        for title, names in (
            (f"{len(missing)} tensors are missing", missing),
            (f"{len(unexpected)} tensors are unexpected", unexpected),
            (f"{len(shapes)} tensors have another shape than the config asks for", shapes),
            (f"{len(dtypes)} tensors have a type that cannot be read ({', '.join(DECODERS)} can)", dtypes),
        )
        if names
    ]
    if f"{HEAD}.weight" in missing:
        problems.append(
            "  the config does not tie the head to the embedding, so the checkpoint must have lm_head.weight"
        )
    if problems:
        raise CheckpointError("\n".join([f"{path}: the weights do not fit the config", *problems]))
    return len(spare)
