"""Which kernels a model needs, before its weights are there: its steps are run on a device that only takes notes."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import numpy as np

from engine.api import SamplingParams
from engine.batch import ForwardBatch
from engine.checkpoint.quantized import keep_packed
from engine.coded8 import blank8
from engine.coded_kv import KVKind
from engine.comm.communicator import OneRank
from engine.config import ModelConfig, StepLimits
from engine.forward import EagerForward
from engine.kernels.dry_load import load_dry
from engine.kernels.embedding import embedding
from engine.kernels.notes import Notes
from engine.kernels.sampling import KernelSampling
from engine.kernels.table import kernel_ops
from engine.kv_cache import make_kv_cache
from engine.models.registry import ARCHITECTURES
from engine.packed4 import PACKED, PACKED_GATED, blank4
from engine.rope_table import RopeTable
from engine.sampler import Sampler
from engine.split import with_row_splits
from engine.weights import (
    EMBEDDING,
    HEAD,
    ActivationKind,
    LinearSpec,
    LinearWeight,
    WeightMap,
    Weights,
    order_of,
    with_activations,
)

# A linear layer's kernel goes by the number of rows: both sides of what may be a border.
LINEAR_ROWS = (1, 2, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 257, 385, 513, 1025, 2049)
BLOCK_SIZE = 16
TABLE_WIDTH = 512  # blocks of the longest sequence: long enough to be split
SAMPLINGS = (  # that together need every kernel of the sampler
    SamplingParams(temperature=0.0),
    SamplingParams(
        top_p=0.9, top_k=10, presence_penalty=0.5, logit_bias={0: 1.0}, logprobs=2, allowed_token_ids=(0, 1, 2)
    ),
)


def run_dry(
    config: ModelConfig,
    dtype: Any,
    limits: StepLimits,
    notes: Notes,
    kv_codes: KVKind | None = None,
    w4a8: ActivationKind = "",
) -> None:
    """Notes every launch that steps of a model can need, up to these limits, sampling included.

    Args:
        dtype: of weights and activations, bfloat16 or float16.
        kv_codes: what the KV cache holds in place of numbers.
        w4a8: what activations of packed layers are quantized to.
    Raises:
        KernelError: the model needs what has no kernel.
    """
    one_layer = replace(config, n_layers=1, stage_layers=None)  # the others launch the same
    architecture = ARCHITECTURES[config.architecture]
    ops = kernel_ops(notes, KernelSampling(notes, limits.max_num_seqs))
    weight_map = architecture.weight_map(one_layer)
    weight_map = keep_packed(weight_map if config.vocab_first is None else with_row_splits(weight_map))
    load_dry(weight_map, notes)
    weights = _blank_weights(weight_map, dtype)
    model = architecture.build(one_layer, with_activations(weights, w4a8), ops)
    cache = make_kv_cache(model.cache_specs, 1, BLOCK_SIZE, dtype, codes=kv_codes)
    rope = RopeTable(config.rope, config.rotary_dim, 1)
    forward = EagerForward(model, OneRank(ops), cache, rope, limits.max_num_seqs)
    for batch in _batches(config.rotary_dim, limits):
        hidden = forward(batch)
        model.logits(embedding(batch.logits_indices, hidden, device=notes))
        embedding(batch.positions, rope.table, device=notes)
    for sampling in SAMPLINGS:
        sampler = Sampler(config.vocab_size, 1, ops.sampling)
        sampler.add(0, sampling, seed=0, prompt_ids=(0, 1))
        logits = notes.empty((1, config.vocab_size), np.float32)
        with np.errstate(divide="ignore"):  # the kernels have left every sum at 0
            sampler.sample(logits, np.zeros(1, np.int32))


def _batches(rotary_dim: int, limits: StepLimits) -> Iterator[ForwardBatch]:
    """Of every size that meets a kernel of its own: one prompt, and as many sequences that decode."""
    for size in LINEAR_ROWS:
        if size < limits.max_num_batched_tokens:
            yield _batch(size, 1, rotary_dim)
        if size <= limits.max_num_seqs:
            yield _batch(size, size, rotary_dim)
    yield _batch(limits.max_num_batched_tokens, 1, rotary_dim)


def _batch(num_tokens: int, num_seqs: int, rotary_dim: int) -> ForwardBatch:
    bounds = np.linspace(0, num_tokens, num_seqs + 1).astype(np.int32)
    each, of_all = np.zeros(num_tokens, np.int32), np.zeros(num_seqs, np.int32)
    return ForwardBatch(
        token_ids=each,
        positions=each,
        cu_seqlens_q=bounds,
        seq_lens=np.diff(bounds),
        slot_mapping=each,
        block_table=np.zeros((num_seqs, TABLE_WIDTH), np.int32),
        logits_indices=bounds[1:] - 1,
        rope_cos_sin=np.zeros((num_tokens, rotary_dim), np.float32),
        two_way_lens=of_all,
        num_decodes=num_seqs if num_seqs == num_tokens else 0,
    )


def _blank_weights(weight_map: WeightMap, dtype: Any) -> Weights:
    """Of zeros, which take no memory before they are touched."""
    arrays = {spec.dest: np.zeros(spec.shape, dtype) for spec in weight_map.arrays}
    linears = {}
    for spec in weight_map.linears:
        bias = np.zeros(spec.out_features, dtype) if spec.bias else None
        format, tensors = _blank(spec, dtype)
        linears[spec.dest] = LinearWeight(format, spec.out_features, spec.in_features, tensors, bias)
        if spec.packed is not None and spec.packed.order == "normed":
            arrays[order_of(spec.norm)] = np.zeros(spec.in_features, np.uint16)
    if weight_map.tied:
        table = arrays[EMBEDDING]
        linears[HEAD] = LinearWeight("dense", table.shape[0], table.shape[1], {"weight": table})
    return Weights(linears, arrays)


def _blank(spec: LinearSpec, dtype: Any) -> tuple[str, dict[str, Any]]:
    """(format, tensors) of a layer."""
    shape = spec.out_features, spec.in_features
    if spec.packed is not None:
        tensors = blank4(*shape, spec.packed.group_size, spec.packed.zeros)
        if spec.packed.order == "gathered":
            tensors["order"] = np.zeros(spec.in_features, np.int32)
        return PACKED_GATED if spec.gated else PACKED, tensors
    if spec.coded is not None:
        return spec.coded.kind, blank8(spec.coded.kind, spec.coded.scale, spec.coded.static, *shape)
    return "dense", {"weight": np.zeros(shape, dtype)}
