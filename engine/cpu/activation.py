"""The gated unit on a CPU. Checked against ref.activation by conformance."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from ref.activation import activation_named

Float32 = NDArray[np.float32]


def gate_up_act(gate_up: Float32, activation: str = "silu") -> Float32:
    """activation(gate) · up, [num_tokens, 2·intermediate_size] (gate first) → [num_tokens, intermediate_size]."""
    half = gate_up.shape[1] // 2
    gate, up = gate_up[:, :half], gate_up[:, half:]
    if activation != "silu":
        return activation_named(activation)(gate) * up
    # silu(g) = g / (1 + exp(−g)); the clip keeps exp finite, and 1 + exp(80) already gives a zero in float32 terms
    out: Float32 = np.negative(gate)
    np.minimum(out, np.float32(80.0), out=out)
    np.exp(out, out=out)
    out += np.float32(1.0)
    np.divide(gate, out, out=out)
    out *= up
    return out
