"""A step in two halves: where it is cut, what each half is, and that both together give what the whole gives."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from dataclasses import fields
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.end_to_end import CHUNKS, make_model, model_prompts
from conformance.engine_run import HALVED, Prompts, make_runner, run_chunks
from conformance.ranks.splits import SPLITS, split_model
from engine.batch import ForwardBatch, StepPlan, build_batch
from engine.comm.communicator import OneRank, StepSum
from engine.halves import NEVER, Halving, first_that_pays, in_halves, split_batch
from engine.ops import OpTable, cpu_ops
from engine.weights import Norm
from tests.engine.rank_threads import on_ranks

Array = NDArray[Any]

BLOCK_SIZE = 4
COUNTS, STARTS, NUM_DECODES = (1, 1, 5, 3), (7, 2, 6, 0), 2  # two decode, one prompt goes on, one begins: 10 tokens


def make_plan(
    counts: Sequence[int] = COUNTS,
    starts: Sequence[int] = STARTS,
    num_decodes: int = NUM_DECODES,
    two_way: Sequence[int] | None = None,
) -> StepPlan:
    """Token ids tell where a token is; of each sequence the logits of the last token are wanted."""
    num_seqs, num_tokens = len(counts), sum(counts)
    width = max(-(-(start + count) // BLOCK_SIZE) for start, count in zip(starts, counts, strict=True))
    return StepPlan(
        step=0,
        slots=np.arange(num_seqs, dtype=np.int32),
        starts=np.array(starts, np.int32),
        cu_seqlens_q=np.cumsum([0, *counts], dtype=np.int32),
        token_ids=np.arange(100, 100 + num_tokens, dtype=np.int32),
        block_table=np.arange(num_seqs * width, dtype=np.int32).reshape(num_seqs, width),
        num_logits=np.ones(num_seqs, np.int32),
        samples=np.ones(num_seqs, np.bool_),
        rope_lens=np.zeros(num_seqs, np.int32),
        two_way_lens=np.zeros(num_seqs, np.int32) if two_way is None else np.array(two_way, np.int32),
        num_decodes=num_decodes,
    )


def make_batch(plan: StepPlan) -> ForwardBatch:
    return build_batch(plan, BLOCK_SIZE, np.arange(2 * plan.num_tokens, dtype=np.float32).reshape(-1, 2))


def what(half: ForwardBatch) -> tuple[list[int], list[int], list[int], list[int], int]:
    return (
        half.token_ids.tolist(),
        half.cu_seqlens_q.tolist(),
        half.seq_lens.tolist(),
        half.logits_indices.tolist(),
        half.num_decodes,
    )


@pytest.mark.parametrize(
    ("num_first", "first", "second"),
    [
        # within the third sequence, after 3 of its 5 tokens, of which 6 were there before: it is in both halves
        (5, ([0, 1, 2, 5], [8, 3, 9], [0, 1], 2), ([0, 2, 5], [11, 3], [1, 4], 0)),
        (7, ([0, 1, 2, 7], [8, 3, 11], [0, 1, 6], 2), ([0, 3], [3], [2], 0)),  # between two sequences
        (1, ([0, 1], [8], [0], 1), ([0, 1, 6, 9], [3, 11, 3], [0, 5, 8], 1)),  # between two that decode
        (9, ([0, 1, 2, 7, 9], [8, 3, 11, 2], [0, 1, 6], 2), ([0, 1], [3], [0], 0)),  # one token is left
        (0, ([0], [], [], 0), ([0, 1, 2, 7, 10], [8, 3, 11, 3], [0, 1, 6, 9], 2)),
        (10, ([0, 1, 2, 7, 10], [8, 3, 11, 3], [0, 1, 6, 9], 2), ([0], [], [], 0)),
    ],
)
def test_what_each_half_has(num_first: int, first: tuple[Any, ...], second: tuple[Any, ...]) -> None:
    """Counted by hand."""
    halves = split_batch(make_batch(make_plan()), num_first)
    assert what(halves[0]) == (list(range(100, 100 + num_first)), *first)
    assert what(halves[1]) == (list(range(100 + num_first, 110)), *second)


@pytest.mark.parametrize("num_first", range(11))
def test_halves_are_the_steps_of_plans_that_say_so(num_first: int) -> None:
    """Two plans, one after the other, give the same arrays of the very same types."""
    in_first = [max(min(count, num_first - before), 0) for count, before in zip(COUNTS, (0, 1, 2, 7), strict=True)]
    left = [count - done for count, done in zip(COUNTS, in_first, strict=True)]
    later = [start + done for start, done in zip(STARTS, in_first, strict=True)]
    for half, counts, starts, first in zip(
        split_batch(make_batch(make_plan()), num_first), (in_first, left), (STARTS, later), (0, num_first), strict=True
    ):
        rows = [row for row, count in enumerate(counts) if count]
        if not rows:
            assert half.num_tokens == 0
            continue
        plan = make_plan([counts[row] for row in rows], [starts[row] for row in rows], half.num_decodes)
        alone = make_batch(plan)
        table = make_plan().block_table[rows]
        np.testing.assert_array_equal(half.block_table, table)
        for name in ("positions", "cu_seqlens_q", "seq_lens", "two_way_lens"):
            found, expected = getattr(half, name), getattr(alone, name)
            np.testing.assert_array_equal(found, expected, name)
            assert found.dtype == expected.dtype
        of_whole = make_batch(make_plan())
        for name in ("slot_mapping", "rope_cos_sin"):
            np.testing.assert_array_equal(
                getattr(half, name), getattr(of_whole, name)[first : first + half.num_tokens], name
            )
        assert half.halves is None


def test_arrays_are_views() -> None:
    """Those of a GPU lie there already."""
    whole = make_batch(make_plan())
    for half in split_batch(whole, 5):
        for name in ("token_ids", "positions", "slot_mapping", "rope_cos_sin", "block_table"):
            assert np.shares_memory(getattr(half, name), getattr(whole, name)), name


def test_a_batch_without_halves_is_whole() -> None:
    batch = make_batch(make_plan())
    assert in_halves(batch, 0) is batch
    halved = in_halves(batch, 5)
    assert halved.halves is not None
    assert [half.num_tokens for half in halved.halves] == [5, 5]
    for field in fields(batch)[:-1]:
        assert getattr(halved, field.name) is getattr(batch, field.name)


@pytest.mark.parametrize(
    ("num_tokens", "row_multiple", "half"),
    [
        *((0, 1, 0), (1, 1, 0), (2, 1, 1), (3, 1, 2), (10, 1, 5)),
        *((1024, 128, 512), (700, 128, 384), (130, 128, 128), (128, 128, 0), (60, 128, 0)),
    ],
)
def test_where_the_middle_is(num_tokens: int, row_multiple: int, half: int) -> None:
    assert Halving(row_multiple=row_multiple).half(num_tokens) == half


def test_which_steps_are_cut() -> None:
    halving = Halving(min_tokens=10, min_decodes=3)
    assert halving.num_first(make_plan()) == 5
    assert halving.num_first(make_plan((1, 1, 5, 2), (7, 2, 6, 0))) == 0, "one token too few"
    assert halving.num_first(make_plan((1, 1, 1), (0, 0, 0), 3)) == 2
    assert halving.num_first(make_plan((1, 1), (0, 0), 2)) == 0
    assert Halving().num_first(make_plan()) == 0
    assert Halving(min_tokens=0).num_first(make_plan((1,), (4,), 0)) == 0


@pytest.mark.parametrize(
    ("counts", "num_first"),
    [
        ((4, 6), 4),  # 5 is within the second one, whose beginning is nearer
        ((1, 1, 7), 2),
        ((8, 1, 1), 8),
        ((9, 1), 9),
        ((10,), 0),  # there is nowhere to cut
        ((5, 5), 5),
    ],
)
def test_what_is_read_both_ways_is_never_cut(counts: tuple[int, ...], num_first: int) -> None:
    plan = make_plan(counts, (0,) * len(counts), 0, two_way=counts)
    assert Halving(min_tokens=2).num_first(plan) == num_first


def test_the_first_size_that_pays() -> None:
    times = {768: (1.0, 1.1), 1536: (2.0, 1.9), 3072: (4.0, 9.0)}
    asked: list[int] = []

    def ask(size: int) -> tuple[float, float]:
        asked.append(size)
        return times[size]

    assert first_that_pays(sorted(times), ask) == 1536
    assert asked == [768, 1536], "steps take time"
    assert first_that_pays([768], ask) == NEVER
    assert first_that_pays([], ask) == NEVER


class Noted(OneRank):
    """Notes in which order sums are asked for, and of how many rows."""

    def __init__(self, ops: OpTable, said: list[str]) -> None:
        super().__init__(ops)
        self._said = said

    def reduce(self, partial: Array) -> Array:
        self._said.append(f"embed {len(partial)}")
        return super().reduce(partial)

    def reduce_add_norm(self, partial: Array, residual: Array, norm: Norm, which: StepSum) -> tuple[Array, Array]:
        place = " first" * which.is_first + " last" * which.is_last
        self._said.append(f"sum {which.first_row}:{len(partial)}{place}")
        return super().reduce_add_norm(partial, residual, norm, which)


class Late:
    """A side that begins with what is started only when the caller asks for it, or starts more."""

    def __init__(self, said: list[str]) -> None:
        self._said, self._work = said, list[Callable[[], None]]()

    def start(self, work: Callable[[], Any]) -> Callable[[], Any]:
        result: list[Any] = []
        self._said.append("start")
        self._work.append(lambda: result.append(work()))

        def take() -> Any:
            while not result:
                self._work.pop(0)()
            return result[0]

        return take

    def join(self, first: Array, second: Array) -> Array:
        return np.concatenate([first, second])


def logits_of(name: str, **how: Any) -> list[Array]:
    with tempfile.TemporaryDirectory() as scratch:
        prompts: Prompts = model_prompts(name)
        runner = make_runner(make_model(scratch, name), cpu_ops(), prompts, **how)
        return run_chunks(runner, prompts, CHUNKS["chunks"], HALVED)


def test_sums_of_one_half_go_under_the_other_one() -> None:
    """While the sum of a half has not begun, the other half's piece is computed; and all is in the order A, B, A, B."""
    said: list[str] = []
    prompts = [[5, 6, 7, 8, 9]]
    with tempfile.TemporaryDirectory() as scratch:
        folder = make_model(scratch, "llama3")
        runner = make_runner(folder, cpu_ops(), prompts, lambda ops: Noted(ops, said), side=Late(said))
        found = run_chunks(runner, prompts, (5,), HALVED)
        whole = run_chunks(make_runner(folder, cpu_ops(), prompts), prompts, (5,))
    pieces = len(runner.model.pieces)
    between = ["sum 0:2", "start", "sum 2:3", "start"] * (pieces - 2)
    first, last = ["sum 0:2 first", "start", "sum 2:3 first", "start"], ["sum 0:2 last", "sum 2:3 last"]
    assert said == ["embed 5", "start", "start", *first, *between, *last]
    np.testing.assert_allclose(found[0], whole[0], rtol=0, atol=1e-5)


@pytest.mark.parametrize("name", ["llama3", "qwen2_window", "deepseek_v2_lite", "command_r"])
def test_work_on_the_side_may_be_late(name: str) -> None:
    """To the bit: nothing is read by the other half before it is taken."""
    for late, in_order in zip(logits_of(name, side=Late([])), logits_of(name), strict=True):
        np.testing.assert_array_equal(late, in_order)


@pytest.mark.parametrize("split", ["TP2", "PP2", "TP2xPP2"])
@pytest.mark.parametrize("name", ["llama3", "deepseek_v2_lite", "cpm_ant"])
def test_ranks_in_halves_give_what_one_rank_gives_whole(name: str, split: str) -> None:
    """All families: mpirun -n 2 python -m conformance.ranks --halves."""
    tp, pp = SPLITS[split]
    said = on_ranks(tp * pp, lambda comm: split_model(comm, name, tp, pp, HALVED))
    assert said == [[]] * (tp * pp)
