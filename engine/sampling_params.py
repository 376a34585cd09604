"""SamplingParams: how tokens are picked and when a choice ends, and the checks of what a client may ask for."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from engine.errors import RequestError

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
            check_list("allowed_token_ids", self.allowed_token_ids, "token ids")
            if not self.allowed_token_ids:
                raise RequestError("allowed_token_ids is empty, so no token could be sampled", "allowed_token_ids")
            _check_token_list("allowed_token_ids", self.allowed_token_ids, vocab_size, vocab_size)
        check_bad_words(self.bad_words)
        check_list("bad_words_ids", self.bad_words_ids, "lists of token ids")
        for word_ids in self.bad_words_ids:
            check_list("bad_words", word_ids, "token ids")
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


def check_list(name: str, value: object, what: str) -> None:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise RequestError(f"{name} must be a list of {what}, got {value!r}", name)


def _check_strings(name: str, value: Sequence[object], most: int) -> None:
    check_list(name, value, "strings")
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
    check_list(name, ids, "token ids")
    if len(ids) > longest:
        raise RequestError(f"{name} has {len(ids)} ids; at most {longest} are allowed", name)
    for token_id in ids:
        _check_token_id(name, token_id, vocab_size)
