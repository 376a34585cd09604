"""The exercises: what solves them, what does not, and what is said of it."""

from __future__ import annotations

import doctest
import inspect
import re
import sys
import types
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance import __main__ as command
from conformance.exercise import Exercise, Mistake, run_case
from conformance.exercises import EXERCISES
from tests.conformance import exercise_solutions
from tests.conformance.exercise_solutions import FAULTS

ROOT = Path(__file__).parents[2]
TEXT = (ROOT / "ref" / "EXERCISES.md").read_text(encoding="utf-8")

MISTAKES = [(exercise, mistake) for exercise in EXERCISES for mistake in exercise.mistakes]


def solution(exercise: Exercise) -> Callable[..., Any]:
    return getattr(exercise_solutions, exercise.function)  # type: ignore[no-any-return]


def with_fault(exercise: Exercise, old: str, new: str) -> Callable[..., Any]:
    """The solution with one piece of its text replaced."""
    text = inspect.getsource(solution(exercise))
    assert text.count(old) == 1, f"{exercise.function} has {text.count(old)} times {old!r}: the fault is out of date"
    module = types.ModuleType("wrong")
    exec(f"from __future__ import annotations\nimport numpy as np\n{text.replace(old, new)}", vars(module))
    return getattr(module, exercise.function)  # type: ignore[no-any-return]


def failures(exercise: Exercise, function: Callable[..., Any], seed: int = 0) -> list[list[str]]:
    """What is said of each case that fails."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of overflow in a wrong answer
        said = [run_case(exercise, case, function, seed) for case in exercise.cases]
    return [lines for lines in said if lines]


@pytest.mark.parametrize("seed", [0, 1, 2])
@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.function)
def test_a_solution_passes(exercise: Exercise, seed: int) -> None:
    assert failures(exercise, solution(exercise), seed) == []


@pytest.mark.parametrize(("number", "fault", "old", "new"), FAULTS, ids=[f"{f[0]}-{f[1]}" for f in FAULTS])
def test_a_wrong_answer_fails(number: int, fault: str, old: str, new: str) -> None:
    """By its numbers, dtype, shape or memory; one that raised for another reason would prove nothing."""
    found = failures(EXERCISES[number - 1], with_fault(EXERCISES[number - 1], old, new))
    assert found
    first = {lines[0].split()[0] for lines in found}
    assert "raised" not in first or "MemoryError" in found[0][0], found


@pytest.mark.parametrize(
    ("exercise", "mistake"),
    MISTAKES,
    ids=lambda value: getattr(value, "function", "") if isinstance(value, Exercise) else value.what[:30],
)
def test_a_known_mistake_fails_and_is_recognized(exercise: Exercise, mistake: Mistake) -> None:
    found = failures(exercise, mistake.function)
    assert found
    said = {lines[-1] for lines in found}
    assert f"this is what comes out if {mistake.what}" in said, found[0]


def said_of(number: int, case: str, function: Callable[..., Any]) -> list[str]:
    """What is said of one case."""
    exercise = EXERCISES[number - 1]
    return run_case(exercise, next(one for one in exercise.cases if one.name == case), function, 0)


def test_no_mistake_is_guessed_where_no_element_could_tell() -> None:
    """A wrong dtype of no token at all is a wrong dtype, not one of the known mistakes."""
    lines = said_of(1, "no-tokens", lambda x, weight, eps: x.astype(np.float64))
    assert len(lines) == 1
    assert lines[0].startswith("normed is float64, expected float32")


def test_nothing_but_nan_names_every_mistake_that_gives_it() -> None:
    """Reading past the sequence's end and reading the whole table both meet NaN."""
    lines = said_of(6, "one-token", lambda q, **inputs: np.full_like(q, np.nan))
    assert "; or if all of a row of block_table is read" in lines[-1]
    assert lines[-1].startswith("this is what comes out if blocks are read in the order in which they lie")


def test_an_answer_that_is_recognized_is_not_called_nearly_right() -> None:
    outside = next(mistake for mistake in EXERCISES[0].mistakes if "eps stands outside" in mistake.what)
    assert not any("nearly right" in line for lines in failures(EXERCISES[0], outside.function) for line in lines)

    def a_little_larger(x: Any, weight: Any, eps: float) -> Any:
        return (solution(EXERCISES[0])(x, weight, eps) * np.float32(1 + 2e-4)).astype(np.float32)

    assert said_of(1, "wide", a_little_larger)[-1].startswith("nearly right: the largest error is 0.0002; ")


