"""From a request to the sequences of its choices: what can never be served is refused here."""

from __future__ import annotations

from dataclasses import dataclass

from engine.api import GenerationRequest
from engine.blocks import BlockManager
from engine.errors import RequestError
from engine.prefix_lm import check_prefix_request
from engine.rope_table import RopeTable
from engine.sampler import check_tokens_left
from engine.sequence import Sequence


@dataclass(frozen=True, slots=True)
class Limits:
    """What a request may ask for."""

    vocab_size: int
    max_model_len: int
    max_logprobs: int
    max_waiting: int
    eos_token_ids: tuple[int, ...]
    soft_prompt_ids: tuple[int, ...] = ()  # before every prompt, in a model that reads it both ways


def check_request(
    request: GenerationRequest, limits: Limits, blocks: BlockManager, max_num_batched_tokens: int
) -> None:
    """Raises RequestError for a request that can never be served."""
    request.validate(limits.vocab_size, limits.max_model_len, limits.max_logprobs)
    check_tokens_left(request.sampling, limits.vocab_size, limits.eos_token_ids)
    num_prompt = len(request.prompt_ids)
    num_rows = len(limits.soft_prompt_ids) + num_prompt
    if limits.soft_prompt_ids:
        check_prefix_request(request, num_rows, max_num_batched_tokens)
    if blocks.blocks_for(num_rows) > blocks.num_blocks:
        raise RequestError(
            f"the prompt has {num_prompt} tokens, but the KV cache holds {blocks.num_blocks * blocks.block_size}: "
            "shorten the prompt, or start the server with a larger --num-gpu-blocks-override",
            "prompt",
            "context_length_exceeded",
        )


def make_sequences(request: GenerationRequest, limits: Limits, rope: RopeTable, seed: int) -> list[Sequence]:
    """One for each choice. seed: of a request that brings none."""
    sampling = request.sampling
    soft_prompt_ids = limits.soft_prompt_ids
    num_prompt = len(soft_prompt_ids) + len(request.prompt_ids)
    max_len = len(soft_prompt_ids) + limits.max_model_len
    if sampling.max_tokens is not None:
        max_len = min(max_len, num_prompt + sampling.max_tokens)
    stop_ids: dict[int, int | None] = {} if sampling.ignore_eos else dict.fromkeys(limits.eos_token_ids)
    stop_ids.update((token_id, token_id) for token_id in sampling.stop_token_ids)
    seqs = [
        Sequence(
            request=request,
            index=index,
            seed=seed if sampling.seed is None else sampling.seed,
            max_len=max_len,
            stop_ids=stop_ids,
            rope_len=rope.rope_len(num_prompt),
            soft_prompt_ids=soft_prompt_ids,
            two_way_len=num_prompt if soft_prompt_ids else 0,
        )
        for index in range(sampling.n)
    ]
    for seq in seqs[1:]:
        seq.first_sibling = seqs[0]
    return seqs
