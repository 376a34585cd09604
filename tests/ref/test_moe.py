"""ref.moe and ref.moe_routing: hand-made scores for every rule (KRN-07), and runs of rows of any length (KRN-06)."""

import math
from collections.abc import Sequence

import numpy as np
import pytest

from ref.activation import gate_up_act, silu
from ref.moe import moe_combine, moe_linear, moe_mlp, moe_shared_expert, moe_sort
from ref.moe_routing import moe_route
from ref.numerics import softmax

Array = np.ndarray


def logits_of(probabilities: list[float]) -> Array:
    """One token's logits whose softmax is this: eighths and the like, so weights can be read off."""
    return np.log(np.array([probabilities]))


def test_softmax_top_k_with_and_without_renormalizing() -> None:
    """KRN-07: Qwen-MoE's norm_topk_prob."""
    logits = logits_of([1 / 8, 4 / 8, 1 / 8, 2 / 8])
    ids, weights = moe_route(logits, 2)
    assert ids.tolist() == [[1, 3]]
    np.testing.assert_allclose(weights, [[4 / 8, 2 / 8]], rtol=1e-14)
    ids, weights = moe_route(logits, 2, renormalize=True)
    assert ids.tolist() == [[1, 3]]
    np.testing.assert_allclose(weights, [[2 / 3, 1 / 3]], rtol=1e-14)


def test_mixtral_is_the_softmax_of_the_chosen_logits() -> None:
    """KRN-07: softmax after top-k and renormalised softmax before it are the same."""
    logits = np.random.default_rng(0).standard_normal((50, 8))
    ids, weights = moe_route(logits, 2, renormalize=True)
    np.testing.assert_allclose(weights, softmax(np.take_along_axis(logits, ids, axis=1)), rtol=1e-14)
    assert np.all(np.diff(weights) <= 0)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_ties_go_to_the_lower_id(dtype: type) -> None:
    ids, weights = moe_route(np.zeros((1, 6), dtype), 3)
    assert ids.tolist() == [[0, 1, 2]]
    assert weights.dtype == dtype
    tied_groups, _ = moe_route(np.zeros((1, 6), dtype), 2, n_group=3, topk_group=1)
    assert tied_groups.tolist() == [[0, 1]]


SIXTEEN = np.array([0.60, 0.10, 0.10, 0.10, 0.50, 0.45, 0.10, 0.10, 0.55, 0.42, 0.41, 0.10, 0.30, 0.30, 0.30, 0.30])
LOGITS16 = np.log(SIXTEEN / (1 - SIXTEEN))[None]  # whose sigmoid is SIXTEEN


def test_v2_takes_groups_by_their_best_member() -> None:
    """KRN-07: bests are .60, .50, .55, .30, so groups 0 and 2 stay, and .50 and .45 of group 1 do not count."""
    total = SIXTEEN.sum()
    ids, weights = moe_route(np.log(SIXTEEN)[None], 4, n_group=4, topk_group=2, scaling_factor=16.0)
    assert ids.tolist() == [[0, 8, 9, 10]]
    np.testing.assert_allclose(weights, 16 * SIXTEEN[[[0, 8, 9, 10]]] / total, rtol=1e-14)


def test_v3_takes_groups_by_their_best_two() -> None:
    """KRN-07: sums of two are .70, .95, .97, .60, so groups 1 and 2 stay: the best single expert is out."""
    ids, weights = moe_route(LOGITS16, 4, scoring="sigmoid", n_group=4, topk_group=2, group_best=2)
    assert ids.tolist() == [[8, 4, 5, 9]]
    np.testing.assert_allclose(weights, SIXTEEN[[[8, 4, 5, 9]]], rtol=1e-14)


def test_v3_bias_chooses_and_does_not_weigh() -> None:
    """KRN-07: +.6 makes expert 3 .70, ahead of expert 0, and its group 1.30; its weight stays .10."""
    bias = np.zeros(16)
    bias[3] = 0.6
    ids, weights = moe_route(LOGITS16, 4, scoring="sigmoid", bias=bias, n_group=4, topk_group=2, group_best=2)
    assert ids.tolist() == [[3, 0, 8, 9]]  # groups 0 (1.30) and 2 (.97)
    np.testing.assert_allclose(weights, [[0.10, 0.60, 0.55, 0.42]], rtol=1e-14)


