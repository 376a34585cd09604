"""ref.model.cpm1 and cpm_ant: what they refuse, and how far a token of CPM-Ant looks."""

import numpy as np
import pytest

from conformance.golden_families import FAMILY_GOLDENS, family_tensors
from ref.config import parse_config
from ref.generate import generate
from ref.model.cpm_ant import position_bucket
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


def test_cpm_ant_looks_both_ways_and_so_has_no_cache() -> None:
    config, weights = parse_config(FAMILY_GOLDENS["cpm_ant"]), weights_of("cpm_ant")
    short, longer = forward(config, weights, [5, 6, 7]), forward(config, weights, [5, 6, 7, 8])
    assert (np.abs(short - longer[:3]).max(axis=1) > 1e-3).all()
    with pytest.raises(ValueError, match="without a cache"):
        generate(config, weights, [5, 6, 7], 1)
    with pytest.raises(ValueError, match="token id 0 is padding"):
        forward(config, weights, [5, 0, 7])
    with pytest.raises(ValueError, match="token id 128 is outside the vocabulary"):
        forward(config, weights, [5, 128])


def test_buckets_of_distance() -> None:
    """16 buckets: 0 to 7 for keys up to the query, of which 4 are exact; from 4 to 16 in steps of √2; 8 more ahead."""
    distance = np.array([0, -1, -3, -4, -5, -6, -8, -12, -16, -100, 1, 3, 4, 100])
    expected = [0, 1, 3, 4, 4, 5, 6, 7, 7, 7, 9, 11, 12, 15]
    assert position_bucket(distance, num_buckets=16, max_distance=16).tolist() == expected
