"""Loaded weights in the layouts that the op table wants them in."""

from __future__ import annotations

from engine.ops import OpTable
from engine.weights import HEAD, WeightMap, Weights


def prepare_weights(weights: Weights, weight_map: WeightMap, ops: OpTable) -> Weights:
    """Takes the weights over: where the caller keeps none, the peak is one weight more than all."""
    arrays, loaded = weights.arrays, dict(weights.linears)
    del weights  # each weight goes when its prepared form is there
    latent = {spec.dest: spec.latent for spec in weight_map.linears if spec.latent is not None}
    prepared = {}
    for dest in list(loaded):
        weight = loaded.pop(dest)
        if dest in latent:
            prepared[dest] = ops.mla_split_kv_b(weight, *latent[dest])
        else:
            # a dense head keeps its layout: where it is tied it is the embedding too
            prepared[dest] = weight if dest == HEAD and weight.format == "dense" else ops.prepare(weight)
    return Weights(prepared, arrays)
