"""Preempted sequences whose KV waits on the host: the books by hand, and answers that stay what they are.

Random traffic over swapping is in test_scheduler_invariants.py, where every read is checked.
"""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.golden_families import family_model
from conformance.golden_models import rand_model
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.faults import Faults
from engine.loop import Engine
from engine.swap import SwapSpace, swap_bytes
from tests.engine.engines import TOLERANCE, Outputs, assert_equal, finish, request, run, tiny_engine
from tests.engine.fake_runner import expected_output, fake_engine, fake_request, find_sequence, row_counts

VOCAB = 1000
CODES_TOLERANCE = 0.02  # a number that another shape of step computes may have the code beside it
SPACE = {"swap_space_gb": 1e-3}  # far more than these models fill
MODELS = {"llama": {}, "int8": {"kv_cache_dtype": "int8"}, "latent": {}}


@pytest.fixture(scope="module", params=MODELS)
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    """Numbers, codes with scales, and latents."""
    folder = tmp_path_factory.mktemp(request.param)
    if request.param == "latent":
        return family_model(folder, "minicpm3", vocab_size=VOCAB, max_position_embeddings=256), {}
    return rand_model(folder), MODELS[request.param]


def prompt(length: int, seed: int = 0) -> list[int]:
    return np.random.default_rng([seed, 7]).integers(3, 300, length).tolist()


def test_the_books_by_hand() -> None:
    """Blocks of 4: 10 tokens are computed in 3 blocks, which go to 3 of 4 places; a second sequence finds no room."""
    engine, _ = fake_engine(num_blocks=16, num_swap_places=4, enable_prefix_caching=False)
    for name, first in (("a", 0), ("b", 1)):
        engine.add(fake_request(name, 8, first=first, max_tokens=20))
    for _ in range(3):
        engine.step()
    a, b = find_sequence(engine, "a"), find_sequence(engine, "b")
    blocks, computed = list(a.block_ids), a.num_computed
    assert (len(blocks), computed) == (3, 10)
    engine.scheduler.preempt(a)
    engine.scheduler.preempt(b)
    swap = engine.scheduler.swap
    assert swap.num_free == 1
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert plan.swaps_out[:, 0].tolist() == blocks
    assert plan.swaps_in[:, 0].tolist() == plan.swaps_out[:, 1].tolist()
    assert plan.swaps_in[:, 1].tolist() == a.block_ids
    starts = dict(zip(plan.slots.tolist(), plan.starts.tolist(), strict=True))
    assert (starts[a.slot], starts[b.slot]) == (10, 0), "b is computed again"
    assert (swap.num_free, swap.num_swapped_tokens) == (4, 10)
    assert all(len(pairs) == 0 for pairs in swap.copies()), "copied once"


def test_what_is_not_kept() -> None:
    """Less than a block, a suspect, and a sequence that has ended meanwhile: whose places are another's at once."""
    engine, _ = fake_engine(num_swap_places=2, enable_prefix_caching=False)
    for name, first in (("short", 0), ("suspect", 1), ("kept", 2), ("next", 3)):
        engine.add(fake_request(name, 2 if name == "short" else 5, first=first, max_tokens=9))
    engine.step()
    engine.step()
    seqs = {name: find_sequence(engine, name) for name in ("short", "suspect", "kept", "next")}
    seqs["suspect"].suspect = True
    swap = engine.scheduler.swap
    for name, num_free in (("short", 2), ("suspect", 2), ("kept", 0), ("next", 0)):
        engine.scheduler.preempt(seqs[name])
        assert swap.num_free == num_free, name
    engine.abort("kept")
    assert swap.num_free == 2
    assert [len(pairs) for pairs in swap.copies()] == [0, 0], "nobody needs it any more"


def test_only_what_the_prefix_cache_has_lost_is_copied_back() -> None:
    engine, _ = fake_engine(num_blocks=16, num_swap_places=8)
    engine.add(fake_request("a", 9, max_tokens=12))
    for _ in range(5):
        engine.step()
    seq = find_sequence(engine, "a")
    assert seq.num_computed == 13
    engine.scheduler.preempt(seq)
    plan = engine.scheduler.schedule()
    assert plan is not None
    assert (len(plan.swaps_out), len(plan.swaps_in), plan.starts.tolist()) == (4, 1, [13])
    assert engine.scheduler.swap.num_swapped_tokens == 1, "12 were found in the cache"


