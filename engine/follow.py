"""What ranks other than 0 do: their share of every step that rank 0 plans. They own no state of scheduling."""

from __future__ import annotations

from collections.abc import Callable

from engine import runner
from engine.comm.board import Record
from engine.comm.communicator import Communicator
from engine.comm.plan_channel import Kind, Receiver
from engine.forward import Forward
from engine.models.model import Model


def follow(
    channel: Receiver,
    model: Model,
    forward: Forward,
    comm: Communicator,
    settle: Callable[[], None],
    record: Record,
) -> None:
    """Returns when rank 0 says that it is over."""
    while True:
        record.idle()
        message = channel.receive()
        match message.kind:
            case Kind.STOP:
                comm.close()
                return
            case Kind.WARM:
                settle()
            case Kind.STEP:
                assert message.plan is not None
                record.announce(message.plan.step)
                record.begin()
                runner.follow(message.plan, model, forward, comm)
