"""Cases of the kernels, each a function of Kernels that says what is wrong; the tests and the mutants run the same."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.tolerance import EXACT
from ref import activation, embedding, layernorm, rmsnorm, rope
from ref.numerics import round_to
from tests.cuda.judge import STORAGES, framed, problems
from tests.cuda.launchers import Kernels

Array = NDArray[Any]

ROWS = {  # num_tokens, size; with 64 threads of 4 or 8 numbers a round is 256 or 512
    "no-tokens": (0, 64),
    "one-token": (1, 576),
    "width-1": (5, 1),
    "odd": (7, 33),
    "one-short-of-a-piece": (3, 63),
    "rounds": (2, 700),
    "many": (67, 96),
}


@dataclass(frozen=True)
class Case:
    stem: str
    name: str
    storage: str
    check: Callable[[Kernels], list[str]]

    def __str__(self) -> str:
        return f"{self.stem}-{self.name}-{self.storage}"


def cases(stem: str) -> list[Case]:
    makers = {
        "rmsnorm": _norms,
        "layernorm": _norms,
        "activation": _activations,
        "embedding": _embeddings,
        "rope": _ropes,
    }
    return list(makers[stem](stem))


def storages(name: str) -> tuple[str, ...]:
    """All types where sizes are odd; bfloat16 for the rest."""
    return ("float32", "float16", "bfloat16") if name in ("odd", "one-token", "rounds") else ("bfloat16",)


def normal(rng: np.random.Generator, *shape: int, storage: str, scale: float | Array = 1.0) -> Array:
    """Normally distributed float32 that the storage type holds exactly."""
    return round_to(rng.standard_normal(shape, np.float32) * np.float32(scale), storage).astype(np.float32)


def sizes(num_tokens: int, storage: str) -> Array:
    """Of the rows, in turn; what float16 cannot hold is left out."""
    return np.resize(
        np.array((1.0, 0.0, 1e-2, 1e2) if storage == "float16" else (1.0, 0.0, 1e-3, 1e4)), (num_tokens, 1)
    )


def _norms(stem: str) -> Iterator[Case]:
    for name, shape in ROWS.items():
        for storage in storages(name):
            for fused in (False, True):
                for view in (False, True) if name in ("odd", "many") else (False,):
                    full = "-".join(["add"] * fused + [name] + ["view"] * view)
                    yield Case(stem, full, storage, partial(_norm, stem, *shape, storage, fused, view))
    if stem == "layernorm":
        yield Case(stem, "heads", "bfloat16", partial(_norm_of_heads, "bfloat16"))
        yield Case(stem, "add-rounded-sum", "bfloat16", _norm_of_rounded_sum)


def _norm(stem: str, num_tokens: int, size: int, storage: str, fused: bool, view: bool, kernels: Kernels) -> list[str]:
    rng = np.random.default_rng(0)
    scale = sizes(num_tokens, storage)
    inputs: dict[str, Any] = {"x": normal(rng, num_tokens, size, storage=storage, scale=scale)}
    if stem == "layernorm":
        inputs["x"] = round_to(inputs["x"] + np.float32(3) * scale.astype(np.float32), storage)
    if fused:
        inputs["residual"] = normal(rng, num_tokens, size, storage=storage, scale=scale)
    if view:
        inputs = {name: framed(value) for name, value in inputs.items()}
    inputs["weight"] = normal(rng, size, storage=storage, scale=0.2) + np.float32(1)
    inputs["weight"] = round_to(inputs["weight"], storage)
    if stem == "layernorm":
        inputs["bias"] = None if num_tokens % 2 else normal(rng, size, storage=storage)
    inputs["eps"] = 1e-5
    name = f"add_{stem}" if fused else stem
    reference = getattr(rmsnorm if stem == "rmsnorm" else layernorm, name)

    def run(function: Callable[..., Any], storage: str | None = None, **values: Any) -> dict[str, Array]:
        extra = {"storage": storage} if storage and fused else {}
        found = function(**values, **extra)
        return dict(zip(("y", "new_residual"), found if fused else (found,), strict=False))

    return problems(partial(run, getattr(kernels, name)), partial(run, reference), inputs, storage)


def _norm_of_heads(storage: str, kernels: Kernels) -> list[str]:
    """x [num_tokens, n_heads, head_dim] with weights and biases [n_heads, head_dim], as rows."""
    rng = np.random.default_rng(1)
    shapes = {"x": (5, 3, 40), "weight": (3, 40), "bias": (3, 40)}
    inputs = {name: normal(rng, *shape, storage=storage) for name, shape in shapes.items()}

    def run(x: Array, weight: Array, bias: Array) -> dict[str, Array]:
        return {"y": kernels.layernorm(x.reshape(-1, x.shape[2]), weight, bias, 1e-5)}

    def reference(x: Array, weight: Array, bias: Array, storage: str | None) -> dict[str, Array]:
        return {"y": layernorm.layernorm(x, weight, bias, 1e-5).reshape(-1, x.shape[2])}

    return problems(run, reference, inputs, storage)


def _norm_of_rounded_sum(kernels: Kernels) -> list[str]:
    """256 + 1/2 is 256 in bfloat16, so all of the row is equal and its norm is 0; unrounded it would be ±1."""
    dtype = STORAGES["bfloat16"]
    x, residual = np.resize(np.array([0.5, -0.25], dtype), (1, 40)), np.full((1, 40), 256, dtype)
    y, new_residual = kernels.add_layernorm(x, residual, np.ones(40, dtype), None, 1e-5)
    return [f"{name} is {v}" for name, v, right in (("y", y, 0), ("sum", new_residual, 256)) if not (v == right).all()]


def _activations(stem: str) -> Iterator[Case]:
    for name in activation.ACTIVATIONS.keys() & {"silu", "gelu", "gelu_new", "relu"}:
        for shape_name, (num_tokens, size) in ROWS.items():
            for storage in storages(shape_name) if name == "gelu" else ("bfloat16",):
                for gated in (False, True):
                    check = partial(_activation, num_tokens, size, storage, name, gated, shape_name == "many")
                    yield Case(stem, f"{'gated-' * gated}{name}-{shape_name}", storage, check)


def _activation(
    num_tokens: int, size: int, storage: str, name: str, gated: bool, view: bool, kernels: Kernels
) -> list[str]:
    rng = np.random.default_rng(2)
    x = normal(rng, num_tokens, size * (1 + gated), storage=storage, scale=3.0)
    if x.size:
        x[0, 0], x[-1, -1] = -60.0, 60.0
    function = "gate_up_act" if gated else "act"

    def run(table: Any, x: Array, storage: str | None = None) -> dict[str, Array]:
        return {"y": getattr(table, function)(x, name)}

    inputs = {"x": framed(x) if view else x}
    return problems(partial(run, kernels), partial(run, activation), inputs, storage)


def _embeddings(stem: str) -> Iterator[Case]:
    for name, (num_tokens, size) in ROWS.items():
        for storage in storages(name):
            yield Case(stem, name, storage, partial(_embedding, num_tokens, size, storage, name == "many"))
    yield Case(stem, "outside", "bfloat16", _embedding_outside)


def _embedding(num_tokens: int, size: int, storage: str, view: bool, kernels: Kernels) -> list[str]:
    rng = np.random.default_rng(3)
    table = normal(rng, 11, size, storage=storage)
    token_ids = rng.integers(0, 11, num_tokens).astype(np.int32)
    token_ids[:2] = (10, 0)[:num_tokens]
    inputs = {"token_ids": token_ids, "table": framed(table) if view else table}

    def run(function: Callable[..., Array], storage: str | None = None, **values: Array) -> dict[str, Array]:
        return {"y": function(**values)}

    found = problems(partial(run, kernels.embedding), partial(run, embedding.embedding), inputs, storage, (), EXACT)
    return found


def _embedding_outside(kernels: Kernels) -> list[str]:
    """Ids that are no rows give NaN and read nothing; their neighbours are right."""
    table = np.arange(24, dtype=np.float32).reshape(3, 8)
    y = kernels.embedding(np.array([2, 3, -1, 0, 2**31 - 1], np.int32), table)
    expected = np.full((5, 8), np.nan, np.float32)
    expected[0], expected[3] = table[2], table[0]
    return [] if np.array_equal(y, expected, equal_nan=True) else [f"found {y}"]


ROPES = {  # num_tokens, n_heads, n_kv_heads, head_dim, rotary_dim, block_size
    "no-tokens": (0, 4, 2, 16, 16, 4),
    "one-token": (1, 9, 3, 64, 64, 16),
    "smallest": (3, 1, 1, 2, 2, 1),
    "gqa": (37, 6, 2, 24, 24, 16),
    "partial": (5, 3, 1, 80, 32, 3),
    "odd-partial": (5, 2, 1, 23, 14, 4),
    "mqa": (6, 8, 1, 128, 128, 8),
}


def _ropes(stem: str) -> Iterator[Case]:
    for name, shape in ROPES.items():
        for storage, interleaved in (("float32", False), ("bfloat16", False), ("bfloat16", True), ("float16", True)):
            for normed in (False, True):
                if storage in ("float32", "float16") and name not in ("one-token", "odd-partial"):
                    continue
                full = "-".join(["norm"] * normed + [name] + ["interleaved"] * interleaved)
                yield Case(stem, full, storage, partial(_rope, *shape, storage, interleaved, normed))


def _rope(
    num_tokens: int,
    n_heads: int,
    n_kv_heads: int,
    head_dim: int,
    rotary_dim: int,
    block_size: int,
    storage: str,
    interleaved: bool,
    normed: bool,
    kernels: Kernels,
) -> list[str]:
    rng = np.random.default_rng(4)
    qkv = normal(rng, num_tokens, n_heads + 2 * n_kv_heads, head_dim, storage=storage)
    qkv = qkv if num_tokens % 2 else framed(qkv)
    num_blocks = -(-num_tokens // block_size) + 2
    slot_mapping = rng.permutation(num_blocks * block_size)[:num_tokens].astype(np.int32)
    slot_mapping[3:5] = -1  # padding
    inv_freq = rope.rope_inv_freq("default", 1e4, rotary_dim)
    cache_shape = (num_blocks, block_size, n_kv_heads, head_dim)
    inputs: dict[str, Any] = {
        "q": qkv[:, :n_heads],
        "k": qkv[:, n_heads : n_heads + n_kv_heads],
        "v": qkv[:, n_heads + n_kv_heads :],
        "cos_sin": rope.rope_cos_sin(inv_freq, rng.integers(0, 8192, num_tokens)).astype(np.float32),
        "slot_mapping": slot_mapping,
        "k_cache": np.full(cache_shape, np.nan, np.float32),
        "v_cache": np.full(cache_shape, np.nan, np.float32),
    }
    if normed:
        weights = [normal(rng, *shape, storage=storage) for shape in ((n_heads, head_dim), (n_kv_heads, head_dim))]
        if num_tokens == 3:  # one weight for all heads
            weights = [weight[0] for weight in weights]
        inputs |= {"q_weight": weights[0], "k_weight": weights[1], "eps": 0.1}
    name = "qk_norm_rope_kv_write" if normed else "rope_kv_write"

    def run(table: Any, storage: str | None = None, **values: Any) -> dict[str, Array]:
        q = getattr(table, name)(**values, interleaved=interleaved)
        return {"q": q, "k_cache": values["k_cache"], "v_cache": values["v_cache"]}

    return problems(partial(run, kernels), partial(run, rope), inputs, storage, ("cos_sin",))