def test_groups_that_are_out_stay_out_when_all_within_is_negative() -> None:
    """KRN-07: a bias of −2 makes every choice negative; a mask of 0 would now prefer the masked groups."""
    args = {"scoring": "sigmoid", "n_group": 4, "topk_group": 2, "group_best": 2}
    ids, weights = moe_route(LOGITS16, 4, bias=np.full(16, -2.0), **args)
    plain_ids, plain_weights = moe_route(LOGITS16, 4, **args)
    assert ids.tolist() == plain_ids.tolist()
    np.testing.assert_array_equal(weights, plain_weights)


@pytest.mark.parametrize("scoring", ["softmax", "sigmoid"])
@pytest.mark.parametrize("renormalize", [False, True])
@pytest.mark.parametrize("scaling_factor", [1.0, 2.5])
def test_scaling_comes_last_and_in_every_case(scoring: str, renormalize: bool, scaling_factor: float) -> None:
    """KRN-07: norm_topk_prob × routed_scaling_factor."""
    logits = np.log(np.array([[1.0, 3.0]])) if scoring == "sigmoid" else logits_of([0.2, 0.3])  # σ: 1/2 and 3/4
    own = np.array([[0.75, 0.5]]) if scoring == "sigmoid" else np.array([[0.6, 0.4]])
    _, weights = moe_route(logits, 2, scoring=scoring, renormalize=renormalize, scaling_factor=scaling_factor)
    expected = own / own.sum() if renormalize else own
    np.testing.assert_allclose(weights, expected * scaling_factor, rtol=1e-14)


