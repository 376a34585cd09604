"""Clients that leave or stop reading: STR-05 to STR-08."""

from __future__ import annotations

import asyncio
import random
from typing import Any

import pytest

from tests.server.calls import CHAT, COMPLETIONS, Connection, app_of, events_of, joined, post, run
from tests.server.fake_client import FakeClient

MESSAGES = [{"role": "user", "content": "Hi"}]
ENDLESS: dict[str, Any] = {"prompt": "x", "max_tokens": 4000, "ignore_eos": True}


@pytest.mark.parametrize("path", [CHAT, COMPLETIONS])
def test_client_leaves_a_stream_str_05(path: str) -> None:
    async def work() -> FakeClient:
        client = FakeClient(delay_s=0.001)
        body = {**ENDLESS, "messages": MESSAGES, "stream": True}
        connection = Connection(app_of(client, api_keys=("k",)), path, body, {"authorization": "Bearer k"})

        async def leave_after_three(message: dict[str, Any]) -> None:
            if len(connection.messages) == 4:
                connection.leave()

        connection.on_message = leave_after_three
        await asyncio.wait_for(connection.run(), 5)
        assert len(connection.messages) <= 6
        return client

    client = run(work())
    assert (len(client.aborted), client.finished, client.running) == (1, [], 0)


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize("phase", ["queued", "prefill", "decode"])
@pytest.mark.parametrize("fan", [{}, {"n": 4}, {"prompt": ["x", "y", "z"]}])
def test_client_leaves_in_each_phase_str_06(phase: str, fan: dict[str, Any], streamed: bool) -> None:
    async def work() -> FakeClient:
        client = FakeClient(
            gate=asyncio.Event() if phase == "queued" else None,
            prefill_s=60 if phase == "prefill" else 0,
            delay_s=0.001 if phase == "decode" else None,
        )
        body = {**ENDLESS, **fan, "stream": streamed}
        app = app_of(client, api_keys=("k",), allowed_origins=("*",))
        connection = Connection(app, COMPLETIONS, body, {"authorization": "Bearer k", "origin": "http://a"})
        task = asyncio.create_task(connection.run())
        await asyncio.sleep(0.02)
        assert client.running >= 1
        connection.leave()
        await asyncio.wait_for(task, 5)
        if not streamed or phase != "decode":
            assert connection.status is None
        return client

    client = run(work())
    assert client.running == 0
    assert client.finished == []
    assert len(client.aborted) == len(fan.get("prompt", "x"))


def test_no_abort_for_what_ended_by_itself_str_05() -> None:
    client = FakeClient()
    for streamed in (False, True):
        post(app_of(client), COMPLETIONS, {"prompt": ["a", "b"], "n": 2, "max_tokens": 3, "stream": streamed})
    assert (len(client.finished), client.aborted) == (4, [])


def test_disconnect_storm_str_07() -> None:
    async def work() -> None:
        client = FakeClient(delay_s=0.002)
        app = app_of(client)
        chance = random.Random(7)
        before = len(asyncio.all_tasks())

        async def visit() -> None:
            connection = Connection(app, COMPLETIONS, {**ENDLESS, "stream": True})
            asyncio.get_running_loop().call_later(chance.random() * 0.1, connection.leave)
            await connection.run()

        for _ in range(2):
            await asyncio.gather(*(visit() for _ in range(100)))
        assert client.running == 0
        assert len(asyncio.all_tasks()) == before
        client.delay_s = 0
        after = [Connection(app, COMPLETIONS, {"prompt": "x", "max_tokens": 8}) for _ in range(20)]
        await asyncio.gather(*(connection.run() for connection in after))
        assert [connection.status for connection in after] == [200] * 20
        assert all('"text":"Hello é"' in connection.text for connection in after)

    run(work())


def test_reader_that_stops_is_cut_off_str_08() -> None:
    async def work() -> None:
        client = FakeClient(delay_s=0.001)
        app = app_of(client, write_timeout_s=0.05)
        slow = Connection(app, COMPLETIONS, {**ENDLESS, "stream": True})

        async def stop_reading(message: dict[str, Any]) -> None:
            if len(slow.messages) == 3:
                slow.may_read.clear()

        slow.on_message = stop_reading
        fast = Connection(app, COMPLETIONS, {"prompt": "x", "max_tokens": 8, "stream": True})
        await asyncio.wait_for(asyncio.gather(slow.run(), fast.run()), 5)
        assert joined(events_of(fast.text)) == "Hello é"
        assert "[DONE]" not in slow.text
        assert (len(client.aborted), len(client.finished), client.running) == (1, 1, 0)

    run(work())
