"""The starter model through the real engine, against what transformers makes of it (conformance.starter)."""

from __future__ import annotations

from typing import Any

import pytest

from conformance.case import HALVES
from conformance.starter.__main__ import line, main
from conformance.starter.follow import GOLDEN, Bound, Deviation, bound_for, follow, score, yardstick
from conformance.starter.prompts import STARTER_PROMPTS
from engine.api import SamplingParams
from engine.build import build_engine
from engine.checkpoint.source import ModelSource
from engine.checkpoint.text import load_text
from engine.config import EngineConfig
from engine.faults import Faults
from engine.llm import LLM
from engine.loop import Engine

BOUND = bound_for("float32")


def entries(*names: str) -> list[Any]:
    return [entry for entry in GOLDEN if entry["name"] in names]


@pytest.fixture(scope="module")
def engine() -> Engine:
    return build_engine(EngineConfig(num_gpu_blocks_override=512)).engine


@pytest.mark.starter
def test_our_tokenizer_gives_the_ids_of_the_reference(starter_model: ModelSource) -> None:
    tokenizer, template = load_text(starter_model, vocab_size=49152)
    assert tokenizer is not None
    for entry in GOLDEN:
        text = STARTER_PROMPTS[entry["name"]]
        assert tokenizer.encode(text) == entry["prompt_ids"], entry["name"]
        assert tokenizer.decode(entry["prompt_ids"]) == text
    assert template is not None
    rendered = template.render([{"role": "user", "content": "What is the capital of France?"}], True, False, None)
    assert rendered == STARTER_PROMPTS["chat_capital"]


@pytest.mark.starter
def test_one_batch_of_all_prompts(engine: Engine) -> None:
    found = follow(engine, GOLDEN)
    assert found.num_places == sum(len(entry["greedy_ids"]) for entry in GOLDEN)
    assert len(found.differences) == 5 * found.num_places
    assert BOUND.faults(found) == []


@pytest.mark.starter
def test_alone_and_with_a_warm_prefix_cache(engine: Engine) -> None:
    """The prompt that was in the batch before: now its blocks are cached, and nobody else runs."""
    hits = engine.stats().prefix_hit_tokens
    for name in ("chat_capital", "raw_long"):
        assert BOUND.faults(follow(engine, entries(name))) == []
    assert engine.stats().prefix_hit_tokens > hits


@pytest.mark.starter
def test_as_prompts(engine: Engine) -> None:
    """prompt_logprobs of the whole text are the logprobs of decoding it."""
    found = score(engine, entries("chat_capital", "raw_code", "raw_one_token"))
    assert len(found.differences) == 5 * (8 + 32 + 32)
    assert BOUND.faults(found) == []


@pytest.mark.starter
@pytest.mark.parametrize(
    ("options", "faults"),
    [
        ({"block_size": 5, "max_num_batched_tokens": 33, "max_num_seqs": 4}, None),
        (
            {"enable_prefix_caching": False, "num_threads": 1},
            Faults(preempt_at={"raw_long": {250, 260}, "raw_code": {20}}),
        ),
    ],
    ids=["small blocks and chunks", "preempted, no cache"],
)
def test_other_shapes_give_the_same(options: dict[str, Any], faults: Faults | None) -> None:
    built = build_engine(EngineConfig(**{"num_gpu_blocks_override": 512, **options}), faults)
    found = follow(built.engine, entries("raw_long", "raw_code", "chat_capital", "raw_chinese"))
    assert BOUND.faults(found) == []
    if faults is not None:
        assert built.engine.stats().preemptions == 3


@pytest.mark.starter
def test_the_offline_class_answers() -> None:
    llm = LLM(num_gpu_blocks_override=64)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    (output,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=24))
    assert output.text == "The capital of France is Paris."
    assert output.completions[0].finish_reason == "stop"
    (completed,) = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4))
    assert "Paris" in (completed.text or "")


# ---- what follows needs no model


def test_bounds() -> None:
    """Twice what transformers in that type was measured to be off; float16 has three bits more than bfloat16."""
    for dtype in HALVES:
        measured = yardstick(dtype)
        assert bound_for(dtype) == Bound(2 * measured.rms, 2 * measured.worst)
    assert yardstick("float16").rms == pytest.approx(yardstick("bfloat16").rms / 8, rel=0.2)
    assert BOUND.rms < bound_for("float16").rms < 0.05


def test_a_deviation_that_is_too_large_is_named() -> None:
    found = Deviation(differences=[0.0, 0.3, 0.4], gaps=[0.25], num_places=1)
    assert found.rms == pytest.approx((0.25 / 3) ** 0.5)
    assert Bound(0.3, 0.4).faults(found) == []
    assert Bound(0.28, 0.4).faults(found) == ["rms 0.2887 > 0.28"]
    assert Bound(0.3, 0.1).faults(found) == [
        "worst 0.4 > 0.1",
        "another token where the two best are 0.25 apart",
    ]
    assert found.share_within(0.3) == pytest.approx(2 / 3)
    assert line("x", found, Bound(0.3, 0.1)).endswith(
        "FAILED: worst 0.4 > 0.1, another token where the two best are 0.25 apart"
    )


@pytest.mark.starter
def test_no_gpu_is_said(capsys: pytest.CaptureFixture[str]) -> None:
    """These tests see no GPU (conftest)."""
    assert main(["--device", "cuda"]) == 2
    assert "no NVIDIA driver" in capsys.readouterr().err
