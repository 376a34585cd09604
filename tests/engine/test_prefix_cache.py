"""The prefix cache under a real model: an answer from the cache equals the cold answer (PFX cases, API-09)."""

import random
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.golden_models import rand_model
from engine.blocks import BlockManager
from engine.faults import Faults
from engine.loop import Engine, drain
from ref.checkpoint import read_checkpoint
from ref.config import read_config
from ref.model.llama import llama
from tests.engine.engines import (
    Output,
    Outputs,
    assert_equal,
    assert_prompt_logprobs,
    finish,
    request,
    run,
    tiny_engine,
)

VOCAB = 1000
SIZE = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rand_model(tmp_path_factory.mktemp("rand"))


def ids(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, 11]).integers(3, VOCAB, length).tolist()


def cold(folder: Path, prompt: list[int], **sampling: Any) -> Output:
    engine = tiny_engine(folder, enable_prefix_caching=False, max_num_batched_tokens=160)
    return run(engine, request("cold", prompt, **sampling))["cold"]


def answer(engine: Engine, prompt: list[int], cache_salt: str | None = None, **sampling: Any) -> Output:
    return run(engine, request("warm", prompt, cache_salt, **sampling))["warm"]


def test_pfx_02_shared_prefixes_a_small_budget_and_preemption(folder: Path) -> None:
    """PFX-02: prompts as long as the budget, half of each shared, with a pool that forces preemption."""
    prompts = [ids(24) + ids(23, seed=i) for i in range(24)]
    engine = tiny_engine(folder, num_gpu_blocks_override=48, max_num_batched_tokens=47, max_num_seqs=16)
    outputs = run(engine, *[request(str(i), prompt, max_tokens=20) for i, prompt in enumerate(prompts)])
    for i, prompt in enumerate(prompts):
        assert_equal(cold(folder, prompt, max_tokens=20), outputs[str(i)])
    assert engine.stats().preemptions > 0
    assert engine.stats().prefix_hit_tokens > 0


@pytest.mark.parametrize("changed_at", [1, 22])
def test_pfx_03_a_hash_that_is_always_the_same(folder: Path, changed_at: int) -> None:
    """PFX-03: prompts that differ in their first or last whole block only get their cold answers."""
    engine = tiny_engine(folder)
    engine.scheduler.blocks = BlockManager(64, SIZE, hash_function=lambda parent, content: b"")
    theirs = ids(26)
    ours = [*theirs[:changed_at], theirs[changed_at] + 1, *theirs[changed_at + 1 :]]
    for prompt in (theirs, ours, theirs, ours):
        assert_equal(cold(folder, prompt), answer(engine, prompt))


