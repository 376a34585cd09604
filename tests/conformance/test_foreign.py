"""Somebody else's kernel or function in the place of ours: --op OP --impl …"""

from __future__ import annotations

from pathlib import Path

import pytest

from conformance import __main__ as command

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
__global__ void plain(const bf16* x, const bf16* weight, bf16* y, int size, index_t x_stride, float eps) {
  for (int i = threadIdx.x; i < size; i += blockDim.x) y[blockIdx.x * size + i] = x[blockIdx.x * x_stride + i];
}
"""
FUNCTIONS = """
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
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "mine.cu").write_text(KERNEL)
    (tmp_path / "functions.py").write_text(FUNCTIONS)
    return tmp_path


def run(capsys: pytest.CaptureFixture[str], op: str, impl: object, *more: str) -> tuple[int, list[str], str]:
    status = command.main(["--op", op, "--impl", str(impl), *more])
    captured = capsys.readouterr()
    return status, captured.out.splitlines(), captured.err


def test_a_kernel(capsys: pytest.CaptureFixture[str], folder: Path) -> None:
    """A template for all types, in all cases that launch rmsnorm; those without rows launch nothing."""
    status, lines, _ = run(capsys, "rmsnorm", f"{folder / 'mine.cu'}:mine")
    assert (status, lines[-1].split(";")[0]) == (0, "24 passed, 0 failed, 0 skipped")


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
        ("rmsnorm", "functions.py:linear", (), "cannot be called as linear(x, weight, eps)"),
        ("mla_decode", "functions.py:linear", (), "--op mla_decode: this target has no case that calls it"),
    ],
)
def test_refused(
    capsys: pytest.CaptureFixture[str], folder: Path, op: str, impl: str, more: tuple[str, ...], message: str
) -> None:
    status, lines, error = run(capsys, op, folder / impl, *more)
    assert (status, lines) == (2, [])
    assert message in error
    assert error.count("\n") == 1
