"""Somebody else's kernel or function in the place of ours: --op OP --impl …"""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conformance import __main__ as command
from conformance import foreign

KERNEL = """
#include "vec.cuh"
template <typename T, int kRounds>
__global__ void mine(const T* x, const T* weight, T* y, int size, index_t x_stride, float eps) {
  const index_t row = blockIdx.x;
  if (threadIdx.x != 0) return;
  float sum = 0.0f;
  for (int i = 0; i < size; ++i) sum += to_float(x[row * x_stride + i]) * to_float(x[row * x_stride + i]);
  const float scale = 1.0f / sqrtf(sum / static_cast<float>(size) + eps);
  for (int i = 0; i < size; ++i)
    y[row * size + i] = from_float<T>(to_float(x[row * x_stride + i]) * scale * to_float(weight[i]));
}
// __global__ void unsaid(int* y)
__global__ void plain(const bf16* x, const bf16* weight, bf16* y, int size, index_t x_stride, float eps) {
  for (int i = threadIdx.x; i < size; i += blockDim.x) y[blockIdx.x * size + i] = x[blockIdx.x * x_stride + i];
}
"""
FUNCTIONS = """
import os
import time

import numpy as np

def rmsnorm(x, weight, eps):
    wide = x.astype(np.float32)
    scale = 1 / np.sqrt(np.mean(wide * wide, axis=-1, keepdims=True) + np.float32(eps))
    return (wide * scale * weight.astype(np.float32)).astype(x.dtype)

def eps_forgotten(x, weight, eps):
    return rmsnorm(x, weight, 0.0)

def linear(x, weight, bias):
    y = x.astype(np.float32) @ weight.astype(np.float32).T
    return (y if bias is None else y + bias.astype(np.float32)).astype(x.dtype)

class Speaks:
    def __init__(self, array):
        self.array = array
    def __dlpack__(self, **how):
        return self.array.__dlpack__(**how)
    def __dlpack_device__(self):
        return self.array.__dlpack_device__()

def by_dlpack(x, weight, eps):
    return Speaks(rmsnorm(x, weight, eps))

def says_goodbye(x, weight, eps):
    raise SystemExit(0)

def ends_the_process(x, weight, eps):
    os._exit(0)

def says_its_number(x, weight, eps):
    print(os.getpid(), flush=True)
    never_ends(x, weight, eps)

def never_ends(x, weight, eps):
    while True:
        time.sleep(1)
"""
HEAD = """#include "vec.cuh"
template <typename T, int kRounds>
__global__ void mine(const T* x, const T* weight, T* y, int size, index_t x_stride, float eps) {
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.cu").write_text(KERNEL)
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    (tmp_path / "bytes.cu").write_bytes(b"\xff__global__ void mine(int* y)")
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], op: str, impl: object, *more: str) -> tuple[int, list[str], str]:
    status = command.main(["--op", op, "--impl", str(impl), *more])
    captured = capsys.readouterr()
    return status, captured.out.splitlines(), captured.err


def test_a_kernel(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """A template for all types, in all cases that launch rmsnorm (24 of its own, 6 of norms before layers of 8 bits);
    those without rows launch nothing."""
    status, lines, _ = run(capsys, "rmsnorm", f"{folder / 'mine.cu'}:mine")
    assert (status, lines[-1].split(";")[0]) == (0, "30 passed, 0 failed, 0 skipped")


def test_a_wrong_kernel_without_a_template(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    impl = f"{folder / 'mine.cu'}:plain"
    status, lines, _ = run(capsys, "rmsnorm", impl, "--case", "odd-bfloat16")
    assert (status, lines[-1].split(";")[0]) == (1, "0 passed, 1 failed, 0 skipped")
    assert lines[2] == f"    again: python -m conformance --target host --op rmsnorm --case odd-bfloat16 --impl {impl}"


@pytest.mark.parametrize(("target", "passed"), [("host", 27), ("cpu", 9)])
def test_a_function(capsys: pytest.CaptureFixture[str], folder: Path, target: str, passed: int) -> None:
    status, lines, _ = run(capsys, "rmsnorm", f"{folder / 'functions.py'}:rmsnorm", "--target", target)
    assert (status, lines[-1].split(";")[0]) == (0, f"{passed} passed, 0 failed, 0 skipped")


@pytest.mark.parametrize("target", ["host", "cpu"])
def test_linear_is_given_arrays(capsys: pytest.CaptureFixture[str], folder: Path, target: str) -> None:
    status, lines, _ = run(capsys, "linear", f"{folder / 'functions.py'}:linear", "--target", target)
    assert status == 0, lines


def test_dlpack(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    impl = f"{folder / 'functions.py'}:by_dlpack"
    status, lines, _ = run(capsys, "rmsnorm", impl, "--case", "many-float32")
    assert (status, lines[-1].split(";")[0]) == (0, "1 passed, 0 failed, 0 skipped")


def test_parameters_of_every_kernel() -> None:
    """Commas within brackets part nothing, and launch bounds are no parameters."""
    text = "template <int n> __global__ void __launch_bounds__(32 * (n + 1)) k(Pair<int, n> a, int size) {}"
    text = foreign.ASIDE.sub("", text)
    assert foreign.GLOBAL.findall(text)[0][1] == "k"
    assert foreign._parameters(text, "k") == ["Pair<int, n> a", "int size"]
    assert len(foreign._own_parameters("attention_decode")) == 18
    assert foreign._own_parameters("nobody's") == []


def test_a_wrong_function(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    status, lines, _ = run(capsys, "rmsnorm", f"{folder / 'functions.py'}:eps_forgotten", "--target", "cpu")
    assert (status, lines[-1].split(";")[0].endswith("0 passed")) == (1, False)
    assert any(line.startswith("rmsnorm odd ") and line.endswith(" FAIL") for line in lines)


@pytest.mark.parametrize(
    ("op", "impl", "more", "message"),
    [
        ("rmsnorm", "mine.cu:yours", (), "has no kernel yours; it has mine, plain"),
        ("rmsnorm", "yours.cu:mine", (), "there is no file"),
        ("norm", "mine.cu:mine", ("--case", "odd-bfloat16"), "--op norm: no case launches a kernel of this name; they"),
        ("rmsnorm", "mine.cu:mine", ("--target", "cpu"), "a kernel runs with --target host or gpu"),
        ("norm", "functions.py:rmsnorm", (), "--op norm is no function of the op table; there are embedding, posi"),
        ("rmsnorm", "functions.py:linear", ("--case", "odd-bfloat16"), "cannot be called as linear(x, weight, eps)"),
        (
            "mla_decode",
            "functions.py:linear",
            ("--case", "odd-bfloat16"),
            "--op mla_decode: this target has no case that calls it",
        ),
        ("rmsnorm", "mine.cu:mine", ("--case", "none"), "no case of --target host has --case none; its stems are"),
        ("rmsnorm", "bytes.cu:mine", (), "cannot be read as UTF-8"),
        ("rmsnorm", "mine.cu:unsaid", (), "has no kernel unsaid; it has mine, plain"),
        (
            "layernorm",
            "mine.cu:mine",
            (),
            "mine has 6 parameters, layernorm of cuda/ has 8: const T* x, const T*",
        ),
    ],
)
def test_refused(
    capsys: pytest.CaptureFixture[str], folder: Path, op: str, impl: str, more: tuple[str, ...], message: str
) -> None:
    status, lines, error = run(capsys, op, folder / impl, *more)
    assert (status, lines) == (2, [])
    assert message in error
    assert error.count("\n") == 1


@pytest.mark.parametrize(
    ("function", "more"), [("says_goodbye", ("--case", "odd")), ("ends_the_process", ("--quick",))]
)
def test_a_function_that_ends_the_process_has_not_passed(
    capsys: pytest.CaptureFixture[str], folder: Path, function: str, more: tuple[str, ...]
) -> None:
    """All its cases have failed: another process goes on with the next. An exit status of 0 would be a pass."""
    status, lines, _ = run(capsys, "rmsnorm", f"{folder / 'functions.py'}:{function}", "--target", "cpu", *more)
    failed = [line for line in lines if line.endswith(" FAIL")]
    assert (status, len(failed)) == (1, 1 if more[0] == "--case" else 4)
    assert lines.count("    ended the process with status 0") == len(failed)
    assert lines[-1] == f"0 passed, {len(failed)} failed, 0 skipped"


def test_a_function_that_never_ends(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    impl = f"{folder / 'functions.py'}:never_ends"
    status, lines, _ = run(capsys, "rmsnorm", impl, "--target", "cpu", "--case", "odd", "--timeout", "0.5")
    assert status == 1
    assert lines[:2] == ["rmsnorm odd inf 0 FAIL", "    took more than 0.5 s and was stopped"]


@pytest.mark.parametrize(
    ("body", "problem"),
    [
        ("y[1ll << 40] = from_float<T>(1.0f);", "    ended the process by SIGSEGV; --sanitizer address may say where"),
        ("__builtin_trap();", "    ended the process by SIGILL; --sanitizer address may say where"),
        ("for (;;) __syncthreads();", "    took more than 2 s and was stopped"),
    ],
)
def test_a_kernel_that_takes_the_process_with_it(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, body: str, problem: str
) -> None:
    (tmp_path / "mine.cu").write_text(f"{HEAD}{body}\n}}\n")
    impl = f"{tmp_path / 'mine.cu'}:mine"
    status, lines, _ = run(capsys, "rmsnorm", impl, "--case", "odd-float32", "--timeout", "2")
    assert (status, lines[:2]) == (1, ["rmsnorm odd-float32 inf 0 FAIL", problem])


def test_a_kernel_with_headers_of_its_own(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """Beside it, in a folder that may have an include/ too; a change of one is built anew."""
    (folder / "include").mkdir()
    (folder / "mine.cu").write_text(KERNEL.replace('#include "vec.cuh"', '#include "vec.cuh"\n#include "deep/own.cuh"'))
    (folder / "deep").mkdir()
    for factor, status in (("", 0), ("* 1.5f", 1)):
        (folder / "deep" / "own.cuh").write_text(f"#define sqrtf(x) (sqrtf(x) {factor})\n")
        found, _, error = run(capsys, "rmsnorm", f"{folder / 'mine.cu'}:mine", "--case", "odd-float32")
        assert (found, error) == (status, "")


def test_list_and_quick(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """--list runs nothing, and --quick is a choice of the cases, as without --impl."""
    status, lines, _ = run(capsys, "rmsnorm", f"{folder / 'mine.cu'}:mine", "--list")
    assert (status, len(lines), "rmsnorm odd-float32" in lines) == (0, 30, True)
    _, few, _ = run(capsys, "rmsnorm", f"{folder / 'mine.cu'}:mine", "--list", "--quick")
    assert 0 < len(few) < len(lines)


def test_nothing_stays_when_the_command_is_ended(folder: Path) -> None:
    """By a signal that it cannot answer, as by timeout -s KILL: the worker that loops ends too."""
    impl = f"{folder / 'functions.py'}:says_its_number"
    command_line = [*(sys.executable, "-m", "conformance", "--op", "rmsnorm", "--impl", impl), "--target", "cpu"]
    with subprocess.Popen([*command_line, "--case", "odd"], stdout=subprocess.PIPE, text=True) as running:
        assert running.stdout is not None
        assert int(running.stdout.readline()) != running.pid
        running.kill()
        left, _ = running.communicate(timeout=60)  # to its end, when the worker has closed it too
        assert left == ""
