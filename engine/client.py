"""EngineClient of the HTTP process: text in and out here, tokens over a socket to the engine's process.

Tokenizing, templates and detokenizing happen on this side, so they never delay a step.
"""

from __future__ import annotations

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from engine.api import EngineState, GenerationRequest, ModelInfo, OutputDelta, SamplingParams, TokenEvent
from engine.chat_template import ChatTemplate
from engine.detokenizer import StopTable, TextStream, prompt_pieces
from engine.errors import CapacityError, EngineDeadError, GlintError, RequestError, RequestFailedError
from engine.messages import Abort, Died, Draining, Events, Rejected, Submit, ToEngine, ToFrontEnd, frame
from engine.metrics import Metrics
from engine.text import (
    KeptResults,
    TextWorkers,
    bad_word_ids,
    check_fits,
    merge_events,
    require_tokenizer,
    size_of,
    with_banned,
)
from engine.tokenizer import Tokenizer

NO_TEXT = "token ids cannot be turned into text"
MAX_UNREAD_EVENTS = 4096  # tokens that a client may be behind; a slower reader is cut off


@dataclass(slots=True)
class _Mailbox:
    """Events of one request that its reader has not taken yet."""

    events: list[TokenEvent] = field(default_factory=list)
    error: GlintError | None = None
    wakeup: asyncio.Event = field(default_factory=asyncio.Event)