def test_scores_that_all_underflow_are_no_nan() -> None:
    _, weights = moe_route(np.full((1, 4), -2000.0), 2, scoring="sigmoid", renormalize=True)
    assert weights.tolist() == [[0, 0]]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"top_k": 2, "scoring": "tanh"}, "scoring 'tanh' of experts is not supported; known are softmax, sigmoid"),
        ({"top_k": 2, "n_group": 4}, "6 experts cannot be cut into 4 equal groups"),
        ({"top_k": 3, "n_group": 3}, "cannot choose 3 experts out of 1 groups of 2"),
        ({"top_k": 0}, "cannot choose 0 experts"),
    ],
)
def test_what_cannot_be_routed_is_refused(arguments: dict[str, object], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        moe_route(np.zeros((1, 6)), **arguments)


def test_rows_are_sorted_by_expert_then_token() -> None:
    rows, offsets = moe_sort(np.array([[2, 0], [-1, -1], [0, 3]]), 5)
    assert rows.tolist() == [1, 4, 0, 5]  # expert 0: token 0's second, token 2's first; then 2 and 3
    assert offsets.tolist() == [0, 2, 2, 3, 4, 4]


@pytest.mark.parametrize("wrong", [-2, 4])
def test_an_id_that_is_no_expert_is_refused(wrong: int) -> None:
    """KRN-06: never a read before or behind the weights."""
    with pytest.raises(ValueError, match=f"expert id {wrong} is outside 0 … 3"):
        moe_sort(np.array([[wrong, 0]]), 4)


def test_combine_by_hand() -> None:
    y = np.array([[1.0, 2.0], [10.0, 20.0], [100.0, 200.0]])
    out = moe_combine(y, np.array([3, 0, 1]), np.array([[0.5, 2.0], [np.nan, 4.0]]))
    assert out.tolist() == [[5 + 200, 10 + 400], [4, 8]]


class OnDemand(Sequence[Array]):
    """Weights that remember which of them were asked for."""

    def __init__(self, weights: Array) -> None:
        self.weights, self.asked = weights, set()

    def __len__(self) -> int:
        return len(self.weights)

    def __getitem__(self, expert: int) -> Array:
        self.asked.add(expert)
        return self.weights[expert]


def test_experts_without_tokens_are_not_looked_at() -> None:
    experts = OnDemand(np.full((4, 2, 3), np.nan))
    experts.weights[1], experts.weights[3] = 1.0, 2.0
    out = moe_linear(np.ones((4, 3)), experts, np.array([0, 0, 1, 1, 3]))
    assert out.tolist() == [[3, 3], [6, 6], [6, 6], [0, 0]]  # the last row is padding
    assert experts.asked == {1, 3}
    assert moe_linear(np.ones((0, 3)), experts, np.zeros(5, int)).shape == (0, 2)


def ids_of(name: str) -> Array:
    """KRN-06: how tokens fall on 8 experts, 2 each."""
    rng = np.random.default_rng(0)
    forced = {
        "two experts get all": np.tile([0, 1], (9, 1)),
        "one expert gets all": np.tile([5, -1], (9, 1)),
        "one token each": np.arange(8).reshape(4, 2),
        "none": np.zeros((0, 2), int),
        "padding": np.array([[3, 7], [-1, -1], [7, 2], [-1, -1]]),
    }
    if name in forced:
        return forced[name]
    return np.stack([rng.permutation(8)[:2] for _ in range(int(name))])


@pytest.mark.parametrize(
    "name",
    ["two experts get all", "one expert gets all", "one token each", "none", "padding", "1", "15", "16", "17", "4097"],
)
def test_sorted_rows_are_a_loop_over_tokens(name: str) -> None:
    """KRN-06: sums of 6 and 4 products and 2 choices, all of size ~1: 1e-13 is 400 units of 2^-52."""
    rng = np.random.default_rng(1)
    ids = ids_of(name)
    x, weights = rng.standard_normal((len(ids), 6)), rng.random((len(ids), 2))
    x[(ids == -1).all(axis=1)] = np.nan  # padding holds anything
    gate_up, down = rng.standard_normal((8, 8, 6)) / 2, rng.standard_normal((8, 6, 4)) / 2
    expected = np.zeros((len(ids), 6))
    for token, choices in enumerate(ids):
        for choice, expert in enumerate(choices):
            if expert >= 0:
                activated = gate_up_act(x[token] @ gate_up[expert].T)
                expected[token] += weights[token, choice] * (activated @ down[expert].T)
    out = moe_mlp(x, ids, weights, gate_up, down)
    np.testing.assert_allclose(out, expected, rtol=0, atol=1e-13)


def test_a_token_does_not_depend_on_its_neighbours() -> None:
    rng = np.random.default_rng(2)
    ids, weights = ids_of("17"), rng.random((17, 2))
    x, gate_up, down = rng.standard_normal((17, 6)), rng.standard_normal((8, 8, 6)), rng.standard_normal((8, 6, 4))
    whole, alone = moe_mlp(x, ids, weights, gate_up, down), moe_mlp(x[3:4], ids[3:4], weights[3:4], gate_up, down)
    # values of size ~10 from sums of 6 and 4 products, whose order may differ with the number of rows
    np.testing.assert_allclose(alone[0], whole[3], rtol=0, atol=1e-12)


def test_shared_expert_with_and_without_gate() -> None:
    """gate 1, up 2, down 3 on x = ln 3: silu(ln 3) · 2 ln 3 · 3; a gate weight of 1 multiplies by σ(ln 3) = 3/4."""
    x = np.array([[math.log(3)]])
    gate_up, down = np.array([[1.0], [2.0]]), np.array([[3.0]])
    plain = 0.75 * math.log(3) * 2 * math.log(3) * 3
    np.testing.assert_allclose(moe_shared_expert(x, gate_up, down), [[plain]], rtol=1e-14)
    gated = moe_shared_expert(x, gate_up, down, shared_expert_gate=np.array([[1.0]]))
    np.testing.assert_allclose(gated, [[0.75 * plain]], rtol=1e-14)


def test_two_shared_experts_are_one_of_twice_the_width() -> None:
    rng = np.random.default_rng(3)
    x, gate, up, down = (rng.standard_normal(shape) for shape in ((5, 6), (2, 4, 6), (2, 4, 6), (2, 6, 4)))
    each = sum((silu(x @ gate[i].T) * (x @ up[i].T)) @ down[i].T for i in range(2))
    joined = moe_shared_expert(x, np.concatenate([*gate, *up]), np.concatenate([*down], axis=1))
    np.testing.assert_allclose(joined, each, rtol=0, atol=1e-12)  # 16 products of size ~10


def test_every_stored_value_is_rounded() -> None:
    """gate_up 1 and 1 + 2^-8, stored as 1 and 1; silu(1) = .73106 is stored as .73046875; times down 1."""
    x, gate_up, down = np.array([[1.0]]), np.array([[1.0], [1 + 2.0**-8]]), np.array([[1.0]])
    assert moe_shared_expert(x, gate_up, down, storage="bfloat16").item() == 0.73046875
    ids, weights = np.array([[0]]), np.array([[1.0]])
    assert moe_mlp(x, ids, weights, gate_up[None], down[None], storage="bfloat16").item() == 0.73046875
