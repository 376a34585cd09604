"""A model that reads a prompt both ways (CPM-Ant): whole prompts in a step, no shared blocks, and what is refused."""

import tracemalloc
from pathlib import Path
from typing import Any

import pytest

from conformance.end_to_end import VARIANTS
from conformance.golden_families import FAMILY_GOLDENS, family_tensors
from conformance.golden_models import GOLDEN_SEED, write_checkpoint
from engine.api import GenerationRequest, SamplingParams
from engine.build import build_engine
from engine.config import EngineConfig, PrefixLmConfig
from engine.errors import ConfigError, RequestError
from engine.loop import Engine, drain
from engine.model_config.read import model_config_from_hf
from ref.config import parse_config
from ref.generate import generate

CONFIG = VARIANTS["cpm_ant_wide"]
PROMPTS = [[5, 6, 7, 8, 9, 10, 11, 12, 13], [9, 8, 7], [5, 6, 7, 8, 9, 10, 11, 12, 14]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_checkpoint(tmp_path_factory.mktemp("cpm_ant"), CONFIG, family_tensors(CONFIG, GOLDEN_SEED))


def build(folder: Path, **settings: Any) -> Engine:
    defaults = {"block_size": 4, "num_gpu_blocks_override": 40, "max_num_seqs": 4, "num_threads": 1}
    return build_engine(EngineConfig(model=str(folder), **defaults | settings), progress=False).engine


def request(name: str, prompt: list[int], **sampling: Any) -> GenerationRequest:
    settings = {"temperature": 0.0, "max_tokens": 6, "ignore_eos": True} | sampling
    return GenerationRequest(name, tuple(prompt), SamplingParams(**settings))


def answers(engine: Engine, prompts: list[list[int]]) -> list[list[int]]:
    for i, prompt in enumerate(prompts):
        engine.add(request(str(i), prompt))
    found: list[list[int]] = [[] for _ in prompts]
    for event in drain(engine):
        assert event.error is None
        found[int(event.request_id)] += event.token_ids
    return found


@pytest.fixture(scope="module")
def wanted() -> list[list[int]]:
    config, weights = parse_config(CONFIG), family_tensors(CONFIG, GOLDEN_SEED)
    return [generate(config, weights, prompt, 6, ignore_eos=True) for prompt in PROMPTS]


@pytest.mark.parametrize("max_num_batched_tokens", [12, 13, 64])
def test_a_prompt_is_read_in_one_step(folder: Path, wanted: list[list[int]], max_num_batched_tokens: int) -> None:
    """With 12 a prompt of 3 + 9 rows fills a step, so it waits until nothing decodes."""
    engine = build(folder, max_num_batched_tokens=max_num_batched_tokens)
    assert answers(engine, PROMPTS) == wanted


def test_prompts_with_the_same_beginning_share_nothing(folder: Path, wanted: list[list[int]]) -> None:
    engine = build(folder)
    assert [answers(engine, [PROMPTS[0]]), answers(engine, [PROMPTS[2]])] == [[wanted[0]], [wanted[2]]]
    assert engine.stats().prefix_hit_tokens == 0
    assert engine.stats().prompt_tokens == 18  # what the client sent, without the learned vectors


def test_a_whole_context_fits(folder: Path) -> None:
    """60 tokens and 4 new ones are max_model_len; the three learned vectors come on top."""
    engine = build(folder, max_num_batched_tokens=63)
    engine.add(request("long", [5] * 60, max_tokens=None))
    events = list(drain(engine))
    assert [len(event.token_ids) for event in events] == [1] * 4
    assert events[-1].finish_reason == "length"


def test_kvm_04_the_longest_prompt_stays_within_the_plan(folder: Path) -> None:
    """KVM-04: a prompt that fills a step and the context."""
    settings = {"block_size": 4, "num_gpu_blocks_override": 17, "max_num_seqs": 1, "max_num_batched_tokens": 66}
    built = build_engine(EngineConfig(model=str(folder), num_threads=1, **settings), progress=False)
    built.engine.add(request("long", [5] * 63, max_tokens=1))
    tracemalloc.start()
    try:
        list(drain(built.engine))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert peak <= built.memory.workspace, f"{peak / 1e6:.2f} MB of {built.memory.workspace / 1e6:.2f} MB planned"


@pytest.mark.parametrize(
    ("prompt", "sampling", "says"),
    [
        ([5] * 18, {}, "the prompt has 18 tokens, but this model reads a prompt in one step, which has room for 17"),
        ([5, 0, 6], {}, "token id 0, which is padding"),
        ([5, 6], {"prompt_logprobs": 1}, "prompt_logprobs: this model reads a prompt both ways"),
        ([5, 134], {}, "token id 134; ids of this model are 0 to 127"),
    ],
)
def test_refusals(folder: Path, prompt: list[int], sampling: dict[str, Any], says: str) -> None:
    engine = build(folder, max_num_batched_tokens=20)
    with pytest.raises(RequestError, match=says):
        engine.add(request("0", prompt, **sampling))


# ---- config


def read(*absent: str, **changes: Any) -> Any:
    config = {key: value for key, value in (FAMILY_GOLDENS["cpm_ant"] | changes).items() if key not in absent}
    return model_config_from_hf(config, None, "config.json")


def test_config() -> None:
    config = read()
    assert config.prefix_lm == PrefixLmConfig((134, 135, 136), 128 + 4 * 3, 4, 16, 20)
    assert (config.head_dim, config.intermediate_size, config.norm_eps, config.hidden_act) == (12, 64, 1e-6, "gelu")
    assert (config.rotary_dim, config.tie_word_embeddings, config.max_position_embeddings) == (0, False, 20)
    silent = read("dim_head", "dim_ff", "prompt_types", "prompt_length", "position_bias_num_buckets",
                  position_bias_max_distance=2048)  # fmt: skip
    assert (silent.head_dim, silent.intermediate_size) == (128, 10240)
    assert silent.prefix_lm.soft_prompt_ids == tuple(range(128 + 64, 128 + 96))


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"prompt_types": 2}, "prompt_types must be at least 3, found 2"),
        ({"prompt_length": 0}, "prompt_length must be an integer of at least 1, found 0"),
        ({"segment_types": 1}, "segment_types must be at least 3, found 1"),
        ({"position_bias_num_buckets": 2}, "position_bias_num_buckets must be at least 4, found 2"),
        ({"position_bias_max_distance": 4}, "position_bias_max_distance must be above a quarter"),
        ({"dim_ff": "x"}, "dim_ff must be an integer"),
        ({"eps": None}, "eps is missing"),
    ],
)
def test_config_refusals(changes: dict[str, Any], says: str) -> None:
    with pytest.raises(ConfigError, match=says):
        read(**changes)
