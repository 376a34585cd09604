"""The HTTP side of the wire: events to deltas, and what is said to the engine when a reader leaves."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Any

import pytest

from engine.api import GenerationRequest, ModelInfo, SamplingParams, TokenEvent
from engine.client import MAX_UNREAD_EVENTS, AsyncEngineClient
from engine.errors import CapacityError, EngineDeadError, RequestError, RequestFailedError
from engine.messages import HEADER_SIZE, Abort, Died, Draining, Events, Rejected, Submit, decode_to_engine
from engine.stats import EngineStats
from engine.tokenizer import Tokenizer
from tests.engine.tiny_tokenizers import byte_id, byte_ids, byte_level_tokenizer

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
