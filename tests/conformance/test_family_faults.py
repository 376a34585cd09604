"""Faults planted in copies of the models beside Llama, each of which a case of the whole model must catch."""

import pytest

import conformance.engine_run
from engine.models.registry import ARCHITECTURES, Architecture
from tests.conformance.test_the_tests import OPS, cases_of, caught, mutated

FAULTS = [  # file of engine.models, golden model, what is written there, what is written instead
    ("command_r", "command_r", "interleaved=config.rope_interleaved", "interleaved=False"),
    ("command_r", "command_r", "out += mlp(hidden,", "out += mlp(out,"),
    ("command_r", "command_r", "config.logit_scale", "1.0"),
    ("command_r", "command_r", ', "layernorm"),\n                partial', "),\n                partial"),
    ("command_r", "command_r_plus", '{layer}.k_norm"]', '{layer}.q_norm"][: k.shape[1]]'),
    ("minicpm", "minicpm", "config.embedding_scale", "1.0"),
    ("minicpm", "minicpm_moe", "config.residual_scale", "1.0"),
    ("minicpm", "minicpm", "config.logit_scale", "1 / config.logit_scale"),
    ("qwen1", "qwen1", '"w2", "w1"', '"w1", "w2"'),
    ("qwen1", "qwen1_long", "if config.logn_length:", "if False:"),
    ("qwen1", "qwen1_long", "batch.positions, config", "batch.positions + 1, config"),
    ("cpm1", "cpm1", "batch.positions, table", "batch.positions * 0, table"),
    ("cpm1", "cpm1", 'weights.arrays[f"{dest}.bias"])', "None)"),
    ("cpm1", "cpm1", "config.hidden_act", '"relu"'),
    ("cpm1", "cpm1", "ops.kv_cache_write(k, v,", "ops.kv_cache_write(v, k,"),
    ("cpm_ant", "cpm_ant", "batch.positions >= num_soft", "batch.positions > num_soft"),
    ("cpm_ant", "cpm_ant", "batch.two_way_lens", "0 * batch.two_way_lens"),
    ("cpm_ant", "cpm_ant", "(PROMPT_SEGMENT, TOKEN_SEGMENT))", "(TOKEN_SEGMENT, PROMPT_SEGMENT))"),
    ("cpm_ant", "cpm_ant", "config.hidden_act", '"silu"'),
]


@pytest.mark.parametrize(("stem", "golden", "old", "new"), FAULTS)
def test_a_fault_in_a_family_is_caught(
    stem: str, golden: str, old: str, new: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = mutated(f"engine.models.{stem}", old, new)
    faulty = Architecture(module.weight_map, module.build)
    mine = {name: faulty for name, known in ARCHITECTURES.items() if known.build.__module__ == f"engine.models.{stem}"}
    assert mine
    monkeypatch.setattr(conformance.engine_run, "ARCHITECTURES", dict(ARCHITECTURES) | mine)
    assert "logits" in str(caught(cases_of("llama", f"forward-{golden}"), OPS))
