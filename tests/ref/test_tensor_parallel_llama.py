"""A whole model on 1 to 8 ranks, and in stages, against the model in one piece."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.golden_models import rand_model
from ref.checkpoint import read_checkpoint
from ref.config import read_config
from ref.model.llama import LlamaConfig, llama
from ref.numerics import relative_error
from ref.pipeline import llama_stage, shard_stages
from ref.tensor_parallel_llama import llama_tensor_parallel, shard_llama

Weights = dict[str, np.ndarray]
IDS = [5, 1, 72, 3, 66, 2, 100, 49]
SMALL: dict[str, Any] = {"vocab_size": 101, "hidden_size": 48, "intermediate_size": 90, "num_hidden_layers": 3}


def model(folder: Path, **overrides: Any) -> tuple[LlamaConfig, Weights]:
    rand_model(folder, 3, **{**SMALL, **overrides})
    config = read_config(folder)
    assert isinstance(config, LlamaConfig)
    return config, read_checkpoint(folder, "float64")


@pytest.mark.parametrize("heads", [(8, 8), (8, 2), (8, 1), (14, 2), (6, 3)])
@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5, 6, 7, 8])
def test_any_number_of_ranks(tmp_path: Path, heads: tuple[int, int], world_size: int) -> None:
    """DST-05: the logits of one rank, or an error that has the numbers; biases everywhere; a vocabulary of 101."""
    n_heads, n_kv_heads = heads
    config, weights = model(
        tmp_path,
        num_attention_heads=n_heads,
        num_key_value_heads=n_kv_heads,
        head_dim=4,
        attention_bias=True,
        mlp_bias=True,
    )
    if world_size > n_heads:
        with pytest.raises(ValueError, match=f"{n_heads} query heads and {n_kv_heads} KV heads cannot be dealt out"):
            shard_llama(config, weights, world_size)
        return
    ranks = shard_llama(config, weights, world_size)
    assert sum(local.n_heads for local, _ in ranks) == n_heads
    assert all(local.n_kv_heads >= 1 for local, _ in ranks)
    logits = llama_tensor_parallel(ranks, config.vocab_size, IDS)
    assert relative_error(logits, llama(config, weights, IDS)) <= 1e-10


@pytest.mark.parametrize("world_size", [2, 3])
def test_tied_embedding(tmp_path: Path, world_size: int) -> None:
    """DST-06: the padded table serves as embedding and as head."""
    config, weights = model(tmp_path, tie_word_embeddings=True)
    logits = llama_tensor_parallel(shard_llama(config, weights, world_size), config.vocab_size, IDS)
    assert logits.shape == (len(IDS), 101)
    assert relative_error(logits, llama(config, weights, IDS)) <= 1e-10


def test_a_rank_holds_its_part_alone(tmp_path: Path) -> None:
    """Twice the ranks, half the elements of what is cut; so a rank cannot compute the whole by itself."""
    config, weights = model(tmp_path, num_attention_heads=8, num_key_value_heads=4, vocab_size=100, hidden_size=64)
    replicated = sum(tensor.size for name, tensor in weights.items() if "norm" in name)
    total = sum(tensor.size for tensor in weights.values()) - replicated
    for _, held in shard_llama(config, weights, 2):
        assert sum(tensor.size for tensor in held.values()) - replicated == total // 2


def test_an_mlp_too_narrow(tmp_path: Path) -> None:
    config, weights = model(tmp_path, intermediate_size=3, num_attention_heads=8)
    with pytest.raises(ValueError, match="intermediate_size 3 leaves one of 4 ranks without any"):
        shard_llama(config, weights, 4)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("num_stages", [1, 2, 3])
def test_stages(tmp_path: Path, num_stages: int, tied: bool) -> None:
    """LDR-07: same logits; a tied embedding is on the first and on the last stage, all else on one."""
    config, weights = model(tmp_path, tie_word_embeddings=tied)
    stages = shard_stages(config, weights, num_stages)
    passed = None
    for stage in stages:
        passed = llama_stage(config, stage, IDS, passed)
    assert passed is not None
    np.testing.assert_array_equal(passed, llama(config, weights, IDS))
    holders = {name: [i for i, stage in enumerate(stages) if name in stage] for name in weights}
    twice = {name for name, found in holders.items() if len(found) > 1}
    assert twice == ({"model.embed_tokens.weight"} if tied and num_stages > 1 else set())
    assert min(map(len, holders.values())) == 1


def test_more_stages_than_layers(tmp_path: Path) -> None:
    config, weights = model(tmp_path)
    with pytest.raises(ValueError, match="3 layers on 4 stages leave one without; at most 3 stages"):
        shard_stages(config, weights, 4)
