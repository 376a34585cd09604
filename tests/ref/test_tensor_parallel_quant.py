"""ref.tensor_parallel_quant and _sizes: parts of quantized weights against the whole, and cuts that are refused."""

import math

import numpy as np
import pytest

from ref.activation import gate_up_act
from ref.collectives import all_reduce, split_ranges
from ref.linear import linear
from ref.tensor_parallel_quant import (
    BlockWeight,
    check_cut,
    dequantize_blocks,
    permute_out,
    refine_blocks,
    shard_in,
    shard_out,
    sort_groups,
)
from ref.tensor_parallel_sizes import (
    FLOAT,
    FP8_BLOCK,
    INT8,
    Geometry,
    WeightFormat,
    awq_format,
    check_world_size,
    gptq_format,
    head_units,
    legal_world_sizes,
)

Array = np.ndarray

DEEPSEEK_V3 = {"n_heads": 128, "n_kv_heads": 128, "q_head_dim": 192, "kv_head_dim": 256, "o_head_dim": 128}
QWEN_05B = {"n_heads": 14, "n_kv_heads": 2, "q_head_dim": 64, "kv_head_dim": 64, "o_head_dim": 64}


def weight(
    out_features: int, in_features: int, block: tuple[int, int], act_order: bool = False, seed: int = 0
) -> BlockWeight:
    """4-bit values with a zero and a scale a block, so different from block to block that a wrong one shows."""
    rng = np.random.default_rng(seed)
    sizes = (out_features, in_features)
    blocks = [-(-size // (b or size)) for size, b in zip(sizes, block, strict=True)]
    return BlockWeight(
        values=rng.integers(0, 16, (out_features, in_features)),
        scales=rng.uniform(0.5, 2, blocks) * 2.0 ** rng.integers(-3, 4, blocks),
        block=block,
        zeros=rng.integers(0, 16, blocks),
        g_idx=rng.permutation(np.arange(in_features) // block[1]) if act_order else None,
    )


def x_for(weight: BlockWeight, num_tokens: int = 3) -> Array:
    return np.random.default_rng(9).standard_normal((num_tokens, weight.values.shape[1]))


def quant_linear(x: Array, weight: BlockWeight) -> Array:
    return linear(x, dequantize_blocks(weight))


def assert_row_split(weight: BlockWeight, parts: list[range], pack: int = 1) -> None:
    x = x_for(weight)
    partials = [quant_linear(x[:, part.start : part.stop], shard_in(weight, part, pack)) for part in parts]
    np.testing.assert_allclose(all_reduce(partials)[0], quant_linear(x, weight), rtol=1e-10, atol=1e-9)


def assert_column_split(weight: BlockWeight, parts: list[range], pack: int = 1) -> None:
    x = x_for(weight)
    columns = [quant_linear(x, shard_out(weight, part, pack)) for part in parts]
    np.testing.assert_allclose(np.concatenate(columns, axis=1), quant_linear(x, weight), rtol=1e-12, atol=1e-10)


def test_dequantize_by_hand() -> None:
    """Blocks of 2 × 2 on 3 × 3: the last row and column have blocks of their own."""
    whole = BlockWeight(np.full((3, 3), 5), np.array([[1.0, 2.0], [3.0, 4.0]]), (2, 2), np.array([[0, 1], [2, 3]]))
    assert dequantize_blocks(whole).tolist() == [[5, 5, 8], [5, 5, 8], [9, 9, 8]]
    by_group = BlockWeight(np.full((1, 3), 5), np.array([[1.0, 2.0]]), (1, 2), g_idx=np.array([1, 0, 1]))
    assert dequantize_blocks(by_group).tolist() == [[10, 5, 10]]


@pytest.mark.parametrize("group_size", [32, 128])
@pytest.mark.parametrize("world_size", [2, 3, 4, 5, 7])
@pytest.mark.parametrize("in_features", [896, 4864])
def test_row_split_on_groups(in_features: int, world_size: int, group_size: int) -> None:
    """QNT-02: 7 and 38 groups of 128 on 2 and 4 ranks are not equal shares, and no group is cut."""
    whole = weight(16, in_features, (1, group_size))
    parts = split_ranges(in_features, world_size, unit=group_size)
    assert_row_split(whole, parts, pack=8)
    assert sum(shard_in(whole, part).scales.shape[1] for part in parts) == in_features // group_size


@pytest.mark.parametrize(("in_features", "world_size"), [(896, 2), (896, 4), (4864, 4)])
def test_an_equal_row_split_would_cut_a_group(in_features: int, world_size: int) -> None:
    """QNT-02: refused with the numbers; groups refined as the message says give the right sum."""
    whole = weight(16, in_features, (1, 128))
    parts = split_ranges(in_features, world_size)
    edge = parts[0].stop
    first = edge // 128 * 128
    finer = {448: 64, 224: 32, 1216: 64}[edge]
    message = (
        f"in_features {in_features} cannot be cut at {edge}: that is inside the block of {first} to {first + 127}; "
        f"cut at {first} or {first + 128}, with shares that are not equal, or refine the blocks to {finer}"
    )
    with pytest.raises(ValueError, match=message):
        shard_in(whole, parts[0])
    refined = refine_blocks(whole, (1, finer))
    np.testing.assert_array_equal(dequantize_blocks(refined), dequantize_blocks(whole))
    assert_row_split(refined, parts, pack=8)


def test_column_split_of_key_heads() -> None:
    """QNT-02: k_proj of 2 heads of 64, packed 8 a word along out, on 2 ranks."""
    assert_column_split(weight(128, 96, (1, 32)), split_ranges(128, 2, unit=64), pack=8)


def test_a_word_is_not_cut() -> None:
    with pytest.raises(
        ValueError, match=r"out_features 36 cannot be cut at 12: .* packed word of 8 to 15; cut at 8 or 16"
    ):
        shard_out(weight(36, 32, (1, 32)), range(12), pack=8)
    with pytest.raises(ValueError, match="packed word of 0 to 7"):
        shard_in(weight(4, 64, (1, 32), act_order=True), range(4), pack=8)
    check_cut(range(32, 36), 36, 1, pack=8)  # the end of the axis is no cut


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_act_order_keeps_all_scales(world_size: int) -> None:
    """QNT-01: K = 512, N = 256, groups of 128 scattered by g_idx; any cut of rows, and cuts of columns."""
    whole = weight(256, 512, (1, 128), act_order=True)
    assert_row_split(whole, split_ranges(512, world_size, unit=8), pack=8)
    assert_column_split(whole, split_ranges(256, world_size, unit=8), pack=8)
    assert shard_in(whole, range(0, 8)).scales.shape == (256, 4)


def test_groups_taken_for_contiguous_are_wrong() -> None:
    """QNT-01: the fault that this guards against shows in these numbers."""
    whole = weight(16, 512, (1, 128), act_order=True)
    naive = BlockWeight(whole.values, whole.scales, (1, 128), whole.zeros)
    x = x_for(whole)
    assert not np.allclose(quant_linear(x, naive), quant_linear(x, whole), rtol=1e-2)


@pytest.mark.parametrize("world_size", [2, 3, 4])
def test_act_order_sorted_away(world_size: int) -> None:
    """QNT-01: gate and up put out what down wants in the order of its groups; no input is permuted at run time."""
    gate, up, down = weight(512, 24, (1, 8), seed=1), weight(512, 24, (1, 8), seed=2), weight(8, 512, (1, 128), True)
    x = np.random.default_rng(3).standard_normal((3, 24)) / 1000
    whole = quant_linear(gate_up_act(np.concatenate([quant_linear(x, gate), quant_linear(x, up)], axis=1)), down)
    in_order, order = sort_groups(down)
    assert in_order.g_idx is None
    partials = []
    for part in split_ranges(512, world_size, unit=128):
        gate_up = [quant_linear(x, shard_out(permute_out(half, order), part)) for half in (gate, up)]
        partials.append(quant_linear(gate_up_act(np.concatenate(gate_up, axis=1)), shard_in(in_order, part)))
    np.testing.assert_allclose(all_reduce(partials)[0], whole, rtol=1e-9, atol=1e-9 * np.abs(whole).max())


def test_parts_of_a_fused_projection_have_their_own_order() -> None:
    """QNT-01: q, k and v with a g_idx each are cut one by one; each part keeps its own."""
    parts = [weight(out, 128, (1, 32), act_order=True, seed=out) for out in (64, 16, 24)]
    assert not np.array_equal(parts[0].g_idx, parts[1].g_idx)
    for part in parts:
        assert_column_split(part, split_ranges(len(part.values), 2, unit=8), pack=8)


def test_groups_that_cannot_be_sorted() -> None:
    uneven = BlockWeight(np.zeros((1, 4)), np.ones((1, 2)), (1, 2), g_idx=np.array([0, 0, 0, 1]))
    with pytest.raises(ValueError, match=r"g_idx makes groups of \[3, 1\]; wanted 2 in each"):
        sort_groups(uneven)
    plain = weight(4, 32, (1, 8))
    assert sort_groups(plain)[0] is plain
    with pytest.raises(ValueError, match="outputs share scales in blocks of 128"):
        permute_out(weight(128, 128, (128, 128)), np.arange(128))


@pytest.mark.parametrize("world_size", [1, 2, 3, 4, 5])
def test_fp8_tiles_with_a_short_end(world_size: int) -> None:
    """QNT-05, QNT-06: 576 rows are 4.5 tiles; they go to 5 ranks, cut on tiles along either axis."""
    assert_column_split(weight(576, 192, (128, 128)), split_ranges(576, world_size, unit=128))
    assert_row_split(weight(192, 576, (128, 128)), split_ranges(576, world_size, unit=128))


def test_a_shard_of_192_is_refused() -> None:
    """QNT-06: 3072 / 16 = 192."""
    whole = weight(3072, 128, (128, 128))
    with pytest.raises(ValueError, match=r"out_features 3072 cannot be cut at 192: .* 128 to 255; cut at 128 or 256"):
        shard_out(whole, range(192))
    assert_column_split(refine_blocks(whole, (64, 128)), split_ranges(3072, 16))


@pytest.mark.parametrize("block", [(1, 0), (0, 0), (0, 16)])
def test_a_scale_of_the_whole_axis_is_copied(block: tuple[int, int]) -> None:
    """QNT-08: group −1, int8 rows and one scale a tensor may be cut anywhere along that axis."""
    whole = weight(30, 48, block)
    assert_row_split(whole, split_ranges(48, 3, unit=block[1] or 1))
    assert_column_split(whole, split_ranges(30, 4))


def test_refining_what_does_not_divide() -> None:
    with pytest.raises(ValueError, match=r"blocks of \(1, 128\) cannot be refined to \(1, 48\)"):
        refine_blocks(weight(4, 256, (1, 128)), (1, 48))


# which sizes are legal


def allowed(geometry: Geometry, weight_format: WeightFormat, even: bool = False, up_to: int = 16) -> list[int]:
    legal = legal_world_sizes(geometry, weight_format, max_world_size=up_to, even=even)
    return [size for size, hindrances in legal.items() if not hindrances]


@pytest.mark.parametrize(
    ("intermediate_size", "even", "any_shares"),
    [
        (18432, [1, 2, 3, 4, 6, 8, 9, 12, 16], 16),  # 144 tiles
        (3072, [1, 2, 3, 4, 6, 8, 12], 16),  # 24
        (1408, [1, 11], 11),  # 11
        (512, [1, 2, 4], 4),  # 4
    ],
)
def test_fp8_sizes(intermediate_size: int, even: list[int], any_shares: int) -> None:
    """QNT-06: which of 1 to 16 ranks are allowed, with equal shares and with any; heads divide by all."""
    heads = {**DEEPSEEK_V3, "n_heads": 2 * math.lcm(*range(1, 17)), "n_kv_heads": 2 * math.lcm(*range(1, 17))}
    geometry = Geometry(**heads, intermediate_sizes={"intermediate_size": intermediate_size})
    assert allowed(geometry, FP8_BLOCK, even=True) == even
    assert allowed(geometry, FP8_BLOCK) == list(range(1, any_shares + 1))
    assert allowed(geometry, INT8) == list(range(1, 17))


def test_experts_dealt_out_need_no_blocks() -> None:
    """DeepSeek V2-Lite: experts of 1408 cannot be cut equally, but 64 of them go to 2, 4 or 8 ranks."""
    cut_inside = Geometry(**{**DEEPSEEK_V3, "n_heads": 16, "n_kv_heads": 16}, intermediate_sizes={"expert": 1408})
    dealt_out = Geometry(**{**DEEPSEEK_V3, "n_heads": 16, "n_kv_heads": 16}, n_experts=64)
    assert allowed(cut_inside, FP8_BLOCK, even=True) == [1]
    assert allowed(dealt_out, FP8_BLOCK, even=True) == [1, 2, 4, 8]
    few = legal_world_sizes(Geometry(**DEEPSEEK_V3, n_experts=4), max_world_size=5)
    assert few[5] == ["4 experts are fewer than 5 ranks"]


def test_group_128_of_a_small_qwen() -> None:
    """QNT-02: heads of 64 stay together by two in groups of 128, and 7 a KV head have no such pairs; 32 is fine."""
    geometry = Geometry(**QWEN_05B, intermediate_sizes={"intermediate_size": 4864})
    assert head_units(geometry, gptq_format(128)) == (2, 1)
    assert allowed(geometry, gptq_format(128)) == [1]
    assert allowed(geometry, gptq_format(64)) == allowed(geometry, awq_format(32)) == list(range(1, 15))
    assert allowed(geometry, gptq_format(32), even=True) == [1, 2]
    assert allowed(geometry, gptq_format(-1), even=True) == [1, 2]
    with pytest.raises(
        ValueError, match=r"GPTQ, groups of 128 cannot be cut for 2 ranks: 14 query heads .* allowed are 1 "
    ):
        check_world_size(geometry, gptq_format(128), 2)
    check_world_size(geometry, gptq_format(32), 2)


def test_all_hindrances_are_named() -> None:
    """DST-05: 14 heads on 4 ranks, if shares must be equal; and an MLP of 100."""
    geometry = Geometry(**QWEN_05B, intermediate_sizes={"intermediate_size": 100})
    assert legal_world_sizes(geometry, FLOAT, even=True)[3] == [
        "14 query heads give shares of [4, 3, 7]",
        "intermediate_size 100 / 3 = 33.3333 is no multiple of 1",
    ]
    assert legal_world_sizes(geometry, FLOAT)[4] == []
    assert legal_world_sizes(geometry, awq_format(32))[5] == [
        "intermediate_size 100 has 4 units of 32, fewer than 5 ranks"
    ]


@pytest.mark.parametrize(
    "weight_format", [FLOAT, INT8, FP8_BLOCK, gptq_format(128), awq_format(64), gptq_format(32, 8)]
)
def test_a_legal_size_can_be_cut(weight_format: WeightFormat) -> None:
    """What legal_world_sizes allows, split_ranges and the shard functions do without an error, and no head is cut."""
    intermediate, unit = 1408, int(np.lcm(*weight_format.units))
    geometry = Geometry(**DEEPSEEK_V3, intermediate_sizes={"intermediate_size": intermediate})
    gate, down = weight(intermediate, 128, weight_format.block), weight(128, intermediate, weight_format.block)
    for world_size in allowed(geometry, weight_format):
        for part in split_ranges(intermediate, world_size, unit):
            assert len(shard_out(gate, part, weight_format.pack[0]).values) == len(part) > 0
            assert shard_in(down, part, weight_format.pack[1]).values.shape[1] == len(part)
