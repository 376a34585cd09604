"""One request, one answer: at any chunk size, block size, batch, cache state and after any preemption.

"Equal" is what the project says it is: logprobs within 1e-4 in float32, and the same ids up to the first near tie.
Undisturbed means alone in a fresh engine, the whole prompt in one step, no prefix cache.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from conformance.golden_models import rand_model
from engine.api import GenerationRequest
from engine.faults import Faults
from ref.checkpoint import read_checkpoint
from ref.config import read_config
from ref.model.llama import llama
from tests.engine.engines import (
    Output,
    Outputs,
    assert_equal,
    assert_prompt_logprobs,
    assert_same_draws,
    finish,
    request,
    run,
    tiny_engine,
)

VOCAB = 1000
MAX_LEN = 256
WHOLE = {"num_gpu_blocks_override": 64, "block_size": 16, "max_num_batched_tokens": 256, "max_model_len": MAX_LEN}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rand_model(tmp_path_factory.mktemp("rand"))


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, 7]).integers(3, VOCAB, length).tolist()


def alone(folder: Path, one: GenerationRequest, **settings: Any) -> Output:
    engine = tiny_engine(folder, enable_prefix_caching=False, **(WHOLE | settings))
    return run(engine, one)[one.request_id]


# ---- against the reference


def test_greedy_ids_and_logprobs_are_those_of_the_reference(folder: Path) -> None:
    output = alone(folder, request("a", prompt(21), max_tokens=24, logprobs=2, prompt_logprobs=2))
    text = [*prompt(21), *output.token_ids]
    logits = llama(read_config(folder), read_checkpoint(folder), text).astype(np.float64)
    logprobs = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
    assert output.prompt_logprobs is not None
    entries = [*output.prompt_logprobs, *output.logprobs]
    assert len(entries) == len(text)
    for place, entry in enumerate(entries):
        if entry is None:
            assert place == 0
            continue
        row = logprobs[place - 1]
        assert entry.token_id == text[place]
        assert entry.logprob == pytest.approx(row[entry.token_id], abs=1e-4)
        assert [logprob for _, logprob in entry.top] == pytest.approx(np.sort(row)[::-1][:2], abs=1e-4)
        if place >= 21:
            assert row[entry.token_id] >= row.max() - 1e-4


# ---- chunks, blocks, batches


@pytest.fixture(scope="module")
def whole_outputs(folder: Path) -> dict[int, Output]:
    """Undisturbed outputs by prompt length, made as they are asked for."""

    class Made(dict[int, Output]):
        def __missing__(self, length: int) -> Output:
            self[length] = alone(folder, border_request(length))
            return self[length]

    return Made()


def border_request(length: int) -> GenerationRequest:
    return request(f"length {length}", prompt(length, seed=length), logprobs=5, prompt_logprobs=2)


@pytest.mark.parametrize("block_size", [1, 3, 16])
@pytest.mark.parametrize("chunk", [1, 16, 17, 64, MAX_LEN])
def test_sch_04_chunk_borders(folder: Path, whole_outputs: dict[int, Output], chunk: int, block_size: int) -> None:
    """SCH-04: lengths around multiples of the chunk, chunks that are no multiple of a block, mixed with decodes."""
    unit = min(chunk, 64)
    lengths = sorted({n for n in (unit - 1, unit, unit + 1, 2 * unit, 2 * unit + 1, 3 * unit - 1) if n > 0})
    engine = tiny_engine(
        folder,
        block_size=block_size,
        num_gpu_blocks_override=-(-900 // block_size),
        max_num_batched_tokens=chunk,
        max_num_seqs=min(chunk, 6),
        max_model_len=MAX_LEN,
    )
    outputs = run(engine, *map(border_request, lengths))
    for length in lengths:
        output, undisturbed = outputs[f"length {length}"], whole_outputs[length]
        assert_equal(undisturbed, output)
        assert undisturbed.prompt_logprobs is not None
        assert output.prompt_logprobs is not None
        assert [entry and entry.token_id for entry in output.prompt_logprobs] == [None, *prompt(length, length)[1:]]
        assert_prompt_logprobs(undisturbed.prompt_logprobs, output.prompt_logprobs)


@pytest.mark.parametrize("num_others", [1, 7, 31])
def test_krn_01_neighbours_change_nothing(folder: Path, num_others: int) -> None:
    """KRN-01 on a CPU: alone, and among others of mixed lengths that come and go; repeated runs are bitwise equal."""
    one = request("one", prompt(19), max_tokens=40)
    undisturbed = alone(folder, one)
    runs: list[Outputs] = []
    for _ in range(2):
        engine = tiny_engine(
            folder,
            **(WHOLE | {"num_gpu_blocks_override": 400}),
            max_num_seqs=num_others + 1,
            enable_prefix_caching=False,
        )
        others = [request(str(i), prompt(3 + 5 * i % 60, i), max_tokens=2 + 7 * i % 50) for i in range(num_others)]
        runs.append(run(engine, *others[::2], one, *others[1::2]))
        assert_equal(undisturbed, runs[-1]["one"])
    assert runs[0] == runs[1], "the same steps give the same bits"


# ---- prefix cache


@pytest.mark.parametrize("length", [15, 16, 17, 32, 128])
def test_pfx_01_the_same_prompt_again(folder: Path, length: int) -> None:
    """PFX-01: answers from a warm cache equal the cold one; two at the same moment too; a token is always computed."""
    undisturbed = alone(folder, request("cold", prompt(length), max_tokens=4, logprobs=3))
    engine = tiny_engine(folder, **WHOLE)
    for number in range(3):
        output = run(engine, request(str(number), prompt(length), max_tokens=4, logprobs=3))[str(number)]
        assert_equal(undisturbed, output)
        assert output.num_cached_tokens == (0 if number == 0 else (length - 1) // 16 * 16)
    for warm_or_cold in (engine, tiny_engine(folder, **WHOLE)):
        twins = [request(name, prompt(length), max_tokens=4, logprobs=3) for name in ("a", "b")]
        for output in run(warm_or_cold, *twins).values():
            assert_equal(undisturbed, output)
            assert output.num_cached_tokens < length


def test_a_generated_continuation_is_read_from_the_cache(folder: Path) -> None:
    """The next turn of a conversation: prompt and answer of the last one are its prefix."""
    engine = tiny_engine(folder, **WHOLE)
    first = run(engine, request("first", prompt(20), max_tokens=30))["first"]
    turn = [*prompt(20), *first.token_ids, *prompt(5, seed=1)]
    second = run(engine, request("second", turn))["second"]
    assert second.num_cached_tokens == 48
    assert_equal(alone(folder, request("second", turn)), second)


# ---- preemption

# A draw falls between two tokens' shares of [0, 1), which move by about 2e-7 with the shape of the step. A small top_k
# leaves few such borders, so that no draw of a test is likely to hit one.
SEEDED = {"temperature": 1.0, "seed": 5, "top_k": 8}
KINDS: dict[str, dict[str, Any]] = {
    "greedy": {},
    "seeded": SEEDED | {"top_p": 0.95},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.5},
    "seeded penalties": SEEDED | {"temperature": 0.8, "seed": -3, "frequency_penalty": 1.0, "min_p": 0.01},
    "stop id": SEEDED | {"stop_token_ids": tuple(range(3, VOCAB, 20)), "min_tokens": 12},
}


def assert_as_undisturbed(undisturbed: Output, output: Output, params: dict[str, Any]) -> None:
    if "seed" in params:
        assert_same_draws(undisturbed, output)
    else:
        assert_equal(undisturbed, output)
    assert output.num_events == len(output.token_ids) == len(undisturbed.token_ids)


@pytest.mark.parametrize("kind", KINDS)
def test_sch_03_eight_requests_that_need_twice_the_pool(folder: Path, kind: str) -> None:
    """SCH-03: the same tokens and logprobs as alone, each once, and preemption did happen."""
    num_output = 128 if kind == "greedy" else 40
    requests = [request(str(i), prompt(8, i), max_tokens=num_output, **KINDS[kind]) for i in range(8)]
    pool = 8 * (8 + num_output) // 2 // 4
    engine = tiny_engine(folder, num_gpu_blocks_override=pool, max_num_seqs=8)
    for one in requests:
        engine.add(one)
    outputs = finish(engine)
    for one in requests:
        assert_as_undisturbed(alone(folder, one), outputs[one.request_id], KINDS[kind])
    stats = engine.stats()
    if kind != "stop id":  # these end early
        assert stats.preemptions > 0
        assert all(len(output.token_ids) == num_output for output in outputs.values())
    assert stats.prompt_tokens == 8 * 8
    assert stats.generated_tokens == sum(len(output.token_ids) for output in outputs.values())


@pytest.fixture(scope="module")
def kinds_alone(folder: Path) -> dict[str, Output]:
    return {kind: alone(folder, request("a", prompt(13), max_tokens=30, **params)) for kind, params in KINDS.items()}


@settings(max_examples=20, derandomize=True, deadline=None)
@given(
    kind=st.sampled_from(sorted(KINDS)),
    lengths=st.sets(st.integers(14, 42), min_size=1, max_size=4),
    caching=st.booleans(),
    chunk=st.sampled_from([4, 64]),
    data=st.data(),
)
def test_preemption_at_any_length(
    folder: Path,
    kinds_alone: dict[str, Output],
    kind: str,
    lengths: set[int],
    caching: bool,
    chunk: int,
    data: st.DataObject,
) -> None:
    faults = Faults(preempt_at={"a": set(lengths)})
    engine = tiny_engine(folder, faults, enable_prefix_caching=caching, max_num_batched_tokens=chunk, max_num_seqs=4)
    engine.add(request("a", prompt(13), max_tokens=30, **KINDS[kind]))
    other = request("b", prompt(9, seed=1), max_tokens=data.draw(st.integers(1, 40)))
    if data.draw(st.booleans()):
        engine.add(other)
    outputs = finish(engine)
    assert_as_undisturbed(kinds_alone[kind], outputs["a"], KINDS[kind])
    reached = {length for length in lengths if length < 13 + len(outputs["a"].token_ids)}
    assert engine.stats().preemptions >= len(reached) > 0 or not reached