def test_pfx_04_shared_blocks_do_not_change_while_they_are_shared(folder: Path) -> None:
    """PFX-04: 16 readers of one prompt, and strangers that reuse blocks meanwhile."""
    engine = tiny_engine(folder, num_gpu_blocks_override=100, max_num_seqs=20)
    prompt = ids(22)
    cold_output = cold(folder, prompt, max_tokens=24)
    engine.add(request("first", prompt, max_tokens=24))
    outputs = Outputs()
    outputs.take(engine.step())
    for i in range(15):
        engine.add(request(f"reader {i}", prompt, max_tokens=24))
    for i in range(60):
        engine.add(request(f"stranger {i}", ids(5 + i % 9, seed=1 + i), max_tokens=1 + i % 3))
    outputs.take(engine.step())
    shared = engine.scheduler.running[0].block_ids[: 22 // SIZE]
    assert all(seq.block_ids[: len(shared)] == shared for seq in engine.scheduler.running[:16])
    cache = engine.runner.cache
    before = [arrays[layer][shared].copy() for arrays in (cache.k_cache, cache.v_cache) for layer in arrays]
    while "first" not in outputs or outputs["first"].finish_reason is None:
        outputs.take(engine.step())
        after = [arrays[layer][shared] for arrays in (cache.k_cache, cache.v_cache) for layer in arrays]
        assert all(np.array_equal(one, other) for one, other in zip(before, after, strict=True))
    finish(engine, outputs)
    for name in ["first", *(f"reader {i}" for i in range(15))]:
        assert_equal(cold_output, outputs[name])


@pytest.mark.parametrize("how", ["abort", "preempt"])
def test_pfx_05_a_dropped_prefill_and_the_same_prompt_again(folder: Path, how: str) -> None:
    """PFX-05: dropped at random points of 8 chunks, the pool filled with other data, then sent again."""
    prompt = ids(64)
    cold_output = cold(folder, prompt, max_tokens=2)
    engine = tiny_engine(folder, num_gpu_blocks_override=20, max_num_batched_tokens=8)
    rng = random.Random(0)
    for number in range(25):
        engine.add(request("victim", prompt, max_tokens=2))
        outputs = Outputs()
        for _ in range(rng.randint(1, 7)):
            outputs.take(engine.step())
        if how == "abort":
            engine.abort("victim")
        elif engine.has_work:
            engine.scheduler.preempt(engine.scheduler.running[0])
        engine.add(request("filler", ids(rng.randint(20, 70), seed=1 + number), max_tokens=1))
        finish(engine, outputs)
        if how == "preempt":
            assert_equal(cold_output, outputs["victim"])
        assert_equal(cold_output, answer(engine, prompt, max_tokens=2))


def test_pfx_06_a_pool_for_three_prompts(folder: Path) -> None:
    """PFX-06: ten prompts in random order, lengths around multiples of the block size, an audit after each step."""
    rng = random.Random(0)
    engine = tiny_engine(folder, num_gpu_blocks_override=3 * 5)
    cold_outputs: dict[tuple[int, int], Output] = {}
    for _ in range(100):
        which, length = rng.randrange(10), rng.randint(15, 17)
        if (which, length) not in cold_outputs:
            cold_outputs[which, length] = cold(folder, ids(length, which), max_tokens=4)
        assert_equal(cold_outputs[which, length], answer(engine, ids(length, which), max_tokens=4))
    assert engine.stats().prefix_hit_tokens > 0


def test_pfx_07_salts_see_nothing_of_each_other(folder: Path) -> None:
    """PFX-07: the same prompt with another salt is computed anew, and gives the same answer."""
    engine = tiny_engine(folder)
    prompt = ids(10)
    cold_output = cold(folder, prompt)
    found = []
    for salt in ("s1", "s2", None, "s2", "s1", None):
        output = answer(engine, prompt, salt)
        assert_equal(cold_output, output)
        found.append(output.num_cached_tokens)
    assert found == [0, 0, 0, 8, 8, 8]


# ---- prompt logprobs


def test_pfx_08_prompt_logprobs_cold_warm_and_beside_plain_requests(folder: Path) -> None:
    """PFX-08, API-09: sent twice, then plain, then again; and a plain one afterwards still hits the cache."""
    prompt = ids(33)
    expected = cold(folder, prompt, max_tokens=1, prompt_logprobs=1)
    assert expected.prompt_logprobs is not None
    assert [entry and entry.token_id for entry in expected.prompt_logprobs] == [None, *prompt[1:]]
    assert all(len(entry.top) == 1 for entry in expected.prompt_logprobs if entry is not None)
    engine = tiny_engine(folder)
    for _ in range(2):
        for _ in range(2):
            output = answer(engine, prompt, max_tokens=1, prompt_logprobs=1)
            assert output.prompt_logprobs is not None
            assert_prompt_logprobs(expected.prompt_logprobs, output.prompt_logprobs, tolerance=1e-4)
            assert output.num_cached_tokens == 0
            assert_equal(expected, output)
        plain = answer(engine, prompt, max_tokens=1)
        assert plain.prompt_logprobs is None
        assert plain.num_cached_tokens == 32


@pytest.mark.parametrize("chunk", [8, 13, 33])
@pytest.mark.parametrize("preempted_after", [None, 1, 2, 4])
def test_prompt_logprobs_in_chunks_and_broken_off(folder: Path, chunk: int, preempted_after: int | None) -> None:
    """API-09: complete, in order and once, also when the prefill is broken off and begins anew."""
    prompt = ids(33)
    expected = cold(folder, prompt, prompt_logprobs=2)
    engine = tiny_engine(folder, max_num_batched_tokens=chunk)
    other = request("other", ids(5, seed=1), max_tokens=30)
    engine.add(other)
    engine.step()
    engine.add(request("a", prompt, prompt_logprobs=2))
    outputs = Outputs()
    for _ in range(preempted_after or 0):
        outputs.take(engine.step())
    if preempted_after is not None:
        engine.scheduler.preempt(engine.scheduler.running[1])
    finish(engine, outputs)
    assert expected.prompt_logprobs is not None
    assert outputs["a"].prompt_logprobs is not None
    assert_prompt_logprobs(expected.prompt_logprobs, outputs["a"].prompt_logprobs)
    assert_equal(expected, outputs["a"])


def test_prompt_logprobs_of_one_token_are_one_none(folder: Path) -> None:
    assert cold(folder, [5], prompt_logprobs=3).prompt_logprobs == [None]


@pytest.mark.parametrize("caching", [True, False])
def test_the_first_choice_has_the_prompt_logprobs_of_all(folder: Path, caching: bool) -> None:
    """Its event comes before any of the others', which read the prompt's blocks from the cache if there is one."""
    engine = tiny_engine(folder, max_num_batched_tokens=10, enable_prefix_caching=caching)
    engine.add(request("a", ids(21), n=3, temperature=1.0, seed=1, prompt_logprobs=0))
    events = list(drain(engine))
    assert events[0].index == 0
    assert len(events[0].prompt_logprobs or ()) == 21
    assert all(event.prompt_logprobs is None for event in events[1:])
    cached = {event.index: event.num_cached_tokens for event in events}
    assert cached == ({0: 0, 1: 20, 2: 20} if caching else {0: 0, 1: 0, 2: 0})


# ---- rope tables of their own


@pytest.fixture(scope="module")
def dynamic_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    scaling = {"type": "dynamic", "factor": 2.0}
    return rand_model(tmp_path_factory.mktemp("dynamic"), rope_scaling=scaling, max_position_embeddings=32)


def test_dynamic_tables_of_different_prompt_lengths_share_no_block(dynamic_folder: Path) -> None:
    text = ids(60)
    engine = tiny_engine(dynamic_folder)
    found = {}
    for length in (32, 40, 41, 50):
        output = answer(engine, text[:length])
        found[length] = output.num_cached_tokens
        assert_equal(cold(dynamic_folder, text[:length]), output)
    assert found == dict.fromkeys((32, 40, 41, 50), 0)
    assert answer(engine, text[:41]).num_cached_tokens == 40
    assert answer(engine, text[:20]).num_cached_tokens == 16, "short prompts have the usual table, as 32 has"


@pytest.mark.parametrize("length", [20, 40])
def test_a_dynamic_table_is_kept_through_growth_and_preemption(dynamic_folder: Path, length: int) -> None:
    """The first token is the reference's; the table that gave it stays, however long the text becomes."""
    prompt = ids(length)
    undisturbed = cold(dynamic_folder, prompt, max_tokens=40)
    logits = llama(read_config(dynamic_folder), read_checkpoint(dynamic_folder), prompt)[-1]
    assert undisturbed.token_ids[0] == int(logits.argmax())
    faults = Faults(preempt_at={"a": {length + 3, length + 20, length + 33}})
    for caching in (True, False):
        faults.preempt_at["a"] |= {length + 3, length + 20, length + 33}
        engine = tiny_engine(dynamic_folder, faults, enable_prefix_caching=caching, max_num_batched_tokens=16)
        assert_equal(undisturbed, run(engine, request("a", prompt, max_tokens=40))["a"])
        assert engine.stats().preemptions == 3
