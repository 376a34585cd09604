"""Where others went wrong, with answers that can be worked out by hand: attention by ref, the CPU's twins and the
kernels, and rows of logits that are not numbers by the sampling kernels. conformance.attention_needle is KRN-09 for
kernels.
"""

from pathlib import Path
from types import ModuleType
from typing import Any

import ml_dtypes
import numpy as np
import pytest

import ref.attention
from conformance.golden_models import rand_model
from conformance.host_device import HostDevice
from conformance.inputs import guarded
from engine.comm.communicator import OneRank
from engine.cpu import attention
from engine.faults import Faults
from engine.kernels.sampling import KernelSampling
from engine.kernels.table import kernel_ops
from engine.loop import Engine
from engine.ops import OpTable, SamplingOps, cpu_ops
from engine.runner import ModelRunner
from engine.sampler import Sampler
from tests.engine.engines import request, run, tiny_engine

WINDOW = 4


def cache_of(rows: np.ndarray, block_size: int) -> tuple[np.ndarray, np.ndarray]:
    """rows [seq_len, head_dim] of one KV head as a paged cache whose blocks run backwards, and its block table.

    Slots behind the last row are NaN.
    """
    num_blocks = -(-len(rows) // block_size)
    padded = np.full((num_blocks * block_size, 1, rows.shape[1]), np.nan, np.float32)
    padded[: len(rows), 0] = rows
    cache = padded.reshape(num_blocks, block_size, 1, -1)[::-1].copy()
    return cache, np.arange(num_blocks - 1, -1, -1, dtype=np.int32)[None]


@pytest.fixture(scope="module")
def kernels() -> OpTable:
    """The op table of the kernels, built for this CPU."""
    device = HostDevice()
    return kernel_ops(device, KernelSampling(device, max_num_rows=8, row_threads=64))


def prefill(module: ModuleType | OpTable, q: np.ndarray, seq_len: int, cache: dict[str, Any]) -> np.ndarray:
    """The last len(q) queries of a sequence that has seq_len tokens by now."""
    lens = np.array([seq_len], np.int32)
    return module.attention_prefill(q, **cache, cu_seqlens_q=np.array([0, len(q)], np.int32), seq_lens=lens)


@pytest.fixture(scope="module", params=["cpu", "ref", "kernels"])
def attention_of(request: pytest.FixtureRequest, kernels: OpTable) -> tuple[ModuleType | OpTable, int, Any]:
    """Functions, a head_dim that they take, and their type."""
    if request.param == "kernels":
        return kernels, 64, ml_dtypes.bfloat16
    return (attention if request.param == "cpu" else ref.attention), 2, np.float32


@pytest.mark.parametrize("block_size", [1, 3, 4, 16])
@pytest.mark.parametrize("seq_len", [WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW])
def test_krn_02_sliding_window_edge(
    attention_of: tuple[ModuleType | OpTable, int, Any], seq_len: int, block_size: int
) -> None:
    """KRN-02: a query sees itself and the W − 1 keys before it; prefill, chunks of 3 and decode agree.

    All scores are 0, so the answer is the mean of the visible values, and value j is 2^j: every key has its own bit.
    """
    module, head_dim, dtype = attention_of
    values = 2.0 ** np.arange(seq_len, dtype=np.float32)[:, None] * np.ones((1, head_dim), np.float32)
    v_cache, block_table = cache_of(values, block_size)
    k_cache, _ = cache_of(np.ones_like(values), block_size)
    cache = {"k_cache": k_cache.astype(dtype), "v_cache": v_cache.astype(dtype), "block_table": block_table}
    cache |= {"sm_scale": 1.0, "window": WINDOW}
    q = np.zeros((seq_len, 1, head_dim), dtype)
    seen = [range(max(0, place - WINDOW + 1), place + 1) for place in range(seq_len)]
    expected = np.array([sum(2.0**j for j in keys) / len(keys) for keys in seen])

    chunks = [prefill(module, q[i : i + 3], min(i + 3, seq_len), cache) for i in range(0, seq_len, 3)]
    decoded = [module.attention_decode(q[:1], **cache, seq_lens=np.array([i + 1], np.int32)) for i in range(seq_len)]
    # a mean of at most 4: in float32 one rounding of 1/n, one a product, one a sum; in bfloat16 one of the answer
    rtol = 8 * 2.0**-24 if dtype is np.float32 else 2.0**-8
    for out in (prefill(module, q, seq_len, cache), np.concatenate(chunks), np.concatenate(decoded)):
        np.testing.assert_allclose(out[:, 0].astype(np.float64), np.repeat(expected[:, None], head_dim, 1), rtol=rtol)


@pytest.mark.parametrize("exponent", range(18))
def test_krn_09_one_key_among_very_many(exponent: int) -> None:
    """KRN-09, the kernel's part: of 131072 keys one holds all the weight, at a power of two and beside it.

    Its score is 100 and all others are 0: together they weigh 131071 · e^−100, below 1e-38.
    """
    seq_len = 131072
    k_cache = guarded(np.zeros((seq_len // 64, 64, 1, 4), np.float32), num_axes=1)
    v_cache = np.random.default_rng(0).standard_normal(k_cache.shape, np.float32)
    block_table = np.random.default_rng(1).permutation(seq_len // 64).astype(np.int32)[None]
    cache = {"k_cache": k_cache, "v_cache": v_cache, "block_table": block_table, "sm_scale": 1.0}
    lens = np.array([seq_len], np.int32)
    q = np.full((1, 1, 4), 5.0, np.float32)
    for place in (2**exponent - 1, min(2**exponent, seq_len - 1), min(2**exponent + 1, seq_len - 1)):
        slot = (block_table[0, place // 64], place % 64)
        k_cache[slot] = 5.0
        expected = v_cache[slot]
        np.testing.assert_allclose(attention.attention_decode(q, **cache, seq_lens=lens)[0], expected, rtol=1e-6)
        np.testing.assert_allclose(prefill(attention, q, seq_len, cache)[0], expected, rtol=1e-6)
        k_cache[slot] = 0.0


# ---- logits that are not numbers

BAD = {
    "all NaN": {"bad_value": float("nan")},
    "all -inf": {"bad_value": float("-inf")},
    "+inf at two ids": {"bad_value": float("inf"), "bad_ids": (5, 77)},
    "NaN at one id": {"bad_value": float("nan"), "bad_ids": (999,)},
}
GREEDY: dict[str, Any] = {"logprobs": 2}
DRAWN: dict[str, Any] = {"temperature": 1.0, "seed": 7, "top_p": 0.9, "frequency_penalty": 0.5, "logprobs": 2}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rand_model(tmp_path_factory.mktemp("rand"))


def engine_on_kernels(folder: Path, sampling: SamplingOps, faults: Faults | None = None) -> Engine:
    """A tiny engine of this CPU that samples by other functions."""
    engine = tiny_engine(folder)
    old = engine.runner
    sampler = Sampler(old.model.config.vocab_size, 8, sampling)
    comm = OneRank(cpu_ops())
    runner = ModelRunner(old.model, old.forward, comm, old.cache, old.rope, sampler, sampling)
    return Engine(engine.scheduler, runner, engine.limits, 0, faults)


@pytest.mark.parametrize("params", [GREEDY, DRAWN], ids=["greedy", "drawn, with edits"])
def test_sam_05_one_bad_row_of_the_sampling_kernels(folder: Path, kernels: OpTable, params: dict[str, Any]) -> None:
    """SAM-05: one request of three goes bad at its third token and ends with an error, each kind of bad in turn; the
    others keep the ids and logprobs, to the bit, of a run in which it ends there by itself.
    """
    sampling = kernels.sampling
    prompts = [np.random.default_rng(i).integers(3, 999, 7 + i).tolist() for i in range(3)]

    def requests(max_tokens: int) -> list[Any]:
        lengths = (5, max_tokens, 5)
        return [request(str(i), prompt, max_tokens=lengths[i], **params) for i, prompt in enumerate(prompts)]

    expected = run(engine_on_kernels(folder, sampling), *requests(3))
    for bad, how in BAD.items():
        engine = engine_on_kernels(folder, sampling, Faults(nan_at={"1": 2}, **how))
        outputs = run(engine, *requests(5))
        assert outputs["0"] == expected["0"], bad
        assert outputs["2"] == expected["2"], bad
        assert outputs["1"].finish_reason == "error", bad
        assert outputs["1"].token_ids == expected["1"].token_ids[:2], bad
        assert "NaN or infinite" in str(outputs["1"].error), bad
        assert (engine.stats().bad_rows, engine.stats().failed_steps) == (1, 0), bad
