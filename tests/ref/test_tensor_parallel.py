"""ref.tensor_parallel: who gets which heads, and the parts of every kind of layer against the whole."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ref.activation import gate_up_act
from ref.attention import attention_dense
from ref.collectives import all_gather, all_reduce, split_ranges
from ref.embedding import embedding
from ref.linear import linear
from ref.tensor_parallel import (
    HeadSplit,
    attention_cuts,
    mla_cuts,
    mlp_cuts,
    shard_gate_up,
    shard_qkv,
    shard_weights,
    split_experts,
    split_heads,
)
from ref.tensor_parallel_vocab import padded_vocab_size, shard_vocab, vocab_embedding, vocab_logits

Array = np.ndarray
Weights = dict[str, Array]
WORLD_SIZES = (1, 2, 3, 4, 5, 6, 7, 8)


def rand(*shape: int, seed: int = 0) -> Array:
    return np.random.default_rng([seed, *shape]).standard_normal(shape)


def assert_sums_to(partials: list[Array], whole: Array) -> None:
    np.testing.assert_allclose(all_reduce(partials)[0], whole, rtol=1e-10, atol=1e-10 * np.abs(whole).max())


def lin(weights: Weights, module: str, x: Array) -> Array:
    return linear(x, weights[f"{module}.weight"], weights.get(f"{module}.bias"))


# heads


def test_heads_by_hand() -> None:
    """Whole groups while there are KV heads enough; then KV heads are copied, and a group is shared."""
    assert split_heads(8, 2, 2) == [HeadSplit(range(0, 4), range(0, 1)), HeadSplit(range(4, 8), range(1, 2))]
    assert [len(split.heads) for split in split_heads(14, 2, 4)] == [4, 3, 4, 3]
    assert [split.kv_heads for split in split_heads(14, 2, 4)] == [range(0, 1), range(0, 1), range(1, 2), range(1, 2)]
    assert [len(split.heads) for split in split_heads(6, 3, 2)] == [4, 2]
    assert [len(split.kv_heads) for split in split_heads(6, 3, 2)] == [2, 1]


@settings(deadline=None, max_examples=200)
@given(st.integers(1, 8), st.integers(1, 9), st.integers(1, 16), st.integers(1, 4), st.integers(1, 3))
def test_heads_go_round(n_kv_heads: int, group: int, world_size: int, unit: int, kv_unit: int) -> None:
    """Each head is on one rank; each rank reads its KV heads by the usual rule; runs stay together."""
    n_heads = n_kv_heads * group
    if world_size > n_heads:
        with pytest.raises(ValueError, match=f"{n_heads} query heads and {n_kv_heads} KV heads"):
            split_heads(n_heads, n_kv_heads, world_size, unit, kv_unit)
        return
    try:
        splits = split_heads(n_heads, n_kv_heads, world_size, unit, kv_unit)
    except ValueError:
        assert unit > 1 or kv_unit > 1
        return
    assert [head for split in splits for head in split.heads] == list(range(n_heads))
    for split in splits:
        local_group = len(split.heads) // len(split.kv_heads)
        assert len(split.heads) % len(split.kv_heads) == 0
        for i, head in enumerate(split.heads):
            assert split.kv_heads[i // local_group] == head // group
        assert all(edge % unit == 0 or edge == n_heads for edge in (split.heads.start, split.heads.stop))
        assert all(edge % kv_unit == 0 or edge == n_kv_heads for edge in (split.kv_heads.start, split.kv_heads.stop))


def test_heads_that_do_not_go_round() -> None:
    """DST-05: the message has the numbers and what would do."""
    with pytest.raises(
        ValueError, match=r"6 query heads and 3 KV heads cannot .* 8 ranks .*possible are 1, 2, 3, 4, 5, 6"
    ):
        split_heads(6, 3, 8)
    with pytest.raises(ValueError, match="6 query heads are no multiple of 4 KV heads"):
        split_heads(6, 4, 2)
    with pytest.raises(
        ValueError, match=r"14 query heads and 2 KV heads in runs of 2 and 1 cannot .* possible are 1 ranks"
    ):
        split_heads(14, 2, 2, unit=2)


# dense layers


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_a_column_and_a_row_split_with_bias(world_size: int) -> None:
    """y = A₂ relu(A₁ x + b₁) + b₂: the second bias is added once."""
    weights = {"a.up_proj.weight": rand(13, 5), "a.up_proj.bias": rand(13, seed=1)}
    weights |= {"a.down_proj.weight": rand(5, 13), "a.down_proj.bias": rand(5, seed=2)}
    x = rand(4, 5)
    whole = lin(weights, "a.down_proj", np.maximum(lin(weights, "a.up_proj", x), 0))
    partials = []
    for rank, part in enumerate(split_ranges(13, world_size)):
        shard = shard_weights(weights, mlp_cuts(part), rank)
        partials.append(lin(shard, "a.down_proj", np.maximum(lin(shard, "a.up_proj", x), 0)))
    assert_sums_to(partials, whole)


@pytest.mark.parametrize(("n_heads", "n_kv_heads"), [(8, 8), (8, 2), (8, 1), (14, 2), (9, 3)])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_attention_with_a_fused_qkv(n_heads: int, n_kv_heads: int, world_size: int) -> None:
    """DST-05, also with biases; the fused weight is cut in each of its three parts."""
    head_dim, hidden, num_tokens = 4, 10, 5
    fused, bias = rand((n_heads + 2 * n_kv_heads) * head_dim, hidden), rand((n_heads + 2 * n_kv_heads) * head_dim)
    o_proj, x = {"a.o_proj.weight": rand(hidden, n_heads * head_dim)}, rand(num_tokens, hidden)

    def attention(fused: Array, bias: Array, o_proj: Array, heads: int, kv_heads: int) -> Array:
        ends = np.cumsum([heads, kv_heads]) * head_dim
        q, k, v = np.split(linear(x, fused, bias), ends, axis=1)
        per_head = [part.reshape(num_tokens, -1, head_dim) for part in (q, k, v)]
        return linear(attention_dense(*per_head, 0.5).reshape(num_tokens, -1), o_proj)

    whole = attention(fused, bias, o_proj["a.o_proj.weight"], n_heads, n_kv_heads)
    partials = []
    for rank, split in enumerate(split_heads(n_heads, n_kv_heads, world_size)):
        rows, row_bias = (shard_qkv(part, n_heads, n_kv_heads, head_dim, split) for part in (fused, bias))
        o_shard = shard_weights(o_proj, attention_cuts(split, head_dim), rank)["a.o_proj.weight"]
        partials.append(attention(rows, row_bias, o_shard, len(split.heads), len(split.kv_heads)))
    assert_sums_to(partials, whole)


def test_a_fused_qkv_of_another_size() -> None:
    with pytest.raises(ValueError, match="a fused qkv has 11 rows; 4 \\+ 2 × 2 heads make 16"):
        shard_qkv(rand(11, 3), 4, 2, 2, split_heads(4, 2, 2)[0])


def test_fused_gate_and_up() -> None:
    fused, down, x = rand(26, 6), rand(6, 13), rand(3, 6)
    partials = []
    for part in split_ranges(13, 3):
        partials.append(linear(gate_up_act(linear(x, shard_gate_up(fused, part))), down[:, part.start : part.stop]))
    assert_sums_to(partials, linear(gate_up_act(linear(x, fused)), down))


def test_norms_of_heads_and_routers_stay_whole() -> None:
    """DST-05: a k-norm weight cut to half a head made models repeat themselves."""
    weights = {"a.k_norm.weight": rand(4), "a.gate.weight": rand(8, 6), "a.gate_up_proj.weight": rand(4, 4)}
    shard = shard_weights(weights, {**attention_cuts(split_heads(4, 2, 2)[0], 4), **mlp_cuts(range(1))}, 1)
    assert {name: tensor.shape for name, tensor in shard.items()} == {n: t.shape for n, t in weights.items()}


# vocabulary


@pytest.mark.parametrize("world_size", WORLD_SIZES)
@pytest.mark.parametrize("vocab_size", [1003, 8, 5])
def test_vocabulary(vocab_size: int, world_size: int) -> None:
    """DST-06: any vocabulary on any number of ranks; ids at the border of two ranks are in their places."""
    table, hidden = rand(vocab_size, 6), rand(3, 6)
    ids = np.unique(np.clip([0, 1, 501, 502, 750, vocab_size - 1], 0, vocab_size - 1))
    shards = [shard_vocab(table, rank, world_size) for rank in range(world_size)]
    assert {len(shard) for shard, _ in shards} == {-(-vocab_size // world_size)}
    embedded = all_reduce([vocab_embedding(ids, shard, first) for shard, first in shards])[0]
    np.testing.assert_array_equal(embedded, embedding(ids, table))
    gathered = all_gather([vocab_logits(hidden, shard, first, vocab_size) for shard, first in shards], axis=-1)[0]
    np.testing.assert_allclose(gathered[:, :vocab_size], linear(hidden, table), rtol=1e-12, atol=1e-12)
    assert (gathered[:, vocab_size:] == -np.inf).all()


def test_padded_ids_never_win() -> None:
    """DST-06: where all logits are negative, the zero rows of the padding would be the best."""
    table, hidden = -np.ones((1003, 2)), np.ones((1, 2))
    shards = [shard_vocab(table, rank, 4, multiple=64) for rank in range(4)]
    gathered = all_gather([vocab_logits(hidden, shard, first, 1003) for shard, first in shards], axis=-1)[0]
    assert gathered.shape == (1, 1024)
    assert gathered.argmax() < 1003


def test_padded_sizes_by_hand() -> None:
    assert padded_vocab_size(1003, 2) == padded_vocab_size(1003, 4) == 1004
    assert padded_vocab_size(151669, 4) == 151672
    assert padded_vocab_size(32000, 3, multiple=64) == 32064
    assert padded_vocab_size(32000, 4, multiple=64) == 32000


# experts


def moe(x: Array, weights: Weights, routing: Array, experts: range | None = None) -> Array:
    """Σ over experts of routing[t, e] · mlp_e(x_t), and the shared expert."""
    out = np.zeros_like(x)
    for expert in range(routing.shape[1]) if experts is None else experts:
        key = f"m.experts.{expert}"
        gate_up = np.concatenate([lin(weights, f"{key}.gate_proj", x), lin(weights, f"{key}.up_proj", x)], axis=1)
        out += routing[:, expert, None] * lin(weights, f"{key}.down_proj", gate_up_act(gate_up))
    key = "m.shared_expert"
    gate_up = np.concatenate([lin(weights, f"{key}.gate_proj", x), lin(weights, f"{key}.up_proj", x)], axis=1)
    return out + lin(weights, f"{key}.down_proj", gate_up_act(gate_up))


def moe_weights(n_experts: int, hidden: int, intermediate: int, shared: int) -> Weights:
    sizes = {f"m.experts.{expert}": intermediate for expert in range(n_experts)} | {"m.shared_expert": shared}
    weights = {"m.gate.weight": rand(n_experts, hidden)}
    for seed, (key, size) in enumerate(sizes.items()):
        weights |= {f"{key}.{name}.weight": rand(size, hidden, seed=seed) for name in ("gate_proj", "up_proj")}
        weights[f"{key}.down_proj.weight"] = rand(hidden, size, seed=seed)
    return weights


def routed(x: Array, router: Array) -> Array:
    """The two best experts of each token, weighted by softmax: [num_tokens, n_experts], zeros elsewhere."""
    scores = np.exp(x @ router.T)
    return np.where(scores >= np.sort(scores, axis=1)[:, -2:-1], scores, 0) / scores.sum(axis=1, keepdims=True)


@pytest.mark.parametrize("by_expert", [False, True])
@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_experts_cut_inside_and_dealt_out(world_size: int, by_expert: bool) -> None:
    """Experts on 1 to 8 ranks, 9 of them; the shared expert is cut inside either way. Routers see the same tokens."""
    n_experts, hidden, intermediate, shared = 9, 6, 11, 17
    weights, x = moe_weights(n_experts, hidden, intermediate, shared), rand(5, hidden)
    partials = []
    for rank in range(world_size):
        cuts = dict(mlp_cuts(split_ranges(shared, world_size)[rank], "*.shared_expert."))
        if not by_expert:
            cuts |= mlp_cuts(split_ranges(intermediate, world_size)[rank], "*.experts.*.")
        shard = shard_weights(weights, cuts, rank)
        experts = split_experts(n_experts, world_size)[rank] if by_expert else None
        partials.append(moe(x, shard, routed(x, shard["m.gate.weight"]), experts))
    assert_sums_to(partials, moe(x, weights, routed(x, weights["m.gate.weight"])))


def test_more_ranks_than_experts() -> None:
    with pytest.raises(ValueError, match="4 experts on 5 ranks leave one without; at most 4 ranks"):
        split_experts(4, 5)


# latent attention


def mla(x: Array, weights: Weights, n_heads: int, nope: int, rope: int, v_dim: int) -> Array:
    """Latent attention written out, without the rotation: it acts on each head alone and changes nothing here."""
    num_tokens = len(x)
    q = lin(weights, "a.q_b_proj", lin(weights, "a.q_a_proj", x)).reshape(num_tokens, n_heads, nope + rope)
    latent, k_rope = np.split(lin(weights, "a.kv_a_proj_with_mqa", x), [-rope], axis=1)
    kv = lin(weights, "a.kv_b_proj", latent).reshape(num_tokens, n_heads, nope + v_dim)
    k = np.concatenate([kv[..., :nope], np.repeat(k_rope[:, None], n_heads, axis=1)], axis=-1)
    scores = np.einsum("qhd,khd->hqk", q, k)
    scores = np.where(np.tril(np.ones((num_tokens, num_tokens))) > 0, np.exp(scores - scores.max()), 0)
    out = np.einsum("hqk,khd->qhd", scores / scores.sum(axis=-1, keepdims=True), kv[..., nope:])
    return lin(weights, "a.o_proj", out.reshape(num_tokens, -1))


@pytest.mark.parametrize("world_size", WORLD_SIZES)
def test_latent_attention(world_size: int) -> None:
    n_heads, nope, rope, v_dim, hidden, q_rank, kv_rank = 9, 4, 2, 3, 8, 5, 6
    weights = {
        "a.q_a_proj.weight": rand(q_rank, hidden) / 3,
        "a.q_b_proj.weight": rand(n_heads * (nope + rope), q_rank) / 3,
        "a.kv_a_proj_with_mqa.weight": rand(kv_rank + rope, hidden) / 3,
        "a.kv_b_proj.weight": rand(n_heads * (nope + v_dim), kv_rank),
        "a.o_proj.weight": rand(hidden, n_heads * v_dim),
    }
    x = rand(4, hidden)
    partials = []
    for rank, split in enumerate(split_heads(n_heads, n_heads, world_size)):
        shard = shard_weights(weights, mla_cuts(split.heads, nope + rope, nope + v_dim, v_dim), rank)
        assert shard["a.kv_a_proj_with_mqa.weight"].shape == (kv_rank + rope, hidden)
        partials.append(mla(x, shard, len(split.heads), nope, rope, v_dim))
    assert_sums_to(partials, mla(x, weights, n_heads, nope, rope, v_dim))
