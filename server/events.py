"""The one iterator of deltas behind every answer, streamed or not, and the watch on the client's connection.

Deltas are taken from the engine only when the writer is ready for them; what comes in the meantime waits in the
engine client and is merged, all that is there, into one delta a choice. So a slow reader holds at most the rest
of its own request in memory.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Sequence
from types import TracebackType
from typing import Self

from starlette.types import Receive

from engine.api import EngineClient, GenerationRequest, OutputDelta
from engine.errors import RequestFailedError
from server.errors import ClientGoneError

_MAX_MERGED = 256  # deltas taken per choice at a time, so that an engine that never pauses cannot hold the writer


class Events:
    """Deltas of all choices of one HTTP request, and the end of its connection.

    Choice index = prompt index * n + index within the prompt. Leaving the context aborts what still runs.
    """

    def __init__(
        self, client: EngineClient, requests: Sequence[GenerationRequest], num_choices: int, receive: Receive
    ) -> None:
        self._generators = [client.generate(request) for request in requests]
        self._num_choices = num_choices
        self._receive = receive
        self._unfinished = set(range(len(requests) * num_choices))
        self._steps: dict[asyncio.Task[OutputDelta | None], int] = {}  # the running step of each live prompt

    async def __aenter__(self) -> Self:
        self._gone = asyncio.create_task(_disconnected(self._receive))
        for prompt in range(len(self._generators)):
            self._start_step(prompt)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        tasks = [self._gone, *self._steps]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        for generator in self._generators:
            await generator.aclose()

    @property
    def open(self) -> bool:
        """Whether more can come."""
        return bool(self._steps)

    async def next(self, timeout_s: float | None = None) -> dict[int, OutputDelta]:
        """What is new, one merged delta a choice in order of arrival; empty after timeout_s of silence.

        Raises:
            ClientGoneError: the connection has been closed.
            GlintError: the engine's own, see EngineClient.generate.
        """
        while self._steps:
            waiting = {self._gone, *self._steps}
            done, _ = await asyncio.wait(waiting, timeout=timeout_s, return_when=asyncio.FIRST_COMPLETED)
            if self._gone in done:
                raise ClientGoneError
            found: dict[int, list[OutputDelta]] = {}
            for _ in range(_MAX_MERGED):
                if not self._take_finished(found):
                    break
                await asyncio.sleep(0)  # lets the steps just started pick up what is already there
            if found or not done:
                return {choice: merge(deltas) for choice, deltas in found.items()}
        return {}

    def _take_finished(self, found: dict[int, list[OutputDelta]]) -> bool:
        """Moves the results of finished steps to found and starts the next ones; whether there were any.

        A failure stays for the next call if there is something to hand out before it.
        """
        finished = [task for task in self._steps if task.done()]
        for task in finished:
            if task.exception() is not None and found:
                return False
            prompt = self._steps[task]
            delta = task.result()
            del self._steps[task]
            if delta is None:
                self._check_complete(prompt)
                continue
            choice = prompt * self._num_choices + delta.index
            if delta.finish_reason == "error":
                raise RequestFailedError("the engine could not finish this request")
            if delta.finish_reason is not None:
                self._unfinished.discard(choice)
            found.setdefault(choice, []).append(delta)
            self._start_step(prompt)
        return bool(finished)

    def _start_step(self, prompt: int) -> None:
        self._steps[asyncio.create_task(_step(self._generators[prompt]))] = prompt

    def _check_complete(self, prompt: int) -> None:
        choices = range(prompt * self._num_choices, (prompt + 1) * self._num_choices)
        if not self._unfinished.isdisjoint(choices):
            raise RequestFailedError("the engine ended this request without a reason")


def merge(deltas: Sequence[OutputDelta]) -> OutputDelta:
    """Consecutive deltas of one choice as one; all of them make the whole answer."""
    if len(deltas) == 1:
        return deltas[0]
    first, last = deltas[0], deltas[-1]
    has_logprobs = any(delta.logprobs is not None for delta in deltas)
    return OutputDelta(
        index=first.index,
        text=None if first.text is None else "".join(delta.text or "" for delta in deltas),
        token_ids=tuple(token_id for delta in deltas for token_id in delta.token_ids),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs or ()) if has_logprobs else None,
        finish_reason=last.finish_reason,
        stop_reason=last.stop_reason,
        num_cached_tokens=first.num_cached_tokens,
        prompt_logprobs=next((d.prompt_logprobs for d in deltas if d.prompt_logprobs is not None), None),
    )


async def _step(generator: AsyncGenerator[OutputDelta, None]) -> OutputDelta | None:
    return await anext(generator, None)


async def _disconnected(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass
