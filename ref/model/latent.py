"""Multi-head latent attention as a block of a model: DeepSeek V2 and V3, MiniCPM3. The operation itself is ref/mla.py.

Beside it stand the names and shapes of its weights. kv_b_proj is decoded whatever its format is, since in the absorbed
form it multiplies queries and sums, not a layer's input. Source: DeepSeek-AI 2024, "DeepSeek-V2".
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from numpy.typing import NDArray

from ref.mla import mla_sm_scale
from ref.mla_latent import mla_latent, mla_rope
from ref.model.blocks import linear_shapes
from ref.model.fields import Config, ModelConfig, common_fields, flag, integer
from ref.model.run import Run, Shapes

Array = NDArray[Any]

LATENT_EPS = 1e-6  # of the two norms inside, whatever rms_norm_eps says: the published models leave it at that


@dataclass(frozen=True, slots=True, kw_only=True)
class LatentConfig(ModelConfig):
    """head_dim is that of queries and keys, qk_nope_head_dim + qk_rope_head_dim."""

    q_lora_rank: int | None  # None: queries come straight from the hidden state
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    attention_bias: bool  # of q_a_proj, kv_a_proj_with_mqa and o_proj


def latent_fields(config: Config, **defaults: Any) -> dict[str, Any]:
    """The fields of LatentConfig by name, as ref.model.fields.common_fields.

    Raises:
        ValueError: as common_fields; or queries and keys of different numbers of heads.
    """
    nope, rotated = integer(config, "qk_nope_head_dim"), integer(config, "qk_rope_head_dim")
    fields = common_fields({**config, "head_dim": nope + rotated}, **defaults)
    if fields["n_kv_heads"] != fields["n_heads"]:
        raise ValueError(
            f"num_key_value_heads is {fields['n_kv_heads']}; with latent attention it must be num_attention_heads "
            f"{fields['n_heads']}"
        )
    return fields | {
        "q_lora_rank": None if config.get("q_lora_rank") is None else integer(config, "q_lora_rank"),
        "kv_lora_rank": integer(config, "kv_lora_rank"),
        "qk_nope_head_dim": nope,
        "qk_rope_head_dim": rotated,
        "v_head_dim": integer(config, "v_head_dim"),
        "attention_bias": flag(config, "attention_bias", False),
    }


def latent_shapes(config: LatentConfig, layer: int) -> Shapes:
    """Name and shape of every weight of the block."""
    key, hidden, rank = f"model.layers.{layer}.self_attn", config.hidden_size, config.kv_lora_rank
    n_heads, bias = config.n_heads, config.attention_bias
    shapes: Shapes = {}
    if config.q_lora_rank is None:
        shapes |= linear_shapes(f"{key}.q_proj", n_heads * config.head_dim, hidden)
    else:
        shapes |= linear_shapes(f"{key}.q_a_proj", config.q_lora_rank, hidden, bias=bias)
        shapes[f"{key}.q_a_layernorm.weight"] = (config.q_lora_rank,)
        shapes |= linear_shapes(f"{key}.q_b_proj", n_heads * config.head_dim, config.q_lora_rank)
    shapes |= linear_shapes(f"{key}.kv_a_proj_with_mqa", rank + config.qk_rope_head_dim, hidden, bias=bias)
    shapes[f"{key}.kv_a_layernorm.weight"] = (rank,)
    shapes |= linear_shapes(f"{key}.kv_b_proj", n_heads * (config.qk_nope_head_dim + config.v_head_dim), rank)
    return shapes | linear_shapes(f"{key}.o_proj", hidden, n_heads * config.v_head_dim, bias=bias)


def latent_attention(
    config: LatentConfig, run: Run, layer: int, hidden: Array, cos_sin: Array, *, interleaved: bool
) -> Array:
    """Queries by way of a short vector if there is one, keys and values by way of another, which is what is cached.

    Args:
        hidden: [num_tokens, hidden_size], normed.
        cos_sin: [num_tokens, qk_rope_head_dim].
        interleaved: DeepSeek turns neighbours, MiniCPM3 halves.
    Returns:
        [num_tokens, hidden_size], dtype of hidden.
    """
    key, num_tokens = f"model.layers.{layer}.self_attn", len(hidden)
    if config.q_lora_rank is None:
        q = run.linear(f"{key}.q_proj", hidden)
    else:
        short = run.rmsnorm(f"{key}.q_a_layernorm", run.linear(f"{key}.q_a_proj", hidden), LATENT_EPS)
        q = run.linear(f"{key}.q_b_proj", short)
    q = q.reshape(num_tokens, config.n_heads, config.head_dim)
    q = run.step(f"{key}.q_rope", mla_rope(q, cos_sin, interleaved=interleaved))
    kv_a = run.linear(f"{key}.kv_a_proj_with_mqa", hidden)
    norm = run.weights[f"{key}.kv_a_layernorm.weight"]
    latent = run.step(f"{key}.latent", mla_latent(kv_a, norm, LATENT_EPS, cos_sin, interleaved=interleaved))
    sm_scale = mla_sm_scale(config.head_dim, config.rope.factor, config.rope.mscale_all_dim)
    out = run.attend_latent(layer, q, latent, run.weights[f"{key}.kv_b_proj.weight"], sm_scale)
    merged = run.step(f"{key}.attention", out).reshape(num_tokens, config.n_heads * config.v_head_dim)
    return run.linear(f"{key}.o_proj", merged)
