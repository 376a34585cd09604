"""The forward pass of a GPU, over a stand-in for CuPy: to the bit what eager steps give.

The stand-in is lazy and poisons its memory (see gpu_stand_in), so a step that reads what is not there yet, or not there
any more, gives other numbers here.
"""

from __future__ import annotations

import random
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from engine.batch import ForwardBatch, StepPlan
from engine.halves import Halving
from engine.loop import Engine
from tests.engine import gpu_stand_in as stand_in
from tests.engine.engines import Outputs, finish, request
from tests.engine.gpu_stand_in import gpu_forward
from tests.engine.stand_in_engine import TOKEN_SIZES, make_engine, model_folder

__all__ = ["gpu_forward"]  # a fixture


def storm(engine: Engine, seed: int) -> Outputs:
    """Requests that come while others run, with prompts of any length, some of them sampled, one aborted."""
    rng = random.Random(seed)
    outputs = Outputs()
    for number in range(14):
        wants: dict[str, Any] = {"max_tokens": rng.choice([1, 3, 12, 30]), "seed": number}
        if rng.random() < 0.3:
            wants |= {"temperature": 1.0, "top_p": 0.9}
        if rng.random() < 0.5:
            wants["logprobs"] = None
        if rng.random() < 0.2:
            wants["prompt_logprobs"] = 1
        if rng.random() < 0.2:
            wants["repetition_penalty"] = 1.3
        prompt = [rng.randrange(4, 60) for _ in range(rng.choice([1, 2, 5, 9, 30, 45]))]
        engine.add(request(str(number), prompt, **wants))
        for _ in range(rng.choice([0, 0, 1, 2])):
            outputs.take(engine.step())
        if number == 7:
            engine.abort("6")
            outputs.pop("6", None)
    return finish(engine, outputs)


@pytest.mark.parametrize(
    ("name", "seed"),
    [("llama", 1), ("llama", 7), ("mistral", 8), ("dynamic", 3), ("minicpm", 4), ("command_r", 5), ("cpm1", 6)],
)
def test_storm(name: str, seed: int, gpu_forward: ModuleType, tmp_path: Path) -> None:
    """Mixed steps, chunks, padding, preemption, penalties, overlap: all outputs are those of an eager engine."""
    folder = model_folder(tmp_path, name)
    settings = {"num_gpu_blocks_override": 18, "max_model_len": 60}
    engine, eager = make_engine(folder, gpu_forward, **settings), make_engine(folder, None, **settings)
    kinds = note_kinds(engine.runner.forward)
    before = stand_in.STREAM.num_graphs
    assert storm(engine, seed) == storm(eager, seed)
    assert engine.scheduler.num_preemptions > 0
    assert kinds == {"decode", "mixed", "prompts", "large"}
    assert stand_in.STREAM.num_graphs - before > engine.stats().steps, "graphs in pieces were launched"


@pytest.mark.parametrize(("name", "seed"), [("llama", 2), ("mistral", 3), ("command_r", 4)])
def test_storm_in_halves(name: str, seed: int, gpu_forward: ModuleType, tmp_path: Path) -> None:
    """Large steps, graphs in pieces and of decoding, with a second stream that is as late as may be."""
    folder = model_folder(tmp_path, name)
    settings = {"num_gpu_blocks_override": 18, "max_model_len": 60}
    engine = make_engine(folder, gpu_forward, Halving(min_tokens=2, min_decodes=2), **settings)
    halved = note_halves(engine.runner.forward)
    assert storm(engine, seed) == storm(make_engine(folder, None, **settings), seed)
    assert halved >= {2, *TOKEN_SIZES[:-1]}, "graphs"
    assert max(halved) > TOKEN_SIZES[-1]
    assert stand_in.STREAM.num_graphs > 0


def note_halves(forward: Any) -> set[int]:
    """Tokens of the steps in halves that it has made since."""
    sizes: set[int] = set()
    make_batch = forward.batch

    def noted(plan: StepPlan) -> ForwardBatch:
        batch: ForwardBatch = make_batch(plan)
        if batch.halves is not None:
            sizes.add(batch.num_tokens)
            assert sum(half.num_tokens for half in batch.halves) == batch.num_tokens
        return batch

    forward.batch = noted
    return sizes


def note_kinds(forward: Any) -> set[str]:
    """The kinds of steps that it has made since."""
    kinds: set[str] = set()
    make_batch = forward.batch

    def noted(plan: StepPlan) -> ForwardBatch:
        if plan.num_tokens > TOKEN_SIZES[-1]:
            kinds.add("large")
        else:
            kinds.add({0: "prompts", plan.num_tokens: "decode"}.get(plan.num_decodes, "mixed"))
        return make_batch(plan)

    forward.batch = noted
    return kinds
