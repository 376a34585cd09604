"""Random traffic on the real loop over FakeRunner, with all that must hold after every step and at the end."""

from dataclasses import dataclass, field
from typing import Any

import pytest

from engine.api import GenerationRequest, SamplingParams, TokenEvent
from engine.blocks import ChainHash, chain_hash
from engine.errors import RequestError
from engine.faults import Faults
from engine.loop import MAX_FAILED_STEPS
from engine.sequence import Sequence
from tests.engine.fake_runner import fake_engine, next_token, score

VOCAB = 4
BASES = tuple(tuple((7 * i * i + i // 3 + base) % VOCAB for i in range(64)) for base in range(2))
HASHES: dict[str, ChainHash] = {
    "blake2": chain_hash,
    "constant": lambda parent, content: b"",
    "4 bits": lambda parent, content: bytes([chain_hash(parent, content)[0] & 15]),
}


@dataclass
class Choice:
    """What a client knows of one choice."""

    request: GenerationRequest
    index: int
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    may_end_early: bool = False  # a fault has touched it


class Traffic:
    """An engine, its clients, and what each of them may see."""

    def __init__(self, num_blocks: int, block_size: int, max_model_len: int, hash_name: str, **limits: Any) -> None:
        self.faults = Faults()
        self.engine, self.runner = fake_engine(
            num_blocks=num_blocks,
            block_size=block_size,
            max_model_len=max_model_len,
            vocab_size=VOCAB,
            hash_function=HASHES[hash_name],
            faults=self.faults if limits.get("num_stages", 1) == 1 else None,  # several stages survive none
            **limits,
        )
        self.blocks = self.engine.scheduler.blocks
        self.pool_tokens = num_blocks * block_size
        self.max_model_len = max_model_len
        self.choices: dict[tuple[str, int], Choice] = {}  # of requests that were accepted and not aborted
        self.num_requests = 0
        self.failed_in_a_row = 0

    # ---- what may happen

    def arrive(self, base: int, num_prompt: int, changed_at: int | None, salt: str | None, **sampling: Any) -> None:
        """A request whose prompt begins as others do, up to the place where it is changed."""
        prompt = list(BASES[base][:num_prompt])
        if changed_at is not None and changed_at < num_prompt:
            prompt[changed_at] = (prompt[changed_at] + 1) % VOCAB
        params = SamplingParams(seed=num_prompt, **sampling)
        request = GenerationRequest(f"r{self.num_requests}", tuple(prompt), params, salt)
        self.num_requests += 1
        if num_prompt >= self.max_model_len or num_prompt > self.pool_tokens:
            with pytest.raises(RequestError):
                self.engine.add(request)
            return
        self.engine.add(request)
        for index in range(params.n):
            self.choices[request.request_id, index] = Choice(request, index)

    @property
    def open_choices(self) -> list[Choice]:
        return [choice for choice in self.choices.values() if choice.finish_reason is None]

    def abort(self, choice: Choice, whole: bool) -> None:
        request_id = choice.request.request_id
        self.engine.abort(request_id, None if whole else choice.index)
        for index in range(choice.request.sampling.n):
            if whole or index == choice.index:
                self.choices.pop((request_id, index), None)

    def preempt(self, place: int) -> None:
        seq = self.engine.scheduler.running[place]
        if len(seq.token_ids) <= self.pool_tokens:  # with one more it is at its end, if it is alone
            self.engine.scheduler.preempt(seq)

    def fail_a_step(self) -> None:
        if self.failed_in_a_row < MAX_FAILED_STEPS - 1:
            self.runner.fail_next = True
            self.step()

    def spoil_a_row(self) -> None:
        self.runner.spoil_next = True
        self.step()

    def refuse_blocks(self) -> None:
        self.faults.refuse_blocks_at.add(self.engine.stats().steps + 1)
        if self.engine.scheduler.running:  # if it ends up alone without a block, the pool is full as far as it knows
            self._touch(self.engine.scheduler.running[:1])
        self.step()

    def step(self) -> None:
        could_work = self.engine.has_work and not self.faults.refuse_blocks_at
        if self.runner.fail_next or self.runner.spoil_next:
            self._touch([*self.engine.scheduler.running, *self.engine.scheduler.waiting])
        before, on_their_way = self.engine.stats(), len(self.engine._in_flight)
        events = self.engine.step()
        for event in events:
            self._take(event)
        after = self.engine.stats()
        if after.steps > before.steps:
            self.failed_in_a_row = self.failed_in_a_row + 1 if after.failed_steps > before.failed_steps else 0
        moved = after.steps > before.steps or len(self.engine._in_flight) < on_their_way
        assert events or moved or not could_work, "an idle step though there is work"
        self.check_books()

    def close(self) -> None:
        """Everything that is open ends in a bounded number of steps, and then everything is free."""
        self.runner.fail_next = self.runner.spoil_next = False
        alone = min(self.max_model_len, self.pool_tokens + 1)  # steps of one choice, a token a step
        bound = 10 + alone * len(self.open_choices) * 3
        for _ in range(bound):
            if self.engine.has_work:
                self.step()
        assert not self.engine.has_work, f"work is left after {bound} steps"
        assert not self.open_choices
        assert self.engine.num_requests == 0
        assert self.blocks.num_free == self.blocks.num_blocks
        assert not self.runner.sampler.slots

    # ---- what must hold

    def check_books(self) -> None:
        running = self.engine.scheduler.running
        self.blocks.audit(running)
        owners: dict[int, Sequence] = {}
        for seq in running:
            for place, block in enumerate(seq.block_ids):
                other = owners.setdefault(block, seq)
                end = (place + 1) * self.blocks.block_size
                assert other.block_ids[place] == block, "a shared block stands at one place"
                assert other.token_ids[:end] == seq.token_ids[:end], "a block shared by different texts"
                assert other.request.cache_salt == seq.request.cache_salt, "a block shared across salts"
                assert other.rope_len == seq.rope_len, "a block shared across rope tables"

    def _touch(self, seqs: list[Sequence]) -> None:
        for seq in seqs:
            self.choices[seq.request.request_id, seq.index].may_end_early = True

    def _take(self, event: TokenEvent) -> None:
        choice = self.choices[event.request_id, event.index]
        assert choice.finish_reason is None, "an event after the end"
        request, sampling = choice.request, choice.request.sampling
        if event.index > 0:
            assert event.prompt_logprobs is None  # the first choice has them for all
        elif sampling.prompt_logprobs is not None and event.token_ids and not choice.token_ids:
            prompt = request.prompt_ids
            assert event.prompt_logprobs is not None
            assert event.prompt_logprobs[0] is None
            found = [(entry.token_id, entry.logprob) for entry in event.prompt_logprobs[1:] if entry is not None]
            assert found == [(prompt[end - 1], score(prompt[:end])) for end in range(2, len(prompt) + 1)]
        else:
            assert event.prompt_logprobs is None
        for token_id in event.token_ids:
            text = [*request.prompt_ids, *choice.token_ids]
            assert token_id == next_token(text, sampling.seed or 0, choice.index, VOCAB), "the output was disturbed"
            choice.token_ids.append(token_id)
        choice.finish_reason = event.finish_reason
        self._check_end(choice)

    def _check_end(self, choice: Choice) -> None:
        sampling, num_output = choice.request.sampling, len(choice.token_ids)
        room = self.max_model_len - len(choice.request.prompt_ids)
        longest = min(room, room if sampling.max_tokens is None else sampling.max_tokens)
        stopped = num_output > 0 and choice.token_ids[-1] in sampling.stop_token_ids
        match choice.finish_reason:
            case "stop":
                assert stopped
            case "length":
                fills_pool = len(choice.request.prompt_ids) + num_output == self.pool_tokens + 1
                assert not stopped
                assert num_output == longest or fills_pool or choice.may_end_early
            case "error":
                assert choice.may_end_early
            case None:
                assert not stopped
                assert num_output < longest
