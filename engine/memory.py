"""Plans memory before anything is allocated, so that the largest legal step is known to fit."""

from __future__ import annotations

from dataclasses import dataclass

from engine.config import EngineConfig
from engine.cpu.attention import DECODE_TILE, QUERY_TILE
from engine.errors import ConfigError
from engine.models.model import Model
from engine.runner import PROMPT_LOGPROB_ROWS
from engine.system import available_memory

FLOAT32 = 4
KV_SHARE = 0.4  # of the memory that is left, if nothing is said
KV_LIMIT = 4 << 30  # bytes; a CPU does not serve more contexts than this holds


@dataclass(frozen=True, slots=True)
class MemoryPlan:
    """Bytes by use. workspace is the largest step's temporary arrays, as an upper estimate."""

    weights: int
    kv_pool: int
    workspace: int
    num_blocks: int
    block_size: int
    max_model_len: int

    @property
    def num_kv_tokens(self) -> int:
        return self.num_blocks * self.block_size

    def table(self) -> str:
        """The plan for people."""
        whole = self.num_kv_tokens / self.max_model_len
        rows = (
            ("weights", f"{self.weights / 1e6:,.0f} MB", ""),
            (
                "KV pool",
                f"{self.kv_pool / 1e6:,.0f} MB",
                f"{self.num_kv_tokens:,} tokens in {self.num_blocks:,} blocks",
            ),
            ("workspace", f"{self.workspace / 1e6:,.0f} MB", "at most, in the largest step"),
            ("concurrency", f"{whole:.1f}", f"sequences of {self.max_model_len:,} tokens at once"),
        )
        return "\n".join(f"  {name:<12} {size:>10}  {note}".rstrip() for name, size, note in rows)


def plan_memory(config: EngineConfig, model: Model, weight_bytes: int, max_model_len: int) -> MemoryPlan:
    """Sizes the KV pool: num_gpu_blocks_override if given, else a share of what is free.

    Raises:
        ConfigError: not even one block fits.
    """
    block_bytes = sum(spec.bytes_per_block(config.block_size, FLOAT32) for spec in model.cache_specs)
    workspace = _workspace(config, model, max_model_len)
    num_blocks = config.num_gpu_blocks_override
    if num_blocks is None:
        enough = config.max_num_seqs * -(-max_model_len // config.block_size)
        free = available_memory() - workspace
        num_blocks = min(enough, int(min(KV_LIMIT, KV_SHARE * free)) // block_bytes)
        if num_blocks < 1:
            raise ConfigError(
                f"no memory is left for the KV cache: {free / 1e6:,.0f} MB are free, a block of {config.block_size} "
                f"tokens takes {block_bytes / 1e6:,.1f} MB; use a smaller model or free some memory"
            )
    return MemoryPlan(weight_bytes, num_blocks * block_bytes, workspace, num_blocks, config.block_size, max_model_len)


def _workspace(config: EngineConfig, model: Model, max_model_len: int) -> int:
    """Bytes of the temporary arrays of a step at its largest: projections, one tile of scores, logits."""
    geometry = model.config
    rows = config.max_num_batched_tokens
    qkv = (geometry.n_heads + 2 * geometry.n_kv_heads) * geometry.head_dim
    layer = rows * (2 * qkv + 3 * geometry.intermediate_size + 4 * geometry.hidden_size)
    whole = -(-max_model_len // config.block_size) * config.block_size  # in whole blocks
    gathered = min(max(DECODE_TILE, whole), config.max_num_seqs * whole)  # tokens held at once
    keys = 2 * gathered * geometry.n_kv_heads * geometry.head_dim
    scores = 2 * max(
        gathered * geometry.n_heads,  # of decoding
        QUERY_TILE * (geometry.n_heads // geometry.n_kv_heads) * whole,  # of a prompt
    )
    logits = 3 * max(PROMPT_LOGPROB_ROWS, config.max_num_seqs) * geometry.vocab_size
    return FLOAT32 * (layer + max(keys + scores, logits))
