"""ref.generate: the paged engine says what the cache-free model says."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.golden_models import GOLDENS, chain_model, llama_config, llama_tensors
from ref.checkpoint import read_checkpoint
from ref.config import parse_config, read_config
from ref.generate import forward_chunk, generate
from ref.model.cache import Cache
from ref.model.llama import LlamaConfig, llama
from ref.sampling import sample

PROMPT = [7, 11, 13, 17, 19, 23, 29, 31, 37, 41, 43, 47, 53, 59, 61, 67, 71]


def model(**overrides: Any) -> tuple[LlamaConfig, dict[str, np.ndarray]]:
    config = llama_config(**overrides)
    return parse_config(config), {name: t.astype(np.float64) for name, t in llama_tensors(config, seed=2).items()}


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("name", [name for name in GOLDENS if name != "dynamic"])
def test_greedy_is_that_of_the_cache_free_model(name: str, block_size: int) -> None:
    config, weights = model(**GOLDENS[name])
    new_ids = generate(config, weights, PROMPT, 12, ignore_eos=True, block_size=block_size)
    logits = llama(config, weights, PROMPT + new_ids)[len(PROMPT) - 1 : -1]
    assert new_ids == logits.argmax(axis=-1).tolist()


@pytest.mark.parametrize("chunks", [[17], [1] * 17, [5, 9, 3]])
@pytest.mark.parametrize("name", ["llama3", "mistral"])
def test_chunks_give_the_logits_of_the_whole(name: str, chunks: list[int]) -> None:
    config, weights = model(**GOLDENS[name])
    cache = Cache(len(PROMPT), 4, table_tokens=len(PROMPT))
    logits, done = [], 0
    for size in chunks:
        logits.append(forward_chunk(config, weights, PROMPT[done : done + size], cache))
        done += size
    # float64 end to end: two orders of summation differ by far less than this
    np.testing.assert_allclose(np.concatenate(logits), llama(config, weights, PROMPT), rtol=0, atol=1e-11)


def test_sampling_is_a_function_of_the_uniforms() -> None:
    config, weights = model(**GOLDENS["llama2"])
    uniforms = [0.9, 0.1, 0.5, 0.99]
    new_ids = generate(
        config, weights, PROMPT, 4, temperature=1.5, top_k=50, top_p=0.9, uniforms=uniforms, ignore_eos=True
    )
    logits = llama(config, weights, PROMPT + new_ids)[len(PROMPT) - 1 : -1]
    expected = sample(logits, [1.5] * 4, [50] * 4, [0.9] * 4, [0.0] * 4, uniforms)
    assert new_ids == expected.tolist()
    assert new_ids != logits.argmax(axis=-1).tolist()


def test_a_chain_is_printed_up_to_its_end(tmp_path: Path) -> None:
    folder = chain_model(tmp_path, {5: 6, 6: 9, 9: 7}, vocab_size=64)
    config, weights = read_config(folder), read_checkpoint(folder)
    assert generate(config, weights, [5, 5], 10) == [6, 9, 7, 2]
    assert generate(config, weights, [5, 5], 2) == [6, 9]
    assert generate(config, weights, [5, 5], 6, ignore_eos=True) == [6, 9, 7, 2, 2, 2]


def test_a_prompt_must_have_a_token() -> None:
    config, weights = model(**GOLDENS["llama2"])
    with pytest.raises(ValueError, match="prompt_ids is empty"):
        generate(config, weights, [], 3)
    with pytest.raises(ValueError, match="token id 160 is outside the vocabulary"):
        generate(config, weights, [160], 3)


def test_dynamic_rope_keeps_the_table_of_the_prompt() -> None:
    """The prompt is past the original length: its own length decides, also for the tokens that follow."""
    config, weights = model(**GOLDENS["dynamic"])
    prompt = PROMPT * 3
    new_ids = generate(config, weights, prompt, 8, ignore_eos=True)
    growth = 2.0 * len(prompt) / 32 - 1
    theta = config.rope.theta * growth ** (config.head_dim / (config.head_dim - 2))
    frozen = replace(config, rope=replace(config.rope, kind="default", theta=theta))
    logits = llama(frozen, weights, prompt + new_ids)[len(prompt) - 1 : -1]
    assert new_ids == logits.argmax(axis=-1).tolist()
