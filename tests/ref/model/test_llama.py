"""ref.model.llama: what must hold for any weights; the numbers themselves are checked in test_golden."""

from typing import Any

import numpy as np
import pytest

from conformance.golden_models import llama_config, llama_tensors
from ref.attention import attention_dense
from ref.config import parse_config
from ref.model.llama import LlamaConfig, llama, weight_shapes
from ref.numerics import relative_error, round_to

SMALL: dict[str, Any] = {"vocab_size": 40, "hidden_size": 32, "intermediate_size": 48}


def model(**overrides: Any) -> tuple[LlamaConfig, dict[str, np.ndarray]]:
    config = llama_config(**SMALL, **overrides)
    tensors = llama_tensors(config, seed=5)
    return parse_config(config), {name: tensor.astype(np.float64) for name, tensor in tensors.items()}


@pytest.mark.parametrize(
    "overrides", [{}, {"tie_word_embeddings": True}, {"attention_bias": True, "mlp_bias": True}, {"head_dim": 6}]
)
def test_weight_shapes_are_those_of_a_checkpoint(overrides: dict[str, Any]) -> None:
    config, weights = model(**overrides)
    assert weight_shapes(config) == {name: weights[name].shape for name in weights}


def test_later_tokens_change_nothing_before_them() -> None:
    config, weights = model()
    ids = [3, 1, 4, 1, 5, 9, 2, 6]
    whole = llama(config, weights, ids)
    for length in range(1, len(ids)):
        np.testing.assert_allclose(llama(config, weights, ids[:length]), whole[:length], rtol=1e-9, atol=1e-12)


def test_no_tokens() -> None:
    config, weights = model()
    assert llama(config, weights, []).shape == (0, 40)


def test_a_window_limits_how_far_a_token_reaches() -> None:
    """Window 4, two layers: a token is seen 3 positions on by the first, 3 more by the second, and no further."""
    config, weights = model(architectures=["MistralForCausalLM"], sliding_window=4)
    ids = list(range(10, 20))
    changed = [30, *ids[1:]]
    difference = np.abs(llama(config, weights, ids) - llama(config, weights, changed)).max(axis=1)
    assert (difference[:7] > 1e-6).all()
    assert (difference[7:] == 0).all()


def test_tied_weights_use_the_embedding_whatever_lm_head_says() -> None:
    config, weights = model(tie_word_embeddings=True)
    untied, _ = model()
    logits = llama(config, weights, [1, 2, 3])
    nonsense = weights | {"lm_head.weight": np.ones((40, 32))}
    np.testing.assert_array_equal(llama(config, nonsense, [1, 2, 3]), logits)
    as_head = weights | {"lm_head.weight": weights["model.embed_tokens.weight"]}
    np.testing.assert_array_equal(llama(untied, as_head, [1, 2, 3]), logits)


def test_a_bias_counts_only_if_config_says_so() -> None:
    with_bias, weights = model(attention_bias=True, mlp_bias=True)
    without, _ = model()
    no_biases = {name: tensor for name, tensor in weights.items() if not name.endswith(".bias")}
    plain = llama(without, no_biases, [1, 2, 3])
    np.testing.assert_array_equal(llama(without, weights, [1, 2, 3]), plain)
    assert relative_error(llama(with_bias, weights, [1, 2, 3]), plain) > 0.01


def test_float32_stays_float32_and_close() -> None:
    config, weights = model()
    single = {name: tensor.astype(np.float32) for name, tensor in weights.items()}
    logits = llama(config, single, [1, 2, 3])
    assert logits.dtype == np.float32
    assert relative_error(logits, llama(config, weights, [1, 2, 3])) < 1e-5


def test_trace_names_every_step_and_storage_rounds_each() -> None:
    config, weights = model()
    seen: dict[str, np.ndarray] = {}
    logits = llama(config, weights, [1, 2, 3], storage="bfloat16", trace=seen.__setitem__)
    assert seen["layers.1.self_attn.k_rope"].shape == (3, 2, 8)
    assert seen["layers.0.mlp.gate_up_act"].shape == (3, 48)
    assert next(iter(seen)) == "embed_tokens"
    assert list(seen)[-2:] == ["norm", "logits"]
    np.testing.assert_array_equal(seen["logits"], logits)
    for name, value in seen.items():
        if name != "embed_tokens":
            np.testing.assert_array_equal(value, round_to(value, "bfloat16"), err_msg=name)
    q, k = seen["layers.0.self_attn.q_rope"], seen["layers.0.self_attn.k_rope"]
    v = seen["layers.0.self_attn.v_proj"].reshape(k.shape)
    attended = round_to(attention_dense(q, k, v, 8**-0.5, storage="bfloat16"), "bfloat16")
    np.testing.assert_array_equal(seen["layers.0.self_attn.attention"], attended)
    assert (attended != round_to(attention_dense(q, k, v, 8**-0.5), "bfloat16")).any()
    # 8 bits in 30 roundings: near 30^½ · 2^-9 = 1 %, and surely not equal
    assert 1e-4 < relative_error(logits, llama(config, weights, [1, 2, 3])) < 0.05


def test_what_is_wrong_is_named() -> None:
    config, weights = model()
    lacking = {name: tensor for name, tensor in weights.items() if name != "model.layers.1.mlp.up_proj.weight"}
    with pytest.raises(ValueError, match=r"no tensor model\.layers\.1\.mlp\.up_proj\.weight.*\[48, 32\]"):
        llama(config, lacking, [1])
    with pytest.raises(ValueError, match=r"model\.norm\.weight has shape \[31\], but config\.json asks for \[32\]"):
        llama(config, weights | {"model.norm.weight": np.ones(31)}, [1])
    with pytest.raises(ValueError, match="token id 40 is outside the vocabulary"):
        llama(config, weights, [1, 40])
