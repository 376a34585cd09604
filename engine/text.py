"""What every front end does around the engine: events merged, words to ids, prompts back to text."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from engine.api import ModelInfo, SamplingParams, TokenEvent
from engine.errors import RequestError
from engine.tokenizer import Tokenizer


def merge_events(events: Iterable[TokenEvent]) -> list[TokenEvent]:
    """Events of one request that a reader has not taken yet, joined to one a choice, in order of first arrival."""
    merged: dict[int, TokenEvent] = {}
    for event in events:
        before = merged.get(event.index)
        merged[event.index] = event if before is None else _join(before, event)
    return list(merged.values())


def _join(first: TokenEvent, second: TokenEvent) -> TokenEvent:
    has_logprobs = first.logprobs is not None or second.logprobs is not None
    return replace(
        second,
        token_ids=first.token_ids + second.token_ids,
        logprobs=(first.logprobs or ()) + (second.logprobs or ()) if has_logprobs else None,
        num_cached_tokens=max(first.num_cached_tokens, second.num_cached_tokens),
        prompt_logprobs=first.prompt_logprobs or second.prompt_logprobs,
    )


def default_sampling(info: ModelInfo) -> SamplingParams:
    """What the checkpoint's generation_config.json asks for where a request says nothing."""
    changes: dict[str, Any] = dict(info.default_sampling)
    return replace(SamplingParams(), **changes)


def with_bad_words(sampling: SamplingParams, tokenizer: Tokenizer | None) -> SamplingParams:
    """sampling with bad_words turned into bad_words_ids: each word as it stands and after a space.

    Raises:
        RequestError: the model has no tokenizer, or a word has no token.
    """
    if not sampling.bad_words:
        return sampling
    if tokenizer is None:
        raise RequestError("this model has no tokenizer, so bad_words cannot be used", "bad_words")
    phrases: dict[tuple[int, ...], None] = dict.fromkeys(sampling.bad_words_ids)
    for word in sampling.bad_words:
        for text in (word, " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False, param="bad_words"))
            if not ids:
                raise RequestError(f"bad_words has {word!r}, which has no token", "bad_words")
            phrases[ids] = None
    return replace(sampling, bad_words_ids=tuple(phrases))


def require_tokenizer(tokenizer: Tokenizer | None, consequence: str) -> Tokenizer:
    """The tokenizer, or a RequestError that says what a model without one cannot do."""
    if tokenizer is None:
        raise RequestError(f"this model has no tokenizer: {consequence}", "prompt")
    return tokenizer
