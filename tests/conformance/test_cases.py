"""Every case of every target that runs here, and what makes a case a case."""

from collections import Counter

import numpy as np
import pytest

from conformance import (
    all_gather,
    all_reduce,
    all_reduce_islands,
    all_reduce_pair,
    all_reduce_pieces,
    int8_all_reduce,
    int8_all_reduce_pair,
    int8_codes,
    quantize,
    sum_parts,
)
from conformance.attention_biased import SEQS
from conformance.case import Case
from conformance.check import check, in_dtype, same_bits
from conformance.suite import cases, rerun_command, target_ops

OPS = target_ops("cpu")
ALL = [(target, case) for target in ("golden", "cpu") for case in cases(target)]
RUN = [(target, case) for target, case in ALL if target not in case.skip]


SIZES = ("none", "one", "odd", "wide", "wider-than-a-block")  # of cases of embedding
COLLECTIVES = (
    all_gather,
    all_reduce,
    all_reduce_islands,
    all_reduce_pair,
    all_reduce_pieces,
    int8_all_reduce,
    int8_all_reduce_pair,
    int8_codes,
    sum_parts,
)
COPIES = ("none", "one", "smallest", "odd", "many", "wider-than-a-block", "wide-odd")  # of blocks


def name_of(value: object) -> str:
    return f"{value.stem}-{value.name}" if isinstance(value, Case) else str(value)


@pytest.mark.parametrize(("target", "case"), RUN, ids=name_of)
def test_case(target: str, case: Case) -> None:
    result = check(case, OPS)
    assert not result.problems, "\n".join([*result.problems, f"again: {rerun_command(target, case, seed=0)}"])


def test_names_are_unique_and_one_word() -> None:
    counts = Counter((target, case.stem, case.name) for target, case in ALL)
    assert [key for key, count in counts.items() if count > 1] == []
    assert [case.name for _, case in ALL if case.name.split() != [case.name]] == []


def test_what_is_skipped_and_why() -> None:
    """A list, so that no case can fall silent unseen."""
    skipped = {f"{case.stem} {case.name}" for target, case in ALL if target in case.skip}
    assert skipped == {
        *(f"embedding {name}" for name in SIZES),
        *(f"embedding positions-{name}" for name in SIZES),
        *(f"embedding part-{name}" for name in ("odd", "wide", "positions-odd", "positions-wide")),
        *(f"attention_logn {name}" for name in ("none", "one", "odd", "heads", "wider-than-a-block")),
        *(f"kv_cache {what}-{name}" for what in ("copy", "swap") for name in COPIES),
        *(f"activation plain-{name}" for name in ("gelu_new", "gelu", "relu", "silu")),
        "mla write-padding",
        *(f"attention_biased {name}" for name in SEQS),
        *(f"rope {name}" for name in ("padding", "qk-norm-padding", "qk-norm-interleaved")),
        *(f"rope part-{name}" for name in ("gqa", "dim80", "dim256", "interleaved")),
        "attention decode-no-sequence",
        "attention decode-empty-sequence",
        *(f"attention {half}-one-key-of-131072" for half in ("decode", "prefill")),
        *(f"quantize {case.name}" for case in quantize.cases()),
        *(f"{case.stem} {case.name}" for op in COLLECTIVES for case in op.cases()),
        *(f"linear_w8 {name}" for name in ("larger-tiles", "larger-tiles-fp8", "larger-tiles-block")),
        "linear_w8 gated-larger-tiles-block",
        *(f"gather_columns {name}" for name in ("filled-up", "filled-up-many-tokens")),
        *(f"kv_cache_codes {name}" for name in ("write-fp8-part", "write-fp8-padding", "decode-fp8-no-sequence")),
    }
    assert all(len(reason.split()) >= 5 for _, case in ALL for reason in case.skip.values())


@pytest.mark.parametrize("keys", ["few", pytest.param("131072", marks=pytest.mark.slow)])
def test_skipped_cases_are_whole(keys: str) -> None:
    """Their inputs and references work, so that a kernel will find them ready. ref takes 15 s for 131072 keys."""
    for target, case in ALL:
        if target in case.skip and case.name.endswith("of-131072") == (keys == "131072"):
            truth = case.reference(**in_dtype(case.make_inputs(0), np.dtype(np.float64)))
            assert all(isinstance(output, np.ndarray) for output in truth.values())


@pytest.mark.parametrize("case", [case for target, case in ALL if case.stem != "llama"], ids=name_of)
def test_inputs_are_a_function_of_the_seed(case: Case) -> None:
    """Equal seeds give equal bits in arrays that share no memory."""
    first, second = case.make_inputs(3), case.make_inputs(3)
    assert first.keys() == second.keys()
    for name, value in first.items():
        if isinstance(value, np.ndarray):
            assert same_bits(value, second[name])
            assert not np.shares_memory(value, second[name])
