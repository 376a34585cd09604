"""A runner without a model, for tests of everything around it. Its memory remembers what each slot's KV stands for.

Instead of keys and values it stores, for every slot of the pool, a number made of all that a real model's KV would
depend on: the rope table and the tokens up to this one. Every read is checked, so a block that is reused, shared or
registered at the wrong moment is found at the step in which attention would have read it.
"""

import zlib
from collections import deque
from collections.abc import Sequence as Ids
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.admission import Limits
from engine.api import GenerationRequest, SamplingParams, TokenLogprob
from engine.batch import StepPlan
from engine.blocks import BlockManager, ChainHash, chain_hash
from engine.loop import Engine
from engine.runner import LogitsHook, PromptScores, StepResult
from engine.scheduler import Scheduler
from engine.sequence import Sequence

VOCAB = 50
LOST = -1  # in memory, in place of what should have been written


def next_token(token_ids: Ids[int], seed: int, choice: int, vocab_size: int) -> int:
    """The fake model: a function of all tokens so far."""
    text = np.array([seed % 1000, choice, *token_ids], np.int64).tobytes()
    return zlib.crc32(text) % vocab_size


def score(token_ids: Ids[int]) -> float:
    """The fake logprob of the last of token_ids after the others."""
    return -1.0 - zlib.crc32(np.array(token_ids, np.int64).tobytes()) % 1000


class FakeRope:
    """A table of its own for each prompt length above the limit, as with dynamic scaling."""

    def __init__(self, limit: int) -> None:
        self._limit = limit

    def rope_len(self, num_prompt: int) -> int:
        return num_prompt if num_prompt > self._limit else 0


@dataclass
class _Slot:
    token_ids: list[int]
    num_prompt: int
    seed: int
    choice: int
    rope_len: int
    num_computed: int | None = None  # unknown until its first step: it may begin behind a cached prefix
    keys: list[int] = field(default_factory=list)

    def keys_until(self, end: int) -> NDArray[np.int64]:
        """What the KV of each position before end depends on: rope table and all tokens up to it, as one number."""
        for token_id in self.token_ids[len(self.keys) : end]:
            self.keys.append(hash((self.keys[-1] if self.keys else self.rope_len, token_id)))
        return np.array(self.keys[:end], np.int64)


class FakeSampler:
    def __init__(self, rope: FakeRope) -> None:
        self._rope = rope
        self.slots: dict[int, _Slot] = {}

    def add(
        self,
        slot: int,
        sampling: SamplingParams,
        seed: int,
        prompt_ids: Ids[int],
        output_ids: Ids[int] = (),
        eos_token_ids: Ids[int] = (),
        choice: int = 0,
    ) -> None:
        assert slot not in self.slots, f"slot {slot} is still taken"
        self.slots[slot] = _Slot(
            [*prompt_ids, *output_ids], len(prompt_ids), seed, choice, self._rope.rope_len(len(prompt_ids))
        )


