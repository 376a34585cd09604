"""engine.sampler: the SAM cases at the level of rows and slots."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from engine.api import SamplingParams
from engine.errors import RequestError
from engine.sampler import NO_TOKEN
from ref import sampling as ref
from tests.engine.table_model import GREEDY, INF, TABLE, VOCAB, new_sampler, run, run_one_step, step


def test_sam_01_very_small_temperatures() -> None:
    """SAM-01: 0, 1e-4 and 1e-30 with a bias in one batch all give the greedy token, with finite logprobs."""
    logits = np.repeat(TABLE[:1] * 30, 4, axis=0)
    best, second = ref.rank(logits[0])[:2].tolist()
    samplings = [
        SamplingParams(temperature=0.0, logprobs=3),
        SamplingParams(temperature=1e-4, logprobs=3),
        SamplingParams(temperature=1e-30, logprobs=3, logit_bias={best: -100.0}),
        SamplingParams(seed=9),
    ]
    result = run_one_step(samplings, logits)
    assert result.token_ids[:3].tolist() == [best, best, second]
    assert not result.bad_rows.any()
    for entry in result.logprobs[:3]:
        assert entry is not None
        assert np.isfinite([entry.logprob, *(logprob for _, logprob in entry.top)]).all()
    changed = run_one_step([replace(s, temperature=0.9) for s in samplings[:3]] + samplings[3:], logits)
    assert changed.token_ids[3] == result.token_ids[3]


def test_sam_01_temperatures_have_a_floor() -> None:
    """At 1e-4 two logits 0.001 apart would be e¹⁰ apart; at the floor of 0.01 both come: a chance of 0.52⁴⁰ not to."""
    logits = np.tile(np.array([0.0, 0.001], dtype=np.float32), (40, 1))
    assert set(run_one_step([SamplingParams(temperature=1e-4)] * 40, logits).token_ids.tolist()) == {0, 1}


@pytest.mark.parametrize(
    "wrong",
    [
        {"temperature": -1.0},
        {"temperature": float("nan")},
        {"top_p": -1.0},
        {"top_p": 0.0},
        {"top_p": 1.5},
        {"top_k": -2},
        {"min_p": 1.1},
        {"repetition_penalty": 0.0},
        {"presence_penalty": 3.0},
        {"logit_bias": {999999999: 5.0}},
        {"logit_bias": {-1: 5.0}},
        {"logit_bias": {"abc": 5.0}},
        {"logit_bias": {5: 101.0}},
        {"logit_bias": {5: "1"}},
        {"stop_token_ids": (VOCAB,)},
        {"bad_words_ids": ((1, -1),)},
        {"allowed_token_ids": (VOCAB,)},
        {"allowed_token_ids": ()},
    ],
)
def test_sam_02_03_04_06_out_of_range_values_never_reach_the_sampler(wrong: dict[str, Any]) -> None:
    """SAM-02 a–e, SAM-03 e and g, SAM-04 c, SAM-06 a–e: refused by name."""
    with pytest.raises(RequestError) as caught:
        SamplingParams(**wrong).validate(VOCAB)
    assert caught.value.param in (*wrong, "bad_words")


def test_sam_02_huge_temperature_is_near_uniform() -> None:
    """SAM-02 f: 4000 draws over 4 ids; each count within 6 standard deviations of 1000."""
    logits = np.tile(np.array([0.0, 5.0, -50.0, 20.0], dtype=np.float32), (4000, 1))
    result = run_one_step([SamplingParams(temperature=1e6)] * 4000, logits)
    counts = np.bincount(result.token_ids, minlength=4)
    assert (abs(counts - 1000) < 6 * np.sqrt(4000 * 0.25 * 0.75)).all()


def test_sam_03_edges_of_top_k_and_top_p() -> None:
    """SAM-03: off is off in three spellings, 1 and 1e-9 are greedy; all in one batch and each alone."""
    plain = SamplingParams(temperature=1.0)
    samplings = [replace(plain, top_k=k) for k in (9999999, 0, -1, 1)] + [replace(plain, top_p=1e-9), GREEDY]
    alone = [run(sampling) for sampling in samplings]
    sampler = new_sampler()
    for slot, sampling in enumerate(samplings):
        sampler.add(slot, sampling, 1, [5, 6])
    last = [6] * len(samplings)
    together: list[list[int]] = [[] for _ in samplings]
    for _ in range(24):
        last = step(sampler, last, range(len(samplings))).token_ids.tolist()
        for output, token_id in zip(together, last, strict=True):
            output.append(token_id)
    assert together == alone
    assert alone[0] == alone[1] == alone[2]
    assert alone[3] == alone[4] == alone[5]
    assert alone[0] != alone[3]


def test_sam_04_a_mask_comes_before_the_filters() -> None:
    """SAM-04: with the whole top 50 banned, or a single id allowed, top_k and min_p pick among what is left."""
    order = ref.rank(TABLE[0]).tolist()
    tight = SamplingParams(min_p=1.0, top_p=0.0001, top_k=1)
    banned = replace(tight, min_p=0.0, top_p=1.0, logit_bias=dict.fromkeys(order[:50], -100.0))
    single = SamplingParams(allowed_token_ids=(order[-1],), top_k=5, min_p=0.9)
    result = run_one_step([tight, banned, single], TABLE[[0, 0, 0]])
    assert result.token_ids.tolist() == [order[0], order[50], order[-1]]
    assert not result.errors


@pytest.mark.parametrize("poison", ["nan", "-inf", "+inf", "one nan"])
@pytest.mark.parametrize("kind", ["greedy", "random", "edited"])
def test_sam_05_a_bad_row_is_named_and_alone(poison: str, kind: str) -> None:
    """SAM-05: the other rows, tokens and logprobs, are bit-equal to a run without it; the row says why."""
    sampling = {
        "greedy": SamplingParams(temperature=0.0, logprobs=2),
        "random": SamplingParams(top_p=0.9, logprobs=2),
        "edited": SamplingParams(logprobs=2, repetition_penalty=1.2, allowed_token_ids=tuple(range(50))),
    }[kind]
    logits = TABLE[:4].copy()
    clean = run_one_step([sampling] * 4, logits)
    assert not clean.bad_rows.any()
    logits[2] = {
        "nan": np.full(VOCAB, np.nan),
        "-inf": np.full(VOCAB, -INF),
        "+inf": np.where(np.arange(VOCAB) % 100 == 3, INF, 1.0),
        "one nan": np.where(np.arange(VOCAB) == 150, np.nan, 1.0),
    }[poison]
    result = run_one_step([sampling] * 4, logits)
    assert result.bad_rows.tolist() == [False, False, True, False]
    assert result.token_ids[2] == NO_TOKEN
    assert result.logprobs[2] is None
    assert "NaN or infinite" in result.errors[2]
    for row in (0, 1, 3):
        assert result.token_ids[row] == clean.token_ids[row]
        assert result.logprobs[row] == clean.logprobs[row]


def test_sam_05_a_bad_row_does_not_count_as_output() -> None:
    """The next good step of the slot draws for the same position, with the same counts, as if it had not been."""
    sampler = new_sampler()
    sampler.add(0, SamplingParams(frequency_penalty=2.0), 7, [1])
    sampler.add(1, SamplingParams(frequency_penalty=2.0), 7, [1])
    sampler.add(2, replace(GREEDY, frequency_penalty=2.0), 7, [1])
    slots = np.array([0, 2], dtype=np.int32)
    assert sampler.sample(np.full((2, VOCAB), np.nan, dtype=np.float32), slots).bad_rows.all()
    tie = np.zeros((1, VOCAB), dtype=np.float32)  # of which 0 is taken unless it counts as seen
    assert sampler.sample(tie.copy(), slots[1:]).token_ids.tolist() == [0]
    assert sampler.sample(tie.copy(), slots[1:]).token_ids.tolist() == [1]
    for _ in range(5):
        ids = step(sampler, [0, 0], [0, 1]).token_ids
        assert ids[0] == ids[1]


def test_masks_that_leave_nothing_are_a_bad_row() -> None:
    """The row names the fields that may be to blame; its neighbour is served."""
    nothing = SamplingParams(allowed_token_ids=(4, 5), logit_bias={4: -100.0}, bad_words_ids=((5,),))
    result = run_one_step([nothing, GREEDY], TABLE[[0, 1]])
    assert result.bad_rows.tolist() == [True, False]
    assert "allowed_token_ids" in result.errors[0]
    assert result.token_ids.tolist() == [NO_TOKEN, int(TABLE[1].argmax())]


def test_sam_07_bias_bans_and_forces() -> None:
    """SAM-07: banned ids never occur in any of 4 choices while rows join and leave; plain rows are as alone."""
    favourites = np.bincount(TABLE.argmax(axis=1), minlength=VOCAB).argsort()[-2:].tolist()
    banned = SamplingParams(n=4, logit_bias=dict.fromkeys(favourites, -100.0))
    plain_alone = [run(SamplingParams(), seed=100 + i) for i in range(3)]
    sampler = new_sampler()
    for choice in range(4):
        sampler.add(choice, banned, 3, [5, 6], choice=choice)
    outputs: dict[int, list[int]] = {slot: [] for slot in range(7)}
    for now in range(40):
        for i in range(3):
            if now == 4 * i:  # joins in a slot behind the choices
                sampler.add(4 + i, SamplingParams(), 100 + i, [5, 6])
            if now == 4 * i + 24:
                sampler.remove(4 + i)
        slots = [0, 1, 2, 3] + [4 + i for i in range(3) if 4 * i <= now < 4 * i + 24]
        slots = slots[::-1] if now % 2 else slots
        ids = step(sampler, [outputs[s][-1] if outputs[s] else 6 for s in slots], slots).token_ids
        for slot, token_id in zip(slots, ids.tolist(), strict=True):
            outputs[slot].append(token_id)
    for choice in range(4):
        assert not set(favourites) & set(outputs[choice])
    assert len({tuple(outputs[choice]) for choice in range(4)}) == 4
    assert [outputs[4 + i] for i in range(3)] == plain_alone
    assert run(SamplingParams(temperature=0.0, logit_bias={42: 100.0}), num_steps=5) == [42] * 5


def test_a_bias_of_minus_100_beats_any_logit() -> None:
    logits = np.zeros((1, VOCAB), dtype=np.float32)
    logits[0, 9] = 500.0
    assert run_one_step([replace(GREEDY, logit_bias={9: -99.0})], logits).token_ids[0] == 9
    assert run_one_step([replace(GREEDY, logit_bias={9: -100.0})], logits).token_ids[0] == 0


def test_sam_08_same_seed_same_answer_whatever_the_neighbours() -> None:
    """SAM-08: alone, as rows 1, 3 and 7 among shuffled neighbours, and preempted and resumed on the way."""
    sampling = SamplingParams(top_p=0.95, presence_penalty=0.3)
    alone = run(sampling, seed=1234, num_steps=32)
    rng = np.random.default_rng(8)
    sampler = new_sampler(8)
    for slot in range(8):
        sampler.add(
            slot, sampling if slot in (1, 3, 7) else SamplingParams(), 1234 if slot in (1, 3, 7) else slot, [5, 6]
        )
    outputs: list[list[int]] = [[] for _ in range(8)]
    for now in range(32):
        if now == 11:
            sampler.remove(3)
            sampler.add(3, sampling, 1234, [5, 6], outputs[3])
        order = rng.permutation(8).tolist()
        ids = step(sampler, [outputs[s][-1] if outputs[s] else 6 for s in order], order).token_ids
        for slot, token_id in zip(order, ids.tolist(), strict=True):
            outputs[slot].append(token_id)
    assert outputs[1] == outputs[3] == outputs[7] == alone


def test_sam_08_seeds_and_choices_differ_and_negative_seeds_work() -> None:
    outputs = [run(SamplingParams(), seed=seed) for seed in (1, 2, -1, -(2**63), 2**63 - 1)]
    outputs.append(run(SamplingParams(), seed=1, choice=1))
    assert len({tuple(output) for output in outputs}) == len(outputs)


def test_sam_09_penalties_match_ref_in_a_mixed_batch() -> None:
    """SAM-09: prompts of 1, 7 and 3000 tokens, penalties on the second row alone; a resume in the middle."""
    rng = np.random.default_rng(9)
    prompts = [rng.integers(0, VOCAB, length).tolist() for length in (1, 7, 3000)]
    sampling = replace(GREEDY, repetition_penalty=1.3, presence_penalty=1.5, frequency_penalty=1.5)
    samplings = [GREEDY, sampling, GREEDY]
    sampler = new_sampler()
    for slot in range(3):
        sampler.add(slot, samplings[slot], 0, prompts[slot])
    outputs: list[list[int]] = [[], [], []]
    for now in range(100):
        last = [(prompts[i] + outputs[i])[-1] for i in range(3)]
        expected = [int(TABLE[t].argmax()) for t in last]
        expected[1] = int(ref.apply_penalties(TABLE[last[1]], prompts[1], outputs[1], 1.3, 1.5, 1.5).argmax())
        if now == 40:
            sampler.remove(1)
            sampler.add(1, sampling, 0, prompts[1], outputs[1])
        ids = step(sampler, last, [0, 1, 2]).token_ids.tolist()
        assert ids == expected
        for i in range(3):
            outputs[i].append(ids[i])
    assert len(set(outputs[1])) > 60  # so the table of seen tokens grew past its first size


def test_sam_09_prompt_counts_for_repetition_only() -> None:
    """SAM-09 a, b: "cat cat cat cat"; also ids without a logit in the prompt, and padded ids of the vocabulary."""
    logits = np.zeros((3, VOCAB), dtype=np.float32)
    logits[:, VOCAB - 1], logits[:, 8] = 2.0, 1.8
    prompt = [VOCAB - 1] * 4 + [-200, VOCAB, 10**9]
    samplings = [
        replace(GREEDY, repetition_penalty=1.3),
        replace(GREEDY, presence_penalty=1.5, frequency_penalty=1.5),
        GREEDY,
    ]
    assert run_one_step(samplings, logits, prompt).token_ids.tolist() == [8, VOCAB - 1, VOCAB - 1]
