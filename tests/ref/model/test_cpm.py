"""ref.model.cpm1 and cpm_ant: what they refuse, and how far a token of CPM-Ant looks."""

import numpy as np
import pytest

from conformance.golden_families import FAMILY_GOLDENS, family_tensors
from ref.attention_biased import position_bucket
from ref.config import parse_config
from ref.generate import forward_chunk
from ref.model.cache import Cache
from ref.model.registry import forward


def weights_of(name: str) -> dict[str, np.ndarray]:
    return family_tensors(FAMILY_GOLDENS[name], seed=3)


def test_cpm1_has_no_positions_past_those_that_were_learned() -> None:
    config = parse_config(FAMILY_GOLDENS["cpm1"])
    assert forward(config, weights_of("cpm1"), [5] * 64).shape == (64, 128)
    with pytest.raises(ValueError, match="position 64 is past the 64 that were learned"):
        forward(config, weights_of("cpm1"), [5] * 65)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"activation_function": "mish"}, "activation_function is 'mish'; supported here: 'silu', 'gelu'"),
        ({"scale_attn_by_inverse_layer_idx": True}, "scale_attn_by_inverse_layer_idx is not supported"),
        ({"n_embd": None}, "hidden_size must be a positive integer, found None"),
    ],
)
def test_cpm1_refuses(change: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config({**FAMILY_GOLDENS["cpm1"], **change})


def test_cpm_ant_looks_both_ways() -> None:
    config, weights = parse_config(FAMILY_GOLDENS["cpm_ant"]), weights_of("cpm_ant")
    short, longer = forward(config, weights, [5, 6, 7]), forward(config, weights, [5, 6, 7, 8])
    assert (np.abs(short - longer[:3]).max(axis=1) > 1e-3).all()
    with pytest.raises(ValueError, match="token id 0 is padding"):
        forward(config, weights, [5, 0, 7])
    with pytest.raises(ValueError, match="token id 128 is outside the vocabulary"):
        forward(config, weights, [5, 128])


def test_cpm_ant_with_a_cache_reads_the_prompt_both_ways_and_later_tokens_one_by_one() -> None:
    """In one layer the keys of a prompt know nothing of what follows, so the newest token is that of a whole pass; in
    two they would have changed."""
    for n_layers in (1, 2):
        config = parse_config({**FAMILY_GOLDENS["cpm_ant"], "num_hidden_layers": n_layers})
        weights, prompt = weights_of("cpm_ant"), [5, 6, 7, 8]
        cache = Cache(8, 4, table_tokens=4)
        np.testing.assert_array_equal(forward_chunk(config, weights, prompt, cache), forward(config, weights, prompt))
        newest = forward_chunk(config, weights, [9], cache)[0]
        whole = forward(config, weights, [*prompt, 9])[-1]
        assert (np.abs(newest - whole).max() < 1e-5) == (n_layers == 1)


def test_cpm_ant_tokens_after_the_prompt_do_not_see_the_next_one() -> None:
    config, weights = parse_config(FAMILY_GOLDENS["cpm_ant"]), weights_of("cpm_ant")
    logits = []
    for chunks in ([[5, 6, 7], [8, 9]], [[5, 6, 7], [8], [9]]):
        cache = Cache(8, 4, table_tokens=3)
        logits.append(np.concatenate([forward_chunk(config, weights, chunk, cache) for chunk in chunks]))
    np.testing.assert_allclose(logits[0], logits[1], rtol=0, atol=1e-5)  # float32, logits of a few units


def test_cpm_ant_reads_a_prompt_in_one_pass() -> None:
    config, weights = parse_config(FAMILY_GOLDENS["cpm_ant"]), weights_of("cpm_ant")
    with pytest.raises(ValueError, match=r"reads a prompt in one pass.* found 2 of 3 tokens"):
        forward_chunk(config, weights, [5, 6], Cache(8, 4, table_tokens=3))


def test_buckets_of_distance() -> None:
    """16 buckets: 0 to 7 for keys up to the query, of which 4 are exact; from 4 to 16 in steps of √2; 8 more ahead."""
    distance = np.array([0, -1, -3, -4, -5, -6, -8, -12, -16, -100, 1, 3, 4, 100])
    expected = [0, 1, 3, 4, 4, 5, 6, 7, 7, 7, 9, 11, 12, 15]
    assert position_bucket(distance, num_buckets=16, max_distance=16).tolist() == expected
