"""Decides what every step computes: admit, chunk, decode, preempt, finish.

Continuous batching: a step mixes one token of every decoding sequence with chunks of several prefills, within
max_num_batched_tokens. Takes sequences from the loop, blocks from the BlockManager; gives StepPlans. Knows
nothing of arrays on a device, of text, or of time.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import numpy as np

from engine.batch import StepPlan
from engine.blocks import BlockManager
from engine.sequence import Sequence, SequenceState
from engine.swap import SwapSpace

MAX_OVERTAKEN = 32  # after so many younger sequences passed it, a waiting one lets nobody pass any more
MAX_LOOKAHEAD = 16  # waiting sequences that do not fit are tried up to this number a step


class Scheduler:
    """Owns the waiting and running queues.

    Rules: decoding goes before prefilling, prefilling in order of admission. A sequence is admitted only if all
    of its tokens fit the free blocks with one block to spare for each running sequence, so prefill never runs
    out. A decoding sequence that needs a block when none is free takes them from the youngest running one, which
    waits at the head of the queue and is computed again, or copied back from the host (see SwapSpace); the oldest
    therefore always gets through. One that is alone and has filled the pool ends with finish reason "length".

    With several stages as many steps are on their way at once, none of which names a token that another is still to
    sample: each takes its share of the decoding sequences. Stages compute them in order, so the next may use blocks
    that one leaves; but the slot of a sequence that has left is kept until the steps that name it are over.
    """

    def __init__(
        self,
        blocks: BlockManager,
        max_num_seqs: int,
        max_num_batched_tokens: int,
        max_model_len: int,
        num_stages: int = 1,
        num_swap_places: int = 0,
    ) -> None:
        self.blocks = blocks
        self.swap = SwapSpace(num_swap_places, blocks.block_size)
        self._num_stages = num_stages
        self._num_on_their_way = np.zeros(max_num_seqs, np.int64)  # steps that name a slot
        self._left_slots: set[int] = set()  # but named by a step that is on its way
        self.max_num_batched_tokens = max_num_batched_tokens
        self.waiting: deque[Sequence] = deque()
        self.running: list[Sequence] = []  # in order of admission
        self.exhausted: list[Sequence] = []  # running alone, but the pool is full: the loop ends them
        self.released_slots: list[int] = []  # since the loop last looked
        self.admitted: list[Sequence] = []  # since the loop last looked, after these slots were released
        self.num_preemptions = 0
        self._free_slots = list(range(max_num_seqs - 1, -1, -1))
        width = min(blocks.blocks_for(max_model_len), blocks.num_blocks)
        self._block_tables = np.full((max_num_seqs, width), -1, np.int32)
        self._step = 0

    @property
    def has_work(self) -> bool:
        return bool(self.running or self.waiting)

    def add(self, seqs: Iterable[Sequence]) -> None:
        self.waiting.extend(seqs)

    def remove(self, seq: Sequence, discard: bool = False) -> None:
        """Ends a sequence in any state; its blocks are free at once. With discard its KV is not reused."""
        if seq.state is SequenceState.RUNNING:
            self.running.remove(seq)
            self._release(seq, discard)
        elif seq.state is SequenceState.WAITING:
            self.waiting.remove(seq)
            self.swap.drop([seq])
        seq.state = SequenceState.FINISHED

    def preempt(self, seq: Sequence) -> None:
        """Sends a running sequence back to the head of the queue; what it has generated is kept."""
        self.running.remove(seq)
        self.swap.put(seq)
        self._release(seq)
        seq.state = SequenceState.WAITING
        seq.num_preemptions += 1
        self.num_preemptions += 1
        self.waiting.appendleft(seq)

    def schedule(self) -> StepPlan | None:
        """The next step, or None if nothing can be computed (all queues empty, or only exhausted sequences)."""
        suspect = self._next_suspect()
        if suspect is not None:
            self._step += 1
            return self._plan([], [(suspect, min(suspect.num_remaining, self.max_num_batched_tokens))])
        decodes, prefills = self._schedule_decodes()
        budget = self.max_num_batched_tokens - len(decodes)
        chunks: list[tuple[Sequence, int]] = []
        for seq in prefills:
            if budget > 0 and seq.state is SequenceState.RUNNING:
                chunks.append((seq, min(seq.num_remaining, budget)))
                budget -= chunks[-1][1]
        self._admit(chunks, budget)
        if not decodes and not chunks:
            return None
        self._step += 1
        return self._plan(decodes, chunks)

    def planned(self, plan: StepPlan) -> list[Sequence]:
        """The sequences of a plan, in the order of its rows."""
        by_slot = {seq.slot: seq for seq in self.running}
        return [by_slot[slot] for slot in plan.slots.tolist()]

    def commit(self, plan: StepPlan, seqs: list[Sequence]) -> None:
        """Notes that a step has been computed: KV of its tokens is in memory. seqs are its rows in order."""
        for seq, count in zip(seqs, np.diff(plan.cu_seqlens_q).tolist(), strict=True):
            if seq.state is not SequenceState.RUNNING:  # the step before has ended it
                continue
            seq.num_computed += count
            seq.suspect = seq.suspect and seq.num_remaining > 0
            if seq.num_computed // self.blocks.block_size > len(seq.prefix):
                self.blocks.commit(seq)

    def launched(self, plan: StepPlan) -> None:
        """From now on its slots are taken, until it has landed."""
        self._num_on_their_way[plan.slots] += 1

    def landed(self, plan: StepPlan) -> None:
        """The slots of sequences that have left meanwhile are free."""
        self._num_on_their_way[plan.slots] -= 1
        for slot in sorted(slot for slot in self._left_slots if not self._num_on_their_way[slot]):
            self._left_slots.remove(slot)
            self._free_slot(slot)

    # ---- inside

    def _schedule_decodes(self) -> tuple[list[Sequence], list[Sequence]]:
        """Sequences that decode in this step, each with a block for its token, and those that still prefill.

        Preempts where there is no block; what it preempts is younger than what it has looked at already, or a prefill.
        """
        decodes: list[Sequence] = []
        prefills: list[Sequence] = []
        share = len(self.running)
        if self._num_stages > 1:
            share = -(-sum(seq.num_remaining <= 1 for seq in self.running) // self._num_stages)
        for seq in list(self.running):
            if seq.state is not SequenceState.RUNNING or len(seq.token_ids) >= seq.max_len:
                continue  # its last token has been launched, but is not known yet
            if self._num_stages > 1 and seq.token_ids[-1] < 0:
                continue  # nor is the one that it would go on from
            if len(seq.token_ids) - seq.num_computed > 1:
                prefills.append(seq)
            elif len(decodes) < share and (not self.blocks.needs_block(seq) or self._make_room(seq)):
                decodes.append(seq)
        return decodes, prefills

    def _make_room(self, seq: Sequence) -> bool:
        """Gives a decoding sequence one more block, at the cost of younger ones; False if it cannot go on."""
        while self.blocks.num_free == 0:
            youngest = self.running[-1]
            if youngest is seq:
                if len(self.running) == 1:
                    self.exhausted.append(seq)
                else:
                    self.preempt(seq)
                return False
            self.preempt(youngest)
        block = self.blocks.grow(seq)
        self._block_tables[seq.slot, len(seq.block_ids) - 1] = block
        return True

    def _admit(self, chunks: list[tuple[Sequence, int]], budget: int) -> None:
        """Moves waiting sequences to running while budget, slots and blocks last.

        A sequence whose blocks do not fit may be overtaken by younger ones, but only MAX_OVERTAKEN times.
        """
        passed: list[Sequence] = []
        for seq in list(self.waiting):
            if budget <= 0 or not self._free_slots or len(passed) == MAX_LOOKAHEAD:
                break
            if any(older.num_overtaken >= MAX_OVERTAKEN for older in passed):
                break
            if self._waits_for_sibling(seq) or seq.token_ids[-1] < 0:  # preempted with a token that is not known yet
                continue
            matched = self.blocks.match_prefix(seq)
            spare = len(self.running)
            has_room = self.blocks.num_blocks_to_admit(seq, matched) + spare <= self.blocks.num_free
            if seq.suspect or not has_room or seq.two_way_len > budget:
                passed.append(seq)
                continue
            for older in passed:
                older.num_overtaken += 1
            self._start(seq, matched)
            chunks.append((seq, min(seq.num_remaining, budget)))
            budget -= chunks[-1][1]

    def _next_suspect(self) -> Sequence | None:
        """A sequence that must survive a step alone before it runs with others again (see Sequence.suspect)."""
        for seq in self.running:
            if seq.suspect:
                return seq
        waiting = next((seq for seq in self.waiting if seq.suspect), None)
        if waiting is None or not self._free_slots:
            return None
        matched = self.blocks.match_prefix(waiting)
        if self.blocks.num_blocks_to_admit(waiting, matched) > self.blocks.num_free:
            return None
        self._start(waiting, matched)
        return waiting

    def _waits_for_sibling(self, seq: Sequence) -> bool:
        """Choices of one request wait until the first has computed the prompt, then share its blocks.

        If the prompt's logprobs are asked for, the first reports them before any other choice says anything.
        """
        first = seq.first_sibling
        if first is None or first.state is SequenceState.FINISHED:
            return False
        if seq.request.sampling.prompt_logprobs is not None and not first.reported:
            return True
        if not self.blocks.enable_prefix_caching:
            return False
        return first.num_computed < first.num_prompt and first.num_preemptions == 0

    def _start(self, seq: Sequence, matched: list[int]) -> None:
        self.waiting.remove(seq)
        self.blocks.admit(seq, matched)
        self.swap.take(seq)
        if seq.num_preemptions == 0:
            seq.num_cached_tokens = seq.num_computed
        if seq.wants_prompt_logprobs:
            seq.prompt_logprobs = [None]  # nothing precedes the first token; entries of a broken-off prefill go
        seq.state = SequenceState.RUNNING
        seq.slot = self._free_slots.pop()
        self._block_tables[seq.slot, : len(seq.block_ids)] = seq.block_ids
        self.running.append(seq)
        self.admitted.append(seq)

    def _release(self, seq: Sequence, discard: bool = False) -> None:
        self._block_tables[seq.slot, : len(seq.block_ids)] = -1
        self.blocks.free(seq, discard)
        if self._num_on_their_way[seq.slot]:
            self._left_slots.add(seq.slot)
        else:
            self._free_slot(seq.slot)
        seq.slot = -1

    def _free_slot(self, slot: int) -> None:
        self._free_slots.append(slot)
        self.released_slots.append(slot)

    def _plan(self, decodes: list[Sequence], chunks: list[tuple[Sequence, int]]) -> StepPlan:
        seqs = decodes + [seq for seq, _ in chunks]
        counts = [1] * len(decodes) + [count for _, count in chunks]
        token_ids = [seq.token_ids[-1] for seq in decodes]
        num_logits = [1] * len(decodes)
        for seq, count in chunks:
            token_ids += seq.token_ids[seq.num_computed : seq.num_computed + count]
            num_logits.append(self._num_logits(seq, count))
        slots = np.array([seq.slot for seq in seqs], np.int32)
        swaps_out, swaps_in = self.swap.copies()
        width = max(len(seq.block_ids) for seq in seqs)
        cu_seqlens_q = np.zeros(len(seqs) + 1, np.int32)
        np.cumsum(counts, out=cu_seqlens_q[1:])
        return StepPlan(
            step=self._step,
            slots=slots,
            starts=np.array([seq.num_computed for seq in seqs], np.int32),
            cu_seqlens_q=cu_seqlens_q,
            token_ids=np.array(token_ids, np.int32),
            block_table=self._block_tables[slots, :width],
            num_logits=np.array(num_logits, np.int32),
            samples=np.array([True] * len(decodes) + [count == seq.num_remaining for seq, count in chunks], np.bool_),
            rope_lens=np.array([seq.rope_len for seq in seqs], np.int32),
            two_way_lens=np.array([seq.two_way_len for seq in seqs], np.int32),
            num_decodes=len(decodes),
            swaps_out=swaps_out,
            swaps_in=swaps_in,
        )

    @staticmethod
    def _num_logits(seq: Sequence, count: int) -> int:
        if seq.wants_prompt_logprobs:
            return count
        return 1 if count == seq.num_remaining else 0
