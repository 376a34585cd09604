"""The starter model through the real engine, against what transformers makes of it (conformance/golden/starter.json).

Ids are equal, or part only where the reference's two best logits are within NEAR_TIE; logprobs agree within
LOGPROB_BOUND. Both bounds allow for float32 sums in another order over 30 layers (seen: 7e-5).
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

import conformance
from conformance.starter_prompts import STARTER_PROMPTS
from engine.api import GenerationRequest, SamplingParams, TokenEvent, TokenLogprob
from engine.build import build_engine
from engine.checkpoint.source import ModelSource
from engine.checkpoint.text import load_text
from engine.config import EngineConfig
from engine.faults import Faults
from engine.llm import LLM
from engine.loop import Engine, drain

pytestmark = pytest.mark.starter

NEAR_TIE = 1e-3
LOGPROB_BOUND = 2e-3
GOLDEN: list[dict[str, Any]] = json.loads((Path(conformance.__file__).parent / "golden" / "starter.json").read_text())


@dataclass
class Output:
    ids: list[int]
    logprobs: list[TokenLogprob]


def run(engine: Engine, names: list[str], faults: Faults | None = None) -> dict[str, Output]:
    """Greedy outputs of golden prompts, all in one batch."""
    golden = {entry["name"]: entry for entry in GOLDEN}
    for name in names:
        sampling = SamplingParams(temperature=0, max_tokens=len(golden[name]["greedy_ids"]), logprobs=5)
        engine.add(GenerationRequest(name, tuple(golden[name]["prompt_ids"]), sampling))
    outputs = {name: Output([], []) for name in names}
    for event in drain(engine):
        assert event.finish_reason != "error"
        take(event, outputs)
    return outputs


def take(event: TokenEvent, outputs: Mapping[str, Output]) -> None:
    outputs[event.request_id].ids.extend(event.token_ids)
    outputs[event.request_id].logprobs.extend(event.logprobs or ())


def check(entry: dict[str, Any], output: Output) -> None:
    """Compares up to and including the first place where the ids part."""
    for place, (expected, found) in enumerate(zip(entry["greedy_ids"], output.ids, strict=False)):
        best = dict(entry["top5"][place])
        mine = dict(output.logprobs[place].top)
        common = best.keys() & mine.keys()
        assert len(common) >= 4
        assert max(abs(best[token_id] - mine[token_id]) for token_id in common) < LOGPROB_BOUND
        if found != expected:
            ranked = sorted(best.values(), reverse=True)
            assert ranked[0] - ranked[1] < NEAR_TIE, f"{entry['name']} parts at {place}"
            return
    assert len(output.ids) == len(entry["greedy_ids"])


@pytest.fixture(scope="module")
def engine() -> Engine:
    return build_engine(EngineConfig(num_gpu_blocks_override=512)).engine


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


def test_one_batch_of_all_prompts(engine: Engine) -> None:
    outputs = run(engine, [entry["name"] for entry in GOLDEN])
    for entry in GOLDEN:
        check(entry, outputs[entry["name"]])


def test_alone_and_with_a_warm_prefix_cache(engine: Engine) -> None:
    """The prompt that was in the batch before: now its blocks are cached, and nobody else runs."""
    hits = engine.stats().prefix_hit_tokens
    for name in ("chat_capital", "raw_long"):
        check(next(entry for entry in GOLDEN if entry["name"] == name), run(engine, [name])[name])
    assert engine.stats().prefix_hit_tokens > hits


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
    outputs = run(built.engine, ["raw_long", "raw_code", "chat_capital", "raw_chinese"])
    for entry in GOLDEN:
        if entry["name"] in outputs:
            check(entry, outputs[entry["name"]])
    if faults is not None:
        assert built.engine.stats().preemptions == 3


def test_the_offline_class_answers() -> None:
    llm = LLM(num_gpu_blocks_override=64)
    question = [{"role": "user", "content": "What is the capital of France?"}]
    (output,) = llm.chat(question, SamplingParams(temperature=0, max_tokens=24))
    assert output.text == "The capital of France is Paris."
    assert output.completions[0].finish_reason == "stop"
    (completed,) = llm.generate("The capital of France is", SamplingParams(temperature=0, max_tokens=4))
    assert "Paris" in (completed.text or "")
