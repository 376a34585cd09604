"""engine.batch: the arrays of a step, checked by hand and against the plainest derivation."""

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.batch import StepPlan, build_batch, token_positions, token_sequences


def plan_of(
    starts: list[int], counts: list[int], tables: list[list[int]], num_logits: list[int], num_decodes: int = 0
) -> StepPlan:
    width = max(map(len, tables))
    return StepPlan(
        step=1,
        slots=np.arange(len(starts), dtype=np.int32),
        starts=np.array(starts, np.int32),
        cu_seqlens_q=np.cumsum([0, *counts]).astype(np.int32),
        token_ids=np.arange(100, 100 + sum(counts), dtype=np.int32),
        block_table=np.array([table + [-1] * (width - len(table)) for table in tables], np.int32),
        num_logits=np.array(num_logits, np.int32),
        samples=np.array(num_logits, np.int32) > 0,
        rope_lens=np.zeros(len(starts), np.int32),
        two_way_lens=np.zeros(len(starts), np.int32),
        num_decodes=num_decodes,
    )


# A decode at position 5; a chunk of three at positions 2 to 4; a whole prompt of two that wants all its logits.
PLAN = plan_of([5, 2, 0], [1, 3, 2], [[7, 3], [0, 9], [4]], [1, 0, 2], num_decodes=1)


def test_positions_and_sequences() -> None:
    assert token_positions(PLAN).tolist() == [5, 2, 3, 4, 0, 1]
    assert token_sequences(PLAN).tolist() == [0, 1, 1, 1, 2, 2]
    assert (PLAN.num_seqs, PLAN.num_tokens) == (3, 6)


def test_arrays_by_hand() -> None:
    cos_sin = np.ones((6, 8), np.float32)
    batch = build_batch(PLAN, block_size=4, rope_cos_sin=cos_sin)
    assert batch.positions.tolist() == [5, 2, 3, 4, 0, 1]
    # position 5 is place 1 of block 3; positions 2, 3 are in block 0 and 4 begins block 9
    assert batch.slot_mapping.tolist() == [3 * 4 + 1, 2, 3, 9 * 4, 4 * 4, 4 * 4 + 1]
    assert batch.seq_lens.tolist() == [6, 5, 2]
    assert batch.logits_indices.tolist() == [0, 4, 5]
    assert batch.rope_cos_sin is cos_sin
    assert (batch.num_decodes, batch.num_tokens) == (1, 6)
    for name in ("positions", "slot_mapping", "seq_lens", "logits_indices", "cu_seqlens_q", "block_table", "token_ids"):
        assert getattr(batch, name).dtype == np.int32, name


def test_a_step_that_samples_nothing_wants_no_logits() -> None:
    batch = build_batch(plan_of([0], [3], [[0]], [0]), 4, None)
    assert batch.logits_indices.tolist() == []
    assert batch.logits_indices.dtype == np.int32


@settings(max_examples=200, derandomize=True, deadline=None)
@given(
    block_size=st.integers(1, 5),
    rows=st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9), st.integers(0, 9)), min_size=1, max_size=5),
)
def test_against_the_plainest_derivation(block_size: int, rows: list[tuple[int, int, int]]) -> None:
    free = iter(np.random.default_rng(0).permutation(200).tolist())
    starts, counts = [row[0] for row in rows], [row[1] for row in rows]
    num_logits = [min(row[2], row[1]) for row in rows]
    tables = [[next(free) for _ in range(-(-(row[0] + row[1]) // block_size))] for row in rows]
    batch = build_batch(plan_of(starts, counts, tables, num_logits), block_size, None)
    slots, wanted, first = [], [], 0
    for start, count, logits, table in zip(starts, counts, num_logits, tables, strict=True):
        slots += [table[p // block_size] * block_size + p % block_size for p in range(start, start + count)]
        wanted += range(first + count - logits, first + count)
        first += count
    assert batch.slot_mapping.tolist() == slots
    assert len(set(slots)) == len(slots)
    assert batch.logits_indices.tolist() == wanted
