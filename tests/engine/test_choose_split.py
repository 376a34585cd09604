"""Which split the engine takes for so many ranks, and what it says where there is none (DST-05 at its start)."""

from __future__ import annotations

from dataclasses import replace

import pytest

from engine.choose_split import choose_split
from engine.config import EngineConfig, ModelConfig, RopeConfig
from engine.errors import ConfigError

MODEL = ModelConfig(
    architecture="LlamaForCausalLM",
    n_layers=6,
    n_heads=8,
    n_kv_heads=2,
    head_dim=16,
    hidden_size=128,
    intermediate_size=256,
    vocab_size=100,
    max_position_embeddings=64,
    norm_eps=1e-5,
    rope=RopeConfig(),
)
STARTER = replace(MODEL, n_heads=9, n_kv_heads=3, n_layers=30)


def choose(num_ranks: int, tp: int | None = None, pp: int | None = None, per_host: int = 8, model=MODEL, split="even"):  # type: ignore[no-untyped-def]
    config = EngineConfig(tensor_parallel_size=tp, pipeline_parallel_size=pp, split=split)
    return choose_split(config, model, num_ranks, per_host)


def test_one_rank_needs_no_split() -> None:
    assert choose(1)[:2] == (1, 1)
    assert choose(1, 1, 1)[:2] == (1, 1)


@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_layers_are_shared_by_as_many_as_can(num_ranks: int) -> None:
    tp, pp, why = choose(num_ranks)
    assert (tp, pp) == (num_ranks, 1)
    assert "shortens the time of a token" in why


def test_the_starter_model_on_eight_ranks() -> None:
    """9 heads in 3 groups: shares are uneven, heads are not cut."""
    assert choose(8, model=STARTER)[:2] == (8, 1)


def test_what_cannot_share_layers_becomes_stages() -> None:
    """12 ranks are more than 8 heads; the reason is given."""
    tp, pp, why = choose(12, per_host=12)
    assert (tp, pp) == (6, 2)
    assert "not TP 12 × PP 1" in why


def test_by_memory_each_rank_is_a_stage_or_what_is_asked_for() -> None:
    assert choose(3, split="memory")[:2] == (1, 3)
    assert choose(4, 2, split="memory")[:2] == (2, 2)
    assert choose(4, None, 2, split="memory")[:2] == (2, 2)
    assert choose(1, split="memory")[:2] == (1, 1)


@pytest.mark.parametrize("asked", [(4, None), (None, 1), (4, 1)])
def test_one_stage_has_nothing_to_share_out(asked: tuple[int | None, int | None]) -> None:
    with pytest.raises(ConfigError, match="--split memory: shares layers out among stages, and there is but one"):
        choose(4, *asked, split="memory")


def test_hosts_do_not_share_layers() -> None:
    tp, pp, why = choose(4, per_host=2)
    assert (tp, pp) == (2, 2)
    assert "TP 4: a host has 2 ranks" in why


@pytest.mark.parametrize(
    ("num_ranks", "asked", "given"), [(4, (2, None), (2, 2)), (4, (None, 4), (1, 4)), (6, (2, 3), (2, 3))]
)
def test_what_is_asked_for_is_taken(
    num_ranks: int, asked: tuple[int | None, int | None], given: tuple[int, int]
) -> None:
    assert choose(num_ranks, *asked)[:2] == given


@pytest.mark.parametrize(
    ("num_ranks", "asked", "says"),
    [
        (1, (8, None), "--tensor-parallel-size 8 does not make the number of ranks: there is one rank; start it with"),
        (4, (2, 3), "--tensor-parallel-size 2 × --pipeline-parallel-size 3 does not make"),
        (4, (3, None), "MPI has started 4 ranks; start it with mpirun -n 3"),
        (9, (9, None), "--tensor-parallel-size 9"),
        (7, (None, 7), "--pipeline-parallel-size 7: 6 layers leave a stage without one"),
        (11, (None, None), "11 ranks cannot share this model"),
    ],
)
def test_what_cannot_be_is_refused(num_ranks: int, asked: tuple[int | None, int | None], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        choose(num_ranks, *asked, per_host=16)
    assert says in str(caught.value)
