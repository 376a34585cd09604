"""What ranks must have in common, and whether their part of a model fits: before any weight is read (DST-03)."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
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
from engine.config import EngineConfig, ParallelConfig, Split
from engine.errors import ConfigError
from engine.models.registry import ARCHITECTURES
from engine.rank_checks import check_room, check_same, share_layers
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
        kind=kind,
        numbers=kind.rpartition(" ")[2],
        room=lambda weight_map: Room(weight_bytes(weight_map, 2), free, total, "GPU 3") if total else None,
        free_beside=lambda weight_map: free - weight_bytes(weight_map, 2),
    )


H200, A100 = KIND, "A100 (sm_80) in bfloat16"


def compared(folder: Path, kinds: Sequence[str], tp: int = 2, split: Split = "even") -> str:
    """What the last rank says of itself, where ranks compute with these."""
    source, config = resolve(str(folder)), EngineConfig(split=split)
    everyone: list[Any] = []
    for rank, kind in enumerate(kinds):
        parallel = ParallelConfig(rank, tp, len(kinds) // tp)
        ranks = SimpleNamespace(gather=lambda value, what: everyone.append(value) or everyone, agree=lambda *_: None)
        if rank == len(kinds) - 1:
            ranks.agree = TwoRanks().agree
        try:
            check_same(config, ranks, source, parallel, backend(kind=kind))  # type: ignore[arg-type]
        except ConfigError as error:
            return str(error)
    return ""


def test_ranks_of_one_kind_agree(folder: Path) -> None:
    assert compared(folder, [H200, H200]) == ""
    assert compared(folder, [H200, H200], split="memory", tp=1) == ""


@pytest.mark.parametrize(
    ("kinds", "would_do"),
    [
        ([H200, A100], "--tensor-parallel-size 1 --pipeline-parallel-size 2"),
        ([H200, H200, A100, A100], "--tensor-parallel-size 2 --pipeline-parallel-size 2"),
        ([A100, H200, H200, A100], "--tensor-parallel-size 1 --pipeline-parallel-size 4"),
        ([H200] * 4 + [A100] * 2, "--tensor-parallel-size 2 --pipeline-parallel-size 3"),
    ],
)
def test_gpus_of_different_kinds_are_refused_with_what_would_do(folder: Path, kinds: list[str], would_do: str) -> None:
    said = compared(folder, kinds, tp=len(kinds))
    last, first = kinds[-1], kinds[0]
    if last == first:
        assert said == "", "rank 1 says it"
        return
    assert f"it computes with {last}, and rank 0 with {first}" in said
    assert "CUDA_VISIBLE_DEVICES" in said
    assert said.endswith(f"layers of its own: --split memory {would_do}")


def test_stages_may_have_gpus_of_different_kinds_but_not_a_stage(folder: Path) -> None:
    assert compared(folder, [H200, A100], tp=1, split="memory") == ""
    assert compared(folder, [H200, H200, A100, A100], tp=2, split="memory") == ""
    said = compared(folder, [H200, H200, H200, A100], tp=2, split="memory")
    assert f"it computes with {A100}, and rank 2 with {H200}" in said


def test_other_types_are_refused_for_stages_too(folder: Path) -> None:
    said = compared(folder, [H200, "a CPU in float32"], tp=1, split="memory")
    assert "rank 0 with H200 (sm_90) in bfloat16: what ranks send each other must be of one type" in said


def test_layers_are_shared_out_by_what_is_free_beside_all_else(folder: Path) -> None:
    """4 layers, and an embedding and a head of some bytes each: of a stage the rank that has least counts."""
    config = load_model_config(resolve(str(folder)))
    first, last = (rank_weights(whole(folder), config, ParallelConfig(rank, 2, 2)) for rank in (2, 0))
    embedding, head = (
        weight_bytes(
            replace(
                part,
                linears=tuple(spec for spec in part.linears if spec.dest == "lm_head"),
                arrays=tuple(spec for spec in part.arrays if spec.dest in ("embed_tokens", "norm")),
            ),
            2,
        )
        for part in (first, last)
    )
    free = {0: head + 5 * MB, 1: head + MB, 2: embedding + 3 * MB, 3: embedding + 9 * MB}
    everyone: list[Any] = []
    for rank, num_bytes in free.items():
        ranks = SimpleNamespace(gather=lambda value, what: everyone.append(value) or everyone)
        parallel = ParallelConfig(rank, 2, 2)
        if rank < 3:  # not all are there yet
            stage = 1 - rank // 2
            with contextlib.suppress(ValueError):
                share_layers(ranks, config, parallel, backend(num_bytes))  # type: ignore[arg-type]
            assert everyone[-1][0] == stage
        else:
            found = share_layers(ranks, config, parallel, backend(num_bytes))  # type: ignore[arg-type]
    assert [num_bytes for _, num_bytes in everyone] == [5 * MB, MB, 3 * MB, 9 * MB]
    assert found == ParallelConfig(3, 2, 2, (3, 1))


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
