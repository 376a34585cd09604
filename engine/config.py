"""The three frozen configurations, built once in `serve` and passed by constructor.

ModelConfig says what the checkpoint is, ParallelConfig how it is cut, EngineConfig how it is served. Values that
are chosen automatically come from dataclasses.replace; nothing is ever changed in place.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any, Literal

RopeKind = Literal["default", "linear", "dynamic", "llama3"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding, whatever form of config.json it came from."""

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0  # llama3: the length before scaling; dynamic: where scaling begins


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Geometry and constants fixed by the checkpoint."""

    architecture: str  # "LlamaForCausalLM"
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    attention_bias: bool = False
    mlp_bias: bool = False
    sliding_window: int | None = None
    dtype: str = "float32"  # of the checkpoint's weights
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # config.json and generation_config.json together
    default_sampling: dict[str, Any] = field(default_factory=dict)  # from generation_config.json


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How many ranks share the model; one for now."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the model is served. Field names are the flags of `engine.serve` with underscores (see options)."""

    model: str = "starter"
    served_model_name: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    device: Literal["auto", "cuda", "cpu"] = "auto"
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    load_format: Literal["auto", "dummy"] = "auto"
    seed: int = 0
    max_model_len: int | None = None  # None: the checkpoint's own limit
    block_size: int = 16
    num_gpu_blocks_override: int | None = None  # the KV pool in blocks; None: sized from memory
    max_num_seqs: int = 64
    max_num_batched_tokens: int = 512  # the token budget of a step
    max_waiting: int = 2048  # requests in the queue before 429
    max_logprobs: int = 20
    enable_prefix_caching: bool = True
    num_threads: int | None = None  # BLAS threads; None: the cores this process may use
    api_key: tuple[str, ...] = ()
    root_path: str = ""
    chat_template: str | None = None
    shutdown_grace_s: float = 5.0
