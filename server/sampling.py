"""Request fields as SamplingParams, with the defaults and the few adjustments that the API promises."""

from __future__ import annotations

import re
from typing import TypeVar

from engine.api import GREEDY_TEMPERATURE, MIN_TEMPERATURE, ModelInfo, SamplingParams, check_logit_bias_size
from engine.errors import RequestError
from server.schema import ChatRequest, CompletionRequest, GenerationFields

DEFAULT_COMPLETION_TOKENS = 16
MAX_CACHE_SALT_CHARS = 128

# Counts above this are cut to it: no context is longer, and no fixed-width integer behind the border overflows.
_LARGEST_COUNT = 2**31 - 1
_MAX_LOGIT_BIAS = 100.0
_TOKEN_ID = re.compile(r"-?[0-9]{1,10}")

T = TypeVar("T")


def chat_sampling(body: ChatRequest, model: ModelInfo) -> SamplingParams:
    """Raises RequestError naming the field."""
    limit = _max_tokens(body, smallest=1)
    return _sampling(body, model, limit, _chat_logprobs(body, model.max_logprobs), body.prompt_logprobs)


def completion_sampling(body: CompletionRequest, model: ModelInfo) -> SamplingParams:
    """Raises RequestError naming the field.

    With echo, max_tokens may be 0 (see is_score_only). The engine always makes a token, so it is asked for one,
    which is dropped. Logprobs of an echoed prompt are the engine's prompt_logprobs.
    """
    limit = _max_tokens(body, smallest=0 if body.echo else 1)
    limit = DEFAULT_COMPLETION_TOKENS if limit is None else limit
    wanted = [count for count in (body.prompt_logprobs, body.logprobs if body.echo else None) if count is not None]
    return _sampling(body, model, max(limit, 1), body.logprobs, max(wanted, default=None))


def is_score_only(body: CompletionRequest) -> bool:
    """Whether only the prompt is wanted back: echo with max_tokens 0."""
    return bool(body.echo) and _max_tokens(body, smallest=0) == 0


def cache_salt(body: GenerationFields) -> str | None:
    if body.cache_salt is not None and not 1 <= len(body.cache_salt) <= MAX_CACHE_SALT_CHARS:
        raise RequestError(f"cache_salt takes 1 to {MAX_CACHE_SALT_CHARS} characters", "cache_salt")
    return body.cache_salt


def _sampling(
    body: GenerationFields, model: ModelInfo, max_tokens: int | None, logprobs: int | None, prompt_logprobs: int | None
) -> SamplingParams:
    _check_combinations(body, model)
    default = model.default_sampling
    plain = SamplingParams()
    params = SamplingParams(
        temperature=_temperature(_given(body.temperature, default.get("temperature", plain.temperature))),
        top_k=min(_given(body.top_k, int(default.get("top_k", plain.top_k))), _LARGEST_COUNT),
        top_p=_given(body.top_p, default.get("top_p", plain.top_p)),
        min_p=_given(body.min_p, default.get("min_p", plain.min_p)),
        repetition_penalty=_given(body.repetition_penalty, default.get("repetition_penalty", plain.repetition_penalty)),
        presence_penalty=_given(body.presence_penalty, plain.presence_penalty),
        frequency_penalty=_given(body.frequency_penalty, plain.frequency_penalty),
        logit_bias=_logit_bias(body.logit_bias),
        allowed_token_ids=None if body.allowed_token_ids is None else tuple(body.allowed_token_ids),
        bad_words=tuple(body.bad_words or ()),
        seed=None if body.seed == -1 else body.seed,
        n=_given(body.n, 1),
        max_tokens=max_tokens,
        min_tokens=min(_given(body.min_tokens, 0), _LARGEST_COUNT),
        stop=_stop(body.stop),
        stop_token_ids=tuple(body.stop_token_ids or ()),
        ignore_eos=bool(body.ignore_eos),
        include_stop_str_in_output=bool(body.include_stop_str_in_output),
        skip_special_tokens=body.skip_special_tokens is not False,
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
    )
    params.validate(model.vocab_size, model.max_logprobs)
    return params


def _given(value: T | None, default: T) -> T:
    return default if value is None else value


def _temperature(value: float) -> float:
    return MIN_TEMPERATURE if GREEDY_TEMPERATURE <= value < MIN_TEMPERATURE else value


def _max_tokens(body: GenerationFields, smallest: int) -> int | None:
    """max_completion_tokens, else max_tokens, else None; cut to what fits any counter."""
    name = "max_tokens" if body.max_completion_tokens is None else "max_completion_tokens"
    value: int | None = getattr(body, name)
    if value is None:
        return None
    if value < smallest:
        hint = "; 0 is for completions with echo, which then only returns the prompt" if value == 0 else ""
        raise RequestError(f"{name} must be at least {smallest}, got {value}{hint}", name)
    return min(value, _LARGEST_COUNT)


def _chat_logprobs(body: ChatRequest, most: int) -> int | None:
    if body.top_logprobs is not None:
        if not body.logprobs:
            raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
        if not 0 <= body.top_logprobs <= most:
            raise RequestError(f"top_logprobs must be 0 to {most}, got {body.top_logprobs}", "top_logprobs")
    return (body.top_logprobs or 0) if body.logprobs else None


def _check_combinations(body: GenerationFields, model: ModelInfo) -> None:
    if body.best_of is not None and body.best_of != _given(body.n, 1):
        raise RequestError(
            "best_of other than n is not supported yet: leave it out", "best_of", "unsupported_parameter"
        )
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options is only for stream: true", "stream_options")
    if body.prompt_logprobs is not None and body.stream:
        raise RequestError("prompt_logprobs is not available with stream: true", "prompt_logprobs")
    if not model.has_tokenizer:
        for name, value in (("stop", body.stop), ("bad_words", body.bad_words)):
            if value:
                raise RequestError(f"{name} needs a tokenizer, and this model has none", name, "no_tokenizer")


def _stop(stop: str | list[str] | None) -> tuple[str, ...]:
    if stop is None:
        return ()
    return (stop,) if isinstance(stop, str) else tuple(stop)


def _logit_bias(bias: dict[str, float] | None) -> dict[int, float]:
    """Keys as token ids, values clamped to ±100 as OpenAI's range has it."""
    check_logit_bias_size(len(bias or {}))
    ids: dict[int, float] = {}
    for key, value in (bias or {}).items():
        if not _TOKEN_ID.fullmatch(key):
            raise RequestError(f"logit_bias has the key {key[:32]!r}, which is no token id", "logit_bias")
        ids[int(key)] = min(max(value, -_MAX_LOGIT_BIAS), _MAX_LOGIT_BIAS)
    return ids
