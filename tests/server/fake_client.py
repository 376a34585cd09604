"""A scripted EngineClient whose tokens are bytes: id = byte + 1, id 0 is the start token, which has no text."""

from __future__ import annotations

import asyncio
import codecs
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.api import (
    EngineState,
    FinishReason,
    GenerationRequest,
    ModelInfo,
    OutputDelta,
    TextLogprob,
    context_length_error,
)
from engine.errors import RequestError

VOCAB_SIZE = 300  # ids 257 and up have no text
CONTEXT = 64
MAX_FAKE_CHARS = 1000  # a longer text is refused untokenized

MODEL = ModelInfo(
    names=("M", "alias/of-M"),
    root="tiny",
    created=1700000000,
    vocab_size=VOCAB_SIZE,
    max_model_len=CONTEXT,
    has_tokenizer=True,
    has_chat_template=True,
)


def ids_of(text: str) -> list[int]:
    return [byte + 1 for byte in text.encode()]


def bytes_of(token_id: int) -> bytes:
    return bytes([token_id - 1]) if 1 <= token_id <= 256 else b""


def pieces_of(token_ids: Sequence[int]) -> list[str]:
    """Text of each token; "" inside a character."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    return [decoder.decode(bytes_of(token_id), i == len(token_ids) - 1) for i, token_id in enumerate(token_ids)]


def logprob_of(position: int, token_id: int) -> float:
    return -(position + token_id / 1000)


@dataclass
class FakeClient:
    """What it says, when, and what becomes of its requests.

    Every choice says replies[index % len(replies)], burst tokens a delta, delay_s before each delta. With failure,
    the delta of step fail_at is replaced by that exception. prefill_s passes before the first delta. gate, if
    given, must be set before any delta comes.
    """

    model_info: ModelInfo = MODEL
    replies: Sequence[str] = ("Hello é",)
    stop_reason: str | int | None = None
    finish_reason: FinishReason | None = None  # in place of stop or length
    burst: int = 1
    delay_s: float | None = None
    prefill_s: float = 0.0
    failure: Exception | None = None
    fail_at: int = 0
    gate: asyncio.Event | None = None
    num_cached_tokens: int = 0
    top_logprobs: Sequence[float] = ()  # of the alternatives, in place of the ordinary ones
    gives_prompt_logprobs: bool = True
    add_bos: bool = False
    engine_state: EngineState = field(default_factory=lambda: EngineState("ready"))

    requests: list[GenerationRequest] = field(default_factory=list)
    finished: list[str] = field(default_factory=list)
    aborted: list[str] = field(default_factory=list)
    rendered: list[dict[str, Any]] = field(default_factory=list)  # arguments of each render_chat

    @property
    def model(self) -> ModelInfo:
        return self.model_info

    @property
    def state(self) -> EngineState:
        return self.engine_state

    @property
    def running(self) -> int:
        return len(self.requests) - len(self.finished) - len(self.aborted)

    async def tokenize(self, text: str, add_special_tokens: bool = True, must_fit: bool = False) -> list[int]:
        if must_fit and len(text) > MAX_FAKE_CHARS:
            raise context_length_error(CONTEXT, f"at least {len(text)} tokens")
        return ([0] if self.add_bos and add_special_tokens else []) + ids_of(text)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        return "".join(pieces_of(token_ids))

    async def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        return [f"<{token_id}>" for token_id in token_ids]

    async def prompt_pieces(self, token_ids: Sequence[int]) -> list[str]:
        return pieces_of(token_ids)

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        must_fit: bool = False,
    ) -> list[int]:
        self.rendered.append(
            {
                "messages": [dict(message) for message in messages],
                "add_generation_prompt": add_generation_prompt,
                "continue_final_message": continue_final_message,
                "template_kwargs": dict(template_kwargs or {}),
                "must_fit": must_fit,
            }
        )
        if "messages" in (template_kwargs or {}):
            raise RequestError("chat_template_kwargs cannot set messages", "chat_template_kwargs.messages")
        if any("REFUSE" in message["content"] for message in messages):
            raise RequestError("the chat template refuses: roles must alternate", "messages")
        return ids_of("".join(f"{message['role'][0]}:{message['content']};" for message in messages))

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[OutputDelta, None]:
        self.requests.append(request)
        whole = False
        try:
            if self.prefill_s:
                await asyncio.sleep(self.prefill_s)
            if self.gate is not None:
                await self.gate.wait()
            for step, delta in enumerate(self._script(request)):
                if self.delay_s is not None:
                    await asyncio.sleep(self.delay_s)
                if self.failure is not None and step == self.fail_at:
                    raise self.failure
                yield delta
            whole = True
        finally:
            (self.finished if whole else self.aborted).append(request.request_id)

    def metrics_text(self) -> bytes:
        return b"# TYPE fake_engine gauge\nfake_engine 1.0\n"

    def _script(self, request: GenerationRequest) -> list[OutputDelta]:
        """All deltas: one a choice in turn."""
        sampling = request.sampling
        rows = [self._choice(request, index) for index in range(sampling.n)]
        script = [delta for column in itertools.zip_longest(*rows) for delta in column if delta is not None]
        prompt_logprobs = None
        if sampling.prompt_logprobs is not None and self.gives_prompt_logprobs:
            prompt_logprobs = self._prompt_logprobs(request.prompt_ids, sampling.prompt_logprobs)
        first = script[0]
        script[0] = OutputDelta(
            first.index,
            first.text,
            first.token_ids,
            first.logprobs,
            first.finish_reason,
            first.stop_reason,
            self.num_cached_tokens,
            prompt_logprobs,
        )
        return script

    def _choice(self, request: GenerationRequest, index: int) -> list[OutputDelta]:
        sampling = request.sampling
        room = CONTEXT - len(request.prompt_ids)
        limit = room if sampling.max_tokens is None else min(room, sampling.max_tokens)
        said = ids_of(self.replies[index % len(self.replies)])
        ids = list(itertools.islice(itertools.cycle(said), limit)) if sampling.ignore_eos else said[:limit]
        finish: FinishReason = self.finish_reason or ("length" if len(ids) == limit else "stop")
        pieces = pieces_of(ids)
        entries = None
        if sampling.logprobs is not None:
            entries = tuple(self._entry(i, token_id, pieces[i], sampling.logprobs) for i, token_id in enumerate(ids))
        deltas = []
        for start in range(0, len(ids), self.burst):
            stop = min(start + self.burst, len(ids))
            deltas.append(
                OutputDelta(
                    index=index,
                    text="".join(pieces[start:stop]) if self.model_info.has_tokenizer else None,
                    token_ids=tuple(ids[start:stop]),
                    logprobs=None if entries is None else entries[start:stop],
                    finish_reason=finish if stop == len(ids) else None,
                    stop_reason=self.stop_reason if stop == len(ids) else None,
                )
            )
        return deltas

    def _entry(self, position: int, token_id: int, piece: str, num_top: int) -> TextLogprob:
        """The sampled token is never among the alternatives."""
        values = self.top_logprobs or [-0.25 * (k + 1) for k in range(num_top)]
        top = tuple(
            TextLogprob("", other, value, bytes_of(other))
            for other, value in zip(range(260, 260 + num_top), values, strict=False)
        )
        return TextLogprob(piece, token_id, logprob_of(position, token_id), bytes_of(token_id), top)

    def _prompt_logprobs(self, ids: Sequence[int], num_top: int) -> tuple[TextLogprob | None, ...]:
        pieces = pieces_of(ids)
        rest = [self._entry(i, ids[i], pieces[i], num_top) for i in range(1, len(ids))]
        return (None, *rest)
