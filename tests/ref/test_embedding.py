"""ref.embedding: a look-up, and no wrap-around at the ends of the table."""

import numpy as np
import pytest

from ref.embedding import embedding, position_embedding

TABLE = np.array([[1, 2], [3, 4], [5, 6]], np.float32)


def test_rows_of_the_table() -> None:
    out = embedding(np.array([2, 0, 2]), TABLE)
    assert out.tolist() == [[5, 6], [1, 2], [5, 6]]
    assert out.dtype == np.float32


def test_no_tokens() -> None:
    assert embedding(np.array([], np.int32), TABLE).shape == (0, 2)


@pytest.mark.parametrize("token_id", [-1, 3])
def test_an_id_outside_the_table_is_refused(token_id: int) -> None:
    with pytest.raises(ValueError, match=f"token id {token_id} is outside the vocabulary: ids are 0 to 2"):
        embedding(np.array([0, token_id]), TABLE)


def test_a_vector_for_the_place_is_added() -> None:
    places = np.array([[10, 20], [30, 40]], np.float32)
    out = position_embedding(np.array([2, 0, 2]), np.array([0, 1, 1]), TABLE, places)
    assert out.tolist() == [[15, 26], [31, 42], [35, 46]]
    assert out.dtype == np.float32


@pytest.mark.parametrize("position", [-1, 2])
def test_a_position_that_was_not_learned_is_refused(position: int) -> None:
    with pytest.raises(ValueError, match=f"position {position} has no vector: they were learned for 0 to 1"):
        position_embedding(np.array([0]), np.array([position]), TABLE, TABLE[:2])
