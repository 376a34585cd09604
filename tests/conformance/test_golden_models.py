"""The tiny checkpoints: the same bytes every time, and chains that say exactly what was scripted."""

from pathlib import Path

import numpy as np
import pytest

from conformance.golden_models import (
    CHAIN_LOGIT,
    GOLDEN_PROMPT_LENGTHS,
    GOLDENS,
    as_stored,
    chain_model,
    golden_prompts,
    llama_config,
    llama_tensors,
    rand_model,
    write_stored,
)
from ref.checkpoint import read_checkpoint, widen
from ref.config import read_config
from ref.model.llama import llama


def logits_of(folder: Path, token_ids: list[int]) -> np.ndarray:
    return llama(read_config(folder), read_checkpoint(folder), token_ids)


def test_same_seed_same_bytes(tmp_path: Path) -> None:
    first, second, other = (rand_model(tmp_path / str(i), seed, vocab_size=50) for i, seed in enumerate((4, 4, 5)))
    for file in ("config.json", "model.safetensors"):
        assert (first / file).read_bytes() == (second / file).read_bytes()
    assert (first / "model.safetensors").read_bytes() != (other / "model.safetensors").read_bytes()


def test_weights_have_the_stated_spread() -> None:
    weight = llama_tensors(llama_config(), seed=0)["model.layers.0.mlp.up_proj.weight"]  # [256, 128]
    # 32768 samples: the mean is off by 1/√128 · 1/√32768, the deviation by less; five of these
    assert abs(weight.mean()) < 5 * 128**-0.5 * 32768**-0.5
    assert weight.std() == pytest.approx(128**-0.5, rel=0.02)
    assert len(np.unique(weight)) > 32000


def test_writing_again_leaves_no_old_weights(tmp_path: Path) -> None:
    rand_model(tmp_path, num_shards=3)
    rand_model(tmp_path)
    assert sorted(file.name for file in tmp_path.iterdir()) == ["config.json", "model.safetensors"]


@pytest.mark.parametrize("dtype", ["float32", "float16", "bfloat16"])
def test_a_chain_has_exact_logits(tmp_path: Path, dtype: str) -> None:
    """5 → 6 → 7 → 5, 9 → 6 too; all others → 2. History does not matter, neither does the storage type."""
    folder = chain_model(tmp_path, {5: 6, 6: 7, 7: 5, 9: 6}, vocab_size=32, dtype=dtype)
    logits = logits_of(folder, [5, 6, 7, 9, 30, 2])
    expected = np.zeros((6, 32))
    expected[range(6), [6, 7, 5, 6, 2, 2]] = CHAIN_LOGIT
    # eps 1e-5 over a mean square of 1/16, halved: 8e-5; CHAIN_LOGIT / 4 = 5 is exact in all types
    np.testing.assert_allclose(logits, expected, rtol=1e-4, atol=0)


def test_a_chain_may_be_long_and_soft(tmp_path: Path) -> None:
    successor = {i: i + 1 for i in range(10, 99)}
    folder = chain_model(tmp_path, successor, vocab_size=100, otherwise=3, logit=1.5, max_position_embeddings=100000)
    assert read_config(folder).max_position_embeddings == 100000
    logits = logits_of(folder, list(range(100)))
    assert logits.argmax(axis=1).tolist() == [3] * 10 + list(range(11, 100)) + [3]
    np.testing.assert_allclose(logits.max(axis=1), 1.5, rtol=1e-3)


def test_golden_prompts() -> None:
    for name, config in GOLDENS.items():
        prompts = golden_prompts(name)
        assert tuple(map(len, prompts)) == GOLDEN_PROMPT_LENGTHS
        assert all(4 <= token_id < config["vocab_size"] for prompt in prompts for token_id in prompt)


@pytest.mark.parametrize(
    ("dtype", "value"), [("float32", 1 + 2**-23), ("float16", 1 + 2**-10), ("bfloat16", 1 + 2**-7)]
)
def test_tensors_are_stored_in_their_own_types(tmp_path: Path, dtype: str, value: float) -> None:
    """A number that the type holds, and one a quarter of a step above it, which is rounded away."""
    codes, integers = np.array([[0x38, 0xB8]], np.uint8), {"i8": np.array([-127, 127], np.int8)}
    integers |= {"i32": np.array([-(2**31)], np.int32), "i64": np.array([2**40], np.int64)}
    floats = as_stored(np.array([value, value + (value - 1) / 4], np.float32), dtype)
    write_stored(tmp_path / "model.safetensors", {"w": floats, "codes": codes, **integers})
    found = read_checkpoint(tmp_path, None)
    np.testing.assert_array_equal(widen(found["w"], np.float64), [value, value])
    for name, stored in {"codes": codes, **integers}.items():
        assert found[name].dtype == stored.dtype
        np.testing.assert_array_equal(found[name], stored)
