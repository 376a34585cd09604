"""Which kernels loading a model needs, before its files are opened: those that put 4-bit words in order."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from engine.checkpoint.quantized_words import layer_layout
from engine.kernels.notes import Notes
from engine.kernels.repack import MAX_PARTS, blank_part, repack4
from engine.weights import WeightMap

FLOAT16, BFLOAT16 = np.dtype(np.float16), np.dtype(ml_dtypes.bfloat16)


def load_dry(weight_map: WeightMap, notes: Notes) -> None:
    """Notes what the packed layers of a map launch; scales of compressed-tensors may be of two types."""
    for spec in weight_map.linears:
        if spec.packed is None or len(spec.parts) > MAX_PARTS:
            continue
        layout = layer_layout(spec, weight_map)
        columns, size = spec.in_features, spec.packed.group_size
        for scales in (FLOAT16, BFLOAT16) if layout == "rows" else (FLOAT16,):
            parts = [
                blank_part(layout, rows, columns, columns // size, scales, spec.packed.zeros) for _, rows in spec.parts
            ]
            repack4(layout, parts, columns, size, device=notes, gated=spec.gated)
