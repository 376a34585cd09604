"""A model with outliers in its activations, and SmoothQuant of it, for the golden of that name.

A few factors of each norm are large, so its output has outliers. What calibration would measure is taken to be in
proportion to the factors, for a norm's input has no preferred channel. Factors of smoothing are rounded to powers of
two: folding them is exact then, so the checkpoint has the same bits on every machine.
"""

from __future__ import annotations

import numpy as np

from conformance.golden_models import Tensors
from ref.quant.smoothquant import smooth_norm, smooth_weight, smoothing_factors

OUTLIERS = slice(7, None, 50)
OUTLIER = 24.0
ABSMAX = 3.0  # of a norm's output, in units of its factor
READERS = {  # which layers read a norm's output
    "input_layernorm": ("q_proj", "k_proj", "v_proj", "q_a_proj", "kv_a_proj_with_mqa"),
    "post_attention_layernorm": ("gate_proj", "up_proj", "w1", "w3", "gate", "shared_expert_gate"),
}


def with_outliers(tensors: Tensors) -> Tensors:
    """The tensors of a model whose norms before attention and MLP put out a few large channels."""
    changed = dict(tensors)
    for name, norm in tensors.items():
        if _kind(name) in READERS:
            changed[name] = norm.copy()
            changed[name][OUTLIERS] *= OUTLIER
    return changed


def smooth(tensors: Tensors) -> Tensors:
    """The same function: each of those norms divided by the factors, the layers that read it multiplied by them."""
    smoothed = dict(tensors)
    for name, norm in tensors.items():
        kind = _kind(name)
        if kind not in READERS:
            continue
        layer = name.removesuffix(f"{kind}.weight")
        inside = [key for key in tensors if key.startswith(layer) and key.endswith(".weight")]
        readers = [key for key in inside if _kind(key) in READERS[kind]]
        factors = smoothing_factors(ABSMAX * np.abs(norm), [tensors[key] for key in readers])
        factors = np.exp2(np.rint(np.log2(factors))).astype(np.float32)
        smoothed[name] = smooth_norm(norm, factors)
        smoothed |= {key: smooth_weight(tensors[key], factors) for key in readers}
    return smoothed


def _kind(name: str) -> str:
    """The last part of a module's name: q_proj of model.layers.0.self_attn.q_proj.weight."""
    return name.split(".")[-2]
