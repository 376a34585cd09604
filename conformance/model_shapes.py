"""The cases of the ops that a model uses, on its own sizes: python -m conformance --target host|gpu --model DIR."""

from __future__ import annotations

from pathlib import Path

from conformance import activation, attention, attention_logn, embedding, kv_cache, layernorm, linear, rmsnorm, rope
from conformance.case import Case
from engine.checkpoint.loader import load_model_config
from engine.checkpoint.source import resolve
from engine.config import ModelConfig
from engine.errors import ConfigError
from engine.kernels.attention import HEAD_DIMS

NUM_TOKENS = (1, 17)
SEQ_LENS = (300, 17, 1)
CHUNKS = ((5, 40, 1), (130, 40, 9))  # query lengths, sequence lengths
BLOCK_SIZE = 16


def model_cases(folder: Path) -> list[Case]:
    """In no storage type yet.

    Raises:
        ConfigError: there is no config, or a model whose attention has no kernels.
    """
    config = load_model_config(resolve(str(folder)))
    if config.mla is not None or config.prefix_lm is not None:
        raise ConfigError(f"{folder}: there are no kernels for the attention of {config.architecture} yet")
    if config.head_dim not in HEAD_DIMS:
        known = ", ".join(map(str, HEAD_DIMS))
        raise ConfigError(f"{folder}: there are no kernels for its head_dim {config.head_dim}, only for {known}")
    hidden = config.hidden_size
    norms = [
        rmsnorm.make_case(f"model-{n}", n, hidden, config.norm_eps, fused)
        if config.norm == "rmsnorm"
        else layernorm.make_case(f"{'add-' * fused}model-{n}", (n, hidden), bias=False)
        for n in NUM_TOKENS
        for fused in (False, True)
    ]
    return norms + _linears(config) + _attention(config)


def _linears(config: ModelConfig) -> list[Case]:
    heads = config.n_heads * config.head_dim
    qkv = heads + 2 * config.n_kv_heads * config.head_dim
    shapes = {  # in_features, out_features, bias
        "qkv": (config.hidden_size, qkv, config.qkv_bias),
        "o": (heads, config.hidden_size, config.o_bias),
        "gate-up": (config.hidden_size, 2 * config.intermediate_size, config.mlp_bias),
        "down": (config.intermediate_size, config.hidden_size, config.mlp_bias),
    }
    found = [
        linear.make_case(f"model-{name}-{n}", n, in_features, out_features, bias)
        for name, (in_features, out_features, bias) in shapes.items()
        for n in NUM_TOKENS
    ]
    return found + [activation.make_case(f"model-{n}", n, config.intermediate_size) for n in NUM_TOKENS]


def _attention(config: ModelConfig) -> list[Case]:
    heads = {"n_heads": config.n_heads, "n_kv_heads": config.n_kv_heads, "head_dim": config.head_dim}
    place = (config.n_kv_heads, config.head_dim, BLOCK_SIZE)
    windows = dict.fromkeys(config.windows or (None,))
    settings = {"qk_norm": config.qk_norm, "interleaved": config.rope_interleaved}
    found = [
        rope.make_case(f"model-{n}", n, config.n_heads, *place, rotary_dim=config.rotary_dim, **settings)
        if config.rope.kind != "none"
        else kv_cache.make_case(f"model-{n}", n, *place)
        for n in NUM_TOKENS
    ]
    if config.rope.kind == "none":
        sizes = config.vocab_size, config.hidden_size
        found += [embedding.make_position_case(f"model-{n}", n, *sizes) for n in NUM_TOKENS]
    if config.logn_length:
        shape = config.n_heads, config.head_dim, config.logn_length
        found += [attention_logn.make_case(f"model-{n}", n, *shape) for n in NUM_TOKENS]
    for window in windows:
        name = "model" if window is None else f"model-window-{window}"
        found.append(attention.decode_case(name, SEQ_LENS, **heads, block_size=BLOCK_SIZE, window=window))
        found.append(attention.prefill_case(name, CHUNKS, **heads, block_size=BLOCK_SIZE, window=window))
    return found
