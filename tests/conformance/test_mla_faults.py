"""Faults planted in copies of the models with latent attention, each of which a case of the whole model must catch."""

import pytest

import engine.models.deepseek
import engine.models.minicpm3
from tests.conformance.test_the_tests import OPS, cases_of, caught, mutated

FAULTS = [  # golden model, what is written in engine.models.mla, what is written instead
    (
        "deepseek_v2-",
        'linears[f"{dest}.kv_b_proj"], mla.sm_scale',
        'linears[f"{dest}.kv_b_proj"], config.head_dim**-0.5',
    ),
    ("deepseek_v2-", "mla.eps)\n        q = ops.linear", "0.1)\n        q = ops.linear"),
    ("deepseek_v2-", 'q_a_layernorm"], mla.eps', 'q_a_layernorm"] * 0 + 1, mla.eps'),
    ("deepseek_v2-", "(q_a, kv_a), hidden", "(kv_a, q_a), hidden"),
    ("deepseek_v2_lite-", "interleaved=config.rope_interleaved", "interleaved=False"),
    ("deepseek_v3_bias-", "interleaved=config.rope_interleaved", "interleaved=True"),
    ("minicpm3-", "interleaved=config.rope_interleaved", "interleaved=True"),
    ("deepseek_v3-", "out[:num_decodes], out[num_decodes:] = decoded, prefilled", "out[num_decodes:] = prefilled"),
    ("deepseek_v3-", "batch.seq_lens[num_decodes:],", "batch.seq_lens[: len(batch.seq_lens) - num_decodes],"),
    (
        "deepseek_v3-",
        "batch.cu_seqlens_q[num_decodes:] - num_decodes",
        "batch.cu_seqlens_q[: len(batch.seq_lens) - num_decodes + 1]",
    ),
]


@pytest.mark.parametrize(("golden", "old", "new"), FAULTS)
def test_a_fault_in_latent_attention_is_caught(
    golden: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(engine.models.deepseek, "mla", mutated("engine.models.mla", old, new))
    assert "logits" in str(caught(cases_of("llama", f"forward-{golden}"), OPS))


def test_minicpm3_without_its_scales_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """KRN-08."""
    monkeypatch.setattr(engine.models.minicpm3, "scaled", lambda model: model)
    assert "logits" in str(caught(cases_of("llama", "forward-minicpm3-"), OPS))
