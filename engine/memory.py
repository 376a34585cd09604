"""Plans the memory of a CPU before anything is allocated, so that the largest legal step is known to fit."""

from __future__ import annotations

from engine.config import EngineConfig, ModelConfig, StepLimits
from engine.cpu.attention import DECODE_TILE, QUERY_TILE
from engine.errors import ConfigError
from engine.memory_plan import ALWAYS, KV_CACHE, STEP, WEIGHTS, WORKSPACE, Buffer, MemoryPlan
from engine.models.model import Model
from engine.runner import PROMPT_LOGPROB_ROWS
from engine.system import available_memory

FLOAT32 = 4
ROPE_BYTES = 24  # per position and dimension, while RopeTable makes its angles, cosines and sines in float64
ROUTER_ROW = 8  # numbers for an expert and row while choices are made: scores, their order, and what is left out
KV_SHARE = 0.4  # of the memory that is left, if nothing is said
KV_LIMIT = 4 << 30  # bytes; a CPU does not serve more contexts than this holds


def plan_memory(
    config: EngineConfig,
    limits: StepLimits,
    model: Model,
    weight_bytes: int,
    max_model_len: int,
    num_ranks: int = 1,
) -> MemoryPlan:
    """Sizes the KV pool: num_gpu_blocks_override if given, else a share of what is free.

    Args:
        num_ranks: how many have their weights by now, and share what is free.

    Raises:
        ConfigError: the largest step, the rotary table, one block or all of num_gpu_blocks_override does not fit;
            names what is too large.
    """
    block_bytes = sum(spec.bytes_per_block(config.block_size, FLOAT32, config.kv_codes) for spec in model.cache_specs)
    uses = _workspace(config, limits, model, max_model_len)
    workspace = uses["max_num_batched_tokens"] + max(uses["max_model_len"], uses["max_num_seqs"])
    available = available_memory() // num_ranks
    if workspace > available:
        name = max(uses, key=uses.__getitem__)
        value = max_model_len if name == "max_model_len" else getattr(limits, name)
        raise ConfigError(
            f"the largest step needs {workspace / 1e6:,.0f} MB, {uses[name] / 1e6:,.0f} MB of them for "
            f"--{name.replace('_', '-')} {value}, and {available / 1e6:,.0f} MB are free; set that lower"
        )
    table = ROPE_BYTES * model.config.rotary_dim * max_model_len
    if table > available:
        raise ConfigError(
            f"the rotary table for --max-model-len {max_model_len} needs {table / 1e6:,.0f} MB while it is made, and "
            f"{available / 1e6:,.0f} MB are free; set that lower"
        )
    free = available - workspace
    num_blocks = config.num_gpu_blocks_override
    if num_blocks is None:
        enough = limits.max_num_seqs * -(-max_model_len // config.block_size)
        num_blocks = min(enough, int(min(KV_LIMIT, KV_SHARE * free)) // block_bytes)
        if num_blocks < 1:
            raise ConfigError(
                f"no memory is left for the KV cache: {free / 1e6:,.0f} MB are free, a block of {config.block_size} "
                f"tokens takes {block_bytes / 1e6:,.1f} MB; use a smaller model or free some memory"
            )
    elif num_blocks * block_bytes > free:
        raise ConfigError(
            f"--num-gpu-blocks-override {num_blocks}: these blocks take {num_blocks * block_bytes / 1e6:,.0f} MB, and "
            f"{free / 1e6:,.0f} MB are free; use at most {free // block_bytes}"
        )
    buffers = (
        Buffer(WEIGHTS, weight_bytes, ALWAYS, "host"),
        Buffer("rope table", FLOAT32 * model.config.rotary_dim * max_model_len, ALWAYS, "host"),
        Buffer(WORKSPACE, workspace, STEP, "host", "at most, in the largest one"),
        Buffer(KV_CACHE, num_blocks * block_bytes, ALWAYS, "host"),
    )
    return MemoryPlan(buffers, num_blocks, config.block_size, max_model_len)


def _workspace(config: EngineConfig, limits: StepLimits, model: Model, max_model_len: int) -> dict[str, int]:
    """Bytes of the temporary arrays of a step at its largest, by the option that sizes them.

    Projections grow with max_num_batched_tokens; beside them are either the tile of keys and scores (max_model_len)
    or the logits (max_num_seqs).
    """
    geometry = model.config
    rows = limits.max_num_batched_tokens
    prefilling, decoding = attention_numbers(geometry)
    layer = rows * (prefilling + mlp_numbers(geometry) + 4 * geometry.hidden_size) + limits.max_num_seqs * decoding
    blocks = -(-max_model_len // config.block_size)
    whole = min(blocks, config.num_gpu_blocks_override or blocks) * config.block_size  # no sequence outgrows the pool
    gathered = min(max(DECODE_TILE, whole), limits.max_num_seqs * whole)  # tokens held at once
    logits = 3 * max(PROMPT_LOGPROB_ROWS, limits.max_num_seqs) * geometry.vocab_size
    return {
        "max_num_batched_tokens": FLOAT32 * layer,
        "max_model_len": FLOAT32 * key_numbers(geometry, gathered, whole, rows),
        "max_num_seqs": FLOAT32 * logits,
    }


def attention_numbers(geometry: ModelConfig) -> tuple[int, int]:
    """Numbers that attention holds at once for a row, keys apart; and what a decoding row needs besides."""
    n_heads, mla = geometry.n_heads, geometry.mla
    if mla is None:
        return 2 * (n_heads + 2 * geometry.n_kv_heads) * geometry.head_dim, 0
    width = mla.kv_lora_rank + mla.qk_rope_head_dim
    heads = n_heads * (3 * geometry.head_dim + mla.v_head_dim)
    decoding = n_heads * (3 * width + 2 * mla.kv_lora_rank + 2 * mla.v_head_dim)  # queries as wide as a latent
    return heads + 2 * ((mla.q_lora_rank or 0) + width), decoding


def key_numbers(geometry: ModelConfig, gathered: int, whole: int, rows: int) -> int:
    """Numbers of keys, values and scores of a tile.

    Args:
        gathered: tokens of the sequences that decode together.
        whole: tokens of the longest sequence.
        rows: tokens of a step.
    """
    n_heads, mla = geometry.n_heads, geometry.mla
    if mla is None:
        keys = 2 * gathered * geometry.n_kv_heads * geometry.head_dim
        if geometry.prefix_lm is not None:  # scores of all heads at once, and distances in 64 bits
            return keys + min(rows, whole) * whole * (4 * n_heads + 24)
        return keys + 2 * max(gathered * n_heads, QUERY_TILE * (n_heads // geometry.n_kv_heads) * whole)
    width = mla.kv_lora_rank + mla.qk_rope_head_dim
    expanded = geometry.head_dim + mla.qk_nope_head_dim + mla.v_head_dim  # of one head
    return max(gathered * (width + 2 * n_heads), whole * (width + expanded + 2 * QUERY_TILE))


def mlp_numbers(geometry: ModelConfig) -> int:
    """Numbers that the MLP holds at once for a row. With experts: the output of each choice, one expert that all rows
    have chosen, the one that all use anyway, and the choosing itself.
    """
    dense = 3 * geometry.intermediate_size
    moe = geometry.moe
    if moe is None:
        return dense
    outputs = (moe.n_experts_per_tok + 2) * geometry.hidden_size
    inside = 3 * max(moe.intermediate_size, moe.shared_intermediate_size)
    return max(dense, outputs + inside + ROUTER_ROW * moe.n_experts)
