"""Sampling parameters of one request, in a batch that others join and leave (SAM-07, SAM-08, SAM-09)."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.golden_models import rand_model
from engine.errors import RequestError
from engine.faults import Faults
from ref import sampling as ref
from ref.checkpoint import read_checkpoint
from ref.config import read_config
from ref.model.llama import llama
from tests.engine.engines import Outputs, assert_equal, assert_same_draws, finish, request, run, tiny_engine

SEEDED = {"temperature": 1.0, "top_k": 8}  # few borders between tokens: see test_equality


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rand_model(tmp_path_factory.mktemp("rand"))


@pytest.fixture(scope="module")
def small_vocab_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model that repeats itself, as it has few words."""
    return rand_model(tmp_path_factory.mktemp("small"), vocab_size=40, max_position_embeddings=4096)


def ids(length: int, seed: int = 0, vocab_size: int = 1000) -> list[int]:
    return np.random.default_rng([seed, 13]).integers(3, vocab_size, length).tolist()


def test_sam_07_a_banned_id_never_comes_and_plain_rows_are_as_alone(folder: Path) -> None:
    """SAM-07 a: four choices that would like the banned ids best, beside three plain requests that join and leave."""
    prompt = ids(9)
    engine = tiny_engine(folder, max_num_seqs=8)
    wanted = run(engine, request("free", prompt, max_tokens=24, n=4, **(SEEDED | {"seed": 3})))
    counts = np.bincount([token_id for output in wanted.values() for token_id in output.token_ids])
    banned = np.argsort(-counts)[:2].tolist()
    plain = [request(f"plain {i}", ids(5 + i, seed=i), max_tokens=6 + 5 * i) for i in range(3)]
    alone = Outputs()
    for one in plain:
        alone |= run(tiny_engine(folder), one)
    outputs = Outputs()
    engine.add(plain[0])
    outputs.take(engine.step())
    bias = dict.fromkeys(banned, -100.0)
    engine.add(request("a", prompt, max_tokens=24, n=4, logit_bias=bias, **(SEEDED | {"seed": 3})))
    for one in plain[1:]:
        outputs.take(engine.step())
        engine.add(one)
    finish(engine, outputs)
    for name in ("a", "a/1", "a/2", "a/3"):
        assert len(outputs[name].token_ids) == 24
        assert not set(banned) & set(outputs[name].token_ids)
    for one in plain:
        assert_equal(alone[one.request_id], outputs[one.request_id])


def test_sam_07_a_forced_id_comes_every_time(folder: Path) -> None:
    """SAM-07 b."""
    engine = tiny_engine(folder)
    outputs = run(engine, request("b", ids(4), max_tokens=5, logit_bias={42: 100.0}), request("plain", ids(4)))
    assert outputs["b"].token_ids == [42] * 5
    assert outputs["plain"].token_ids != [42] * 8


def test_sam_08_the_same_seed_gives_the_same_answer_whatever_the_neighbours(folder: Path) -> None:
    """SAM-08: alone; as first, third and seventh of a batch of other seeds; and from a warm prefix cache."""
    prompt = ids(12)
    one = request("one", prompt, max_tokens=32, seed=1234, **SEEDED)
    alone = run(tiny_engine(folder), one)["one"]
    for place in (0, 2, 6):
        others = [request(str(i), prompt[: 12 - i], max_tokens=32 - i, seed=i, **SEEDED) for i in range(7)]
        engine = tiny_engine(folder)
        outputs = run(engine, *others[:place], one, *others[place:])
        assert_same_draws(alone, outputs["one"])
        assert all(output.token_ids != alone.token_ids for name, output in outputs.items() if name != "one")
        warm = run(engine, one)["one"]
        assert warm.num_cached_tokens > 0
        assert_same_draws(alone, warm)
    other_seed = run(tiny_engine(folder), request("one", prompt, max_tokens=32, seed=1235, **SEEDED))["one"]
    assert other_seed.token_ids != alone.token_ids


def test_without_a_seed_every_request_and_choice_draws_its_own(folder: Path) -> None:
    engine = tiny_engine(folder)
    requests = [request(name, ids(5), max_tokens=16, n=2, **SEEDED) for name in ("a", "b")]
    outputs = run(engine, *requests)
    assert len({tuple(output.token_ids) for output in outputs.values()}) == 4
    again = run(tiny_engine(folder), *requests)
    assert {n: o.token_ids for n, o in again.items()} == {n: o.token_ids for n, o in outputs.items()}, "--seed decides"


