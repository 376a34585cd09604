"""What crosses the border between a front end (server, LLM class) and the engine.

Takes nothing from the rest of the engine but errors and sampling_params, so it imports in a moment and anywhere. The
five nouns of the flow are GenerationRequest, Sequence, StepPlan, ForwardBatch and TokenEvent; the first and the last
live here, the others never leave the engine.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from engine.errors import RequestError
from engine.sampling_params import (
    GREEDY_TEMPERATURE,
    MIN_TEMPERATURE,
    SamplingParams,
    check_bad_words,
    check_list,
    check_logit_bias_size,
)

__all__ = [
    "GREEDY_TEMPERATURE",
    "MIN_TEMPERATURE",
    "EngineClient",
    "EngineState",
    "FinishReason",
    "GenerationRequest",
    "ModelInfo",
    "OutputDelta",
    "SamplingParams",
    "TextLogprob",
    "TokenEvent",
    "TokenLogprob",
    "check_bad_words",
    "check_logit_bias_size",
    "context_length_error",
]

FinishReason = Literal["stop", "length", "abort", "error"]


def context_length_error(max_model_len: int, requested: str, param: str = "prompt") -> RequestError:
    """What is said of a prompt that is too long; requested says how long it is ("70 tokens")."""
    return RequestError(
        f"This model's maximum context length is {max_model_len} tokens. However, you requested {requested}. "
        "Please reduce the length of the messages or completion.",
        param,
        "context_length_exceeded",
    )


@dataclass(frozen=True, slots=True)
class GenerationRequest:
    """One prompt, already in token ids; it gives sampling.n choices.

    request_id is made by the engine's own side and is unique; a name chosen by a client is never used as one.
    cache_salt keeps the request's KV blocks from being shared with requests of another salt.
    """

    request_id: str
    prompt_ids: tuple[int, ...]
    sampling: SamplingParams
    cache_salt: str | None = None

    def validate(self, vocab_size: int, max_model_len: int, max_logprobs: int = 20) -> None:
        """Raises RequestError for an empty prompt, ids outside the vocabulary, or no room for one new token."""
        self.sampling.validate(vocab_size, max_logprobs)
        check_list("prompt", self.prompt_ids, "token ids")
        if not self.prompt_ids:
            raise RequestError("the prompt is empty: give at least one token", "prompt")
        if set(map(type, self.prompt_ids)) != {int}:
            odd = next(token_id for token_id in self.prompt_ids if type(token_id) is not int)
            raise RequestError(f"the prompt must be a list of token ids, which are integers; it has {odd!r}", "prompt")
        num_prompt = len(self.prompt_ids)
        if num_prompt >= max_model_len:  # before anything walks the ids
            wanted = 1 if self.sampling.max_tokens is None else self.sampling.max_tokens
            found = f"{num_prompt + wanted} tokens ({num_prompt} in the messages, {wanted} in the completion)"
            raise context_length_error(max_model_len, found)
        lowest, highest = min(self.prompt_ids), max(self.prompt_ids)
        if lowest < 0 or highest >= vocab_size:
            wrong = lowest if lowest < 0 else highest
            raise RequestError(
                f"the prompt has token id {wrong}; ids of this model are 0 to {vocab_size - 1}", "prompt"
            )


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """Log-probability of one token, natural log, and of the best alternatives, best first."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...] = ()  # (token_id, logprob)


@dataclass(slots=True)
class TokenEvent:
    """New tokens of one choice, from the engine. The last event of a choice carries finish_reason.

    Nobody changes one; it is not frozen because one is made for every token, and a frozen one takes five times as long.
    """

    request_id: str
    index: int  # 0 … n-1
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TokenLogprob, ...] | None = None  # one a token, if asked for
    finish_reason: FinishReason | None = None
    stop_reason: int | None = None  # the stop token id, None for the model's own end-of-sequence id
    num_cached_tokens: int = 0  # prompt tokens read from the prefix cache; right in the first event
    prompt_logprobs: tuple[TokenLogprob | None, ...] | None = None  # once, in the first event; entry 0 is None
    error: str | None = None  # with finish_reason "error"


@dataclass(frozen=True, slots=True)
class TextLogprob:
    """TokenLogprob with text. Pieces joined over a choice are its text; a piece is "" inside a character."""

    token: str
    token_id: int
    logprob: float
    bytes: bytes
    top: tuple[TextLogprob, ...] = ()


@dataclass(frozen=True, slots=True)
class OutputDelta:
    """New text of one choice, for a client. text is None if the model has no tokenizer.

    logprobs has one entry for each of token_ids, also where their text is held back or cut by a stop string.
    """

    index: int
    text: str | None
    token_ids: tuple[int, ...] = ()
    logprobs: tuple[TextLogprob, ...] | None = None
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_cached_tokens: int = 0
    prompt_logprobs: tuple[TextLogprob | None, ...] | None = None


@dataclass(frozen=True, slots=True)
class ModelInfo:
    """What a front end must know of the served model."""

    names: tuple[str, ...]  # accepted as "model"; the first is the default
    root: str
    created: int  # Unix time
    vocab_size: int
    max_model_len: int
    has_tokenizer: bool
    has_chat_template: bool
    max_logprobs: int = 20
    default_sampling: Mapping[str, float | int] = field(default_factory=dict)  # from generation_config.json
    about: Mapping[str, Any] = field(default_factory=dict)  # versions, device, flags: for those who measure; no secrets


@dataclass(frozen=True, slots=True)
class EngineState:
    """phase "ready" is the only one in which a request would be answered."""

    phase: Literal["starting", "ready", "draining", "dead"]
    reason: str = ""


class EngineClient(Protocol):
    """The engine as the HTTP server sees it."""

    @property
    def model(self) -> ModelInfo:
        """Raises EngineDeadError before the model is known."""

    @property
    def state(self) -> EngineState: ...

    async def tokenize(self, text: str, add_special_tokens: bool = True, must_fit: bool = False) -> list[int]:
        """Raises RequestError: the model has no tokenizer; with must_fit, the text can never fit the context."""

    async def detokenize(self, token_ids: Sequence[int]) -> str: ...

    async def token_strings(self, token_ids: Sequence[int]) -> list[str]: ...

    async def prompt_pieces(self, token_ids: Sequence[int]) -> list[str]:
        """The text of each prompt token; joined they are detokenize(token_ids). Used by echo."""

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        must_fit: bool = False,
    ) -> list[int]:
        """Prompt ids of a conversation.

        Raises:
            RequestError: no tokenizer, no template, the template refuses the messages or leaves its sandbox; with
                must_fit, the rendered text can never fit the context.
        """

    def generate(self, request: GenerationRequest) -> AsyncGenerator[OutputDelta, None]:
        """Streams all choices of a request; closing the generator at any moment aborts it.

        Raises, from the first or a later step of the iteration:
            RequestError: the request cannot be served.
            CapacityError: the waiting queue is full.
            RequestFailedError: the engine failed this request.
            EngineDeadError: the engine is gone.
        """

    def metrics_text(self) -> bytes:
        """The engine's metrics in the Prometheus text format."""