class FakeRunner:
    """Checks every plan against what it knows of each slot, and every read against what was written."""

    def __init__(self, num_blocks: int, block_size: int, budget: int, vocab_size: int, rope_limit: int = 10**9) -> None:
        self.rope = FakeRope(rope_limit)
        self.sampler = FakeSampler(self.rope)
        self.plans: list[StepPlan] = []
        self.num_unknown = 0  # tokens that a step was launched with before anybody knew them
        self.fail_next = False  # the next step writes half of its KV, then raises
        self.lose_next = False  # the next step that lands has written nothing, as those behind it, and raises
        self.spoil_next = False  # the first sampling row of the next step is bad
        self._block_size = block_size
        self._budget = budget
        self._vocab_size = vocab_size
        self._memory = np.zeros(num_blocks * block_size, np.int64)  # key of what was written to each slot of the pool
        self._on_host: dict[int, NDArray[np.int64]] = {}  # what was copied to each place
        self._scores: dict[int, PromptScores] = {}
        self._in_flight: dict[int, int] = {}  # number of the plan of a result that is not told yet, by the result's id

    def score_prompt(self, slot: int, scores: PromptScores) -> None:
        self._scores[slot] = scores

    def release(self, slot: int) -> None:
        self.sampler.slots.pop(slot, None)
        self._scores.pop(slot, None)

    def start(self, plan: StepPlan) -> StepResult:
        """Computes at once, but tells nothing until finish; ids that are unknown are those it sampled last."""
        token_ids = plan.token_ids.copy()
        for i in np.flatnonzero(token_ids < 0).tolist():
            token_ids[i] = self.sampler.slots[-1 - int(token_ids[i])].token_ids[-1]
        self.num_unknown += int((plan.token_ids < 0).sum())
        num_before = len(self.plans)
        result = self.step(replace(plan, token_ids=token_ids))
        self._in_flight[id(result)] = num_before
        return result

    def finish(self, started: StepResult) -> StepResult:
        first = self._in_flight.pop(id(started))
        if self.lose_next:
            self.lose_next = False
            self._in_flight.clear()
            for plan in self.plans[first:]:
                for row, (start, count) in enumerate(zip(plan.starts, np.diff(plan.cu_seqlens_q), strict=True)):
                    self._memory[self._places(plan, row, start + count)[start:]] = LOST
            raise MemoryError("a step that was launched, on purpose")
        return started

    def step(self, plan: StepPlan, logits_hook: LogitsHook | None = None) -> StepResult:
        self.plans.append(plan)
        self._swap(plan)
        self._check_plan(plan)
        rows = list(zip(plan.slots.tolist(), plan.starts.tolist(), np.diff(plan.cu_seqlens_q).tolist(), strict=True))
        written: set[int] = set()
        for row, (slot, start, count) in enumerate(rows):
            if self.fail_next and 2 * row >= len(rows):
                break
            self._write(plan, row, slot, start, count, written)
        if self.fail_next:
            self.fail_next = False
            raise MemoryError("a step on purpose")
        for row, (slot, start, count) in enumerate(rows):
            self._read(plan, row, slot, start + count)
            self.sampler.slots[slot].num_computed = start + count
        return self._results(plan, rows)

    def _swap(self, plan: StepPlan) -> None:
        blocks = self._memory.reshape(-1, self._block_size)
        for pairs in (plan.swaps_out, plan.swaps_in):
            assert len(set(pairs[:, 1].tolist())) == len(pairs), "two blocks go to one place"
        for block, place in plan.swaps_out.tolist():
            self._on_host[place] = blocks[block].copy()
        for place, block in plan.swaps_in.tolist():
            blocks[block] = self._on_host[place]

    def _check_plan(self, plan: StepPlan) -> None:
        counts = np.diff(plan.cu_seqlens_q)
        assert 0 < plan.num_tokens <= self._budget, "the token budget of a step"
        assert (counts > 0).all(), "an empty row"
        assert len(set(plan.slots.tolist())) == plan.num_seqs, "a slot twice in one step"
        assert (counts[: plan.num_decodes] == 1).all(), "a decoding row has one token"
        assert plan.samples[: plan.num_decodes].all(), "a decoding row samples"
        assert (plan.num_logits >= plan.samples).all(), "a row that samples needs logits"
        for row, slot in enumerate(plan.slots.tolist()):
            state, start, count = self.sampler.slots[slot], int(plan.starts[row]), int(counts[row])
            first = int(plan.cu_seqlens_q[row])
            assert state.num_computed in (None, start), "positions go on where they ended"
            assert plan.token_ids[first : first + count].tolist() == state.token_ids[start : start + count]
            assert bool(plan.samples[row]) == (start + count == len(state.token_ids)), "samples at the last token only"
            assert int(plan.rope_lens[row]) == state.rope_len
            num_blocks = -(-len(state.token_ids) // self._block_size)
            assert (plan.block_table[row, num_blocks:] == -1).all(), "blocks of somebody who was here before"

    def _places(self, plan: StepPlan, row: int, end: int) -> NDArray[np.int32]:
        """Slots of the pool of the positions before end."""
        positions = np.arange(end)
        blocks = plan.block_table[row, positions // self._block_size]
        assert (blocks >= 0).all(), "a position without a block"
        return blocks * self._block_size + positions % self._block_size

    def _write(self, plan: StepPlan, row: int, slot: int, start: int, count: int, written: set[int]) -> None:
        places = self._places(plan, row, start + count)[start:]
        assert len(set(places.tolist())) == count, "two tokens of a sequence go to one slot"
        assert not written & set(places.tolist()), "two sequences of a step write to one slot"
        written.update(places.tolist())
        self._memory[places] = self.sampler.slots[slot].keys_until(start + count)[start:]

    def _read(self, plan: StepPlan, row: int, slot: int, seq_len: int) -> None:
        """What attention of this row reads must be the KV of exactly these tokens."""
        found = self._memory[self._places(plan, row, seq_len)]
        stale = np.flatnonzero(found != self.sampler.slots[slot].keys_until(seq_len))
        assert not len(stale), f"stale KV at positions {stale}"

    def _results(self, plan: StepPlan, rows: list[tuple[int, int, int]]) -> StepResult:
        prompt_logprobs: dict[int, list[TokenLogprob]] = {}
        token_ids: list[int] = []
        errors: dict[int, str] = {}
        for row, (slot, start, count) in enumerate(rows):
            state = self.sampler.slots[slot]
            num_scores = int(plan.num_logits[row]) - int(plan.samples[row])
            if num_scores:
                prompt = self._scores[slot].prompt_ids.tolist()
                assert num_scores == min(count, len(prompt) - 1 - start)
                ends = range(start + 2, start + 2 + num_scores)
                prompt_logprobs[slot] = [TokenLogprob(prompt[end - 1], score(prompt[:end])) for end in ends]
            if not plan.samples[row]:
                continue
            if self.spoil_next:
                self.spoil_next = False
                errors[len(token_ids)] = "bad on purpose"
                token_ids.append(-1)
                state.token_ids.append(0)  # a step that is under way already reads some id or other
                continue
            token_ids.append(next_token(state.token_ids, state.seed, state.choice, self._vocab_size))
            state.token_ids.append(token_ids[-1])
        return StepResult(token_ids, [None] * len(token_ids), errors, prompt_logprobs)


class FakeStages(FakeRunner):
    """Steps are on their way from start to finish, and computed at its end: rank 0 is the last stage."""

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        self.on_their_way: deque[StepPlan] = deque()
        self.most_on_their_way = 0

    def start(self, plan: StepPlan) -> Any:
        assert (plan.token_ids >= 0).all(), "a stage before this one cannot know what is sampled here"
        self.on_their_way.append(plan)
        self.most_on_their_way = max(self.most_on_their_way, len(self.on_their_way))
        return plan

    def finish(self, started: Any) -> StepResult:
        assert started is self.on_their_way.popleft(), "steps land in the order in which they were launched"
        return self.step(started)

    def release(self, slot: int) -> None:
        assert all(slot not in plan.slots for plan in self.on_their_way), "a step on its way needs the slot's state"
        super().release(slot)


def fake_engine(
    num_blocks: int = 16,
    block_size: int = 4,
    max_num_seqs: int = 4,
    max_num_batched_tokens: int = 16,
    max_model_len: int = 64,
    vocab_size: int = VOCAB,
    eos_token_ids: tuple[int, ...] = (),
    enable_prefix_caching: bool = True,
    hash_function: ChainHash = chain_hash,
    rope_limit: int = 10**9,
    max_waiting: int = 1000,
    faults: Any = None,
    overlap: bool = False,
    num_stages: int = 1,
    num_ranks: int = 1,
    num_swap_places: int = 0,
) -> tuple[Engine, FakeRunner]:
    """The real loop, scheduler and block manager over a fake runner."""
    blocks = BlockManager(num_blocks, block_size, enable_prefix_caching, hash_function)
    scheduler = Scheduler(blocks, max_num_seqs, max_num_batched_tokens, max_model_len, num_stages, num_swap_places)
    kind = FakeRunner if num_stages == 1 else FakeStages
    runner = kind(num_blocks, block_size, max_num_batched_tokens, vocab_size, rope_limit)
    limits = Limits(vocab_size, max_model_len, 20, max_waiting, eos_token_ids)
    ranks = {"num_stages": num_stages, "num_ranks": num_ranks}
    return Engine(scheduler, runner, limits, 0, faults, overlap, **ranks), runner  # type: ignore[arg-type]


def fake_request(
    request_id: str, num_prompt: int = 6, first: int = 0, salt: str | None = None, **sampling: Any
) -> GenerationRequest:
    """A prompt that begins with token `first`; requests that begin differently share nothing."""
    prompt = tuple((first + 3 * i) % VOCAB for i in range(num_prompt))
    params = {"max_tokens": 4, "seed": 1} | sampling
    return GenerationRequest(request_id, prompt, SamplingParams(**params), salt)


def expected_output(one: GenerationRequest, index: int = 0, num_output: int | None = None) -> list[int]:
    """What the fake model gives when nothing disturbs it."""
    text = list(one.prompt_ids)
    for _ in range((one.sampling.max_tokens or 0) if num_output is None else num_output):
        text.append(next_token(text, one.sampling.seed or 0, index, VOCAB))
    return text[len(one.prompt_ids) :]


def row_counts(plan: StepPlan) -> list[int]:
    """Tokens of each row of a step."""
    counts: list[int] = np.diff(plan.cu_seqlens_q).tolist()
    return counts


def find_sequence(engine: Engine, request_id: str, index: int = 0) -> Sequence:
    sequences = [*engine.scheduler.running, *engine.scheduler.waiting]
    return next(seq for seq in sequences if (seq.request.request_id, seq.index) == (request_id, index))