@pytest.mark.parametrize("overlap", [False, True])
def test_nothing_is_computed_twice(overlap: bool) -> None:
    """SCH-03 with room on the host: all tokens of all requests but the last of each, once."""
    engine, runner = fake_engine(
        num_blocks=32,
        max_num_seqs=8,
        max_model_len=128,
        overlap=overlap,
        num_swap_places=64,
        enable_prefix_caching=False,
    )
    requests = [fake_request(str(i), 4, first=i, max_tokens=28) for i in range(8)]
    outputs = run(engine, *requests)
    assert engine.stats().preemptions > 0
    for one in requests:
        assert outputs[one.request_id].token_ids == expected_output(one)
    assert sum(sum(row_counts(plan)) for plan in runner.plans) == 8 * (4 + 28 - 1)


def test_sch_03_with_room_on_the_host(model: tuple[Path, dict[str, Any]]) -> None:
    """SCH-03: each gives what it gives alone, and some of it was copied back."""
    folder, settings = model
    requests = [request(str(i), prompt(8, i), max_tokens=40) for i in range(8)]
    engine = tiny_engine(folder, num_gpu_blocks_override=48, enable_prefix_caching=False, **settings, **SPACE)
    outputs = run(engine, *requests)
    assert engine.stats().preemptions > 0
    assert engine.scheduler.swap.num_swapped_tokens > 0
    assert engine.scheduler.swap.num_free == engine.scheduler.swap.num_places
    for one in requests:
        undisturbed = run(tiny_engine(folder, enable_prefix_caching=False, **settings), one)
        tolerance = CODES_TOLERANCE if settings else TOLERANCE
        assert_equal(undisturbed[one.request_id], outputs[one.request_id], tolerance)


def test_a_failed_step_trusts_no_copy() -> None:
    """It may have ended before anything was copied, so what waits is computed again."""

    def run_with(faults: Faults) -> tuple[Engine, Outputs]:
        engine, _ = fake_engine(
            num_blocks=6, block_size=2, num_swap_places=6, enable_prefix_caching=False, faults=faults
        )
        for name, first in (("old", 0), ("young", 1)):
            engine.add(fake_request(name, 3, first=first, max_tokens=6))
        outputs = Outputs()
        while engine.stats().preemptions == 0:
            outputs.take(engine.step())
        return engine, outputs

    engine, _ = run_with(Faults())
    assert engine.scheduler.swap.num_free < 6
    failing = engine.stats().steps
    engine, outputs = run_with(Faults(raise_once_at={failing}))
    assert engine.scheduler.swap.num_free == 6
    finish(engine, outputs)
    assert engine.stats().failed_steps == 1
    assert outputs["young"].token_ids == expected_output(fake_request("young", 3, first=1, max_tokens=6))


def test_a_space_without_places_keeps_nothing() -> None:
    swap = SwapSpace(0, 4)
    engine, _ = fake_engine()
    engine.add(fake_request("a", 9))
    engine.step()
    swap.put(find_sequence(engine, "a"))
    swap.take(find_sequence(engine, "a"))
    assert [len(pairs) for pairs in swap.copies()] == [0, 0]


def test_what_cannot_be_had(tmp_path: Path) -> None:
    assert swap_bytes(EngineConfig(model="m"), num_ranks=2) == 0
    assert swap_bytes(EngineConfig(model="m", swap_space_gb=0.5), num_ranks=1) == 500_000_000
    with pytest.raises(ConfigError, match=r"--swap-space-gb 1: a model on several ranks computes preempted"):
        swap_bytes(EngineConfig(model="m", swap_space_gb=1), num_ranks=2)
    with pytest.raises(ConfigError, match=r"--swap-space-gb 100000: .* GB of the host's memory are free; use less"):
        tiny_engine(rand_model(tmp_path), swap_space_gb=100_000)
    assert [field for field, _ in EngineConfig(model="m", swap_space_gb=-1).problems()] == ["swap_space_gb"]