def test_every_exercise_has_wrong_answers() -> None:
    assert [exercise.number for exercise in EXERCISES] == list(range(1, 13))
    counts = Counter(number for number, *_ in FAULTS)
    assert all(counts[exercise.number] >= 2 and len(exercise.mistakes) >= 2 for exercise in EXERCISES)
    for exercise in EXERCISES:
        names = [case.name for case in exercise.cases]
        assert len(set(names)) == len(names) >= 5


def section(exercise: Exercise) -> str:
    """The text of one exercise in ref/EXERCISES.md."""
    head = f"## {exercise.number}. {exercise.function}\n"
    assert TEXT.count(head) == 1
    return TEXT.split(head)[1].split("\n## ")[0]


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.function)
def test_the_text_fits_the_exercise(exercise: Exercise) -> None:
    """Signature, every parameter, the files and the command."""
    text = section(exercise)
    assert f"`{exercise.signature}`" in text
    described = re.findall(r"^- ([\w, ]+):", text, re.M) + re.findall(r"; (\w+): a ", text)
    assert sorted(name for names in described for name in names.split(", ")) == sorted(exercise.parameters)
    for file in re.findall(r"ref/[\w/]+\.(?:py|md)", exercise.read):
        assert f"({file.removeprefix('ref/')})" in text
        assert (ROOT / file).exists()
    assert f"python -m conformance --exercise {exercise.number} --impl my_file.py:{exercise.function}`" in text
    for name in exercise.outputs if len(exercise.outputs) > 1 else ():
        assert f"{name} [" in text


@pytest.mark.parametrize("exercise", EXERCISES, ids=lambda exercise: exercise.function)
def test_the_worked_number_is_right(exercise: Exercise) -> None:
    names = {exercise.function: solution(exercise), "np": np}
    text = section(exercise).replace("```", "")
    example = doctest.DocTestParser().get_doctest(text, names, exercise.function, "EXERCISES.md", 0)
    assert example.examples
    report: list[str] = []
    with np.printoptions(precision=4):
        doctest.DocTestRunner(verbose=False).run(example, out=report.append)
    assert not report, "".join(report)


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, list[str], str]:
    status = command.main(arguments)
    captured = capsys.readouterr()
    return status, captured.out.splitlines(), captured.err


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "mine.py"
    path.write_text(MINE)
    return path


MINE = """
import numpy as np
from neighbour import half

def rmsnorm(x, weight, eps):
    return x / (np.mean(x * x, axis=-1, keepdims=True) + np.float32(eps)) ** half * weight

def no_weight(x, weight, eps):
    return rmsnorm(x, np.ones_like(weight), eps)

def transposed(x, weight, eps):
    return rmsnorm(x, weight, eps).T

def wider(x, weight, eps):
    return rmsnorm(x, weight, eps) * np.sqrt(1.0)

def a_list(x, weight, eps):
    return [1.0]

def raises(x, weight, eps):
    return {}["no such key"]

def writes(x, weight, eps):
    out = rmsnorm(x, weight, eps)
    x[...] = 0
    return out

def other_names(x, w, eps):
    return x

a_number = 3
"""


@pytest.fixture(autouse=True)
def neighbour(tmp_path: Path) -> None:
    (tmp_path / "neighbour.py").write_text("half = 0.5\n")


