"""ref.roofline: counts that can be checked against published sizes, and limits by hand."""

import pytest

from ref.roofline import (
    H200,
    LLAMA_3_1_8B,
    LLAMA_3_1_70B,
    RTX_4090,
    Hardware,
    activation_bytes,
    attention_flops,
    decode_work,
    kv_bytes_per_token,
    latent_bytes_per_token,
    limit_seconds,
    linear_bytes,
    linear_flops,
    num_parameters,
    num_read_parameters,
    pcie_bandwidth,
    prefill_work,
)


def test_parameters_of_published_models() -> None:
    """The sizes that model cards give: 8.03 and 70.6 billion."""
    assert num_parameters(LLAMA_3_1_8B) == 8_030_261_248
    assert num_parameters(LLAMA_3_1_70B) == 70_553_706_496
    assert num_parameters(LLAMA_3_1_8B) - num_read_parameters(LLAMA_3_1_8B) == 128256 * 4096


def test_cache_by_hand() -> None:
    assert kv_bytes_per_token(LLAMA_3_1_8B) == 2 * 32 * 8 * 128 * 2
    assert kv_bytes_per_token(LLAMA_3_1_70B, 1) == 2 * 80 * 8 * 128
    assert latent_bytes_per_token(61, 512, 64) == 61 * 576 * 2


def test_linear_by_hand() -> None:
    """Two tokens, three inputs, five outputs: 30 products and sums; 15 weights and 16 activations."""
    assert linear_flops(2, 3, 5) == 60
    assert linear_bytes(2, 3, 5) == 2 * 15 + 2 * 16
    assert linear_bytes(2, 3, 5, 0.5) == 7.5 + 32


@pytest.mark.parametrize(("q_len", "kv_len"), [(1, 1), (1, 7), (3, 3), (3, 5), (0, 4)])
def test_attention_counts_visible_pairs(q_len: int, kv_len: int) -> None:
    pairs = sum(kv_len - q_len + i + 1 for i in range(q_len))
    assert attention_flops(q_len, kv_len, 2, 8) == 4 * 2 * 8 * pairs


def test_limit_is_the_larger_of_both() -> None:
    toy = Hardware("toy", memory=1, bandwidth=2, flops=10, link=1)
    assert toy.ridge == 5
    assert limit_seconds(10, 1, toy) == 1
    assert limit_seconds(10, 4, toy) == 2
    assert limit_seconds(50, 10, toy) == 5  # at the ridge both are


def test_a_step_reads_the_weights_once() -> None:
    flops, num_bytes = decode_work(LLAMA_3_1_8B, 4, 100)
    one_flops, one_bytes = decode_work(LLAMA_3_1_8B, 1, 100)
    assert flops == 4 * one_flops
    assert num_bytes - one_bytes == 3 * 100 * 131072
    assert decode_work(LLAMA_3_1_8B, 1, 0, 0.5)[1] == num_read_parameters(LLAMA_3_1_8B) / 2


def test_prefill_of_one_token_is_a_decode_step() -> None:
    assert prefill_work(LLAMA_3_1_8B, 1) == decode_work(LLAMA_3_1_8B, 1, 1)


def test_activations() -> None:
    """The MLP of a big pass, the logits of a small one with many sequences."""
    assert activation_bytes(LLAMA_3_1_8B, 1000, 1) == 1000 * (2 * 4096 + 3 * 14336) * 2
    assert activation_bytes(LLAMA_3_1_8B, 1, 1) == 4 * 128256 + 4096 * 2


def test_links() -> None:
    assert pcie_bandwidth(4) == pytest.approx(31.5e9, rel=1e-3)
    assert pcie_bandwidth(5, 8) == pcie_bandwidth(4) == 2 * pcie_bandwidth(3) == RTX_4090.link
    assert H200.link / RTX_4090.link == pytest.approx(14.3, abs=0.05)
    with pytest.raises(ValueError, match="PCIe generation is 6"):
        pcie_bandwidth(6)