class AsyncEngineClient:
    """Implements engine.api.EngineClient. All methods run in one event loop."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._mailboxes: dict[str, _Mailbox] = {}
        self._metrics = Metrics()
        self._state = EngineState("starting", "the model is being loaded")
        self._info: ModelInfo | None = None
        self._tokenizer: Tokenizer | None = None
        self._template: ChatTemplate | None = None
        self._workers = TextWorkers()
        self._stop_tables = KeptResults(StopTable, self._workers.short)
        self._bad_word_ids = KeptResults(self._encode_bad_words, self._workers.short)

    # ---- what the process around it tells

    def set_ready(self, info: ModelInfo, tokenizer: Tokenizer | None, template: ChatTemplate | None) -> None:
        """The model and what belongs to it are in memory; requests are answered from now on."""
        has_template = tokenizer is not None and template is not None
        self._info = replace(info, has_tokenizer=tokenizer is not None, has_chat_template=has_template)
        self._tokenizer, self._template = tokenizer, template
        self._state = EngineState("ready")

    def on_message(self, message: ToFrontEnd) -> None:
        """Takes what the engine sent."""
        match message:
            case Events(events=events, stats=stats):
                for event in events:
                    self._metrics.on_event(event)
                    self._deliver(event)
                self._metrics.on_stats(stats)
            case Rejected():
                self._metrics.on_reject(message.request_id)
                error = (
                    CapacityError(message.message)
                    if message.is_busy
                    else RequestError(message.message, message.param, message.code)
                )
                self._fail(message.request_id, error)
            case Draining():
                self._state = EngineState("draining", "the server is shutting down")
            case Died(reason=reason):
                self.set_dead(reason)
            case _:
                raise TypeError(f"unexpected message {type(message).__name__}")

    def set_dead(self, reason: str) -> None:
        """Ends every open request with an error; from now on nothing is answered."""
        self._state = EngineState("dead", reason)
        for request_id in list(self._mailboxes):
            self._fail(request_id, EngineDeadError(reason))

    @property
    def num_open(self) -> int:
        return len(self._mailboxes)

    # ---- EngineClient

    @property
    def model(self) -> ModelInfo:
        if self._info is None:
            raise EngineDeadError(self._state.reason or "the model is not loaded")
        return self._info

    @property
    def state(self) -> EngineState:
        return self._state

    def metrics_text(self) -> bytes:
        return self._metrics.text()

    async def tokenize(self, text: str, add_special_tokens: bool = True, must_fit: bool = False) -> list[int]:
        tokenizer = require_tokenizer(self._tokenizer, "text prompts need one; send token ids instead")
        if must_fit:
            check_fits(text, tokenizer, self.model.max_model_len, "prompt")
        return await self._workers.run(len(text), tokenizer.encode, text, add_special_tokens)

    async def detokenize(self, token_ids: Sequence[int]) -> str:
        tokenizer = require_tokenizer(self._tokenizer, NO_TEXT)
        return await self._workers.run(len(token_ids), tokenizer.decode, token_ids)

    async def token_strings(self, token_ids: Sequence[int]) -> list[str]:
        tokenizer = require_tokenizer(self._tokenizer, NO_TEXT)
        return await self._workers.run(len(token_ids), lambda: list(map(tokenizer.token_string, token_ids)))

    async def prompt_pieces(self, token_ids: Sequence[int]) -> list[str]:
        tokenizer = require_tokenizer(self._tokenizer, NO_TEXT)
        return await self._workers.run(len(token_ids), prompt_pieces, tokenizer, token_ids)

    async def render_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
        must_fit: bool = False,
    ) -> list[int]:
        tokenizer = require_tokenizer(self._tokenizer, "chat needs one; send token ids to /v1/completions instead")
        template = self._template
        if template is None:
            raise RequestError(
                "this model has no chat template: use /v1/completions, or start the server with --chat-template",
                "messages",
            )

        def render() -> list[int]:
            text = template.render(messages, add_generation_prompt, continue_final_message, template_kwargs)
            if must_fit:  # known only now: a template may leave messages out
                check_fits(text, tokenizer, self.model.max_model_len, "messages")
            return tokenizer.encode(text, add_special_tokens=False)

        return await self._workers.run(size_of([messages, template_kwargs]), render)

    async def generate(self, request: GenerationRequest) -> AsyncGenerator[OutputDelta, None]:
        self._check_ready()
        request.validate(self.model.vocab_size, self.model.max_model_len, self.model.max_logprobs)
        request = replace(request, request_id=uuid.uuid4().hex, sampling=await self._with_bad_words(request.sampling))
        streams = await self._text_streams(request)
        self._check_ready()  # it may have ended while words were encoded
        mailbox = self._mailboxes[request.request_id] = _Mailbox()
        self._metrics.on_submit(request)
        self._send(Submit(request))
        engine_done: set[int] = set()
        outcome = "abort"  # of choices that have not ended when the reader leaves
        try:
            while streams:
                for event in await self._next_events(mailbox):
                    if event.finish_reason is not None:
                        engine_done.add(event.index)
                    stream = streams.get(event.index)
                    if stream is None:
                        continue
                    delta = stream.push(event)
                    if delta.finish_reason is not None:
                        del streams[event.index]
                        if event.finish_reason is None:  # a stop string, of which the engine knows nothing
                            self._metrics.on_finish(request.request_id, event.index, "stop")
                            self._send(Abort(request.request_id, event.index))
                            engine_done.add(event.index)
                    yield delta
        except GlintError:
            outcome = "error"
            raise
        finally:
            self._close(request, engine_done, outcome)

    # ---- inside

    def _check_ready(self) -> None:
        if self._state.phase != "ready":
            raise EngineDeadError(self._state.reason)

    def _encode_bad_words(self, words: tuple[str, ...]) -> tuple[tuple[int, ...], ...]:
        return bad_word_ids(words, self._tokenizer)

    async def _with_bad_words(self, sampling: SamplingParams) -> SamplingParams:
        if not sampling.bad_words:
            return sampling
        return with_banned(sampling, await self._bad_word_ids.get(tuple(sampling.bad_words)))

    async def _text_streams(self, request: GenerationRequest) -> dict[int, TextStream]:
        """One for each choice, by index; all share one table of stop strings."""
        sampling = request.sampling
        stops = await self._stop_tables.get(tuple(sampling.stop)) if sampling.stop else StopTable(())
        return {index: TextStream(self._tokenizer, sampling, request.prompt_ids, stops) for index in range(sampling.n)}

    async def _next_events(self, mailbox: _Mailbox) -> list[TokenEvent]:
        """Everything that has arrived, merged to one event a choice; raises what ended the request."""
        while not mailbox.events:
            if mailbox.error is not None:
                raise mailbox.error
            mailbox.wakeup.clear()
            await mailbox.wakeup.wait()
        events, mailbox.events = merge_events(mailbox.events), []
        for event in events:
            if event.finish_reason == "error":
                raise RequestFailedError(event.error or "the engine failed this request")
            if event.finish_reason == "abort":
                raise EngineDeadError("the server is shutting down")
        return events

    def _deliver(self, event: TokenEvent) -> None:
        mailbox = self._mailboxes.get(event.request_id)
        if mailbox is None:
            return
        mailbox.events.append(event)
        if len(mailbox.events) > MAX_UNREAD_EVENTS:
            reason = f"the client is more than {MAX_UNREAD_EVENTS} tokens behind"
            self._fail(event.request_id, RequestFailedError(reason))
            mailbox.events.clear()
        mailbox.wakeup.set()

    def _fail(self, request_id: str, error: GlintError) -> None:
        mailbox = self._mailboxes.get(request_id)
        if mailbox is not None:
            mailbox.error = mailbox.error or error
            mailbox.wakeup.set()

    def _close(self, request: GenerationRequest, engine_done: set[int], outcome: str) -> None:
        mailbox = self._mailboxes.pop(request.request_id)
        if len(engine_done) < request.sampling.n and not isinstance(mailbox.error, RequestError | CapacityError):
            self._send(Abort(request.request_id))
        self._metrics.on_close(request.request_id, outcome)

    def _send(self, message: ToEngine) -> None:
        with contextlib.suppress(ConnectionError):  # the reader notices a dead engine and ends all requests
            self._writer.write(frame(message))
