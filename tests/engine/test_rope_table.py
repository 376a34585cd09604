"""engine.rope_table: which table a sequence gets, and rows of several tables in one step. Formulas: conformance."""

import numpy as np
import pytest

from engine.config import RopeConfig
from engine.rope_table import RopeTable
from ref.rope import rope_cos_sin, rope_inv_freq

HEAD_DIM = 8
DYNAMIC = RopeConfig("dynamic", 10000.0, factor=2.0, original_max_position_embeddings=32)


@pytest.mark.parametrize(("num_prompt", "rope_len"), [(1, 0), (31, 0), (32, 0), (33, 33), (100, 100)])
def test_a_dynamic_table_is_chosen_by_the_prompts_length(num_prompt: int, rope_len: int) -> None:
    assert RopeTable(DYNAMIC, HEAD_DIM, 128).rope_len(num_prompt) == rope_len


@pytest.mark.parametrize(("num_prompt", "rope_len"), [(1, 0), (32, 0), (33, 33), (34, 33), (100, 33)])
def test_longrope_has_a_table_for_short_prompts_and_one_for_all_long_ones(num_prompt: int, rope_len: int) -> None:
    """KRN-10: the prompt's length decides; long prompts of any length share their cached keys."""
    rope = RopeConfig("longrope", original_max_position_embeddings=32, short_factor=(1.0,) * 4, long_factor=(2.0,) * 4)
    table = RopeTable(rope, HEAD_DIM, 128)
    assert table.rope_len(num_prompt) == rope_len
    row = table.rows(np.array([6], np.int32), np.array([rope_len], np.int32))[0]
    assert row[0] == pytest.approx(np.cos(3.0 if rope_len else 6.0), abs=2**-24)


@pytest.mark.parametrize("kind", ["default", "linear", "llama3", "yarn"])
def test_other_kinds_have_one_table(kind: str) -> None:
    rope = RopeConfig(kind, 10000.0, 2.0, original_max_position_embeddings=32)  # type: ignore[arg-type]
    assert RopeTable(rope, HEAD_DIM, 128).rope_len(100) == 0


def test_rows_of_several_tables_in_one_step() -> None:
    """Each token gets the row of its own sequence's table, in any order and at any position."""
    table = RopeTable(DYNAMIC, HEAD_DIM, 128)
    positions = np.array([0, 5, 40, 5, 99, 127], np.int32)
    rope_lens = np.array([0, 0, 50, 50, 100, 0], np.int32)
    rows = table.rows(positions, rope_lens)
    assert (rows.shape, rows.dtype) == ((6, HEAD_DIM), np.float32)
    for row, position, rope_len in zip(rows, positions, rope_lens.tolist(), strict=True):
        inv_freq = rope_inv_freq(
            "dynamic", 10000.0, HEAD_DIM, 2.0, original_max_position_embeddings=32, seq_len=rope_len
        )
        # float64 here and there; one rounding to float32 of a number up to 1, at most half an ulp
        np.testing.assert_allclose(row, rope_cos_sin(inv_freq, np.array([position]))[0], rtol=0, atol=2**-24)
    assert not np.array_equal(rows[1], rows[3]), "the same position in another table"


def test_rows_are_copies() -> None:
    table = RopeTable(DYNAMIC, HEAD_DIM, 128)
    zeros = np.zeros(1, np.int32)
    table.rows(np.array([3], np.int32), zeros)[...] = 7
    assert np.abs(table.rows(np.array([3], np.int32), zeros)).max() <= 1
