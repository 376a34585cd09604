"""engine.faults: each fault on purpose does what it says and hurts nobody else (SAM-05, KVM-03), with a real model."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.golden_models import rand_model
from engine.api import TokenEvent
from engine.faults import Faults, InjectedFault
from engine.loop import Engine
from tests.engine.engines import Outputs, assert_equal, finish, request, run, tiny_engine
from tests.engine.fake_runner import fake_engine

pytestmark = pytest.mark.usefixtures("quiet_loop")

VOCAB = 1000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rand_model(tmp_path_factory.mktemp("rand"))


def ids(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, 17]).integers(3, VOCAB, length).tolist()


def four(**sampling: Any) -> list[Any]:
    """Four requests that share no prefix."""
    return [request(str(i), ids(9 + i, seed=i), **({"max_tokens": 10} | sampling)) for i in range(4)]


GREEDY: dict[str, Any] = {}
RANDOM: dict[str, Any] = {"temperature": 1.0, "seed": 7}
BAD = {
    "all NaN": {"bad_value": float("nan")},
    "all -inf": {"bad_value": float("-inf")},
    "+inf at two ids": {"bad_value": float("inf"), "bad_ids": (5, 77)},
    "NaN at one id": {"bad_value": float("nan"), "bad_ids": (999,)},
}


@pytest.mark.parametrize("edits", [{}, {"frequency_penalty": 0.5, "logit_bias": {3: 1.0}}], ids=["plain", "edits"])
@pytest.mark.parametrize("sampling", [GREEDY, RANDOM], ids=["greedy", "random"])
@pytest.mark.parametrize("bad", BAD)
def test_sam_05_one_bad_row(folder: Path, bad: str, sampling: dict[str, Any], edits: dict[str, Any]) -> None:
    """SAM-05: row 2 of 4 goes bad at its fifth token. It ends with a clear error, its blocks are not kept, a counter
    goes up; the others are bit-equal to a run in which row 2 ends there by itself, so with the same step shapes.
    """
    requests = four(**sampling, **edits)
    healthy = [*requests[:2], request("2", ids(11, seed=2), max_tokens=5, **sampling, **edits), requests[3]]
    engine = tiny_engine(folder)
    expected = run(engine, *healthy)
    assert run(engine, request("again", ids(11, seed=2)))["again"].num_cached_tokens == 8

    engine = tiny_engine(folder, Faults(nan_at={"2": 4}, **BAD[bad]))  # type: ignore[arg-type]
    outputs = run(engine, *requests)
    for name in ("0", "1", "3"):
        assert outputs[name] == expected[name], "bitwise, logprobs too"
    assert outputs["2"].finish_reason == "error"
    assert outputs["2"].token_ids == expected["2"].token_ids[:4]
    assert "NaN or infinite" in str(outputs["2"].error)
    assert engine.stats().bad_rows == 1
    assert engine.stats().failed_steps == 0
    assert run(engine, request("again", ids(11, seed=2)))["again"].num_cached_tokens == 0
    assert run(engine, request("third", ids(12, seed=3)))["third"].num_cached_tokens == 8, "others' blocks are kept"


def test_a_bad_row_gives_back_its_prefix_without_harm_to_who_shares_it(folder: Path) -> None:
    prompt = ids(20)
    engine = tiny_engine(folder, Faults(nan_at={"bad": 2}))
    cold = run(tiny_engine(folder), request("a", prompt, max_tokens=12))["a"]
    engine.add(request("a", prompt, max_tokens=12))
    outputs = Outputs()
    outputs.take(engine.step())
    engine.add(request("bad", prompt, max_tokens=12))
    finish(engine, outputs)
    assert outputs["bad"].num_cached_tokens == 16
    assert outputs["bad"].finish_reason == "error"
    assert_equal(cold, outputs["a"])
    assert_equal(cold, run(engine, request("b", prompt, max_tokens=12))["b"])


@pytest.mark.parametrize("num_output", [0, 1, 6])
@pytest.mark.parametrize("caching", [True, False])
def test_only_the_request_at_fault_ends_when_its_steps_raise(folder: Path, num_output: int, caching: bool) -> None:
    """Three others run on and are equal to a run alone."""
    requests = four(max_tokens=16)
    engine = tiny_engine(folder, Faults(raise_at={"2": num_output}), enable_prefix_caching=caching)
    outputs = run(engine, *requests)
    for one in requests:
        if one.request_id != "2":
            assert_equal(run(tiny_engine(folder), one)[one.request_id], outputs[one.request_id])
    assert outputs["2"].finish_reason == "error"
    assert len(outputs["2"].token_ids) == num_output
    assert engine.stats().failed_steps == 2


@pytest.mark.parametrize("step", [1, 2, 20])
def test_kvm_03_a_step_that_raises_once_is_computed_again(folder: Path, step: int) -> None:
    """KVM-03: in prefill and in decode at step 20; nobody is lost, and the engine works on."""
    requests = four(max_tokens=24)
    engine = tiny_engine(folder, Faults(raise_once_at={step}), max_num_batched_tokens=30)
    outputs = run(engine, *requests)
    for one in requests:
        assert_equal(run(tiny_engine(folder), one)[one.request_id], outputs[one.request_id])
    assert engine.stats().failed_steps == 1
    assert_equal(run(tiny_engine(folder), requests[0])["0"], run(engine, requests[0])["0"])


@pytest.mark.parametrize("layer", [0, 1])
def test_kvm_03_memory_missing_in_the_middle_of_the_model(folder: Path, layer: int) -> None:
    """KVM-03: some layers have written the KV of the step, others have not."""
    requests = four(max_tokens=12)
    engine = tiny_engine(folder)
    cache = engine.runner.cache
    healthy = cache.k_cache[layer]
    for one in requests:
        engine.add(one)
    outputs = Outputs()
    for _ in range(3):
        outputs.take(engine.step())
    del cache.k_cache[layer]
    outputs.take(engine.step())
    cache.k_cache[layer] = healthy
    finish(engine, outputs)
    assert engine.stats().failed_steps == 1
    for one in requests:
        assert_equal(run(tiny_engine(folder), one)[one.request_id], outputs[one.request_id])


# ---- the object itself


def prepared(faults: Faults, **settings: Any) -> Engine:
    return fake_engine(num_blocks=12, block_size=4, faults=faults, **settings)[0]


def fake_request(request_id: str, first: int, **sampling: Any) -> Any:
    return request(request_id, [(first + i) % 50 for i in range(7)], temperature=1.0, seed=1, **sampling)


def test_preempt_at_preempts_once_at_each_length() -> None:
    engine = prepared(Faults(preempt_at={"a": {8, 10}}))
    one = fake_request("a", 0)
    assert run(engine, one)["a"].token_ids == run(prepared(Faults()), one)["a"].token_ids
    assert engine.stats().preemptions == 2


def test_in_a_step_that_is_refused_blocks_the_youngest_gives_way() -> None:
    """Two decode and both need a block; as none is free, the older gets it from the younger, as with a full pool."""
    requests = [fake_request("old", 0), fake_request("young", 20)]
    engine = prepared(Faults(refuse_blocks_at={3}))
    for one in requests:
        engine.add(one)
    outputs = Outputs()
    for _ in range(3):
        outputs.take(engine.step())
    assert engine.scheduler.blocks.num_withheld == 0
    assert engine.stats().num_blocks_used == 3
    assert [seq.request.request_id for seq in engine.scheduler.waiting] == ["young"]
    finish(engine, outputs)
    assert engine.stats().preemptions == 1
    undisturbed = run(prepared(Faults()), *requests)
    assert {n: o.token_ids for n, o in outputs.items()} == {n: o.token_ids for n, o in undisturbed.items()}


def test_alone_and_refused_a_block_a_sequence_ends_with_length() -> None:
    engine = prepared(Faults(refuse_blocks_at={3}))
    output = run(engine, fake_request("a", 0))["a"]
    assert (output.finish_reason, len(output.token_ids)) == ("length", 2)


def test_nothing_is_admitted_in_a_step_that_is_refused_blocks() -> None:
    engine = prepared(Faults(refuse_blocks_at={1}))
    engine.add(fake_request("a", 0))
    assert engine.step() == []
    assert engine.stats().num_waiting == 1
    assert len(finish(engine)["a"].token_ids) == 8


def test_a_refusal_where_no_block_is_wanted_changes_nothing() -> None:
    one = fake_request("a", 0)
    engine = prepared(Faults(refuse_blocks_at={2}))
    assert run(engine, one)["a"].token_ids == run(prepared(Faults()), one)["a"].token_ids
    assert engine.stats().preemptions == 0


def test_raise_at_and_raise_once_at_raise_the_same_exception() -> None:
    with pytest.raises(InjectedFault, match="step 4"):
        Faults(raise_once_at={4}).before_run(4, [])
    Faults(raise_once_at={4}).before_run(5, [])
    engine = prepared(Faults(raise_at={"a": 1}))
    engine.add(fake_request("a", 0))
    events: list[TokenEvent] = engine.step()
    with pytest.raises(InjectedFault, match="request a"):
        Faults(raise_at={"a": 1}).before_run(1, engine.scheduler.running)
    assert len(events) == 1


def test_a_slot_that_goes_bad_serves_the_next_request(folder: Path) -> None:
    engine = tiny_engine(folder, Faults(nan_at={"bad": 0}), max_num_seqs=1)
    outputs = run(engine, request("bad", ids(5)), request("good", ids(5), frequency_penalty=0.5))
    assert outputs["bad"].finish_reason == "error"
    assert_equal(run(tiny_engine(folder), request("good", ids(5), frequency_penalty=0.5))["good"], outputs["good"])
