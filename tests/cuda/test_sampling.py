"""Sampling kernels on this CPU, against ref, on rows that are hard to rank; faults planted in them; the sanitizer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.check import check
from conformance.host import KernelFault
from conformance.host_build import CUDA
from conformance.host_device import ORDERS, HostDevice
from conformance.sampling import arguments_of_ref, cases, tokens_near
from engine.api import SamplingParams
from engine.cpu import sampling as cpu
from engine.errors import KernelError
from engine.kernels.device import Instance
from engine.kernels.sampling import EDIT_LOGITS, GREEDY, SAMPLE_ROWS, TOKEN_LOGPROBS, KernelSampling
from engine.logit_edits import SAMPLED, SlotEdits, pack_edits
from engine.ops import OpTable, SamplingOps, cpu_ops
from engine.sampler import Sampler, SampleResult
from ref.sampling import keep_set
from tests.cuda.conftest import Verdict
from tests.cuda.isolated import planted

Array = NDArray[Any]

HEADER = "include/ranked_row.cuh"
KINDS: dict[str, Callable[[np.random.Generator, tuple[int, int]], Array]] = {
    "normal": lambda rng, shape: rng.normal(size=shape) * 3,
    "ties": lambda rng, shape: rng.integers(-3, 4, shape),
    "equal": lambda rng, shape: np.full(shape, -7.5),
    "one-huge": lambda rng, shape: np.where(np.arange(shape[1]) == shape[1] // 2, 3e38, -1e30) * np.ones(shape),
    "wide": lambda rng, shape: rng.uniform(-3.4e38, 3.4e38, shape),
    "neighbours": lambda rng, shape: 1 + rng.integers(0, 50, shape) * 2.0**-23,
    "signed-zeros": lambda rng, shape: rng.choice([0.0, -0.0, -1e-3], shape),
    "subnormal": lambda rng, shape: rng.integers(-9, 9, shape) * 2.0**-149,
    "banned": lambda rng, shape: np.where(rng.random(shape) < 0.95, -np.inf, rng.normal(size=shape)),
    "one-left": lambda rng, shape: np.where(np.arange(shape[1]) == shape[1] - 1, -5.0, -np.inf) * np.ones(shape),
}
FILTERS: tuple[dict[str, Any], ...] = (  # of a row each
    {},
    {"temperature": 0.0},
    {"temperature": 0.01},
    {"temperature": 100.0},
    {"top_k": 1},
    {"top_k": 5},
    {"top_k": -1, "top_p": 0.5},
    {"top_p": 1e-9},
    {"top_p": 0.97},
    {"top_p": 1 - 2.0**-53},
    {"min_p": 0.1},
    {"min_p": 1.0},
    {"top_k": 7, "top_p": 0.8, "min_p": 0.05, "temperature": 0.7},
    {"top_k": 64, "top_p": 0.4},
    {"top_k": 10**6, "top_p": 0.9},
)
VOCABS = (1, 2, 31, 127, 130, 1000, 2311)


@cache
def device(sanitizer: str = "", folder: Path = CUDA) -> HostDevice:
    found = HostDevice(sanitizer=sanitizer, folder=folder)
    found.build([GREEDY, SAMPLE_ROWS, EDIT_LOGITS, TOKEN_LOGPROBS])
    return found


def hostile(kind: str, num_rows: int, vocab_size: int, seed: int = 0) -> Array:
    """Rows at odd addresses, if vocab_size is odd; each has something finite."""
    rng = np.random.default_rng([seed, vocab_size])
    logits = np.asarray(KINDS[kind](rng, (num_rows, vocab_size)), np.float32)
    logits[~np.isfinite(logits).any(axis=1), -1] = 0.5
    return logits


def filters(num_rows: int, seed: int = 0) -> dict[str, Array]:
    """FILTERS in turn, with large seeds, positions and streams."""
    rng = np.random.default_rng([seed, 1])
    usual: dict[str, Any] = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    rows = [usual | FILTERS[row % len(FILTERS)] for row in range(num_rows)]
    found = {name: np.array([row[name] for row in rows]) for name in usual}
    return {
        **found,
        "seed": rng.integers(0, 2**64, num_rows, np.uint64),
        "position": rng.integers(0, 2**40, num_rows),
        "stream": rng.integers(0, 2**40, num_rows),
    }


def sample_problems(ops: SamplingOps, logits: Array, rows: dict[str, Array]) -> list[str]:
    """What is wrong with the ids: each must be that of ref in float64, or lie where ref lands when top_p, min_p or the
    uniform goes over a border that is nearer than float32 can tell."""
    token_ids, status = ops.start_copy(ops.sample_rows(logits, **rows))()
    exact = arguments_of_ref(logits.astype(np.float64), rows)
    near = tokens_near(logits, rows)
    found = []
    for row, token_id in enumerate(token_ids.tolist()):
        low, high = int(near[:, row].min()), int(near[:, row].max())
        right = low == high == token_id
        if not right and low <= token_id <= high:
            heat, k, p, m = (exact[name][row] for name in ("temperature", "top_k", "top_p", "min_p"))
            right = bool(
                keep_set(exact["logits"][row], float(heat), int(k), float(p) * 1.00001, float(m) * 0.99999)[token_id]
            )
        if not right or status[row] != SAMPLED:
            found.append(f"row {row}: id {token_id}, status {status[row]}; expected {low} … {high}")
    return found


def kernels(order: int = 0, num_threads: int = 64, max_num_rows: int = 32) -> KernelSampling:
    device().begin(order)
    return KernelSampling(device(), max_num_rows, num_threads)


@pytest.mark.parametrize("vocab_size", VOCABS)
@pytest.mark.parametrize("kind", KINDS)
def test_sample_on_hostile_rows(kind: str, vocab_size: int) -> None:
    num_rows = len(FILTERS)
    order = (VOCABS.index(vocab_size) + list(KINDS).index(kind)) % len(ORDERS)
    for seed, num_threads in ((0, 64), (1, 96)):
        logits = hostile(kind, num_rows, vocab_size, seed)
        assert sample_problems(kernels(order, num_threads), logits, filters(num_rows, seed)) == []


@pytest.mark.parametrize("kind", ["normal", "ties", "wide"])
def test_sample_on_a_real_vocabulary(kind: str) -> None:
    """151 936 tokens, 10 rows: too many for the candidates in shared memory, in several rounds of the search."""
    rows = {name: value[-10:] for name, value in filters(len(FILTERS)).items()}
    rows["temperature"][0], rows["top_k"][1] = 30.0, 140_000
    assert sample_problems(kernels(num_threads=256), hostile(kind, 10, 151936), rows) == []


def test_rows_that_cannot_be_sampled_say_so_and_touch_nobody() -> None:
    logits = hostile("normal", 12, 501)
    rows = filters(12, seed=3)
    clean = kernels().sample_rows(logits, **rows)
    for order in range(len(ORDERS)):
        for greedy in (False, True):
            bad = logits.copy()
            bad[1, 77], bad[3, 500], bad[6, [5, 499]], bad[8] = np.nan, -np.nan, np.inf, -np.inf
            reasons = np.where(np.arange(12) == 3, 2, 1).astype(np.int32)
            now = {**rows, "temperature": np.zeros(12)} if greedy else rows
            token_ids, status = kernels(order).sample_rows(bad, **now, reasons=reasons)
            assert status.tolist() == [0, 1, 0, 2, 0, 0, 1, 0, 1, 0, 0, 0]
            assert token_ids[[1, 3, 6, 8]].tolist() == [77, 500, 5, 0]
            good = status == 0
            expected = logits.argmax(axis=1) if greedy else clean[0]
            assert token_ids[good].tolist() == expected[good].tolist()


def test_greedy_over_parts_of_a_row_launch_after_launch() -> None:
    """Three blocks a row, equals in several of them, and the workspace is as it was."""
    for order in range(len(ORDERS)):
        ops = kernels(order)
        for seed, best in enumerate(([9999], [4095, 4096], [0, 9000], [8191, 8192, 9999], [5000, 4097])):
            logits = hostile("normal", 2, 10001, seed)
            logits[:, best] = 99.0
            rows = filters(2) | {"temperature": np.zeros(2)}
            assert ops.sample_rows(logits, **rows).tolist() == [[min(best)] * 2, [0, 0]]
        assert not ops._best.any()
        assert not ops._num_done.any()


def step(ops: SamplingOps) -> SampleResult:
    """Edits, logprobs of edited rows, plain rows and two bad ones, all in a batch."""
    vocab_size = 301
    samplings = [
        SamplingParams(temperature=0.0, logprobs=3, logit_bias={5: 60.0}),
        SamplingParams(top_p=0.9),
        SamplingParams(logprobs=0),
        SamplingParams(allowed_token_ids=(7, 300), logprobs=5, repetition_penalty=1.5, top_k=2),
        SamplingParams(allowed_token_ids=(3,), bad_words_ids=((3,),), logprobs=1),
        SamplingParams(logprobs=2, frequency_penalty=0.5, min_tokens=3),
        SamplingParams(top_k=10, logprobs=20),
    ]
    sampler = Sampler(vocab_size, len(samplings), ops)
    for slot, sampling in enumerate(samplings):
        sampler.add(slot, sampling, slot, [5, 6], [7], [2])
    logits = hostile("normal", len(samplings), vocab_size)
    logits[5, 9] = np.nan
    return sampler.sample(logits, np.arange(len(samplings), dtype=np.int32))


def test_the_sampler_over_kernels_gives_what_it_gives_over_numpy() -> None:
    expected = step(cpu)
    for order in range(len(ORDERS)):
        found = step(kernels(order))
        assert found.token_ids.tolist() == expected.token_ids.tolist()
        assert found.errors == expected.errors
        assert sorted(found.errors) == [4, 5]
        for one, other in zip(found.logprobs, expected.logprobs, strict=True):
            assert (one is None) == (other is None)
            if one is not None and other is not None:
                assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
                assert [i for i, _ in one.top] == [i for i, _ in other.top]


def test_wrong_arguments_are_named_before_anything_is_launched() -> None:
    ops = kernels(max_num_rows=4)
    rows = filters(2)
    with pytest.raises(KernelError, match=r"logits is float64; expected .*float32"):
        ops.sample_rows(np.zeros((2, 9)), **rows)
    with pytest.raises(KernelError, match="at most 4 rows"):
        ops.sample_rows(np.zeros((5, 9), np.float32), **filters(5))
    with pytest.raises(KernelError, match="axis of logits has gaps"):
        ops.sample_rows(np.zeros((2, 18), np.float32)[:, ::2], **rows)
    outside = SlotEdits(SamplingParams(logit_bias={9: 1.0}), [], [], [], 10)
    with pytest.raises(KernelError, match="token ids 9 … 9; expected 0 … 8"):
        ops.edit_logits(np.zeros((2, 9), np.float32), pack_edits([0], [outside], np.array([0]), [False]))
    assert ops.sample_rows(np.zeros((0, 9), np.float32), **filters(0)).shape == (2, 0)


STEMS: dict[str, tuple[list[Instance], tuple[str, ...]]] = {  # .cu file → its kernels, beginnings of its cases' names
    "sampling": ([GREEDY, SAMPLE_ROWS], ("sample-greedy", "sample-all")),
    "sampling_edits": ([EDIT_LOGITS], ("edits", "penalties-all", "penalties-reward")),
    "sampling_logprobs": ([TOKEN_LOGPROBS], ("logprobs-20", "logprobs-beyond")),
}


def finding(folder: Path, stem: str, sanitizer: str = "") -> str:
    """The first thing that is wrong with the kernels of a file; "" = nothing."""
    watched = HostDevice(sanitizer=sanitizer, folder=folder)
    instances, names = STEMS[stem]
    watched.build(instances)
    ops = KernelSampling(watched, 32, 64)
    table: OpTable = replace(cpu_ops(), sampling=ops)
    try:
        for order in (0, 3):
            watched.begin(order)
            for case in cases():
                if case.name.startswith(names):
                    for problem in check(case, table, repeats=False).problems:
                        return f"{case.name}: {problem}"
            for kind in KINDS if stem == "sampling" and not sanitizer else ():
                for vocab_size in (131, 2600):
                    logits = hostile(kind, len(FILTERS), vocab_size, order)
                    for problem in sample_problems(ops, logits, filters(len(FILTERS), order)):
                        return f"{kind} {vocab_size}: {problem}"
    except KernelFault as fault:
        return f"fault: {fault}"
    return ""


@pytest.mark.parametrize("stem", STEMS)
def test_nothing_is_found_under_address_sanitizer(stem: str) -> None:
    assert finding(CUDA, stem, "address") == ""


def test_nothing_is_found_in_the_true_kernels() -> None:
    assert finding(CUDA, "sampling") == ""


FAULTS = (  # file, what is wrong, the right text, the wrong one
    (HEADER, "last-among-equals", "if (key > best) best", "if (key >= best) best"),
    (HEADER, "minus-zero-below-zero", "key == 0x7fffffffu ? 0x80000000u : key", "key"),
    (HEADER, "nan-is-lowest", "best = 0xffffffffu, best_id", "best = 1u, best_id"),
    (HEADER, "tail-of-a-row-lost", "min(max(end - start - first, 0), 4)", "min(max(end - start - first, 0), 3)"),
    (HEADER, "segments-overlap", "return {min(begin + part * size", "return {min(begin - 4 * (part > 0) + part * size"),
    (HEADER, "lowest-threshold-left-out", "if (key < thresholds[0] ||", "if (key <= thresholds[0] ||"),
    (HEADER, "middle-threshold-left-out", "if (key < thresholds[kFew", "if (key <= thresholds[kFew"),
    (HEADER, "candidates-in-one-place", "__popc(votes & lower_lanes)", "0"),
    (HEADER, "top-p-of-all-weight", "total = shared.found[0].mass + more", "total = total_mass(row, shared)"),
    (HEADER, "draw-passes-at-equality", "if (sum(next) > target) {", "if (sum(next) >= target) {"),
    (HEADER, "equals-without-a-limit", "equal_mass * min(x.count, cut.num_equal)", "equal_mass * x.count"),
    (HEADER, "min-p-ignored", "if (weight >= min_weight) mine", "if (weight >= 0.0f) mine"),
    (HEADER, "mass-before-forgotten", "upto.mass += before.mass - mine.mass", "upto.mass -= mine.mass"),
    ("sampling.cu", "nine-rounds", "round < 10", "round < 9"),
    ("sampling.cu", "position-of-32-bits", "static_cast<unsigned>(position >> 32)", "0"),
    ("sampling.cu", "filters-of-another-row", "static_cast<float>(min_p[number])", "static_cast<float>(min_p[0])"),
    (
        "sampling.cu",
        "top-k-one-more",
        "static_cast<unsigned>(top_k[number])",
        "static_cast<unsigned>(top_k[number] + 1)",
    ),
    ("sampling.cu", "equals-rounded-down", "(head.missing + mass - 1) / mass", "max(head.missing / mass, 1ull)"),
    ("sampling.cu", "temperature-ignored", "kLog2E / static_cast<float>(temperature[number])", "kLog2E"),
    ("sampling.cu", "workspace-left-full", "atomicExch(&best[number], 0ull)", "best[number]"),
    ("sampling_edits.cu", "product-a-little-off", "__fmul_rn(old, repetition)", "old * repetition * 1.0001f"),
    ("sampling_edits.cu", "bad-rows-edited", "if (!is_finite(best)) return;", ""),
    ("sampling_edits.cu", "mask-of-the-next-bit", "allowed[i / 32] >> i % 32", "allowed[i / 32] >> (i + 1) % 32"),
    ("sampling_edits.cu", "values-of-another-kind", "+= values[i];", "+= values[i - bound[kBias]];"),
    ("sampling_logprobs.cu", "all-equals-written", "key && id <= last_equal", "key && id <= vocab_size"),
    ("sampling_logprobs.cu", "one-equal-short", "cut.num_equal - 1, shared", "cut.num_equal - 2, shared"),
)
IN_EVERY_RUN = (  # of one kind each; the others take `make test-full`
    "last-among-equals",
    "tail-of-a-row-lost",
    "middle-threshold-left-out",
    "top-p-of-all-weight",
    "draw-passes-at-equality",
    "equals-without-a-limit",
    "position-of-32-bits",
    "filters-of-another-row",
    "bad-rows-edited",
    "all-equals-written",
)


def judge(fault: tuple[str, str, str, str], folder: Path) -> str:
    file, _, old, new = fault
    stems = ("sampling", "sampling_logprobs") if file == HEADER else (file.removesuffix(".cu"),)
    header = (CUDA / HEADER).read_text("utf-8")
    if file == HEADER:
        header = planted(header, old, new)
    for stem in stems:
        text = (CUDA / f"{stem}.cu").read_text("utf-8")
        text = text if file == HEADER else planted(text, old, new)
        # the header goes into the file: parts of the shim are built again for each set of headers
        text = text.replace('#include "ranked_row.cuh"', header.replace("#pragma once", ""))
        (folder / f"{stem}.cu").write_text(text, "utf-8")
    return next(filter(None, (finding(folder, stem) for stem in stems)), "")


@pytest.mark.parametrize(
    "fault",
    [
        pytest.param(fault, id=fault[1], marks=[] if fault[1] in IN_EVERY_RUN else [pytest.mark.slow])
        for fault in FAULTS
    ],
)
def test_a_planted_fault_is_found(fault: tuple[str, str, str, str], verdict: Verdict) -> None:
    assert verdict(judge), "nothing is found"
