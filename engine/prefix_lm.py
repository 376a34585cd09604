"""Requests to a model that reads a prompt both ways, and so in one step (CPM-Ant): what they must keep to."""

from __future__ import annotations

from engine.api import GenerationRequest
from engine.errors import RequestError

PADDING_ID = 0  # what the model was trained to look away from


def check_prefix_request(request: GenerationRequest, num_rows: int, step_tokens: int) -> None:
    """Raises RequestError for a request that such a model cannot serve.

    Args:
        num_rows: of the prompt, the learned vectors before it included.
        step_tokens: as many rows as a step has room for.
    """
    if request.sampling.prompt_logprobs is not None:
        raise RequestError(
            "prompt_logprobs: this model reads a prompt both ways, so its tokens have no probability; leave it out",
            "prompt_logprobs",
        )
    if PADDING_ID in request.prompt_ids:
        raise RequestError(
            f"the prompt has token id {PADDING_ID}, which is padding in this model; leave it out", "prompt"
        )
    if num_rows > step_tokens:
        room = step_tokens - (num_rows - len(request.prompt_ids))
        raise RequestError(
            f"the prompt has {len(request.prompt_ids)} tokens, but this model reads a prompt in one step, which has "
            f"room for {room}: shorten the prompt, or start the server with a larger --max-num-batched-tokens",
            "prompt",
            "context_length_exceeded",
        )
