"""The engine's side of the wire: Service between a real engine and a front end that only keeps what it is sent."""

from __future__ import annotations

import queue
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conformance.golden_models import chain_model
from engine.api import GenerationRequest, ModelInfo, SamplingParams, TokenEvent
from engine.build import BuiltEngine, build_engine
from engine.config import EngineConfig
from engine.errors import ConfigError, EngineDeadError
from engine.faults import Faults
from engine.messages import Abort, Draining, Events, FrontEndFailed, FrontEndReady, Rejected, Submit, ToEngine
from engine.serve import Service, wait_until_front_end_is_ready


class FrontEnd:
    """Keeps what the service sends. after_step is called once, with the first events."""

    def __init__(self, *inbox: ToEngine | None) -> None:
        self.inbox: queue.SimpleQueue[ToEngine | None] = queue.SimpleQueue()
        self.sent: list[Any] = []
        self.after_step: Callable[[], None] = lambda: None
        for message in inbox:
            self.inbox.put(message)

    def send(self, message: Any) -> None:
        self.sent.append(message)
        if isinstance(message, Events):
            after_step, self.after_step = self.after_step, lambda: None
            after_step()

    @property
    def events(self) -> list[TokenEvent]:
        return [event for message in self.sent if isinstance(message, Events) for event in message.events]


@pytest.fixture
def built(tmp_path: Path) -> Callable[..., BuiltEngine]:
    """Builds a model that counts 10, 11, … 19 and begins again."""

    def build(faults: Faults | None = None, **settings: Any) -> BuiltEngine:
        chain_model(tmp_path, {token: token + 1 for token in range(10, 19)} | {19: 10}, max_position_embeddings=4096)
        limits = {"num_gpu_blocks_override": 64, "num_threads": 1, "max_num_seqs": 4}
        return build_engine(EngineConfig(model=str(tmp_path), **(limits | settings)), faults, progress=False)

    return build


def submit(request_id: str, max_tokens: int = 3, prompt: tuple[int, ...] = (10,)) -> Submit:
    return Submit(GenerationRequest(request_id, prompt, SamplingParams(temperature=0, max_tokens=max_tokens)))


def test_requests_are_answered_and_the_drain_ends_the_run(built: Callable[..., BuiltEngine]) -> None:
    front_end = FrontEnd(submit("a"), submit("b", 2))
    service = Service(built(), front_end, grace_s=30)  # type: ignore[arg-type]
    front_end.after_step = service.request_stop
    service.run()
    assert [(event.request_id, event.token_ids) for event in front_end.events if event.request_id == "a"] == [
        ("a", (11,)),
        ("a", (12,)),
        ("a", (13,)),
    ]
    assert {event.request_id: event.finish_reason for event in front_end.events} == {"a": "length", "b": "length"}
    assert any(isinstance(message, Draining) for message in front_end.sent)


def test_what_is_not_done_in_time_is_ended(built: Callable[..., BuiltEngine]) -> None:
    front_end = FrontEnd(submit("endless", 4000))
    service = Service(built(), front_end, grace_s=0)  # type: ignore[arg-type]
    front_end.after_step = service.request_stop
    service.run()
    assert front_end.events[-1].finish_reason == "abort"


def test_a_second_signal_ends_at_once(built: Callable[..., BuiltEngine]) -> None:
    front_end = FrontEnd(submit("endless", 4000))
    service = Service(built(), front_end, grace_s=1e9)  # type: ignore[arg-type]

    def twice() -> None:
        service.request_stop()
        service.request_stop()

    front_end.after_step = twice
    service.run()
    assert front_end.events[-1].finish_reason == "abort"


def test_refusals_name_the_request(built: Callable[..., BuiltEngine]) -> None:
    """A prompt that can never fit, and a queue that is full."""
    engine = built(max_waiting=2, num_gpu_blocks_override=4)
    queued = [submit(name, 40) for name in ("a", "b", "c")]
    front_end = FrontEnd(submit("long", 1, (10,) * 100), *queued)
    service = Service(engine, front_end, grace_s=30)  # type: ignore[arg-type]
    front_end.after_step = service.request_stop
    service.run()
    refused = {message.request_id: message for message in front_end.sent if isinstance(message, Rejected)}
    assert refused.keys() == {"long", "c"}
    assert (refused["long"].is_busy, refused["long"].code) == (False, "context_length_exceeded")
    assert refused["c"].is_busy


def test_an_abort_frees_the_blocks_and_the_front_end_hears_of_it(built: Callable[..., BuiltEngine]) -> None:
    engine = built()
    front_end = FrontEnd(submit("a", 4000))
    service = Service(engine, front_end, grace_s=30)  # type: ignore[arg-type]

    def after_step() -> None:
        front_end.inbox.put(Abort("a"))
        service.request_stop()

    front_end.after_step = after_step
    service.run()
    assert front_end.events[-1].finish_reason is None
    assert front_end.sent[-1].stats.num_running == 0
    assert front_end.sent[-1].stats.num_blocks_used == 0


def test_a_dead_front_end_ends_the_run(built: Callable[..., BuiltEngine]) -> None:
    with pytest.raises(EngineDeadError, match="HTTP process"):
        Service(built(), FrontEnd(None), grace_s=1).run()  # type: ignore[arg-type]


def test_an_engine_that_fails_every_step_ends_the_run(built: Callable[..., BuiltEngine]) -> None:
    """Requests keep coming; after MAX_FAILED_STEPS the engine gives up instead of failing them one by one for ever."""
    engine = built(Faults(raise_once_at=set(range(1, 100))))
    front_end = FrontEnd(*(submit(str(number)) for number in range(20)))
    with pytest.raises(EngineDeadError, match="steps in a row"):
        Service(engine, front_end, grace_s=1).run()  # type: ignore[arg-type]


def test_start_waits_for_the_front_end() -> None:
    wait_until_front_end_is_ready(FrontEnd(FrontEndReady()))  # type: ignore[arg-type]
    with pytest.raises(ConfigError, match="tokenizer is broken"):
        wait_until_front_end_is_ready(FrontEnd(FrontEndFailed("the tokenizer is broken")))  # type: ignore[arg-type]
    with pytest.raises(EngineDeadError):
        wait_until_front_end_is_ready(FrontEnd(None))  # type: ignore[arg-type]


def test_the_model_info_is_complete(built: Callable[..., BuiltEngine], tmp_path: Path) -> None:
    info = built(served_model_name=("one", "two")).info
    assert isinstance(info, ModelInfo)
    assert (info.names, info.max_model_len, info.vocab_size) == (("one", "two"), 4096, 256)
    assert built().info.names == (tmp_path.name,)  # never a path of this machine
    assert built().info.root == tmp_path.name
