"""All cases, by target."""

from __future__ import annotations

from collections.abc import Sequence

from conformance import (
    activation,
    all_gather,
    all_reduce,
    all_reduce_islands,
    all_reduce_pair,
    all_reduce_pieces,
    attention,
    attention_biased,
    attention_logn,
    attention_needle,
    embedding,
    end_to_end,
    format_models,
    gather_columns,
    golden,
    int8_all_reduce,
    int8_all_reduce_pair,
    int8_codes,
    kernel_models,
    kv_cache,
    kv_cache_codes,
    layernorm,
    linear,
    linear_w4,
    linear_w4a8,
    linear_w8,
    mla,
    moe,
    moe_routing,
    quantize,
    rmsnorm,
    rope,
    rope_table,
    sampling,
    sum_parts,
)
from conformance.case import Case
from engine.ops import OpTable, cpu_ops

OPS = (
    embedding,
    linear,
    linear_w4,
    linear_w4a8,
    linear_w8,
    gather_columns,
    int8_all_reduce,
    int8_all_reduce_pair,
    int8_codes,
    mla,
    rmsnorm,
    quantize,
    layernorm,
    activation,
    all_gather,
    all_reduce,
    all_reduce_islands,
    all_reduce_pair,
    all_reduce_pieces,
    moe_routing,
    moe,
    kv_cache,
    kv_cache_codes,
    rope,
    attention,
    attention_biased,
    attention_logn,
    attention_needle,
    sampling,
    rope_table,
    sum_parts,
)  # files with cases of one stem
CPU_THREADS = 3  # more than one, so that matrix products are shared out, and odd, so that shares differ in size
TARGETS = ("golden", "cpu", "host", "gpu")
KERNEL_TARGETS = ("host", "gpu")
QUICK = (  # words of names: ends that are easy to miss
    *("penalties-all", "odd", "wider-than-a-block", "one-short-of-16-bytes", "gqa", "padding"),
    *("seventeen-tokens", "splits", "prefill-chunks", "forward-llama3", "all-ties", "logprobs-20"),
    *("edits-spread", "rows-window-of-2", "rotated-rows-window", "-rows-of-2", "add-rows-2-islands-of-2"),
)
NO_KERNEL = "there is no kernel for it yet"


def cases(target: str) -> list[Case]:
    """The cases of a target in the order in which they are run.

    golden  ref against the stored logits of conformance/golden
    cpu     the op table of a machine without a GPU, and the engine over it, against ref
    host    the op table of kernels, built for this CPU, in each storage type that a case has
    gpu     the same on a GPU
    """
    if target == "golden":
        return golden.cases()
    if target == "cpu":
        return [case for op in OPS for case in op.cases()] + end_to_end.cases()
    if target in KERNEL_TARGETS:
        return in_storages([case for op in OPS for case in op.cases()]) + kernel_models.cases() + format_models.cases()
    raise ValueError(f"target {target!r} is none of {', '.join(TARGETS)}")


def in_storages(found: Sequence[Case]) -> list[Case]:
    """Each case in each of the types that kernels store it in."""
    return [case.stored_as(storage) for case in found for storage in case.storages]


def quick(found: Sequence[Case]) -> list[Case]:
    """A few cases of every stem, in one storage type: for runs under a sanitizer."""
    return [
        case for case in found if case.storage in ("float32", "bfloat16") and any(word in case.name for word in QUICK)
    ]


def left_out(target: str) -> list[Case]:
    """The cases of the CPU that a target with kernels has nothing for. (Rope tables are made by a CPU everywhere.)"""
    ops = [op for op in OPS if op is not rope_table] if target in KERNEL_TARGETS else []
    return [case for op in ops for case in op.cases() if not case.storages]


def target_ops(target: str) -> OpTable:
    """What the candidates of a target run on; those of golden are stored arrays and run on nothing."""
    return cpu_ops(CPU_THREADS if target == "cpu" else 1)


def rerun_command(target: str, case: Case, seed: int, op: str = "", impl: str = "") -> str:
    """The one command that runs this case again. op, impl: what stands for one of ours, if anything does."""
    with_seed = f" --seed {seed}" if seed else ""
    with_impl = f" --impl {impl}" if impl else ""
    return f"python -m conformance --target {target} --op {op or case.stem} --case {case.name}{with_impl}{with_seed}"
