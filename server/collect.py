"""A whole answer: the events of a stream folded into one body."""

from __future__ import annotations

from typing import Any

from starlette.types import Receive

from engine.api import EngineClient, OutputDelta
from server.events import Events, merge
from server.generation import Format, Job, Tally


async def collect(job: Job, style: Format, client: EngineClient, receive: Receive) -> dict[str, Any]:
    """Runs a job to its end.

    Raises:
        ClientGoneError: the client has closed the connection; the job is aborted.
        GlintError: the engine's own.
    """
    tally = Tally(job)
    parts: dict[int, list[OutputDelta]] = {}
    async with Events(client, job.requests, job.num_choices, receive) as events:
        while events.open:
            for choice, delta in (await events.next()).items():
                tally.add(choice, delta)
                parts.setdefault(choice, []).append(delta)
    choices = [style.answer(choice, merge(parts[choice]), tally) for choice in sorted(parts)]
    return {**job.envelope(style.object, choices), "usage": tally.usage(), **style.extras(tally)}
