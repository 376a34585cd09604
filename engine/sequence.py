"""One choice of one request, from arrival to its last token.

Takes a GenerationRequest; the scheduler and the block manager keep its state here. Knows nothing of arrays.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import NamedTuple

from engine.api import FinishReason, GenerationRequest, TokenEvent, TokenLogprob


class SequenceState(Enum):
    WAITING = "waiting"  # owns no block and no slot
    RUNNING = "running"
    FINISHED = "finished"


@dataclass(frozen=True, slots=True)
class PrefixNode:
    """Identity of a cached block together with all blocks before it (see blocks)."""

    digest: bytes
    serial: int


class BlockKey(NamedTuple):
    """By what a full block is looked up: a digest of it and all blocks before it, and its own ids (see blocks)."""

    digest: bytes
    content: bytes


@dataclass(slots=True, eq=False)
class Sequence:
    """State of one choice.

    token_ids is prompt then output; the KV of the first num_computed of them is in the cache, in block_ids.
    A sequence decodes when exactly one token is left to compute, and prefills when more are, so a resumed
    sequence (whose output is computed again) needs no state of its own.
    """

    request: GenerationRequest
    index: int
    seed: int
    max_len: int  # prompt and output together; the output ends here at the latest
    stop_ids: dict[int, int | None]  # ids that end the sequence → stop_reason (None for the model's own)
    rope_len: int = 0  # which rope table its prompt's length chose (see RopeTable.rope_len); 0: the usual
    soft_prompt_ids: tuple[int, ...] = ()  # of vectors that the model puts before the prompt; they count as prompt here
    two_way_len: int = 0  # leading tokens that see each other both ways, and so are computed in one step
    token_ids: list[int] = field(default_factory=list)
    num_prompt: int = 0
    num_computed: int = 0
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    block_ids: list[int] = field(default_factory=list)
    block_keys: list[BlockKey] = field(default_factory=list)  # of leading full blocks, as far as they were asked for
    prefix: list[PrefixNode] = field(default_factory=list)  # of the leading blocks that are full and computed
    state: SequenceState = SequenceState.WAITING
    slot: int = -1
    num_overtaken: int = 0  # younger sequences admitted while this one waited for blocks
    num_preemptions: int = 0
    first_sibling: Sequence | None = None  # choice 0, whose prompt blocks the other choices share
    prompt_logprobs: list[TokenLogprob | None] | None = None  # grows chunk by chunk, None once reported
    suspect: bool = False  # was in a step that raised; runs alone next, so that only the culprit fails
    reported: bool = False  # an event has been emitted

    def __post_init__(self) -> None:
        self.token_ids = [*self.soft_prompt_ids, *self.request.prompt_ids]
        self.num_prompt = len(self.token_ids)

    @property
    def num_output(self) -> int:
        return len(self.token_ids) - self.num_prompt

    @property
    def num_remaining(self) -> int:
        """Tokens whose KV is still to be computed."""
        return len(self.token_ids) - self.num_computed

    @property
    def wants_prompt_logprobs(self) -> bool:
        """True until every prompt position has its entry; such a prefill reads nothing from the prefix cache.

        The first choice computes them for all.
        """
        asked = self.request.sampling.prompt_logprobs is not None and self.first_sibling is None and not self.reported
        return asked and len(self.prompt_logprobs or ()) < self.num_prompt


def token_event(seq: Sequence, token_id: int, logprob: TokenLogprob | None) -> TokenEvent:
    """What a client learns of the newest known token of seq, which may end it."""
    finish: FinishReason | None = None
    if token_id in seq.stop_ids:
        finish = "stop"
    elif len(seq.token_ids) >= seq.max_len and seq.token_ids[-1] >= 0:
        finish = "length"
    event = TokenEvent(
        seq.request.request_id,
        seq.index,
        (token_id,),
        None if logprob is None else (logprob,),
        finish,
        seq.stop_ids[token_id] if finish == "stop" else None,
        seq.num_cached_tokens,
    )
    if not seq.reported:
        seq.reported = True
        event.prompt_logprobs = None if seq.prompt_logprobs is None else tuple(seq.prompt_logprobs)
        seq.prompt_logprobs = None  # a long prompt's take megabytes
    return event
