"""ref.induction: weights set by hand do what the file says."""

from itertools import permutations

import numpy as np
import pytest

from ref.induction import VOCABULARY, encode, induction_config, induction_weights
from ref.model.llama import llama
from ref.plot_data import attention_weights
from ref.sampling import greedy


def guess(text: str) -> str:
    logits = llama(induction_config(), induction_weights(), encode(text))
    return VOCABULARY[int(greedy(logits[-1:])[0])]


@pytest.mark.parametrize("word", ["".join(word) for word in permutations("glint", 3)])
def test_it_goes_on_with_what_it_has_seen(word: str) -> None:
    """Every word of three different letters, after the first and after the second letter of its repetition."""
    assert guess(f"^{word}{word[0]}") == word[1]
    assert guess(f"^{word}{word[:2]}") == word[2]


def test_heads_look_where_they_should() -> None:
    seen: dict[str, np.ndarray] = {}
    llama(induction_config(), induction_weights(), encode("^glintglint"), trace=seen.__setitem__)
    maps = [attention_weights(*(seen[f"layers.{layer}.self_attn.{name}_rope"] for name in "qk")) for layer in range(2)]
    back, average, induction = maps[0][0], maps[0][1], maps[1][0]
    assert all(back[i, i - 1] > 0.99 for i in range(1, 11))
    np.testing.assert_allclose(average[10], 1 / 11)
    assert all(induction[i, i - 4] > 0.95 for i in range(6, 11))  # behind the same letter, five back


def test_unknown_letters() -> None:
    with pytest.raises(ValueError, match="'x' is not in the vocabulary"):
        encode("lynx")
