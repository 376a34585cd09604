"""What the shim stands in for, each thing against NumPy, in every order of threads."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.host import Library
from conformance.host_device import ORDERS
from ref.numerics import bf16_bits
from ref.quant.fp8 import FP8_MIDPOINTS, FP8_TABLE, fp8_decode, fp8_encode

KERNELS = Path(__file__).parent / "kernels"
MMA = {  # C++ types of the operands and of the sum, depth, by dtype
    "bfloat16": "bf16, float, 16",
    "float16": "fp16, float, 16",
    "int8": "signed char, int, 32",
    "float8_e4m3fn": "e4m3, float, 32",
}
PLAIN = ("shuffles", "votes", "atomics", "native_shared", "found_in_shared", "named_barriers_128")
PLAIN += ("ldmatrices_32", "copies_32", "polls", "codes", "products_bf16")
X = np.random.default_rng(0).integers(-5, 8, 64).astype(np.int32)
NAN = 0xFFFFFFFF  # the bits of poison


@pytest.fixture(scope="module")
def library() -> Library:
    names = [*PLAIN, *(f"mma_32<{types}>" for types in MMA.values())]
    names += [f"roundings<{name}>" for name in ("bf16", "fp16", "e4m3")]
    return Library(KERNELS / "shim.cu", names)


@pytest.fixture(params=ORDERS, ids=lambda order: f"{order[0]}{order[1]}")
def how(request: pytest.FixtureRequest) -> dict[str, Any]:
    schedule, seed = request.param
    return {"schedule": schedule, "seed": seed}


def test_shuffles(library: Library, how: dict[str, Any]) -> None:
    y = np.full((8, 64), -99, np.int32)
    library.launch("shuffles", (1,), (64,), [X, y], **how)
    t, lane = np.arange(64), np.arange(64) % 32
    warp = t - lane
    expected = np.full((8, 64), -99)
    expected[0] = X[warp + 3]
    expected[1] = X[warp + (lane ^ 5)]
    expected[2] = X[np.where(lane % 8 >= 2, t - 2, t)]
    expected[3] = X[np.where(lane % 8 < 6, t + 2, t)]
    expected[4] = X[t - t % 16 + (t + 1) % 16]
    expected[5, lane < 12] = X[(warp + 11 - lane)[lane < 12]]
    expected[6] = X[np.where(lane < 31, t + 1, t)]
    expected[6, expected[6] < 0] += 1  # the cast cuts −5 + 0.5 to −4
    expected[7] = X.reshape(8, 8).sum(axis=1).repeat(8)
    np.testing.assert_array_equal(y, expected)


def test_votes(library: Library, how: dict[str, Any]) -> None:
    y = np.zeros((8, 64), np.uint32)
    library.launch("votes", (1,), (64,), [X, y], **how)
    for warp in (slice(0, 32), slice(32, 64)):
        x = X[warp]
        bits = 1 << np.arange(32, dtype=np.uint64)
        assert (y[0, warp] == bits[x > 0].sum()).all()
        assert (y[1, warp] == (x == 7).any()).all()
        assert (y[2, warp] == (x < 7).all()).all()
        assert y[3, warp].tolist() == [int(bits[(x & 3) == (value & 3)].sum()) for value in x]
        assert (y[4, warp] == (x & 15).sum()).all()
        assert (y[5, warp] == (x & 15).max()).all()
    assert (y[6] == (X > 0).sum()).all()
    assert (y[7] == 2 * (X == 7).any() + (X < 7).all()).all()


def test_atomics(library: Library, how: dict[str, Any]) -> None:
    x = np.arange(-100, 156, dtype=np.int32)
    y, total, order = np.zeros(6, np.int32), np.zeros(1, np.float32), np.zeros(1, np.uint32)
    library.launch("atomics", (4,), (64,), [x, y, total, order], **how)
    assert y.tolist() == [x.sum(), x.max(), x.min(), 0xFFFF, 1, x.sum()]
    assert total[0] == x.sum()
    assert order[0] == 4


def test_shared_memory_as_cuda_writes_it(library: Library, how: dict[str, Any]) -> None:
    x, y = np.arange(64, dtype=np.float32), np.zeros(64, np.float32)
    library.launch("native_shared", (1,), (64,), [x, y], shared_bytes=256, **how)
    np.testing.assert_array_equal(y, x[::-1])


def test_shared_memory_is_poisoned_before_each_block(library: Library, how: dict[str, Any]) -> None:
    y = np.zeros((2, 64, 2), np.uint32)
    library.launch("found_in_shared", (2,), (64,), [y], shared_bytes=256, **how)
    assert (y == NAN).all()


def test_named_barriers(library: Library, how: dict[str, Any]) -> None:
    x, y = np.arange(128, dtype=np.int32), np.zeros(128, np.int32)
    library.launch("named_barriers_128", (1,), (128,), [x, y], **how)
    np.testing.assert_array_equal(y.reshape(2, 64), x.reshape(2, 64)[:, ::-1])


def test_ldmatrix(library: Library, how: dict[str, Any]) -> None:
    """Lane i gets numbers 2 · (i % 4) and the next of row i / 4 of each matrix; transposed, of column i / 4."""
    rows = np.arange(256, dtype=np.uint16).reshape(32, 8) * 3
    y = np.zeros((13, 32), np.uint32)
    library.launch("ldmatrices_32", (1,), (32,), [rows, y], **how)
    matrices = rows.reshape(4, 8, 8)

    def fragments(matrix: NDArray[np.uint16]) -> NDArray[np.uint32]:
        return np.ascontiguousarray(matrix).reshape(-1).view(np.uint32)

    plain = [fragments(matrix) for matrix in matrices]
    trans = [fragments(matrix.T) for matrix in matrices]
    np.testing.assert_array_equal(y, [*plain[:1], *plain[:2], *trans[:2], *plain, *trans])


@pytest.mark.parametrize("dtype", MMA)
def test_mma(library: Library, dtype: str, how: dict[str, Any]) -> None:
    """Small integers, which every format holds exactly, so the sums are exact too."""
    rng = np.random.default_rng(1)
    kind = np.dtype(getattr(ml_dtypes, dtype, dtype))
    depth, sum_dtype = (16, np.float32) if kind.itemsize == 2 else (32, np.int32 if dtype == "int8" else np.float32)
    a, b, d = (rng.integers(-8, 9, shape) for shape in ((16, depth), (8, depth), (16, 8)))
    y = d.astype(sum_dtype)
    library.launch(f"mma_32<{MMA[dtype]}>", (1,), (32,), [a.astype(kind), b.astype(kind), y], **how)
    np.testing.assert_array_equal(y, d + a @ b.T)


def test_copies_arrive_with_their_wait(library: Library, how: dict[str, Any]) -> None:
    x, y = np.arange(64, dtype=np.float32), np.zeros((5, 32), np.float32)
    library.launch("copies_32", (1,), (32,), [x, y], **how)
    second = np.where(np.arange(32) % 2 == 0, x[32:], 0)
    assert np.isnan(y[0]).all(), "before any wait"
    np.testing.assert_array_equal(y[1], x[:32])
    assert np.isnan(y[2]).all(), "the newest group may still be under way"
    np.testing.assert_array_equal(y[3:], [second, second[::-1]])


@pytest.mark.parametrize(("name", "dtype"), [("bf16", ml_dtypes.bfloat16), ("fp16", np.float16)])
def test_roundings(library: Library, name: str, dtype: Any) -> None:
    """Every value of 16 bits, its neighbours in float32, and the middles between two, which go to the even one."""
    values = np.arange(65536, dtype=np.uint16).view(dtype).astype(np.float32)
    bits = values[np.isfinite(values)].view(np.uint32)
    near = [bits + np.uint32(step) for step in (0, 1, 0x7FFF, 0x8000, 0x8001, 0xFFF, 0x1000, 0x1001)]
    x = np.concatenate([part.view(np.float32) for part in near] + [np.array([np.inf, -np.inf, 7e4, 1e-8], np.float32)])
    x = x[~np.isnan(x)]
    y, back = np.zeros(len(x), dtype), np.zeros(len(x), np.float32)
    library.launch(f"roundings<{name}>", (1,), (64,), [x, y, back, np.int32(len(x))])
    with np.errstate(over="ignore"):
        expected = bf16_bits(x) if name == "bf16" else x.astype(np.float16).view(np.uint16)
    np.testing.assert_array_equal(y.view(np.uint16), expected)
    np.testing.assert_array_equal(back, y.astype(np.float32))


def test_codes_of_e4m3(library: Library) -> None:
    """Every code, the middles between two, which go to the even one, what is just beside them, and what saturates."""
    exact = FP8_TABLE[~np.isnan(FP8_TABLE)]
    middles = np.concatenate([FP8_MIDPOINTS, -FP8_MIDPOINTS]).astype(np.float32)
    beside = [np.nextafter(middles, np.float32(to)) for to in (np.inf, -np.inf)]
    special = np.array([448.1, -448.1, 464, 1e6, np.inf, -np.inf, np.nan, -0.0, 1e-30, 2**-10], np.float32)
    x = np.concatenate([exact, middles, *beside, special]).astype(np.float32)
    y, back = np.zeros(len(x), ml_dtypes.float8_e4m3fn), np.zeros(len(x), np.float32)
    library.launch("roundings<e4m3>", (1,), (64,), [x, y, back, np.int32(len(x))])
    np.testing.assert_array_equal(y.view(np.uint8), fp8_encode(x))
    np.testing.assert_array_equal(back, fp8_decode(fp8_encode(x)))
    pairs = np.zeros(len(x) // 2, np.uint16)
    library.launch("codes", (1,), (64,), [x, pairs, np.int32(len(x))])
    np.testing.assert_array_equal(pairs.view(np.uint8), fp8_encode(x)[: 2 * len(pairs)])


def test_products_of_bf16_keep_subnormal_numbers(library: Library) -> None:
    rng = np.random.default_rng(3)
    a, b = (rng.integers(0, 1 << 16, 256, dtype=np.uint16) & 0xBFFF for _ in range(2))  # none infinite or NaN
    a[:8], b[:8] = np.arange(8), 0x7B80  # 2¹²⁰ times the smallest
    y = np.zeros(128, np.uint32)
    library.launch("products_bf16", (1,), (64,), [a.view(np.uint32), b.view(np.uint32), y, np.int32(128)])
    numbers = [bits.view(ml_dtypes.bfloat16).astype(np.float32) for bits in (a, b)]
    np.testing.assert_array_equal(y.view(np.uint16), bf16_bits(numbers[0] * numbers[1]))
    assert (y.view(np.uint16)[1:8] > 0).all()


def test_a_poll_lets_others_run(library: Library, how: dict[str, Any]) -> None:
    flag = np.zeros(1, np.int32)
    library.launch("polls", (1,), (64,), [flag], **how)
    assert flag[0] == 1


@pytest.mark.parametrize(
    "built", [{}, {"num_threads": 3}, {"defines": ["HOST_UCONTEXT"]}], ids=["one", "three-os-threads", "any-processor"]
)
def test_tensor_cores_and_copies_together(built: dict[str, Any], how: dict[str, Any]) -> None:
    """A matrix product in two stages, with tiles that stick out; HOST_UCONTEXT is how fibers switch off x86-64."""
    library = Library(KERNELS / "gemm.cu", ["gemm<bf16>"], **built)
    rng = np.random.default_rng(2)
    a, b = (rng.standard_normal((n, 96)).astype(ml_dtypes.bfloat16) for n in (130, 67))
    c = np.full((130, 67), np.nan, np.float32)
    sizes = [np.int32(n) for n in (130, 67, 96)]
    library.launch("gemm<bf16>", (2, 3), (128,), [a, b, c, *sizes], **how)
    np.testing.assert_allclose(c, a.astype(np.float64) @ b.astype(np.float64).T, rtol=0, atol=96 * 16 * 2**-24)
