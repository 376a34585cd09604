"""Cases of activations in 8 bits: alone, behind a norm, and behind a residual add and a norm.

A quotient that lies between two codes, as near as float32 can tell, may become either: it is left undecided. A norm of
4104 numbers is a sum of squares, 16 of a thread and then a tree of 10: 27 roundings, half of which reach the root;
that rounds twice, two products, the scale's quotient and the number's once each: NEAR is 20 roundings.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import HALVES, Case, Inputs, Kept, Outputs
from conformance.inputs import guarded, normal
from engine.coded8 import CodedActivations
from engine.ops import OpTable
from engine.weights import LinearWeight
from ref.numerics import round_to
from ref.quant.fp8 import fp8_quantize_static
from ref.quant.fused import quantize_activations
from ref.quant.int8 import int8_quantize_static
from ref.rmsnorm import rmsnorm

Array = NDArray[Any]

SHAPES = {  # num_tokens, n
    "no-tokens": (0, 64),
    "one-token": (1, 576),
    "odd": (7, 33),
    "ragged": (3, 200),  # a group of 128, and one of 72
    "many": (40, 96),
    "wider-than-a-block": (2, 4104),
}
KINDS = ("int8", "fp8", "fp8_block")
OPS = ("plain", "norm", "add-norm")
GROUP = 128
EPS = 1e-5
NEAR = 20 * 2.0**-24  # relative
UNDECIDED = -1000  # no code
FIXED = np.float32(0.0625)
HOSTILE = ("zeros", "tiny", "tiniest", "subnormal", "large", "infinity", "nan", "steps")


def cases() -> list[Case]:
    found = [
        case
        for op in OPS
        for kind in KINDS
        for name, shape in SHAPES.items()
        for case in _cases(op, kind, name, *shape)
    ]
    found += [case for kind in KINDS for case in _cases("plain", kind, "hostile", len(HOSTILE), 80)]
    return found + [case for op in OPS for kind in KINDS[:2] for case in _cases(op, kind, "fixed", len(HOSTILE), 80)]


def _cases(op: str, kind: str, name: str, num_tokens: int, size: int) -> list[Case]:
    """Behind a norm one for each storage type: the truth is what becomes of a norm that is rounded to it."""
    if op == "plain":
        return [_case(op, kind, name, num_tokens, size, None)]
    return [_case(op, kind, name, num_tokens, size, storage) for storage in HALVES]


def _case(op: str, kind: str, name: str, num_tokens: int, size: int, stored: str | None) -> Case:
    fixed = FIXED if name == "fixed" else None

    def reference(
        x: Array, weight: Array | None, residual: Array | None, fixed_scale: Array | None, storage: str | None = None
    ) -> Outputs:
        added = {}
        if residual is not None:
            x = round_to(x + residual, stored)
            added = {"residual": x}
        with np.errstate(all="ignore"):
            low, high = (_quantized(x, weight, 1 + sign * NEAR, kind, fixed, stored) for sign in (-1, 1))
            scales = quantize_activations(_normed(x, weight, 1.0, stored), kind)[1]
            if fixed is not None:
                scales = np.full(len(x), fixed, x.dtype)
            sure_scales = np.abs(high[1] / low[1] - 1) < 2.0**-12  # a rounding to storage is much more
            scales = np.where(sure_scales | ~np.isfinite(scales) | (scales == 0), scales, x.dtype.type(UNDECIDED))
        return {"codes": np.where(low[0] == high[0], low[0], np.int16(UNDECIDED)), "scales": scales} | added

    def candidate(
        ops: OpTable, x: Array, weight: Array | None, residual: Array | None, fixed_scale: Array | None
    ) -> Outputs:
        more = {} if fixed_scale is None else {"input_scale": fixed_scale}
        into = LinearWeight(
            "int8" if kind == "int8" else "fp8",
            *(1, size, {"scale": np.ones((1, 1) if kind == "fp8_block" else 1, np.float32)} | more),
        )
        if residual is not None:
            assert weight is not None
            x, residual = ops.add_norm_quant(x, residual, weight, EPS, into)
        elif weight is not None:
            x = ops.norm_quant(x, weight, EPS, into)
        codes, scales = (
            (x.codes, x.scales) if isinstance(x, CodedActivations) else ops.quantize_activations(x, kind, **more)
        )
        found = {"codes": codes.astype(np.int16), "scales": scales}
        return found if residual is None else found | {"residual": residual}

    return Case(
        stem="quantize",
        name=f"{op}-{kind}-{name}" + ("" if stored is None else f"-of-{stored}"),
        axes={"num_tokens": num_tokens, "size": size, "kind": kind, "op": op},
        make_inputs=partial(_inputs, op=op, kind=kind, name=name, num_tokens=num_tokens, size=size),
        reference=reference,
        candidate=candidate,
        undecided=UNDECIDED,
        changes=("residual",) if op == "add-norm" else (),
        disturb=_disturb,
        storages=HALVES if stored is None else (stored,),
        wide=("scales", "fixed_scale"),
        skip={"cpu": "quantize_activations of the CPU's op table is that of ref itself"},
    )


def _normed(x: Array, weight: Array | None, times: float, storage: str | None) -> Array:
    """What is quantized, of which float32 may find `times` as much before it is rounded to storage."""
    return x if weight is None else round_to(rmsnorm(x, weight, EPS) * x.dtype.type(times), storage)


def _quantized(
    x: Array, weight: Array | None, times: float, kind: str, fixed: np.float32 | None, storage: str | None
) -> tuple[Array, Array]:
    """Codes and scales, if a float32 errs by as much."""
    z = _normed(x, weight, times, storage)
    scales = quantize_activations(z, kind)[1] if fixed is None else np.full(len(z), fixed, z.dtype)
    return _coded(z, scales, kind, times).astype(np.int16), scales


def _coded(z: Array, scales: Array, kind: str, times: float) -> Array:
    """The codes of z · times."""
    by_number = np.repeat(scales, GROUP, 1)[:, : z.shape[1]] if scales.ndim == 2 else scales[:, None]
    code = int8_quantize_static if kind == "int8" else fp8_quantize_static
    codes: Array = code(z * z.dtype.type(times), by_number.astype(z.dtype))
    return codes


def _inputs(seed: int, op: str, kind: str, name: str, num_tokens: int, size: int) -> Inputs:
    rng = np.random.default_rng(seed)
    sizes = np.exp2(rng.integers(-10, 10, (num_tokens, 1))).astype(np.float32) if name != "fixed" else np.float32(1)
    x, residual = (_coarse(normal(rng, num_tokens, size)) * sizes for _ in range(2))
    if op != "add-norm":
        x = normal(rng, num_tokens, size) * sizes
        if name in ("hostile", "fixed"):
            _make_hostile(x, kind, name == "fixed")
    return {
        "x": guarded(x),
        "weight": None if op == "plain" else 1 + normal(rng, size, scale=0.2),
        "residual": guarded(residual) if op == "add-norm" else None,
        "fixed_scale": np.array([FIXED]) if name == "fixed" else None,
    }


def _coarse(numbers: Array) -> Array:
    """Nearest of six bits, so that a sum of two is exact in every type and codes need not agree by luck."""
    coarse: Array = np.clip(np.rint(numbers * 16), -63, 63) / np.float32(16)
    return coarse


def _make_hostile(x: Array, kind: str, fixed: bool) -> None:
    """QNT-09: rows of zeros, of 1e-8, around the smallest scale; one large number, infinity, NaN; what lies at, and
    beyond, the largest code."""
    step = float(FIXED) if fixed else 1.0
    most = 127.0 if kind == "int8" else 448.0
    for row, what in zip(x, HOSTILE, strict=True):
        match what:
            case "zeros":
                row[...] = 0
                row[::3] = -0.0
            case "tiny":
                row[...] = 1e-8
            case "tiniest":  # of a bfloat16; the scale of what is quantized has no inverse below 2⁻¹²⁶
                row[...] = most * 2.0**-126
                row[::2] = 2.0**-125
            case "subnormal":
                row[...] = most * 2.0**-127
                row[::2] = 0
            case "large":
                row[5] = 6e4
            case "infinity":
                row[7] = -np.inf
            case "nan":
                row[9] = np.nan
            case "steps":  # with a scale of one step: ties, and what saturates
                row[:8] = np.array([1, -1, 0.5, -0.5, 1.5, 2.5, 1 + 0.1 / most, 1 + 0.5 / most]) * step
                row[:2] *= most
                row[6:8] *= most if fixed else 1
                row[8] = -0.0


def _disturb(inputs: Inputs, rng: np.random.Generator) -> Kept:
    x = inputs["x"]
    keep = int(rng.integers(len(x))) if len(x) else 0
    others = np.arange(len(x)) != keep
    x[others] = normal(rng, int(others.sum()), x.shape[1], scale=10.0)
    kept = slice(keep, keep + 1)
    return {"codes": kept, "scales": kept} | ({} if inputs["residual"] is None else {"residual": kept})
