"""ref.philox against the published known answers, and as a source of uniforms."""

import numpy as np
import pytest

from ref.philox import philox4x32, uniform

KNOWN_ANSWERS = [  # Random123, tests/kat_vectors, "philox4x32 10": counter, key, output
    ("00000000 00000000 00000000 00000000", "00000000 00000000", "6627e8d5 e169c58d bc57ac4c 9b00dbd8"),
    ("ffffffff ffffffff ffffffff ffffffff", "ffffffff ffffffff", "408f276d 41c83b0e a20bc7c6 6d5451fd"),
    ("243f6a88 85a308d3 13198a2e 03707344", "a4093822 299f31d0", "d16cfe09 94fdcceb 5001e420 24126ea1"),
]


def words(text: str) -> list[int]:
    return [int(word, 16) for word in text.split()]


@pytest.mark.parametrize(("counter", "key", "output"), KNOWN_ANSWERS)
def test_known_answers(counter: str, key: str, output: str) -> None:
    result = philox4x32(words(counter), words(key))
    assert result.dtype == np.uint32
    assert result.tolist() == words(output)


def test_leading_axes_broadcast() -> None:
    counters = np.array([words(counter) for counter, _, _ in KNOWN_ANSWERS])
    keys = np.array([words(key) for _, key, _ in KNOWN_ANSWERS])
    assert philox4x32(counters, keys).tolist() == [words(output) for _, _, output in KNOWN_ANSWERS]
    table = philox4x32(counters[:, None], keys)
    assert table.shape == (3, 3, 4)
    assert table[2, 2].tolist() == words(KNOWN_ANSWERS[2][2])


def test_uniform_is_the_top_24_bits_of_the_first_word() -> None:
    assert uniform(0, 0) == np.float32(0x6627E8 / 2**24)
    assert uniform(2**64 - 1, 2**64 - 1, 2**64 - 1) == np.float32(0x408F27 / 2**24)
    assert uniform(0, 0).dtype == np.float32


def test_uniform_puts_low_words_first() -> None:
    """Seed, position and stream are 64-bit; the words of key and counter are those of Random123's third vector."""
    seed = 0x299F31D0_A4093822
    position = 0x85A308D3_243F6A88
    stream = 0x03707344_13198A2E
    assert uniform(seed, position, stream) == np.float32(0xD16CFE / 2**24)


def test_uniform_is_even_over_positions_seeds_and_streams() -> None:
    """χ² over 64 bins. Laurent and Massart 2000: P(χ²_d ≥ d + 2√(d·t) + 2t) ≤ exp(−t); t = 20 is 2·10⁻⁹."""
    num_draws, num_bins, t = 1 << 16, 64, 20.0
    counts = np.arange(num_draws, dtype=np.uint64)
    bound = (num_bins - 1) + 2 * np.sqrt((num_bins - 1) * t) + 2 * t
    for draws in (uniform(7, counts), uniform(counts, 7), uniform(1, 2, counts)):
        assert draws.min() >= 0
        assert draws.max() < 1
        observed = np.bincount((draws * num_bins).astype(np.int64), minlength=num_bins)
        expected = num_draws / num_bins
        assert ((observed - expected) ** 2 / expected).sum() < bound


def test_uniform_draws_of_neighbours_are_uncorrelated() -> None:
    """The correlation of n independent pairs has standard deviation 1/√n; 6 of them are allowed."""
    num_draws = 1 << 14
    counts = np.arange(num_draws, dtype=np.uint64)
    base = uniform(3, counts)
    for other in (uniform(4, counts), uniform(3, counts + np.uint64(1)), uniform(3, counts, 1)):
        assert abs(np.corrcoef(base, other)[0, 1]) < 6 / np.sqrt(num_draws)
