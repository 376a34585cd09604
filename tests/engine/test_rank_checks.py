"""What ranks must have in common, and whether their part of a model fits: before any weight is read (DST-03)."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from conformance.golden_models import rand_model
from engine.backends.backend import Room
from engine.checkpoint.loader import load_model_config, load_weights
from engine.checkpoint.source import resolve
from engine.comm.ranks import Ranks
from engine.config import EngineConfig, ParallelConfig
from engine.errors import ConfigError
from engine.models.registry import ARCHITECTURES
from engine.rank_checks import check_room, check_same
from engine.split import rank_weights
from engine.weights import Coded, Packed, WeightMap, weight_bytes

KIND = "H200 (sm_90) in bfloat16"
MB = 10**6


class TwoRanks(Ranks):
    """This is rank 1, and rank 0 brings what is in `first`."""

    first: Any = None

    def gather(self, value: Any, what: str, deadline_s: float = 0.0) -> list[Any]:
        return [TwoRanks.first, value]

    def agree(self, problems: Any, what: str) -> None:
        if problems:
            raise ConfigError("\n".join(problems))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rand_model(tmp_path_factory.mktemp("model"), num_hidden_layers=4)


def backend(free: int = 0, total: int = 0, kind: str = KIND) -> Any:
    return SimpleNamespace(
        kind=kind, room=lambda weight_map: Room(weight_bytes(weight_map, 2), free, total, "GPU 3") if total else None
    )


def compared(folder: Path, kind: str) -> str:
    """What is said of a rank, when rank 0 has a backend of another kind."""
    ranks, source, config = TwoRanks(rank=1, size=2), resolve(str(folder)), EngineConfig()
    found: list[Any] = []
    TwoRanks.first = None
    ranks_of_0 = SimpleNamespace(gather=lambda value, what: found.append(value) or [value], agree=lambda *_: None)
    check_same(config, ranks_of_0, source, backend())  # type: ignore[arg-type]
    TwoRanks.first = found[0]
    try:
        check_same(config, ranks, source, backend(kind=kind))
    except ConfigError as error:
        return str(error)
    return ""


def test_ranks_of_one_kind_agree(folder: Path) -> None:
    assert compared(folder, KIND) == ""


def test_a_gpu_of_another_kind_is_refused_by_name(folder: Path) -> None:
    said = compared(folder, "A100 (sm_80) in bfloat16")
    assert "it computes with A100 (sm_80) in bfloat16, and rank 0 with H200 (sm_90) in bfloat16" in said
    assert "CUDA_VISIBLE_DEVICES" in said


def whole(folder: Path) -> WeightMap:
    config = load_model_config(resolve(str(folder)))
    return ARCHITECTURES[config.architecture].weight_map(config)


@pytest.mark.parametrize(("tp", "pp"), [(1, 1), (2, 1), (1, 2)])
def test_bytes_of_weights_are_those_that_are_loaded(folder: Path, tp: int, pp: int) -> None:
    config = load_model_config(resolve(str(folder)))
    for rank in range(tp * pp):
        part = rank_weights(whole(folder), config, ParallelConfig(rank, tp, pp))
        loaded = load_weights(resolve(str(folder)), part, progress=False)
        assert weight_bytes(part, 4) == loaded.num_bytes


def test_bytes_of_integers_and_codes(folder: Path) -> None:
    """Of 4 bits, with a scale and a zero for 128 of them, and of 8 bits."""
    linear = whole(folder).linears[0]
    size = linear.out_features * linear.in_features
    packed = WeightMap((replace(linear, packed=Packed(128, zeros=True)),), ())
    assert weight_bytes(packed, 2) == size // 2 + size // 128 * 5 // 2
    assert weight_bytes(WeightMap((replace(linear, packed=Packed(128, zeros=False)),), ()), 2) == size // 2 + size // 64
    assert weight_bytes(WeightMap((replace(linear, coded=Coded("fp8", "channel", static=False)),), ()), 2) == size


def test_a_part_that_fits_is_told(folder: Path, caplog: pytest.LogCaptureFixture) -> None:
    config = load_model_config(resolve(str(folder)))
    with caplog.at_level(logging.INFO):
        check_room(EngineConfig(), config, ParallelConfig(0, 2, 1), backend(5 * MB, 8 * MB))
    assert "the weights of this rank take 1 MB; 5 MB of GPU 3 are free" in caplog.text
    check_room(EngineConfig(), config, ParallelConfig(0, 1, 1), backend())


def test_a_gpu_that_is_full_is_refused_with_needed_and_free_bytes(folder: Path) -> None:
    config = load_model_config(resolve(str(folder)))
    with pytest.raises(ConfigError, match="take 1 MB, and 0 of the 8 MB of GPU 3 are free; end what else runs there"):
        check_room(EngineConfig(), config, ParallelConfig(1, 2, 1), backend(0, 8 * MB))


def test_too_few_gpus_are_told_how_many_would_do(folder: Path) -> None:
    config = load_model_config(resolve(str(folder)))
    needed = [weight_bytes(rank_weights(whole(folder), config, ParallelConfig(0, tp, 1)), 2) for tp in (1, 2, 4)]
    with pytest.raises(ConfigError, match="use 2 ranks: start it with mpirun -n 2"):
        check_room(EngineConfig(), config, ParallelConfig(0, 1, 1), backend(needed[1], needed[1]))
    with pytest.raises(ConfigError, match="use 4 ranks"):
        check_room(EngineConfig(tensor_parallel_size=1), config, ParallelConfig(0, 1, 1), backend(needed[2], needed[2]))
    with pytest.raises(ConfigError, match="use a smaller model"):
        check_room(EngineConfig(), config, ParallelConfig(0, 1, 1), backend(1000, 1000))
