"""All cases, by target."""

from __future__ import annotations

from conformance import (
    activation,
    attention,
    attention_biased,
    embedding,
    end_to_end,
    golden,
    kv_cache,
    layernorm,
    linear,
    mla,
    moe,
    moe_routing,
    rmsnorm,
    rope,
    rope_table,
    sampling,
)
from conformance.case import Case
from engine.ops import OpTable, cpu_ops

OPS = (
    embedding,
    linear,
    mla,
    rmsnorm,
    layernorm,
    activation,
    moe_routing,
    moe,
    kv_cache,
    rope,
    attention,
    attention_biased,
    sampling,
    rope_table,
)  # files with cases of one stem
CPU_THREADS = 3  # more than one, so that matrix products are shared out, and odd, so that shares differ in size
TARGETS = ("golden", "cpu", "host", "gpu")
NO_KERNELS = {
    "host": "there are no CUDA kernels yet, so there is nothing to build for the host; use --target cpu or golden",
    "gpu": "there are no CUDA kernels yet, so there is nothing to run on a GPU; use --target cpu or golden",
}


def cases(target: str) -> list[Case]:
    """The cases of a target in the order in which they are run.

    golden  ref against the stored logits of conformance/golden
    cpu     the op table of a machine without a GPU, and the engine over it, against ref
    """
    if target == "golden":
        return golden.cases()
    if target == "cpu":
        return [case for op in OPS for case in op.cases()] + end_to_end.cases()
    raise ValueError(f"target {target!r} has no cases; golden and cpu have")


def target_ops(target: str) -> OpTable:
    """What the candidates of a target run on; those of golden are stored arrays and run on nothing."""
    return cpu_ops(CPU_THREADS if target == "cpu" else 1)


def rerun_command(target: str, case: Case, seed: int) -> str:
    """The one command that runs this case again."""
    with_seed = f" --seed {seed}" if seed else ""
    return f"python -m conformance --target {target} --op {case.stem} --case {case.name}{with_seed}"
