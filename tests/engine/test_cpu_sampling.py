"""engine.cpu.sampling gives what ref.sampling gives on the same float32 rows, and no row depends on another."""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.cpu import sampling as cpu
from ref import sampling as ref

INF = np.inf
LAST_UNIFORM = np.float32(1 - 2**-24)


def filters(num_rows: int, **values: Any) -> dict[str, np.ndarray]:
    """Arguments of sample for num_rows equal rows."""
    default = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "uniforms": 0.5} | values
    dtypes = {"top_k": np.int64, "uniforms": np.float32}
    return {name: np.full(num_rows, value, dtype=dtypes.get(name, np.float64)) for name, value in default.items()}


@st.composite
def rows(draw: st.DrawFn) -> np.ndarray:
    """Rows with many ties, plain random ones, one-hot ones; some with −inf entries, never all."""
    vocab_size = draw(st.integers(1, 700))
    rng = np.random.default_rng(draw(st.integers(0, 2**32 - 1)))
    kind = draw(st.sampled_from(["ties", "normal", "peaked", "equal", "one-hot"]))
    row = {
        "ties": rng.integers(-3, 3, vocab_size).astype(np.float32),
        "normal": rng.normal(size=vocab_size).astype(np.float32) * 4,
        "peaked": rng.exponential(size=vocab_size).astype(np.float32) ** 3,
        "equal": np.full(vocab_size, -7.5, dtype=np.float32),
        "one-hot": np.where(np.arange(vocab_size) == rng.integers(vocab_size), 80, -80).astype(np.float32),
    }[kind]
    banned = rng.random(vocab_size) < draw(st.sampled_from([0.0, 0.3, 0.95]))
    banned[rng.integers(vocab_size)] = False
    row[banned] = -INF
    return row


@given(
    row=rows(),
    temperature=st.sampled_from([0.0, 1e-6, 0.01, 0.5, 1.0, 3.0, 1e6]),
    top_k=st.sampled_from([-1, 0, 1, 2, 5, 50, 699, 700, 10**7]),
    top_p=st.one_of(st.sampled_from([1e-9, 0.5, 0.9, 1.0, 1 - 2**-53]), st.floats(0.01, 0.999)),
    min_p=st.sampled_from([0.0, 1e-6, 0.1, 0.5, 1.0]),
    uniforms=st.one_of(st.sampled_from([0.0, 0.5, LAST_UNIFORM]), st.integers(0, 2**24 - 1).map(lambda i: i / 2**24)),
)
@settings(max_examples=300, deadline=None)
def test_sample_equals_ref(row: np.ndarray, **values: Any) -> None:
    arguments = filters(1, **values)
    assert cpu.sample(row[None], **arguments).tolist() == ref.sample(row[None], **arguments).tolist()


@pytest.mark.parametrize("temperature", [0.7, 1.0])
@pytest.mark.parametrize("values", [{}, {"top_k": 40}, {"top_p": 0.9}, {"top_k": 500, "top_p": 0.95, "min_p": 0.01}])
def test_sample_equals_ref_on_a_real_vocabulary(values: dict[str, Any], temperature: float) -> None:
    """49 152 logits a row. The sums of cpu and ref are in different orders: a draw so close to a border that they may
    differ has a chance of 10⁻¹⁰ here, and the seed is fixed."""
    rng = np.random.default_rng(5)
    logits = (rng.normal(size=(12, 49152)) * np.linspace(0.5, 4, 12)[:, None]).astype(np.float32)
    arguments = filters(12, temperature=temperature, **values) | {"uniforms": rng.random(12, dtype=np.float32)}
    ids = cpu.sample(logits, **arguments)
    assert ids.dtype == np.int32
    assert ids.tolist() == ref.sample(logits, **arguments).tolist()


@pytest.mark.parametrize(
    ("values", "kept"),
    [
        ({"top_p": 0.5}, 4),
        ({"top_k": 3}, 3),
        ({"top_k": 3, "top_p": 0.5}, 2),
        ({"min_p": 1.0}, 8),
        ({"top_p": 1e-9}, 1),
    ],
)
def test_sam_03_ties_draw_only_from_the_documented_set(values: dict[str, Any], kept: int) -> None:
    """SAM-03: 1000 draws over 8 equal logits come from the `kept` lowest ids and reach each of them."""
    arguments = filters(1000, **values) | {"uniforms": np.random.default_rng(0).random(1000, dtype=np.float32)}
    ids = cpu.sample(np.zeros((1000, 8), dtype=np.float32), **arguments)
    assert set(ids.tolist()) == set(range(kept))


