"""Offline use: `LLM(model).generate(prompts)` in one process, without HTTP.

from engine.llm import LLM, SamplingParams

llm = LLM()                                       # the starter model
for output in llm.generate(["The capital of France is"], SamplingParams(temperature=0, max_tokens=8)):
    print(output.text)
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Self

from engine.api import (
    FinishReason,
    GenerationRequest,
    OutputDelta,
    SamplingParams,
    TextLogprob,
    TokenEvent,
)
from engine.build import build_engine
from engine.checkpoint.text import load_text
from engine.config import EngineConfig
from engine.detokenizer import StopTable, TextStream
from engine.errors import ConfigError, RequestError, RequestFailedError
from engine.options import config_from_keywords
from engine.text import default_sampling, require_tokenizer, with_bad_words

__all__ = ["LLM", "Completion", "RequestOutput", "SamplingParams"]

Prompt = str | Sequence[int]
Messages = Sequence[Mapping[str, Any]]


@dataclass(frozen=True, slots=True)
class Completion:
    """One choice. text is None if the model has no tokenizer."""

    index: int
    text: str | None
    token_ids: tuple[int, ...]
    finish_reason: FinishReason
    stop_reason: str | int | None
    logprobs: tuple[TextLogprob, ...] | None = None


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """All choices of one prompt; text and token_ids are those of the first."""

    prompt_ids: tuple[int, ...]
    completions: tuple[Completion, ...]
    num_cached_tokens: int
    prompt_logprobs: tuple[TextLogprob | None, ...] | None = None

    @property
    def text(self) -> str | None:
        return self.completions[0].text

    @property
    def token_ids(self) -> tuple[int, ...]:
        return self.completions[0].token_ids


class LLM:
    """A model in this process. Keyword arguments are engine.serve's flags with underscores."""

    def __init__(self, model: str = "starter", **options: Any) -> None:
        """
        Raises:
            ConfigError, CheckpointError: the model cannot be served.
        """
        self._start(config_from_keywords(model=model, **options))

    @classmethod
    def from_config(cls, config: EngineConfig) -> Self:
        """The same for a config that has been validated."""
        llm = cls.__new__(cls)
        llm._start(config)
        return llm

    def _start(self, config: EngineConfig) -> None:
        built = build_engine(config)
        self.engine = built.engine
        self.info = built.info
        self.tokenizer, self.chat_template = load_text(built.source, built.info.vocab_size, config.chat_template)
        self._num_requests = 0
        self._pid = os.getpid()

    def generate(
        self,
        prompts: Prompt | Sequence[Prompt],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
    ) -> list[RequestOutput]:
        """Completes prompts (text or token ids), all in one batch, and returns their outputs in order.

        Args:
            prompts: one prompt or several.
            sampling: for all prompts, or one each; by default the model's own.

        Raises:
            RequestError: a prompt or a parameter is wrong; nothing has been computed then.
            RequestFailedError: the engine failed a request.
            ConfigError: this process was forked from the one that made the engine.
        """
        many = _prompts(prompts)
        params = self._sampling(sampling, len(many))
        return self._run([(self._encode(prompt), one) for prompt, one in zip(many, params, strict=True)])

    def chat(
        self,
        conversations: Messages | Sequence[Messages],
        sampling: SamplingParams | Sequence[SamplingParams] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        **template_kwargs: Any,
    ) -> list[RequestOutput]:
        """Answers one conversation or several; messages are {"role": …, "content": …}. Raises as generate does."""
        tokenizer = require_tokenizer(self.tokenizer, "chat needs one; use generate with token ids")
        if self.chat_template is None:
            raise RequestError("this model has no chat template: use generate, or pass chat_template", "messages")
        ids = []
        for messages in _conversations(conversations):
            text = self.chat_template.render(messages, add_generation_prompt, continue_final_message, template_kwargs)
            ids.append(tokenizer.encode(text, add_special_tokens=False, param="messages"))
        return self._run(list(zip(map(tuple, ids), self._sampling(sampling, len(ids)), strict=True)))

    def _encode(self, prompt: Prompt) -> tuple[int, ...]:
        if isinstance(prompt, str):
            return tuple(require_tokenizer(self.tokenizer, "pass token ids").encode(prompt))
        return tuple(_list("prompt", prompt))

    def _sampling(self, sampling: SamplingParams | Sequence[SamplingParams] | None, count: int) -> list[SamplingParams]:
        if sampling is None:
            sampling = default_sampling(self.info)
        many = [sampling] * count if isinstance(sampling, SamplingParams) else _list("sampling", sampling)
        if odd := [one for one in many if not isinstance(one, SamplingParams)]:
            raise RequestError(f"sampling must be SamplingParams, or a list of them, found {odd[0]!r}", "sampling")
        if len(many) != count:
            raise RequestError(
                f"{len(many)} sampling parameters for {count} prompts; give one, or one each", "sampling"
            )
        for one in many:  # before bad_words are read
            one.validate(self.info.vocab_size, self.info.max_logprobs)
        return [with_bad_words(one, self.tokenizer) for one in many]

    def _run(self, jobs: list[tuple[tuple[int, ...], SamplingParams]]) -> list[RequestOutput]:
        if os.getpid() != self._pid:  # GPUs, ranks and threads stay with that process
            raise ConfigError(
                f"this LLM belongs to process {self._pid}, which {os.getpid()} was forked from: make one in each "
                "process that needs one, and start processes with 'spawn'"
            )
        requests = []
        for prompt_ids, sampling in jobs:
            request = GenerationRequest(f"offline-{self._num_requests}", prompt_ids, sampling)
            self._num_requests += 1
            self.engine.validate(request)
            requests.append(request)
        folds = {request.request_id: _Fold(request, self._streams(request)) for request in requests}
        pending = list(reversed(requests))
        try:
            while pending or self.engine.has_work:
                while pending and self.engine.has_room(pending[-1].sampling.n):
                    self.engine.add(pending.pop())
                for event in self.engine.step():
                    self._take(event, folds)
        except BaseException:
            for request in requests:
                self.engine.abort(request.request_id)
            raise
        return [folds[request.request_id].output() for request in requests]

    def _streams(self, request: GenerationRequest) -> list[TextStream]:
        sampling, stops = request.sampling, StopTable(request.sampling.stop)
        return [TextStream(self.tokenizer, sampling, request.prompt_ids, stops) for _ in range(sampling.n)]

    def _take(self, event: TokenEvent, folds: Mapping[str, _Fold]) -> None:
        if event.finish_reason == "error":
            raise RequestFailedError(event.error or "the engine failed a request")
        delta = folds[event.request_id].push(event)
        if delta.finish_reason is not None and event.finish_reason is None:  # a stop string
            self.engine.abort(event.request_id, event.index)


