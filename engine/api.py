"""What crosses the border between a front end (server, LLM class) and the engine.

Takes nothing from the rest of the engine but errors, so it imports in a moment and anywhere. The five
nouns of the flow are GenerationRequest, Sequence, StepPlan, ForwardBatch and TokenEvent; the first and the
last live here, the others never leave the engine.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, Protocol

from engine.errors import RequestError

FinishReason = Literal["stop", "length", "abort", "error"]

GREEDY_TEMPERATURE = 1e-5  # below this a row is greedy, and top_k, top_p and min_p have no effect
MIN_TEMPERATURE = 1e-2  # positive temperatures below this are raised to it: smaller ones overflow the softmax
MAX_N = 128
MAX_STOP_STRINGS = 64
MAX_STOP_CHARS = 256
MAX_BAD_WORDS = 128
MAX_BAD_WORD_CHARS = 128
MAX_LOGIT_BIAS = 1024  # entries; allowed_token_ids takes as many as the vocabulary has
MAX_TOKEN_LIST = 4096
MAX_INT = 2**63 - 1  # what a message to the engine can carry


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """How the next token of every choice of one request is picked and when a choice ends.

    The order of operations is: penalties, logit_bias, masks (allowed_token_ids, bad words, min_tokens),
    temperature, top_k, top_p, min_p, one draw. Reported logprobs are those of the model itself, taken before
    all of these.
    """

    temperature: float = 1.0
    top_k: int = 0  # 0 or -1: off
    top_p: float = 1.0
    min_p: float = 0.0
    repetition_penalty: float = 1.0  # counts prompt and output
    presence_penalty: float = 0.0  # counts output only
    frequency_penalty: float = 0.0  # counts output only
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words: tuple[str, ...] = ()  # becomes bad_words_ids where there is a tokenizer
    bad_words_ids: tuple[tuple[int, ...], ...] = ()
    seed: int | None = None
    n: int = 1
    max_tokens: int | None = None  # None: up to the context limit
    min_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True
    logprobs: int | None = None  # None: none; 0: the sampled token's own; k: and the k best
    prompt_logprobs: int | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_TEMPERATURE

    def validate(self, vocab_size: int, max_logprobs: int = 20) -> None:
        """Refuses what cannot be sampled.

        Raises:
            RequestError: names the first field that is out of range, what was found and what is allowed.
        """
        for name, low, high, open_low in _FLOAT_RANGES:
            _check_float(name, getattr(self, name), low, high, open_low)
        for name, low_int, high_int in _INT_RANGES:
            _check_int(name, getattr(self, name), low_int, high_int)
        for name in _FLAGS:
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} must be true or false, got {getattr(self, name)!r}", name)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, MAX_INT)
            if self.min_tokens > self.max_tokens:
                raise RequestError(f"min_tokens is {self.min_tokens}, above max_tokens {self.max_tokens}", "min_tokens")
        if self.n > 1 and self.is_greedy:
            raise RequestError(
                f"n is {self.n} with temperature 0: all choices would be the same; set n to 1 or raise temperature",
                "n",
            )
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), 0, max_logprobs)
        if self.seed is not None:
            _check_int("seed", self.seed, -(2**63), 2**63 - 1)
        self._validate_stops()
        self._validate_token_lists(vocab_size)

    def _validate_stops(self) -> None:
        _check_strings("stop", self.stop, MAX_STOP_STRINGS)
        for text in self.stop:
            if not text:
                raise RequestError("stop contains an empty string, which would match at once", "stop")
            if len(text) > MAX_STOP_CHARS:
                raise RequestError(
                    f"stop has an entry of {len(text)} characters; at most {MAX_STOP_CHARS} are allowed", "stop"
                )

    def _validate_token_lists(self, vocab_size: int) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(f"logit_bias must map token ids to numbers, got {self.logit_bias!r}", "logit_bias")
        check_logit_bias_size(len(self.logit_bias))
        for token_id, bias in self.logit_bias.items():
            _check_token_id("logit_bias", token_id, vocab_size)
            _check_float("logit_bias", bias, -100.0, 100.0, False)
        _check_token_list("stop_token_ids", self.stop_token_ids, vocab_size)
        if self.allowed_token_ids is not None:
            _check_list("allowed_token_ids", self.allowed_token_ids, "token ids")
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids is empty, so no token could be sampled", "allowed_token_ids")
            _check_token_list("allowed_token_ids", self.allowed_token_ids, vocab_size, vocab_size)
        check_bad_words(self.bad_words)
        _check_list("bad_words_ids", self.bad_words_ids, "lists of token ids")
        for word_ids in self.bad_words_ids:
            _check_list("bad_words", word_ids, "token ids")
            if not word_ids:
                raise RequestError("bad_words has an entry without any token", "bad_words")
            _check_token_list("bad_words", word_ids, vocab_size)


_FLOAT_RANGES = (  # name, lowest, highest, lowest itself excluded
    ("temperature", 0.0, 100.0, False),  # far above it float32 overflows, and every token is as likely already
    ("top_p", 0.0, 1.0, True),
    ("min_p", 0.0, 1.0, False),
    ("repetition_penalty", 0.01, 100.0, False),
    ("presence_penalty", -2.0, 2.0, False),
    ("frequency_penalty", -2.0, 2.0, False),
)
_INT_RANGES = (("top_k", -1, 2**31 - 1), ("n", 1, MAX_N), ("min_tokens", 0, MAX_INT))
_FLAGS = ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens")


def _check_list(name: str, value: object, what: str) -> None:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise RequestError(f"{name} must be a list of {what}, got {value!r}", name)


def _check_strings(name: str, value: Sequence[object], most: int) -> None:
    _check_list(name, value, "strings")
    if len(value) > most:  # before anything walks them
        raise RequestError(f"{name} has {len(value)} entries; at most {most} are allowed", name)
    for text in value:
        if not isinstance(text, str):
            raise RequestError(f"{name} must be a list of strings, got one with {text!r}", name)


def check_logit_bias_size(num_entries: int) -> None:
    """Raises RequestError for more than MAX_LOGIT_BIAS entries."""
    if num_entries > MAX_LOGIT_BIAS:
        raise RequestError(f"logit_bias has {num_entries} entries; at most {MAX_LOGIT_BIAS} are allowed", "logit_bias")


def check_bad_words(words: Sequence[str]) -> None:
    """Raises RequestError for what is no list of strings, too many words, an empty or a too long one."""
    _check_strings("bad_words", words, MAX_BAD_WORDS)
    for word in words:
        if not 1 <= len(word) <= MAX_BAD_WORD_CHARS:
            raise RequestError(
                f"bad_words has an entry of {len(word)} characters; 1 to {MAX_BAD_WORD_CHARS} are allowed", "bad_words"
            )


def context_length_error(max_model_len: int, requested: str, param: str = "prompt") -> RequestError:
    """What is said of a prompt that is too long; requested says how long it is ("70 tokens")."""
    return RequestError(
        f"This model's maximum context length is {max_model_len} tokens. However, you requested {requested}. "
        "Please reduce the length of the messages or completion.",
        param,
        "context_length_exceeded",
    )


def _check_float(name: str, value: object, low: float, high: float, open_low: bool) -> None:
    wanted = f"{'above' if open_low else 'at least'} {low:g} and at most {high:g}"
    if isinstance(value, bool) or not isinstance(value, int | float):
        raise RequestError(f"{name} must be a number {wanted}, got {value!r}", name)
    if not low <= value <= high or (open_low and value == low):  # NaN is in no range
        raise RequestError(f"{name} must be finite, {wanted}, got {value!r}", name)


def _check_int(name: str, value: object, low: int, high: int) -> None:
    wanted = f"at least {low}" + ("" if high == MAX_INT else f" and at most {high}")
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer {wanted}, got {value!r}", name)
    if not low <= value <= high:
        raise RequestError(f"{name} must be {wanted}, got {value}", name)


def _check_token_id(name: str, value: object, vocab_size: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < vocab_size:
        raise RequestError(f"{name} has token id {value!r}; ids of this model are 0 to {vocab_size - 1}", name)


def _check_token_list(name: str, ids: Sequence[int], vocab_size: int, longest: int = MAX_TOKEN_LIST) -> None:
    _check_list(name, ids, "token ids")
    if len(ids) > longest:
        raise RequestError(f"{name} has {len(ids)} ids; at most {longest} are allowed", name)
    for token_id in ids:
        _check_token_id(name, token_id, vocab_size)


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
        _check_list("prompt", self.prompt_ids, "token ids")
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

    Nobody changes one; it is not frozen because one is made for every token, and a frozen one takes thrice as long.
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
