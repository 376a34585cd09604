"""DeepSeek V3's multi-token prediction: one more layer that guesses the token after the next, for speculation.

At position i the model has said what it thinks of token i + 1. Once that token is known, the layer joins its
embedding with the model's last hidden state of position i and goes on from there:
x_i = eh_proj · [enorm(embed(token_{i+1})), hnorm(hidden_i)],
logits of token i + 2 = lm_head(shared_head.norm(layer(x)_i)).
Embedding and head are those of the model; checkpoints hold them twice. Source: DeepSeek-AI 2024, "DeepSeek-V3
Technical Report", 2.2. hidden_i is taken after the model's last norm, as transformers and vLLM do.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from ref.model.blocks import decoder_hidden, decoder_layer, linear_shapes, lm_head
from ref.model.deepseek import DeepseekConfig, blocks_of, weight_shapes
from ref.model.experts import moe_shapes
from ref.model.latent import latent_shapes
from ref.model.run import Run, Shapes, Trace, Weights

Array = NDArray[Any]


def mtp_weight_shapes(config: DeepseekConfig) -> Shapes:
    """Name and shape of every tensor of the first MTP layer, which stands behind the model's last."""
    layer, hidden = config.n_layers, config.hidden_size
    key = f"model.layers.{layer}"
    norms = ("enorm", "hnorm", "input_layernorm", "post_attention_layernorm", "shared_head.norm")
    return {
        **{f"{key}.{norm}.weight": (hidden,) for norm in norms},
        **linear_shapes(f"{key}.eh_proj", hidden, 2 * hidden),
        **latent_shapes(config, layer),
        **moe_shapes(config.moe, f"{key}.mlp", hidden),
    }


def deepseek_mtp(
    config: DeepseekConfig,
    weights: Weights,
    token_ids: ArrayLike,
    *,
    storage: str | None = None,
    trace: Trace | None = None,
) -> Array:
    """What the MTP layer says of the token after the next, at every position whose next token is known.

    Args:
        token_ids: [num_tokens], at least 2.
        weights, storage, trace: see ref.model.run.Run.
    Returns:
        [num_tokens − 1, vocab_size], dtype of the weights: row i is for token i + 2.
    Raises:
        ValueError: the model has no MTP layer; fewer than two tokens; weights that do not fit config.
    """
    token_ids = np.asarray(token_ids, np.int64)
    if not config.n_mtp_layers:
        raise ValueError("the model has no MTP layer: num_nextn_predict_layers is 0")
    if len(token_ids) < 2:
        raise ValueError(f"an MTP layer needs a token and the one after it; found {len(token_ids)} tokens")
    shapes = weight_shapes(config) | mtp_weight_shapes(config)
    model = Run(shapes, weights, token_ids[:-1], storage, trace)
    hidden = decoder_hidden(config, model, *blocks_of(config, model))
    # each pair stands where its second token does; scores depend on differences of positions only, so from 0 will do
    run = Run(shapes, weights, token_ids[1:], storage, trace)
    key, eps = f"model.layers.{config.n_layers}", config.norm_eps
    embedded = run.rmsnorm(f"{key}.enorm", run.embed("model.embed_tokens"), eps)
    joined = np.concatenate([embedded, run.rmsnorm(f"{key}.hnorm", hidden, eps)], axis=-1)
    residual = run.linear(f"{key}.eh_proj", joined)
    residual = decoder_layer(config, run, config.n_layers, residual, *blocks_of(config, run))
    return lm_head(config, run, run.rmsnorm(f"{key}.shared_head.norm", residual, eps))