PENALTIES = {
    "a": {"repetition_penalty": 1.3},
    "b": {"presence_penalty": 1.5, "frequency_penalty": 1.5},
}


@pytest.mark.parametrize("name", PENALTIES)
def test_sam_09_penalties_in_a_batch_in_chunks_and_after_preemption(small_vocab_folder: Path, name: str) -> None:
    """SAM-09: prompts of 1, 7 and 3000 tokens with penalties on the middle one; then in chunks, then preempted. The
    repetition penalty counts prompt and output, the other two the output only.
    """
    folder, prompt = small_vocab_folder, [17, 4, 17, 4, 17, 4, 17]
    limits = {"max_model_len": 3100, "num_gpu_blocks_override": 220, "block_size": 16, "max_num_batched_tokens": 1024}
    middle = request("middle", prompt, max_tokens=16, **PENALTIES[name])
    long, short = request("long", ids(3000, vocab_size=40), max_tokens=2), request("short", [9], max_tokens=16)
    outputs = run(tiny_engine(folder, **limits), short, middle, long)
    plain = run(tiny_engine(folder, **limits), short)
    assert_equal(plain["short"], outputs["short"])

    text = prompt + outputs["middle"].token_ids
    logits = llama(read_config(folder), read_checkpoint(folder), text).astype(np.float32)
    params = {"repetition_penalty": 1.0, "presence_penalty": 0.0, "frequency_penalty": 0.0} | PENALTIES[name]
    changed = 0
    for end in range(len(prompt), len(text)):
        row = ref.apply_penalties(logits[end - 1], prompt, text[len(prompt) : end], **params)
        best = int(row.argmax())
        assert text[end] == best or row[best] - row[text[end]] < 1e-4, f"token {end}"
        changed += best != int(logits[end - 1].argmax())
    assert changed > 0, "the penalty changed nothing, so nothing was shown"

    chunked = tiny_engine(folder, max_num_batched_tokens=3, max_num_seqs=3)
    assert_equal(outputs["middle"], run(chunked, middle)["middle"])
    for caching in (True, False):
        faults = Faults(preempt_at={"middle": {8, 12, 20}})
        engine = tiny_engine(folder, faults, enable_prefix_caching=caching)
        assert_equal(outputs["middle"], run(engine, middle)["middle"])
        assert engine.stats().preemptions == 3


@pytest.mark.parametrize(
    ("sampling", "named"),
    [
        ({"logit_bias": dict.fromkeys(range(1000), -100.0)}, "logit_bias"),
        ({"allowed_token_ids": (7,), "logit_bias": {7: -100.0}}, "allowed_token_ids"),
        ({"allowed_token_ids": (2,), "min_tokens": 3, "ignore_eos": False}, "allowed_token_ids"),
        ({"allowed_token_ids": (40,), "stop_token_ids": (40,), "min_tokens": 3}, "allowed_token_ids"),
        ({"allowed_token_ids": (40,), "bad_words_ids": ((40,),)}, "allowed_token_ids"),
    ],
)
def test_masks_that_leave_nothing_are_the_callers_fault(folder: Path, sampling: dict[str, Any], named: str) -> None:
    """Refused before anything is computed; one token less in the mask is served."""
    engine = tiny_engine(folder)
    with pytest.raises(RequestError, match="no token is left to sample") as caught:
        engine.add(request("a", [5, 6], **sampling))
    assert caught.value.param == named
    assert not engine.has_work
    engine.add(request("b", [5, 6], logit_bias=dict.fromkeys(range(999), -100.0), max_tokens=2))
    assert finish(engine)["b"].token_ids == [999, 999]


@pytest.mark.parametrize(
    ("name", "value"), [("temperature", 1e39), ("temperature", 101.0), ("repetition_penalty", 1e-300)]
)
def test_sam_02_values_that_would_overflow_are_refused(folder: Path, name: str, value: float) -> None:
    engine = tiny_engine(folder)
    with pytest.raises(RequestError, match=name):
        engine.add(request("a", [5, 6], **{name: value}))
    engine.add(request("b", [5, 6], temperature=100.0, repetition_penalty=0.01, logit_bias={5: -100.0}))
    assert finish(engine)["b"].finish_reason == "length"
