"""ref.model.qwen1 past seq_length, where no oracle goes: log-n scaling, and a rope table that grows with the prompt."""

import math
from typing import Any

import numpy as np
import pytest

from conformance.golden_families import FAMILY_GOLDENS, family_tensors
from ref.config import parse_config
from ref.generate import generate
from ref.model.qwen1 import Qwen1Config, ntk_alpha, qwen1

IDS = list(range(10, 30))  # 20 tokens


def model(**changes: Any) -> tuple[Qwen1Config, dict[str, np.ndarray]]:
    config = {**FAMILY_GOLDENS["qwen1"], "seq_length": 8, **changes}
    weights = {name: tensor.astype(np.float64) for name, tensor in family_tensors(config, seed=3).items()}
    return parse_config(config), weights


@pytest.mark.parametrize(
    ("num_tokens", "alpha"), [(1, 1.0), (8, 1.0), (9, 3.0), (16, 3.0), (17, 7.0), (32, 7.0), (33, 15.0)]
)
def test_alpha_doubles_and_adds_one_at_each_doubling_of_the_length(num_tokens: int, alpha: float) -> None:
    assert ntk_alpha(num_tokens, 8) == alpha


def test_the_table_of_a_long_prompt_is_that_of_a_larger_theta() -> None:
    """20 tokens of 8: alpha 7, theta · 7^(12 / 10)."""
    config, weights = model(use_logn_attn=False)
    plain, _ = model(use_logn_attn=False, use_dynamic_ntk=False, rotary_emb_base=10000 * 7 ** (12 / 10))
    np.testing.assert_allclose(qwen1(config, weights, IDS), qwen1(plain, weights, IDS), rtol=0, atol=1e-10)
    short, _ = model(use_logn_attn=False, use_dynamic_ntk=False)
    np.testing.assert_array_equal(qwen1(config, weights, IDS[:8]), qwen1(short, weights, IDS[:8]))


def test_queries_from_seq_length_on_are_scaled() -> None:
    """The query at position p sees p + 1 keys and is multiplied by log(p + 1) / log(8), once that is above 1."""
    seen: dict[bool, dict[str, np.ndarray]] = {True: {}, False: {}}
    for logn in seen:
        config, weights = model(use_logn_attn=logn, use_dynamic_ntk=False)
        qwen1(config, weights, IDS, trace=seen[logn].__setitem__)
    name = "transformer.h.0.attn.q_rope"
    factor = seen[True][name][:, 0, 0] / seen[False][name][:, 0, 0]
    np.testing.assert_allclose(factor, [1.0] * 8 + [math.log(p + 1) / math.log(8) for p in range(8, 20)], rtol=1e-12)


def test_generation_keeps_the_table_of_the_prompt() -> None:
    config, weights = model()
    frozen, _ = model(use_dynamic_ntk=False)  # 7 tokens: the plain table, also after the ninth
    assert generate(config, weights, IDS[:7], 6, ignore_eos=True) == generate(
        frozen, weights, IDS[:7], 6, ignore_eos=True
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"intermediate_size": 63}, "must be even; found 63"),
        ({"kv_channels": 16}, "kv_channels times 4 heads must be hidden_size 48"),
        ({"rotary_pct": 0.5}, r"rotary_pct must be 1, found 0\.5"),
        ({"seq_length": None}, "seq_length must be a positive integer"),
    ],
)
def test_what_cannot_be_honoured_is_refused(change: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_config({**FAMILY_GOLDENS["qwen1"], **change})
