"""engine.sampler: min_tokens, bad words, logprobs, and what a slot remembers."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.api import SamplingParams, TokenLogprob
from engine.cpu import sampling as ops
from engine.errors import RequestFailedError
from engine.sampler import Sampler, prompt_logprobs
from ref import sampling as ref
from tests.engine.table_model import EOS, GREEDY, TABLE, VOCAB, new_sampler, run_one_step, step


def test_min_tokens_hold_back_every_end() -> None:
    """End-of-sequence and stop ids are masked for exactly min_tokens tokens, also across a resume."""
    sampling = replace(GREEDY, min_tokens=3, stop_token_ids=(9,))
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, [EOS, 9, 30]] = [5.0, 4.0, 3.0]
    for resume in (False, True):
        sampler = new_sampler()
        sampler.add(0, sampling, 0, [1], (), [EOS])
        output: list[int] = []
        for _ in range(4):
            if resume:
                sampler.remove(0)
                sampler.add(0, sampling, 0, [1], output, [EOS])
            output.append(int(sampler.sample(logits.copy(), np.array([0], dtype=np.int32)).token_ids[0]))
        assert output == [30, 30, 30, EOS]


def test_bad_words_end_where_the_output_began() -> None:
    """A bad word of one id never comes; one of several never comes in full, and the prompt is no part of it."""
    table = np.zeros((VOCAB, VOCAB), dtype=np.float32)
    for last, best, second in [(5, 6, 7), (6, 5, 8), (8, 5, 9)]:
        table[last, [best, second]] = [2.0, 1.0]
    sampling = replace(GREEDY, bad_words_ids=((6, 5), (7,), (5, 6, 8, 5)))
    sampler = new_sampler()
    sampler.add(0, sampling, 0, [5])
    output = [5]
    for _ in range(4):
        logits = table[[output[-1]]]
        output.append(int(sampler.sample(logits, np.array([0], dtype=np.int32)).token_ids[0]))
    assert output == [5, 6, 8, 5, 6]  # (6, 5) turns 5 into 8; (5, 6, 8, 5) would need the prompt's 5


@given(
    word=st.lists(st.integers(0, 3), min_size=1, max_size=4).map(tuple),
    other=st.lists(st.integers(0, 3), min_size=1, max_size=3).map(tuple),
    seed=st.integers(0, 1000),
)
@settings(max_examples=60, deadline=None)
def test_bad_words_never_occur(word: tuple[int, ...], other: tuple[int, ...], seed: int) -> None:
    """Over a vocabulary of 6 ids, in 30 random tokens, with a resume on the way, as ref says."""
    sampler = Sampler(6, 1, ops)
    sampling = SamplingParams(bad_words_ids=(word, other))
    output: list[int] = []
    for now in range(30):
        if now % 10 == 0:
            sampler.add(0, sampling, seed, [1, 2, 3], output)
        token_id = int(sampler.sample(np.zeros((1, 6), dtype=np.float32), np.array([0], dtype=np.int32)).token_ids[0])
        assert token_id not in ref.banned_by_bad_words([word, other], output)
        output.append(token_id)


def test_logprobs_are_of_the_model_itself() -> None:
    """Before bias, masks and temperature; the sampled token's own is there also outside the best k."""
    order = ref.rank(TABLE[0]).tolist()
    forced = SamplingParams(temperature=2.0, logprobs=5, allowed_token_ids=(order[-1],), repetition_penalty=2.0)
    result = run_one_step([forced, replace(GREEDY, logprobs=0), GREEDY], TABLE[[0, 0, 0]])
    logprobs = ref.log_softmax(TABLE[0].astype(np.float64))
    first = result.logprobs[0]
    assert first is not None
    assert first.token_id == order[-1]
    assert first.logprob == pytest.approx(logprobs[order[-1]], abs=1e-5)
    assert [token_id for token_id, _ in first.top] == order[:5]
    assert [value for _, value in first.top] == pytest.approx(logprobs[order[:5]].tolist(), abs=1e-5)
    assert result.logprobs[1] == TokenLogprob(order[0], pytest.approx(logprobs[order[0]], abs=1e-5), ())
    assert result.logprobs[2] is None


def test_logprobs_of_the_whole_vocabulary_sum_to_one() -> None:
    result = run_one_step([replace(GREEDY, logprobs=VOCAB)], TABLE[:1])
    assert result.logprobs[0] is not None
    assert sum(np.exp(logprob) for _, logprob in result.logprobs[0].top) == pytest.approx(1.0, abs=1e-5)


def test_prompt_logprobs() -> None:
    num_rows = 40
    logits = TABLE[np.arange(num_rows) % VOCAB]
    next_ids = (np.arange(num_rows, dtype=np.int32) * 7) % VOCAB
    entries = prompt_logprobs(logits, next_ids, 2, ops)
    expected = ref.log_softmax(logits.astype(np.float64))
    assert [entry.token_id for entry in entries] == next_ids.tolist()
    np.testing.assert_allclose([e.logprob for e in entries], expected[np.arange(num_rows), next_ids], atol=1e-5)
    assert [e.top[0][0] for e in entries] == expected.argmax(axis=1).tolist()
    assert prompt_logprobs(logits[:0], next_ids[:0], 2, ops) == []


def test_prompt_logprobs_of_a_bad_row_are_an_error() -> None:
    logits = TABLE[:70].copy()
    logits[66, 3] = np.nan
    with pytest.raises(RequestFailedError, match="prompt"):
        prompt_logprobs(logits, np.zeros(70, dtype=np.int32), 0, ops)


def test_a_reused_slot_remembers_nothing() -> None:
    """Everything of the old sequence is gone, also without a remove between."""
    everything = SamplingParams(
        top_k=3, logprobs=2, presence_penalty=2.0, logit_bias={1: -100.0}, min_tokens=50, bad_words_ids=((3,),)
    )
    for forget in (True, False):
        sampler = new_sampler()
        sampler.add(3, everything, 77, [1, 2], [3, 4], [EOS])
        step(sampler, [1], [3])
        if forget:
            sampler.remove(3)
            sampler.remove(3)
        sampler.add(3, GREEDY, 0, [6])
        assert step(sampler, [6], [3]).logprobs == [None]
        sampler.add(3, everything, 77, [1, 2], [3, 4], [EOS])
        sampler.add(3, replace(GREEDY, logprobs=0), 0, [6])
        for last in range(20):
            result = step(sampler, [last], [3])
            assert result.token_ids.tolist() == [int(TABLE[last].argmax())]
            assert result.logprobs[0] is not None
            assert result.logprobs[0].top == ()


def test_rows_that_ask_for_nothing_are_not_written() -> None:
    sampler = new_sampler()
    sampler.add(0, GREEDY, 0, [1])
    sampler.add(1, SamplingParams(top_k=4, logprobs=3), 0, [1])
    logits = TABLE[[1, 2]]
    logits.flags.writeable = False
    assert not sampler.sample(logits, np.array([0, 1], dtype=np.int32)).bad_rows.any()


def test_no_rows() -> None:
    result = new_sampler().sample(np.zeros((0, VOCAB), dtype=np.float32), np.zeros(0, dtype=np.int32))
    assert (len(result.token_ids), result.logprobs, result.errors) == (0, [], {})
