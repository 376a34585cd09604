"""An op table by ref whose rows do not depend on each other to the bit, on NumPy arrays or launched on a stand-in's."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from engine.cpu import sampling
from engine.ops import OpTable, cpu_ops
from engine.weights import LinearWeight
from ref import activation, attention, embedding, kv_cache, layernorm, rmsnorm, rope
from tests.engine.gpu_stand_in import STREAM, Array, Event, asarray, empty, launch, raw


def linear(x: np.ndarray, weight: LinearWeight) -> np.ndarray:
    """Row by row, so that a row's numbers do not depend on how many there are."""
    rows = [weight.tensors["weight"] @ row for row in x]
    y = np.array(rows, x.dtype).reshape(len(x), weight.out_features)
    return y if weight.bias is None else y + weight.bias


def linear_gate_up_act(x: np.ndarray, weight: LinearWeight, function: str = "silu") -> np.ndarray:
    return activation.gate_up_act(linear(x, weight), function)


def plain_ops() -> OpTable:
    """By ref, on NumPy arrays: a row's numbers depend on that row and its own keys alone, to the bit."""
    return replace(
        cpu_ops(),
        embedding=embedding.embedding,
        position_embedding=embedding.position_embedding,
        linear=linear,
        linear_gate_up_act=linear_gate_up_act,
        logits=linear,
        rmsnorm=rmsnorm.rmsnorm,
        add_rmsnorm=rmsnorm.add_rmsnorm,
        layernorm=layernorm.layernorm,
        add_layernorm=layernorm.add_layernorm,
        kv_cache_write=kv_cache.kv_cache_write,
        rope_kv_write=rope.rope_kv_write,
        qk_norm_rope_kv_write=rope.qk_norm_rope_kv_write,
        attention_decode=attention_decode,
        attention_prefill=attention_prefill,
        act=activation.act,
        gate_up_act=activation.gate_up_act,
        prepare=lambda weight: weight,
    )


def attention_decode(q: np.ndarray, *arguments: Any, out: np.ndarray | None = None) -> np.ndarray:
    out = np.empty_like(q) if out is None else out
    out[...] = attention.attention_decode(q, *arguments)
    return out


def attention_prefill(q: np.ndarray, *arguments: Any, out: np.ndarray | None = None) -> np.ndarray:
    out = np.empty_like(q) if out is None else out
    rows = slice(arguments[3][0], arguments[3][-1])
    out[rows] = attention.attention_prefill(q, *arguments)[rows]
    return out


def stand_in_ops() -> OpTable:
    """The same, launched."""
    plain = plain_ops()

    def like_first(name: str) -> Callable[..., Array]:
        return launched(getattr(plain, name), lambda x, *rest: x.shape)

    return replace(
        plain,
        embedding=launched(plain.embedding, lambda ids, table: (len(ids), table.shape[1])),
        position_embedding=launched(
            plain.position_embedding, lambda ids, positions, table, _: (len(ids), table.shape[1])
        ),
        linear=launched(linear, lambda x, weight: (len(x), weight.out_features)),
        linear_gate_up_act=launched(linear_gate_up_act, lambda x, weight, *rest: (len(x), weight.out_features // 2)),
        logits=launched(linear, lambda x, weight: (len(x), weight.out_features)),
        gate_up_act=launched(activation.gate_up_act, lambda x, *rest: (len(x), x.shape[1] // 2)),
        add_rmsnorm=launched_add(rmsnorm.add_rmsnorm),
        add_layernorm=launched_add(layernorm.add_layernorm),
        kv_cache_write=lambda *arguments: launch(kv_cache.kv_cache_write, *arguments),
        sampling=StandInSampling(),
        **{
            name: like_first(name)
            for name in (
                "rmsnorm",
                "layernorm",
                "rope_kv_write",
                "qk_norm_rope_kv_write",
                "attention_decode",
                "attention_prefill",
                "act",
            )
        },
    )


def launched(function: Callable[..., Any], shape: Callable[..., tuple[int, ...]]) -> Callable[..., Array]:
    """An op that writes to a new array of this shape, or to out."""

    def op(*arguments: Any, out: Array | None = None, **kwargs: Any) -> Array:
        if out is None:
            out = empty(shape(*arguments))
            launch(lambda to, *given: np.copyto(to, function(*given, **kwargs)), out, *arguments)
        else:
            launch(lambda to, *given: function(*given, out=to, **kwargs), out, *arguments)
        return out

    return op


def launched_add(function: Callable[..., Any]) -> Callable[..., tuple[Array, Array]]:
    def add(normed: np.ndarray, x: np.ndarray, residual: np.ndarray, *rest: Any) -> None:
        normed[...], residual[...] = function(x, residual, *rest)

    def op(x: Array, residual: Array, *rest: Any) -> tuple[Array, Array]:
        normed = empty(x.shape)
        launch(add, normed, x, residual, *rest)
        return normed, residual

    return op


class StandInSampling:
    """engine.cpu.sampling where the logits are: the draw is launched, all else waits."""

    def sample_rows(self, logits: Array, *arguments: Any) -> Array:
        sampled = empty((2, len(logits)), np.int32)
        launch(lambda to, *given: np.copyto(to, sampling.sample_rows(*given)), sampled, logits, *arguments)
        return sampled

    def edit_logits(self, logits: Array, edits: Any) -> tuple[Array, Array]:
        STREAM.synchronize()
        reasons, kept = sampling.edit_logits(raw(logits), edits)
        return asarray(reasons), asarray(kept)

    def token_logprobs(self, logits: Array, token_ids: Any, k: int, rows: Any = None, kept: Any = None) -> Any:
        STREAM.synchronize()
        return sampling.token_logprobs(raw(logits), token_ids, k, rows, raw(kept))

    def start_copy(self, array: Array) -> Callable[[], np.ndarray]:
        copy, done = np.empty(array.shape, array.dtype), Event(disable_timing=True)
        launch(lambda given: np.copyto(copy, given), array)
        done.record(STREAM)

        def wait() -> np.ndarray:
            done.synchronize()
            return copy

        return wait