def test_draw_at_the_borders_of_its_blocks() -> None:
    """1024 equal logits and the uniform i / 1024: id i, exactly, also where blocks of the running sum meet."""
    ids = np.array([0, 1, 255, 256, 257, 511, 512, 767, 768, 1023])
    arguments = filters(len(ids)) | {"uniforms": (ids / 1024).astype(np.float32)}
    assert cpu.sample(np.zeros((len(ids), 1024), dtype=np.float32), **arguments).tolist() == ids.tolist()


def test_sam_04_filters_that_leave_nothing() -> None:
    """SAM-04: all filters at their tightest leave the best token, and a single finite logit is always taken."""
    rng = np.random.default_rng(2)
    logits = rng.normal(size=(4, 300)).astype(np.float32)
    tightest = filters(4, min_p=1.0, top_p=0.0001, top_k=1, uniforms=LAST_UNIFORM)
    assert cpu.sample(logits, **tightest).tolist() == cpu.greedy(logits).tolist()
    logits[:] = -INF
    logits[:, 77] = -1e30
    one_left = filters(4, min_p=0.9, top_k=5, top_p=0.3, uniforms=LAST_UNIFORM)
    assert cpu.sample(logits, **one_left).tolist() == [77] * 4


def test_sam_05_unusable_rows_take_the_argmax_and_disturb_nobody() -> None:
    """SAM-05: NaN, all −inf and +inf rows among others, greedy and random."""
    rng = np.random.default_rng(3)
    logits = rng.normal(size=(5, 100)).astype(np.float32)
    arguments = filters(5, top_k=10, top_p=0.9, min_p=0.01) | {"temperature": np.array([1.0, 0.0, 1.0, 1.0, 1.0])}
    clean = cpu.sample(logits, **arguments).tolist()
    for poison in (np.full(100, np.nan), np.full(100, -INF), np.where(np.arange(100) % 50 == 7, INF, 0)):
        logits[2] = poison
        ids = cpu.sample(logits, **arguments).tolist()
        assert not np.isfinite(logits[2, ids[2]])
        assert ids[:2] + ids[3:] == clean[:2] + clean[3:]


def test_batch_equals_single_bitwise() -> None:
    """The same row alone, in a batch, and in a batch that is a view with padding between its rows."""
    rng = np.random.default_rng(4)
    wide = (rng.normal(size=(9, 1300)) * 3).astype(np.float32)
    logits = wide[:, :1237]
    arguments = filters(9, top_p=0.97) | {"uniforms": rng.random(9, dtype=np.float32), "top_k": np.arange(9) * 40}
    batch = cpu.sample(logits, **arguments)
    own, top_ids, top = cpu.token_logprobs(logits, batch, 7)
    for i in range(9):
        row = logits[i : i + 1].copy()
        alone = cpu.sample(row, **{name: value[i : i + 1] for name, value in arguments.items()})
        assert alone[0] == batch[i]
        own_alone, top_ids_alone, top_alone = cpu.token_logprobs(row, alone, 7)
        assert own_alone[0] == own[i]
        assert (top_ids_alone[0] == top_ids[i]).all()
        assert (top_alone[0] == top[i]).all()


@given(row=rows(), k=st.sampled_from([0, 1, 5, 20, 10**6]))
@settings(max_examples=100, deadline=None)
def test_token_logprobs_equal_ref(row: np.ndarray, k: int) -> None:
    """Against float64: two float32 roundings of a logprob, 2 · 2⁻²⁴ of it, and a few of the log of the sum."""
    ids = cpu.greedy(row[None])
    own, top_ids, top = cpu.token_logprobs(row[None], ids, k)
    true_own, true_ids, true_top = ref.token_logprobs(row[None].astype(np.float64), ids, k)
    assert (top_ids == true_ids).all()
    np.testing.assert_allclose(own, true_own, rtol=2**-23, atol=1e-6)
    np.testing.assert_allclose(top, true_top, rtol=2**-23, atol=1e-6)


@given(row=rows(), seed=st.integers(0, 2**32 - 1), repetition=st.sampled_from([0.5, 1.0, 1.3]))
@settings(max_examples=50, deadline=None)
def test_penalties_equal_ref_bitwise(row: np.ndarray, seed: int, repetition: float) -> None:
    rng = np.random.default_rng(seed)
    prompt, output = rng.integers(0, len(row), 30), rng.integers(0, len(row), rng.integers(0, 20))
    seen = np.union1d(prompt, output)
    counts = np.bincount(output, minlength=len(row))[seen]
    expected = ref.apply_penalties(row, prompt, output, repetition, 0.7, -0.3)
    penalties = (-0.3 * counts + 0.7 * (counts > 0)).astype(np.float32)
    cpu.apply_penalties(row, seen.astype(np.int32), penalties, np.float32(repetition))
    assert row.tobytes() == expected.tobytes()
