"""The cases of conformance.whole_engine over ranks: rank 0 has the engine, the others follow."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from conformance.whole_engine.cases import Device
from engine.build import build_engine
from engine.comm.failure import Followed
from engine.config import EngineConfig
from engine.loop import Engine


@dataclass(frozen=True, slots=True)
class RankDevice(Device):
    """Engines for all ranks of the job."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    halves: bool = False  # steps are computed in two
    closes: list[Callable[[], None]] = field(default_factory=list)  # of engines that were made

    def engine(self, folder: Path, **settings: Any) -> Engine:
        """On rank 0. Raises Followed on the others, when it is closed."""
        config = EngineConfig(
            model=str(folder),
            device=self.name,  # type: ignore[arg-type]
            dtype=self.dtype,  # type: ignore[arg-type]
            tensor_parallel_size=self.tensor_parallel_size,
            pipeline_parallel_size=self.pipeline_parallel_size,
            num_threads=1,
            dual_stream="on" if self.halves else "off",
            **settings,
        )
        built = build_engine(config, progress=False)
        self.closes.append(built.close)
        return built.engine


def over_ranks(
    case: Callable[[Device], list[str]], machine: Device, tp: int, pp: int, halves: bool = False
) -> list[str]:
    """What is wrong, as rank 0 says it. The case makes one engine."""
    device = RankDevice(machine.name, machine.dtype, machine.length, tp, pp, halves)
    try:
        return case(device)
    except Followed as end:
        if end.code:
            raise
        return []
    finally:
        for close in device.closes:
            close()
