"""A model on several ranks gives what it gives on one: families, formats, uneven sizes, stages."""

from pathlib import Path

import numpy as np
import pytest

from conformance.engine_run import make_runner, run_chunks
from conformance.golden_families import FAMILY_GOLDENS, family_model, family_prompts
from conformance.golden_formats import FORMAT_FAMILIES, FORMATS, format_folder
from conformance.golden_models import GOLDENS, Config, golden_model, random_ids
from engine.ops import cpu_ops
from tests.engine.split_ranks import ranks_as_one

OPS = cpu_ops()
CHUNKS = (3, 17)  # of two prompts: a step of both, then decodes beside chunks
TOLERANCE = 1e-5


def assert_as_one_rank(folder: Path, prompts: list[list[int]], tp: int, pp: int, **how: object) -> None:
    expected = run_chunks(make_runner(folder, OPS, prompts, **how), prompts, CHUNKS)
    found = run_chunks(ranks_as_one(folder, OPS, prompts, tp, pp, **how), prompts, CHUNKS)
    for one, other in zip(expected, found, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(other, one, rtol=0, atol=TOLERANCE * max(1, np.abs(one).max()))


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (3, 1), (4, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("name", [*GOLDENS, *FAMILY_GOLDENS])
def test_logits_are_those_of_one_rank(tmp_path: Path, name: str, tp: int, pp: int) -> None:
    """DST-05: heads cut, KV heads copied where ranks outnumber them; latents, experts, biases by row and by column."""
    folder = (family_model if name in FAMILY_GOLDENS else golden_model)(tmp_path, name)
    assert_as_one_rank(folder, family_prompts("qwen2"), tp, pp)


SIZES = {  # in which heads and shares are whole groups of 32 and tiles of 128
    **{"vocab_size": 67, "hidden_size": 256, "intermediate_size": 384, "num_key_value_heads": 2, "head_dim": 128},
    **{"moe_intermediate_size": 256, "shared_expert_intermediate_size": 384, "num_local_experts": 3, "num_experts": 3},
    **{"kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "n_shared_experts": 1},
}


def format_config(family: str) -> Config:
    base = FORMAT_FAMILIES[family]
    sizes = {
        key: size for key, size in SIZES.items() if key in base or (key == "head_dim" and "q_lora_rank" not in base)
    }
    if "q_lora_rank" in base:
        sizes["num_key_value_heads"] = base["num_attention_heads"]
    if family in ("qwen2", "qwen2_moe"):  # whose heads are as wide as hidden_size says
        sizes |= {"num_attention_heads": 2}
    return base | sizes


FAMILIES_AND_FORMATS = (
    *(("llama", name) for name in FORMATS if name != "bf16"),
    *(
        (family, name)
        for family in FORMAT_FAMILIES
        if family != "llama"
        for name in ("fp8_block", "gptq_act_order", "awq")
    ),
)


@pytest.mark.parametrize(("family", "name"), FAMILIES_AND_FORMATS)
def test_decoded_formats_are_cut_like_floats(tmp_path: Path, family: str, name: str) -> None:
    """DST-05, packed: words, groups and tiles lie on one rank each, and a scale for all on every rank."""
    folder = format_folder(tmp_path, format_config(family), name)
    assert_as_one_rank(folder, random_ids(67, (5, 21)), 2, 1)


@pytest.mark.parametrize("name", ["gptq", "gptq_act_order", "awq", "ct_int4", "fp8_block", "ct_fp8_tensor"])
def test_formats_on_three_ranks_with_a_copied_head(tmp_path: Path, name: str) -> None:
    folder = format_folder(tmp_path, format_config("llama"), name)
    assert_as_one_rank(folder, random_ids(67, (5, 21)), 3, 1)
