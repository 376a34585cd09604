"""What every front end does around the engine: events merged, words to ids, limits of texts, work off the loop."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, Generic, TypeVar

from engine.api import ModelInfo, SamplingParams, TokenEvent, check_bad_words, context_length_error
from engine.errors import RequestError
from engine.tokenizer import Tokenizer

LONG_TEXT = 64 * 1024  # characters or tokens; work on more goes through one worker of its own
NUM_SHORT_WORKERS = 4
MAX_KEPT_RESULTS = 16

T = TypeVar("T")


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
    return with_banned(sampling, bad_word_ids(sampling.bad_words, tokenizer))


def with_banned(sampling: SamplingParams, phrases: Iterable[tuple[int, ...]]) -> SamplingParams:
    """sampling with phrases after its own bad_words_ids, each once."""
    return replace(sampling, bad_words_ids=tuple(dict.fromkeys((*sampling.bad_words_ids, *phrases))))


def bad_word_ids(words: tuple[str, ...], tokenizer: Tokenizer | None) -> tuple[tuple[int, ...], ...]:
    """The ids of each word as it stands and after a space. Raises as with_bad_words does, and for too many or long."""
    if tokenizer is None:
        raise RequestError("this model has no tokenizer, so bad_words cannot be used", "bad_words")
    check_bad_words(words)
    phrases: dict[tuple[int, ...], None] = {}
    for word in words:
        for text in (word, " " + word.lstrip()):
            ids = tuple(tokenizer.encode(text, add_special_tokens=False, param="bad_words"))
            if not ids:
                raise RequestError(f"bad_words has {word!r}, which has no token", "bad_words")
            phrases[ids] = None
    return tuple(phrases)


def require_tokenizer(tokenizer: Tokenizer | None, consequence: str) -> Tokenizer:
    """The tokenizer, or a RequestError that says what a model without one cannot do."""
    if tokenizer is None:
        raise RequestError(f"this model has no tokenizer: {consequence}", "prompt")
    return tokenizer


def check_fits(text: str, tokenizer: Tokenizer, max_model_len: int, param: str) -> None:
    """Raises RequestError for a text with more tokens than the context has, whatever they are; costs no tokenizing."""
    size = len(text.encode("utf-8", "surrogatepass"))
    if size > max_model_len * tokenizer.longest_token_bytes:
        at_least = -(-size // tokenizer.longest_token_bytes)
        raise context_length_error(max_model_len, f"at least {at_least} tokens", param)


def size_of(value: object, enough: int = LONG_TEXT) -> int:
    """Characters of all strings in a JSON value plus the number of its parts; counting stops above enough."""
    size, pending = 0, [value]
    while pending and size <= enough:
        part = pending.pop()
        size += 1
        if isinstance(part, str):
            size += len(part)
        elif isinstance(part, Mapping):
            size += sum(map(len, part))
            pending.extend(part.values())
        elif isinstance(part, list | tuple):
            pending.extend(part)
    return size


class TextWorkers:
    """Threads for work on texts: several for short ones, one for long ones, so no short one waits for a long one.

    One long text at a time also bounds the memory: the tokenizer takes over a hundred bytes for each of a text.
    """

    def __init__(self) -> None:
        self.short = ThreadPoolExecutor(NUM_SHORT_WORKERS, "short-text")
        self._long = ThreadPoolExecutor(1, "long-text")

    async def run(self, size: int, function: Callable[..., T], *args: Any) -> T:
        """function(*args) on a thread.

        Args:
            size: characters or tokens that it works on.
        """
        executor = self._long if size > LONG_TEXT else self.short
        return await asyncio.get_running_loop().run_in_executor(executor, function, *args)


class KeptResults(Generic[T]):
    """Results of a function of some strings; each is computed once, on a thread, and the last few are kept."""

    def __init__(self, function: Callable[[tuple[str, ...]], T], executor: ThreadPoolExecutor) -> None:
        self._function = function
        self._executor = executor
        self._futures: dict[tuple[str, ...], asyncio.Future[T]] = {}  # the latest used last

    async def get(self, key: tuple[str, ...]) -> T:
        """The result for key; raises what the function raises, which is not kept."""
        future = self._futures.pop(key, None)
        if future is None:
            future = asyncio.get_running_loop().run_in_executor(self._executor, self._function, key)
        self._futures[key] = future
        if len(self._futures) > MAX_KEPT_RESULTS:
            del self._futures[next(iter(self._futures))]
        try:
            return await asyncio.shield(future)  # others may wait for it too
        except RequestError:
            self._futures.pop(key, None)
            raise
