"""The HTTP side of the wire: events to deltas, and what is said to the engine when a reader leaves."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Awaitable, Callable, Iterable
from typing import Any

import pytest

from engine.api import GenerationRequest, ModelInfo, SamplingParams, TokenEvent
from engine.chat_template import ChatTemplate
from engine.client import MAX_UNREAD_EVENTS, AsyncEngineClient
from engine.detokenizer import StopTable
from engine.errors import CapacityError, EngineDeadError, RequestError, RequestFailedError
from engine.messages import HEADER_SIZE, Abort, Died, Draining, Events, Rejected, Submit, decode_to_engine
from engine.stats import EngineStats
from engine.text import LONG_TEXT
from engine.tokenizer import Tokenizer
from tests.engine.tiny_tokenizers import CHAT_TEMPLATE, byte_id, byte_ids, byte_level_tokenizer

INFO = ModelInfo(("m",), "m", 0, 400, 64, False, False)


class Wire:
    """Stands for the socket to the engine, and keeps what was said."""

    def __init__(self) -> None:
        self.said: list[Any] = []

    def write(self, data: bytes) -> None:
        self.said.append(decode_to_engine(data[HEADER_SIZE:]))

    @property
    def request_id(self) -> str:
        return str(next(message.request.request_id for message in self.said if isinstance(message, Submit)))

    @property
    def aborts(self) -> list[Abort]:
        return [message for message in self.said if isinstance(message, Abort)]


def make_client(with_text: bool = True) -> tuple[AsyncEngineClient, Wire]:
    wire = Wire()
    client = AsyncEngineClient(wire)  # type: ignore[arg-type]
    specials = {"eos_token": "<|im_end|>"}
    client.set_ready(INFO, Tokenizer(byte_level_tokenizer(), specials, "test") if with_text else None, None)
    return client, wire


def request(**sampling: Any) -> GenerationRequest:
    return GenerationRequest("from the server", (5, 6), SamplingParams(**sampling))


def event(wire: Wire, *ids: int, index: int = 0, **fields: Any) -> TokenEvent:
    return TokenEvent(wire.request_id, index, ids, **fields)


def tell(client: AsyncEngineClient, *events: TokenEvent) -> None:
    client.on_message(Events(list(events), EngineStats()))


async def submitted(wire: Wire, count: int = 1) -> None:
    """Waits until the engine has been told of so many requests; stop strings and bad words are prepared on a thread."""
    while sum(isinstance(message, Submit) for message in wire.said) < count:
        await asyncio.sleep(0.001)


def outcomes(client: AsyncEngineClient) -> dict[str, float]:
    lines = [line for line in client.metrics_text().decode().splitlines() if "request_success_total{" in line]
    return {line.split('"')[1]: float(line.rsplit(" ", 1)[1]) for line in lines if not line.endswith(" 0.0")}


def play(scenario: Callable[[], Awaitable[None]]) -> None:
    asyncio.run(asyncio.wait_for(scenario(), 10))  # type: ignore[arg-type]


def test_a_whole_request() -> None:
    """The engine gets an id of our own making; a normal end sends no abort."""

    async def scenario() -> None:
        client, wire = make_client()
        stream = client.generate(request(max_tokens=3))
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        assert wire.request_id != "from the server"
        tell(client, event(wire, byte_id(ord("h")), num_cached_tokens=1))
        assert (await first).text == "h"
        tell(client, event(wire, byte_id(ord("i"))), event(wire, 2, finish_reason="stop"))
        rest = [delta async for delta in stream]
        assert [(delta.text, delta.token_ids, delta.finish_reason) for delta in rest] == [
            ("i", (byte_id(ord("i")), 2), "stop")
        ]
        assert not wire.aborts
        assert client.num_open == 0
        assert outcomes(client) == {"stop": 1}

    play(scenario)


def test_a_reader_that_leaves_aborts() -> None:
    async def scenario() -> None:
        client, wire = make_client()
        stream = client.generate(request())
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        tell(client, event(wire, 40))
        await first
        await stream.aclose()
        assert wire.aborts == [Abort(wire.request_id)]
        tell(client, event(wire, 41))  # too late, for nobody
        assert client.num_open == 0
        assert outcomes(client) == {"abort": 1}

    play(scenario)


def test_a_stop_string_ends_one_choice_and_the_others_go_on() -> None:
    async def scenario() -> None:
        client, wire = make_client()
        stream = client.generate(request(n=2, stop=("XY",)))
        deltas = [asyncio.ensure_future(anext(stream))]
        await submitted(wire)
        tell(client, event(wire, *byte_ids("aXYb")), event(wire, *byte_ids("c"), index=1))
        found = [await deltas[0], await anext(stream)]
        assert (found[0].text, found[0].finish_reason, found[0].stop_reason) == ("a", "stop", "XY")
        assert found[0].token_ids == tuple(byte_ids("aXY"))
        assert wire.aborts == [Abort(wire.request_id, 0)]
        tell(client, event(wire, *byte_ids("z")), event(wire, *byte_ids("d"), index=1, finish_reason="length"))
        rest = [delta async for delta in stream]
        assert [(delta.index, delta.text, delta.finish_reason) for delta in rest] == [(1, "d", "length")]
        assert len(wire.aborts) == 1
        assert outcomes(client) == {"stop": 1, "length": 1}

    play(scenario)


def test_str_08_a_reader_that_is_too_slow_is_cut_off() -> None:
    async def scenario() -> None:
        client, wire = make_client()
        stream = client.generate(request())
        first = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        tell(client, event(wire, 40))
        await first
        for _ in range(MAX_UNREAD_EVENTS + 1):
            tell(client, event(wire, 40))
        with pytest.raises(RequestFailedError, match="behind"):
            await anext(stream)
        assert wire.aborts == [Abort(wire.request_id)]
        assert outcomes(client) == {"error": 1}

    play(scenario)


@pytest.mark.parametrize(
    ("rejected", "error"),
    [
        ({"is_busy": True}, CapacityError),
        ({"param": "prompt", "code": "context_length_exceeded"}, RequestError),
    ],
)
def test_a_rejected_request(rejected: dict[str, Any], error: type[Exception]) -> None:
    """It raises what the engine raised, is not aborted, and counts as no outcome."""

    async def scenario() -> None:
        client, wire = make_client()
        first = asyncio.ensure_future(anext(client.generate(request())))
        await asyncio.sleep(0)
        client.on_message(Rejected(wire.request_id, "no", **rejected))
        with pytest.raises(error, match="no") as caught:
            await first
        if isinstance(caught.value, RequestError):
            assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")
        assert not wire.aborts
        assert outcomes(client) == {}

    play(scenario)


@pytest.mark.parametrize(
    ("fields", "error"),
    [({"finish_reason": "error", "error": "NaN"}, RequestFailedError), ({"finish_reason": "abort"}, EngineDeadError)],
)
def test_a_choice_that_fails_ends_the_request(fields: dict[str, Any], error: type[Exception]) -> None:
    async def scenario() -> None:
        client, wire = make_client()
        first = asyncio.ensure_future(anext(client.generate(request(n=2))))
        await asyncio.sleep(0)
        tell(client, event(wire, index=1, **fields))
        with pytest.raises(error):
            await first
        assert wire.aborts == [Abort(wire.request_id)]
        assert outcomes(client) == ({"error": 2} if error is RequestFailedError else {"abort": 1, "error": 1})

    play(scenario)


def test_a_dead_engine_ends_everything() -> None:
    async def scenario() -> None:
        client, _ = make_client()
        pending = [asyncio.ensure_future(anext(client.generate(request()))) for _ in range(3)]
        await asyncio.sleep(0)
        client.on_message(Died("out of luck"))
        for one in pending:
            with pytest.raises(EngineDeadError, match="out of luck"):
                await one
        assert client.state.phase == "dead"
        with pytest.raises(EngineDeadError):
            await anext(client.generate(request()))
        assert outcomes(client) == {"error": 3}

    play(scenario)


def test_draining_takes_nothing_new() -> None:
    async def scenario() -> None:
        client, wire = make_client()
        client.on_message(Draining())
        assert client.state.phase == "draining"
        with pytest.raises(EngineDeadError, match="shutting down"):
            await anext(client.generate(request()))
        assert not wire.said

    play(scenario)


def test_a_wrong_request_is_refused_before_the_engine_hears_of_it() -> None:
    async def scenario() -> None:
        client, wire = make_client()
        for wrong in (request(top_p=2.0), request(logit_bias={400: 1.0}), GenerationRequest("x", (), SamplingParams())):
            with pytest.raises(RequestError):
                await anext(client.generate(wrong))
        assert not wire.said
        assert client.num_open == 0

    play(scenario)


def test_what_needs_a_tokenizer_says_so() -> None:
    async def scenario() -> None:
        client, _ = make_client(with_text=False)
        assert not client.model.has_tokenizer
        for attempt in (
            client.tokenize("x"),
            client.detokenize([1]),
            client.prompt_pieces([1]),
            client.render_chat([]),
        ):
            with pytest.raises(RequestError, match="no tokenizer"):
                await attempt

    play(scenario)


class WatchedTokenizer(Tokenizer):
    """Notes what is encoded and on which thread; holds long texts up until released."""

    def __init__(self) -> None:
        super().__init__(byte_level_tokenizer(), {"eos_token": "<|im_end|>"}, "test")
        self.encoded: list[str] = []
        self.encoders: set[str] = set()
        self.decoders: set[str] = set()
        self.release = threading.Event()
        self.num_held = 0
        self.most_held = 0

    def encode(self, text: str, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        self.encoded.append(text)
        self.encoders.add(threading.current_thread().name)
        if len(text) <= LONG_TEXT:
            return super().encode(text, add_special_tokens, param)
        self.num_held += 1
        self.most_held = max(self.most_held, self.num_held)
        assert self.release.wait(10)
        self.num_held -= 1
        return [0]

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        self.decoders.add(threading.current_thread().name)
        return super().decode(token_ids, skip_special_tokens)

    def token_string(self, token_id: int) -> str:
        self.decoders.add(threading.current_thread().name)
        return super().token_string(token_id)

    def skipped(self, skip_special_tokens: bool) -> frozenset[int]:
        self.decoders.add(threading.current_thread().name)
        return super().skipped(skip_special_tokens)


def watched_client() -> tuple[AsyncEngineClient, Wire, WatchedTokenizer]:
    wire, tokenizer = Wire(), WatchedTokenizer()
    client = AsyncEngineClient(wire)  # type: ignore[arg-type]
    client.set_ready(INFO, tokenizer, ChatTemplate(CHAT_TEMPLATE, {}, "test"))
    return client, wire, tokenizer


def test_long_texts_delay_no_short_one() -> None:
    """More of them than any pool of threads has; they are tokenized one at a time, which bounds the memory."""

    async def scenario() -> None:
        client, _, tokenizer = watched_client()
        long = "a" * (LONG_TEXT + 1)
        held: list[asyncio.Future[list[int]]] = [asyncio.ensure_future(client.tokenize(long)) for _ in range(20)]
        held += [asyncio.ensure_future(client.render_chat([{"role": "user", "content": long}])) for _ in range(20)]
        await asyncio.sleep(0)
        try:
            async with asyncio.timeout(5):
                assert await client.tokenize("hi") == byte_ids("hi")
                assert await client.render_chat([{"role": "user", "content": "hi"}])
                assert await client.token_strings([byte_id(ord("h"))]) == ["h"]
        finally:
            tokenizer.release.set()
        assert await asyncio.gather(*held) == [[0]] * 40
        assert tokenizer.most_held == 1

    play(scenario)


def test_a_text_that_can_never_fit_is_refused_untokenized() -> None:
    """A context of 64 tokens of at most 13 bytes, those of <|endoftext|>, holds at most 832 bytes."""

    async def scenario() -> None:
        client, _, tokenizer = watched_client()
        said = "maximum context length is 64 tokens. However, you requested at least 65 tokens"
        for text in ("a" * 833, "é" * 417):
            with pytest.raises(RequestError, match=said) as refused:
                await client.tokenize(text, must_fit=True)
            assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "prompt")
        with pytest.raises(RequestError, match="context length is 64 tokens") as refused:
            await client.render_chat([{"role": "user", "content": "a" * 833}], must_fit=True)
        assert (refused.value.code, refused.value.param) == ("context_length_exceeded", "messages")
        assert not tokenizer.encoded
        assert await client.tokenize("<|endoftext|>" * 64, must_fit=True) == [0] * 64
        assert len(await client.tokenize("a" * 833)) == 833, "a limit of prompts, not of tokenizing"

    play(scenario)


def test_bad_words_are_encoded_once_and_off_the_loop() -> None:
    async def scenario() -> None:
        client, wire, tokenizer = watched_client()
        words = {"bad_words": ("cat", "hello")}
        pending = [asyncio.ensure_future(anext(client.generate(request(**words)))) for _ in range(16)]
        await submitted(wire, 16)
        pending[0].cancel()
        pending.append(asyncio.ensure_future(anext(client.generate(request(**words)))))
        await submitted(wire, 17)
        assert sorted(tokenizer.encoded) == [" cat", " hello", "cat", "hello"]
        assert threading.current_thread().name not in tokenizer.encoders
        submits = [message for message in wire.said if isinstance(message, Submit)]
        assert {len(submit.request.sampling.bad_words_ids) for submit in submits} == {4}
        client.set_dead("end")
        await asyncio.gather(*pending, return_exceptions=True)

    play(scenario)


def test_stop_strings_are_prepared_once_and_off_the_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    built: list[tuple[Any, str]] = []

    class WatchedTable(StopTable):
        def __init__(self, stops: Any) -> None:
            built.append((stops, threading.current_thread().name))
            super().__init__(stops)

    for module in ("engine.client", "engine.detokenizer"):
        monkeypatch.setattr(f"{module}.StopTable", WatchedTable)

    async def scenario() -> None:
        client, wire, _ = watched_client()
        pending = [asyncio.ensure_future(anext(client.generate(request(n=48, stop=("XY",))))) for _ in range(3)]
        await submitted(wire, 3)
        assert [stops for stops, _ in built] == [("XY",)]
        assert built[0][1] != threading.current_thread().name
        client.set_dead("end")
        await asyncio.gather(*pending, return_exceptions=True)

    play(scenario)


def test_an_engine_that_dies_while_words_are_encoded_ends_the_request() -> None:
    async def scenario() -> None:
        client, wire, _ = watched_client()
        first = asyncio.ensure_future(anext(client.generate(request(stop=("XY",), bad_words=("cat",)))))
        await asyncio.sleep(0)
        client.set_dead("out of luck")
        with pytest.raises(EngineDeadError, match="out of luck"):
            await first
        assert not wire.said
        assert client.num_open == 0

    play(scenario)


def test_ids_become_text_off_the_loop() -> None:
    async def scenario() -> None:
        client, _, tokenizer = watched_client()
        ids = byte_ids("hi")
        assert await client.detokenize(ids) == "hi"
        assert await client.token_strings(ids) == ["h", "i"]
        assert await client.prompt_pieces(ids) == ["h", "i"]
        assert tokenizer.decoders
        assert threading.current_thread().name not in tokenizer.decoders

    play(scenario)
