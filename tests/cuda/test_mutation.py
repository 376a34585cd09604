"""Mutants made by rule: that they are what they should be, and that the cases find them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

from conformance.host_build import CUDA
from conformance.report import RESULTS
from tests.cuda.mutation.operators import OPERATORS, mutants_of
from tests.cuda.mutation.report import EQUIVALENT, Record, explanations
from tests.cuda.mutation.suites import MORE, NOT_RUN, SHARED, cases_of, files, stems_of
from tests.cuda.mutation.sweep import KILLED, NO_BUILD, SURVIVED, Verdict, all_mutants, chosen

ROOT = Path(__file__).parents[2]
SAMPLE = ("embedding.cu", "layernorm.cu", "kv_cache_copy.cu")  # quick to build
KERNEL = """#include "vec.cuh"
constexpr int kRows = 4 + 1;  // outside functions nothing is changed
template <typename T>
__global__ void scale(const T* x, T* y, int n, float factor) {
  __shared__ float scratch[32];
  const int i = blockIdx.x * 32 + threadIdx.x;
  if (i >= n) return;
  scratch[i % 32] = x[i];
  __syncthreads();
  for (int j = 0; j < 32; ++j) {
    if (j != i && i > 0) y[i] += scratch[j] * factor;
  }
#if defined(__CUDACC__)
  asm("exit + 1;");
#endif
}
"""
CHANGES = {  # operator → lines as they become
    "barrier": {";"},
    "compare": {
        "if (i > n) return;",
        "for (int j = 0; j <= 32; ++j) {",
        "if (j == i && i > 0) y[i] += scratch[j] * factor;",
        "if (j != i && i >= 0) y[i] += scratch[j] * factor;",
    },
    "guard": {"if (false) return;", "if (true) y[i] += scratch[j] * factor;"},
    "logic": {"if (j != i || i > 0) y[i] += scratch[j] * factor;"},
    "index": {
        "scratch[(i % 32) + 1] = x[i];",
        "scratch[i % 32] = x[i + 1];",
        "if (j != i && i > 0) y[i + 1] += scratch[j] * factor;",
        "if (j != i && i > 0) y[i] += scratch[j + 1] * factor;",
    },
    "swap": {"scratch[i / 32] = x[i];"},
    "factor": {
        "const int i = blockIdx.x + threadIdx.x;",
        "if (j != i && i > 0) y[i] += scratch[j];",
    },
    "sign": {"const int i = blockIdx.x * 32 - threadIdx.x;"},
    "loop": {"for (int j = 1; j < 32; ++j) {", "for (int j = 0; j < 32 - 1; ++j) {"},
    "sum": {"if (j != i && i > 0) y[i] = scratch[j] * factor;"},
}


def test_every_place_of_a_small_kernel() -> None:
    found: dict[str, set[str]] = {}
    for mutant in mutants_of("scale.cu", KERNEL):
        found.setdefault(mutant.operator, set()).add(mutant.new)
    assert found == CHANGES


@pytest.mark.parametrize(
    ("statement", "operator", "new"),
    [
        ("cp_async_wait<kStages - 1>();", "wait", "cp_async_wait<kStages - 1 + 1>();"),
        ("cp_async_wait<kStages - 1>();", "barrier", ";"),
        ("load(stage, x);", "stage", "load((stage ^ 1), x);"),
        ("load(stage, x);", "swap", "load(x, stage);"),
        ("a = p[i][j];", "swap", "a = p[j][i];"),
        ("a = b + 1;", "one", "a = b;"),
        ("a = max(b, c);", "minmax", "a = min(b, c);"),
        ("a = -b;", "sign", "a = b;"),
        ("a = 0.5f * b;", "constant", "a = (0.5f * 1.25f) * b;"),
        ("a += __shfl_xor_sync(kAllLanes, a, 2);", "mask", "a += __shfl_xor_sync(kAllLanes, a, (2 * 2));"),
        ("a += __shfl_xor_sync(kAllLanes, a, 2);", "mask", "a += __shfl_xor_sync((kAllLanes >> 1), a, 2);"),
        ("a = b << 3;", "mask", "a = b << (3 + 1);"),
        ("if (!a) b = 1;", "logic", "if (a) b = 1;"),
        ("a = known ? b : 0;", "guard", "a = true ? b : 0;"),
    ],
)
def test_one_change(statement: str, operator: str, new: str) -> None:
    found = mutants_of("a.cu", f"void f(int a) {{\n  {statement}\n}}\n")
    assert (operator, new) in {(mutant.operator, mutant.new) for mutant in found}


@pytest.mark.parametrize(
    "line",
    [
        "float x[kRows][4] = {}, y[kColumns];",  # sizes of arrays
        "const T* a = static_cast<const T*>(b);",
        "max(a, b);",  # of which no order matters
        "static_assert(a < b, c);",
        "dependency_wait();",
        "return a == b ? Row<T, kRounds>() : c;  // a < b",
    ],
)
def test_what_is_no_place_for_a_fault(line: str) -> None:
    changed = [(m.operator, m.new) for m in mutants_of("a.cu", f"void f(int a) {{\n  {line}\n}}\n")]
    assert set(changed) <= {("minmax", "min(a, b);"), ("compare", "return a != b ? Row<T, kRounds>() : c;")}


def test_ids_stay_while_other_lines_change() -> None:
    before = {mutant.id: mutant.hunk for mutant in mutants_of("scale.cu", KERNEL)}
    later = KERNEL.replace("constexpr int", "// a line more\nconstexpr int").replace("x[i];", "x[2 * i];")
    after = {mutant.id: mutant.hunk for mutant in mutants_of("scale.cu", later)}
    same = before.items() & after.items()
    assert len(before) - 8 < len(same) < len(before)
    assert all("for" in before[name] or "if" in before[name] or "blockIdx" in before[name] for name, _ in same)


def test_all_files_have_mutants_of_all_kinds() -> None:
    mutants = all_mutants()
    assert len({mutant.id for mutant in mutants}) == len(mutants) == len({(m.file, m.text) for m in mutants})
    counts = Counter(mutant.file for mutant in mutants)
    assert counts.keys() == set(files())
    assert min(counts.values()) > 5
    assert {mutant.operator for mutant in mutants} == OPERATORS.keys()
    assert SHARED.keys() | {f"include/{name}" for name in NOT_RUN} <= {
        f"include/{path.name}" for path in CUDA.glob("include/*.cuh")
    }
    assert all(stems_of(file) for file in files())
    assert all(cases_of(stem) or stem in MORE for file in files() for stem in stems_of(file))


def test_a_choice_begins_with_every_file_and_is_the_same_every_time() -> None:
    mutants = all_mutants()
    some = chosen(mutants, seed=3, per_file=2)
    assert Counter(mutant.file for mutant in some) == dict.fromkeys(files(), 2)
    assert {mutant.file for mutant in some[: len(files())]} == set(files())
    assert some == chosen(reversed(mutants), seed=3, per_file=2)
    assert some != chosen(mutants, seed=4, per_file=2)
    assert sorted(m.id for m in chosen(mutants, seed=3)) == sorted(m.id for m in mutants)


def test_explanations_are_of_mutants_that_are_there() -> None:
    """A line of a kernel that has changed takes its explanation with it."""
    explained = explanations(EQUIVALENT.read_text("utf-8"))
    hunks = {mutant.hunk for mutant in all_mutants()}
    assert [hunk for hunk in explained if hunk not in hunks] == []


def test_a_mutant_without_a_reason_is_refused() -> None:
    assert explanations("# id\na.cu\n  x\n- y\n+ z\n  w\n= it is\n= so\n") == {"a.cu\n  x\n- y\n+ z\n  w": "it is so"}
    with pytest.raises(ValueError, match="nothing says why"):
        explanations("a.cu\n  x\n- y\n+ z\n  w\n=\n")


def test_verdicts_are_counted_stored_and_read_again(tmp_path: Path) -> None:
    mutants = [mutant for mutant in all_mutants() if mutant.file == "embedding.cu"][:4]
    record = Record({mutant.id: mutant for mutant in mutants})
    for mutant, status in zip(mutants, (KILLED, SURVIVED, NO_BUILD, SURVIVED), strict=True):
        record.add(Verdict(mutant.id, status, "odd-bfloat16: wrong", 1.5))
    record.explained = {mutants[3].hunk: "it changes nothing"}
    assert record.raw_rate == 1 / 3
    assert record.unexplained == [mutants[1].id]
    assert mutants[1].hunk in record.survivors()
    assert [line.split()[1:] for line in record.table()[1:]] == [["4", "1", "1", "1", "1", "33.3%", "50.0%"]] * 2
    record.write(tmp_path / "a.json")
    stored = json.loads((tmp_path / "a.json").read_text())
    assert Counter(case["status"] for case in stored["cases"]) == {"ok": 1, "FAIL": 1, "no build": 1, "equivalent": 1}
    assert {m.id for m in mutants if Record.load(tmp_path / "a.json", mutants).knows(m)} == {m.id for m in mutants}
    stored["cases"][0]["source"] = "00000000"  # the file was another
    (tmp_path / "a.json").write_text(json.dumps(stored))
    assert [Record.load(tmp_path / "a.json", mutants).knows(m) for m in mutants].count(False) == 1
    assert all(Record.load(tmp_path / "a.json", mutants, same_file=False).knows(m) for m in mutants)


def sweep(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    command = [sys.executable, "-m", "tests.cuda.mutation", *arguments]
    return subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)


def test_a_few_are_found() -> None:
    done = sweep(*SAMPLE, "--per-file", "2", "--quiet", "--explained")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"


@pytest.mark.slow
def test_a_sample_of_every_file_is_found_or_explained(tmp_path: Path) -> None:
    """Of files that are as they were when conformance/results/nightly.json was made, what that says is believed."""
    if (RESULTS / "nightly.json").exists():
        (tmp_path / "all.json").write_bytes((RESULTS / "nightly.json").read_bytes())
    done = sweep("--json", str(tmp_path / "all.json"), "--per-file", "2", "--quiet", "--explained")
    assert done.returncode == 0, f"{done.stdout}\n{done.stderr}"