class _Fold:
    """Collects the deltas of one request."""

    def __init__(self, request: GenerationRequest, streams: list[TextStream]) -> None:
        self._request = request
        self._streams = streams
        self._deltas: list[list[OutputDelta]] = [[] for _ in streams]

    def push(self, event: TokenEvent) -> OutputDelta:
        delta = self._streams[event.index].push(event)
        self._deltas[event.index].append(delta)
        return delta

    def output(self) -> RequestOutput:
        first = self._deltas[0][0]
        completions = tuple(_completion(deltas) for deltas in self._deltas)
        return RequestOutput(self._request.prompt_ids, completions, first.num_cached_tokens, first.prompt_logprobs)


def _completion(deltas: list[OutputDelta]) -> Completion:
    last = deltas[-1]
    assert last.finish_reason is not None
    with_logprobs = any(delta.logprobs is not None for delta in deltas)
    return Completion(
        index=last.index,
        text=None if last.text is None else "".join(delta.text or "" for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs or ()) if with_logprobs else None,
    )


def _list(name: str, value: Any) -> list[Any]:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise RequestError(f"{name} must be a list or a tuple, found {type(value).__name__}", name)
    return list(value)


def _prompts(prompts: Any) -> list[Prompt]:
    """A list of prompts; a text or a list of ids alone is one prompt."""
    if isinstance(prompts, str):
        return [prompts]
    many = _list("prompt", prompts)
    return [many] if many and isinstance(many[0], int) else many


def _conversations(conversations: Any) -> list[Messages]:
    """A list of conversations; one conversation alone is one."""
    many = _list("messages", conversations)
    if not many:
        raise RequestError("messages is empty; give at least one message", "messages")
    many = [many] if isinstance(many[0], Mapping) else [_list("messages", messages) for messages in many]
    for messages in many:
        if not messages:
            raise RequestError("a conversation has no messages; give at least one", "messages")
        for index, message in enumerate(messages):
            _check_message(message, f"messages[{index}]")
    return many


def _check_message(message: object, name: str) -> None:
    """What the server asks of a message too; the chat template looks at the content."""
    if not isinstance(message, Mapping):
        raise RequestError(f"a message must be a mapping such as a dict, found {type(message).__name__}", name)
    if not isinstance(message.get("role"), str):
        raise RequestError("a message must have a 'role', which is a text", f"{name}.role")
    if message.get("content") is None and not message.get("tool_calls"):
        raise RequestError("a message must have a 'content', a text or a list of text parts", f"{name}.content")