def test_list(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, _ = run(capsys, "--exercises")
    assert status == 0
    assert [int(line.split()[0]) for line in lines[:12]] == list(range(1, 13))


def test_task(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, _ = run(capsys, "--exercise", "12")
    assert status == 0
    assert lines[0] == "exercise 12: mla_decode(q, latent, kv_b_proj, sm_scale)"


def test_passing(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    status, lines, _ = run(capsys, "--exercise", "1", "--impl", f"{file}:rmsnorm")
    assert status == 0
    assert lines[0] == "no-tokens passed"
    assert lines[-1] == f"{len(EXERCISES[0].cases)} passed, 0 failed"


def test_a_module_will_do(capsys: pytest.CaptureFixture[str]) -> None:
    status, lines, _ = run(capsys, "--exercise", "3", "--impl", "tests.conformance.exercise_solutions:rope")
    assert (status, lines[-1]) == (0, "7 passed, 0 failed")


def test_failing(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    """Where, what was expected, what was found, why, what to read, and the command that runs one case again."""
    status, lines, _ = run(capsys, "--exercise", "1", "--impl", f"{file}:no_weight", "--seed", "5")
    assert status == 1
    place = lines.index("width-1 FAILED   (num_tokens 5, hidden_size 1, eps 1e-05)")
    assert lines[place + 1] == "    normed first differs at token 0, element 0; 4 of 5 elements differ"
    assert re.fullmatch(r"    expected -?[\d.]+", lines[place + 2])
    assert re.fullmatch(r"    found    -?[\d.]+", lines[place + 3])
    assert lines[place + 4] == "    this is what comes out if the weight is left out"
    assert lines[-3] == "to read: exercise 1 of ref/EXERCISES.md, ref/course/layers.md, ref/rmsnorm.py"
    assert lines[-1] == f"1 passed, {len(EXERCISES[0].cases) - 1} failed"
    again = lines[-2].removeprefix("again: python -m conformance ").split()
    status, lines, _ = run(capsys, *again)
    assert (status, lines[-1]) == (1, "0 passed, 1 failed")


@pytest.mark.parametrize(
    ("function", "said"),
    [
        ("transposed", "normed has shape [33, 7], expected [7, 33]"),
        ("wider", "normed is float64, expected float32: float32 with a NumPy scalar of float64"),
        ("a_list", "returned list, wanted an array"),
        ("raises", "raised KeyError: 'no such key' (mine.py, line "),
        ("writes", "input x was written: work on a copy"),
    ],
)
def test_what_is_said(capsys: pytest.CaptureFixture[str], file: Path, function: str, said: str) -> None:
    status, lines, _ = run(capsys, "--exercise", "1", "--impl", f"{file}:{function}", "--case", "odd")
    assert status == 1
    assert lines[1].startswith(f"    {said}")


@pytest.mark.parametrize(
    ("impl", "said"),
    [
        ("{file}", "--impl {file}: wanted FILE.py:function or module:function"),
        ("nowhere.py:rmsnorm", "there is no file nowhere.py below "),
        (
            "{file}:rmsnrom",
            "{file} has no function rmsnrom; it has rmsnorm, no_weight, transposed, wider, a_list, raises, ",
        ),
        ("{file}:a_number", "a_number of {file} is no function but int"),
        ("{file}:other_names", "other_names(x, w, eps) cannot be called as other_names(x, weight, eps): missing a "),
        ("{broken}:rmsnorm", "{broken} cannot be imported: line 2: "),
        ("{failing}:rmsnorm", "{failing} cannot be imported: line 2: ZeroDivisionError: division by zero"),
        ("{leaving}:rmsnorm", "{leaving} cannot be imported: line 2: SystemExit: 3"),
        ("no_such_module:rmsnorm", "there is no module no_such_module; for a file write no_such_module.py:function"),
        ("kernel.cu:rmsnorm", "--impl kernel.cu:rmsnorm: only Python functions are run here"),
    ],
)
def test_a_bad_impl(capsys: pytest.CaptureFixture[str], file: Path, impl: str, said: str) -> None:
    """One line, and no case is run."""
    names = {"file": file}
    for name, line in {"broken": "def (", "failing": "1 / 0", "leaving": "raise SystemExit(3)"}.items():
        names[name] = file.with_name(f"{name}.py")
        names[name].write_text(f"\n{line}\n")
    status, lines, error = run(capsys, "--exercise", "1", "--impl", impl.format(**names))
    assert (status, lines) == (2, [])
    assert error.startswith(f"python -m conformance: {said.format(**names)}")
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--exercise", "13"), "there is no exercise 13; they go from 1 to 12"),
        (
            ("--exercise", "1", "--impl", "tests.conformance.exercise_solutions:rmsnorm", "--case", "even"),
            "no case even",
        ),
    ],
)
def test_nothing_to_run(capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], said: str) -> None:
    status, lines, error = run(capsys, *arguments)
    assert (status, lines) == (2, [])
    assert said in error


def test_nothing_of_what_was_imported_stays_in_the_path(capsys: pytest.CaptureFixture[str], file: Path) -> None:
    before = list(sys.path)
    run(capsys, "--exercise", "1", "--impl", f"{file}:rmsnorm")
    assert sys.path == before
