"""Cases of codes that ranks copy to each other, and of their sum: the sums of a step, errors carried or not."""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from conformance.all_reduce import SKIP
from conformance.carried import NUM_SUMS, WIRES, Errors, step_disturb, step_inputs, step_reference, wide_outputs
from conformance.case import HALVES, Case, Inputs, Outputs
from conformance.ranked import RankedOps, zeros
from engine.kernels.int8_codes import codes_bytes, quantize_codes, sum_codes

SHAPES = {"one-group": (1, 32), "three-groups": (3, 96), "rows": (9, 160), "several-rounds": (130, 544)}


def cases() -> list[Case]:
    found = [_case(name, world_size, wire) for name in SHAPES for world_size in (2, 3) for wire in WIRES]
    return found + [_case("three-groups", world_size, "carried") for world_size in (4, 5, 6, 7, 8)]


def _case(name: str, world_size: int, wire: str) -> Case:
    num_tokens, hidden_size = SHAPES[name]
    axes = {"num_tokens": num_tokens, "hidden_size": hidden_size, "world_size": world_size, "wire": wire}
    return Case(
        stem="int8_codes",
        name=f"{wire}-{name}-of-{world_size}",
        axes=axes,
        make_inputs=partial(_inputs, **axes),
        reference=partial(step_reference, owners=False),
        candidate=_candidate,
        disturb=step_disturb,
        changes=("residual",) if wire == "carried" else (),
        wide=wide_outputs(world_size),
        storages=HALVES if world_size <= 3 else ("bfloat16",),
        skip={"cpu": SKIP["cpu"]},
    )


def _inputs(seed: int, num_tokens: int, hidden_size: int, world_size: int, wire: str) -> Inputs:
    return step_inputs(np.random.default_rng(seed), num_tokens, hidden_size, world_size, wire)


def _candidate(ops: RankedOps, x: Any, num_tokens: int, wire: str, residual: Any = None) -> Outputs:
    """Codes lie beside each other; each rank takes its own, and a copy of the others'."""
    world_size, hidden_size = int(x.shape[1]), int(x.shape[3])
    how: dict[str, Any] = {"rotate": wire != "int8", "device": ops.device}
    errors = [Errors(ops, num_tokens, hidden_size, wire) for _ in range(world_size)]
    num_bytes = codes_bytes(num_tokens * hidden_size)
    outputs: Outputs = {}
    for call in range(NUM_SUMS):
        mine = [x[call, rank, :num_tokens] for rank in range(world_size)]
        codes = zeros(ops.device, world_size * num_bytes, np.uint8).reshape(world_size, num_bytes)
        for rank in range(world_size):
            quantize_codes(mine[rank], codes[rank], errors[rank].of(call), **how)
        for rank in range(world_size):
            others = zeros(ops.device, (world_size - 1) * num_bytes, np.uint8).reshape(world_size - 1, num_bytes)
            others[:rank], others[rank:] = codes[:rank], codes[rank + 1 :]
            old = None if residual is None else residual[call, rank, :num_tokens]
            outputs[f"sum_{call}_rank_{rank}"] = sum_codes(codes[rank], others, rank, mine[rank], old, **how)
    for rank in range(world_size):
        outputs |= errors[rank].output(rank)
    return outputs
