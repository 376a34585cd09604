"""The frozen configurations, built once and passed by constructor; nothing is ever changed in place.

ModelConfig says what the checkpoint is, EngineConfig how it is served, ParallelConfig which part of it a rank has.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from typing import Any, Literal, get_args, get_type_hints

from engine.coded_kv import KVKind
from ref.quant.scheme_config import QuantConfig

CudaArch = Literal["auto", "sm_80", "sm_86", "sm_89", "sm_90", "sm_100", "sm_120"]
AllReduce = Literal["auto", "float32", "bfloat16", "int8", "int8-plain", "window", "peer", "islands", "nccl"]
DualStream = Literal["auto", "on", "off"]
Split = Literal["even", "memory"]
CUDA_ARCHES = get_args(CudaArch)
RopeKind = Literal["none", "default", "linear", "dynamic", "ntk_alpha", "llama3", "yarn", "longrope"]


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding, whatever form of config.json it came from. none: nothing rotates."""

    kind: RopeKind = "default"
    theta: float = 10000.0
    factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    original_max_position_embeddings: int = 0  # the length before scaling; dynamic, ntk_alpha: where scaling begins
    beta_fast: float = 32.0  # yarn
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()  # longrope: a factor a pair, up to and past the original length
    long_factor: tuple[float, ...] = ()
    attention_factor: float = 1.0  # multiplies cosines and sines


@dataclass(frozen=True, slots=True)
class MoeConfig:
    """Mixture of experts: the arguments of ref.moe_routing.moe_route, and the sizes."""

    n_experts: int
    n_experts_per_tok: int
    intermediate_size: int  # of one expert
    layers: tuple[bool, ...]  # which layers have experts; the others have a dense MLP
    renormalize: bool
    scoring: Literal["softmax", "sigmoid"] = "softmax"
    scaling_factor: float = 1.0
    n_group: int = 1
    topk_group: int = 1
    group_best: int = 1
    selection_bias: bool = False
    shared_intermediate_size: int = 0  # 0: no expert that all tokens use
    shared_gate: bool = False


@dataclass(frozen=True, slots=True)
class MlaConfig:
    """Latent attention: sizes of its projections. head_dim of the model is qk_nope_head_dim + qk_rope_head_dim."""

    q_lora_rank: int | None  # None: queries come straight from the hidden state
    kv_lora_rank: int
    qk_nope_head_dim: int
    qk_rope_head_dim: int
    v_head_dim: int
    sm_scale: float  # of scores, with yarn's factor in it (see ref.mla.mla_sm_scale)
    eps: float = 1e-6  # of the two norms inside


@dataclass(frozen=True, slots=True)
class PrefixLmConfig:
    """A prompt that sees itself both ways, behind learned vectors, and scores with a bias by distance (CPM-Ant)."""

    soft_prompt_ids: tuple[int, ...]  # rows of the embedding that stand before every prompt
    num_embeddings: int  # rows of the embedding: tokens, then vectors
    segment_types: int
    num_buckets: int  # of distance
    max_distance: int


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Geometry and constants fixed by the checkpoint; or of the smaller model that a rank has, see engine.split."""

    architecture: str  # "LlamaForCausalLM"
    n_layers: int
    n_heads: int
    n_kv_heads: int
    head_dim: int
    hidden_size: int
    intermediate_size: int
    vocab_size: int
    max_position_embeddings: int
    norm_eps: float
    rope: RopeConfig
    rope_interleaved: bool = False  # neighbouring elements turn together, not halves
    norm: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    hidden_act: str = "silu"
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False  # a norm on each head of q and k, before the rotary embedding
    mlp_bias: bool = False
    embedding_scale: float = 1.0
    residual_scale: float = 1.0  # of what each piece adds to the residual
    logit_scale: float = 1.0
    logn_length: int = 0  # queries are scaled by ref.attention.logn_query with this length; 0: they are not
    moe: MoeConfig | None = None
    mla: MlaConfig | None = None
    prefix_lm: PrefixLmConfig | None = None
    n_mtp_layers: int = 0  # behind the others in the checkpoint, for speculation; they are not read
    windows: tuple[int | None, ...] = ()  # of each layer: keys that a query sees, itself included; None = all
    dtype: str = "float32"  # of the checkpoint's weights
    quantization: QuantConfig | None = None  # how they are stored, if not in floating point
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()  # config.json and generation_config.json together
    default_sampling: dict[str, Any] = field(default_factory=dict)  # from generation_config.json
    stage_layers: range | None = None  # those of this rank's stage; None: all
    vocab_first: int | None = None  # the id of the first row that this rank's embedding has; None: it has all

    @property
    def layers(self) -> range:
        """The layers that this rank has, by their numbers in the checkpoint."""
        return range(self.n_layers) if self.stage_layers is None else self.stage_layers

    @property
    def is_first_stage(self) -> bool:
        """Whether this rank embeds tokens."""
        return self.layers.start == 0

    @property
    def is_last_stage(self) -> bool:
        """Whether this rank has the final norm and the head."""
        return self.layers.stop == self.n_layers

    @property
    def rotary_dim(self) -> int:
        """Elements of a head that rotate."""
        if self.rope.kind == "none":
            return 0
        return self.head_dim if self.mla is None else self.mla.qk_rope_head_dim

    @property
    def soft_prompt_ids(self) -> tuple[int, ...]:
        """What stands before every prompt."""
        return () if self.prefix_lm is None else self.prefix_lm.soft_prompt_ids


@dataclass(frozen=True, slots=True)
class ParallelConfig:
    """How ranks share the model, and which part is this rank's.

    Layers are cut into pipeline_parallel_size stages, and each layer among the tensor_parallel_size ranks of a stage.
    Rank 0 is in the last stage: it has the logits, so it schedules, samples and answers; the embedding, which is
    stage 0, is on the last ranks.
    """

    rank: int = 0
    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    layers_of_stages: tuple[int, ...] = ()  # how many each has; (): as even as can be

    @property
    def world_size(self) -> int:
        return self.tensor_parallel_size * self.pipeline_parallel_size

    @property
    def tp_rank(self) -> int:
        """Which share of each layer."""
        return self.rank % self.tensor_parallel_size

    @property
    def stage(self) -> int:
        """Which run of layers; 0 has the first."""
        return self.pipeline_parallel_size - 1 - self.rank // self.tensor_parallel_size


@dataclass(frozen=True, slots=True)
class StepLimits:
    """The largest step."""

    max_num_seqs: int
    max_num_batched_tokens: int


@dataclass(frozen=True, slots=True)
class EngineConfig:
    """How the model is served. Field names are the flags of `engine.serve` with underscores (see options)."""

    model: str = "starter"
    served_model_name: tuple[str, ...] = ()
    host: str = "127.0.0.1"
    port: int = 8000
    device: Literal["auto", "cuda", "cpu"] = "auto"
    cuda_arch: CudaArch = "auto"  # auto: the GPU's own
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = "auto"
    kv_cache_dtype: Literal["auto", "fp8", "fp8_e4m3", "int8"] = "auto"  # auto: that of activations
    w4a8: Literal["off", "int8", "fp8"] = "off"  # activations of many tokens, where weights are of 4 bits; GPU only
    load_format: Literal["auto", "dummy", "dummy-small"] = "auto"
    seed: int = 0
    max_model_len: int | None = None  # None: the checkpoint's own limit
    block_size: int = 16
    num_gpu_blocks_override: int | None = None  # the KV pool in blocks; None: sized from memory
    gpu_memory_utilization: float = 0.9  # share of a GPU's memory; means nothing on a CPU
    reserve_memory_mb: int = 512  # of a GPU's memory, left to others whatever that share is; means nothing on a CPU
    swap_space_gb: float = 0.0  # of the host's memory for KV of preempted sequences; 0: theirs is computed again
    max_num_seqs: int | None = None  # None: 64 on a CPU, 256 on a GPU
    max_num_batched_tokens: int | None = None  # the token budget of a step; None: 512 on a CPU, 8192 on a GPU
    max_waiting: int = 2048  # requests in the queue before 429
    max_logprobs: int = 20
    enable_prefix_caching: bool = True
    num_threads: int | None = None  # of matrix products; None: the cores that this process may use
    api_key: tuple[str, ...] = field(default=(), repr=False)  # secret: never in a log
    root_path: str = ""
    allowed_origins: tuple[str, ...] = ()  # web pages that may call the server from a browser
    chat_template: str | None = None
    shutdown_grace_s: float = 5.0
    tensor_parallel_size: int | None = None  # ranks that share each layer; None: chosen for the ranks there are
    pipeline_parallel_size: int | None = None  # stages, each with a run of layers; None: as above
    split: Split = "even"  # of layers among stages; memory: in proportion to what is free there
    check_ranks: bool = False  # compare what ranks compute after every step
    # what ranks send to add up (bfloat16, float32: of a CPU), or the way that it goes (of GPUs)
    allreduce: AllReduce = "auto"
    # large steps in two halves, sums of one under the compute of the other; auto: from the size on where it is quicker
    dual_stream: DualStream = "auto"

    def step_limits(self, defaults: StepLimits) -> StepLimits:
        """What is asked for, or else the defaults of the machine, each within the other where only one is given."""
        tokens = self.max_num_batched_tokens or max(defaults.max_num_batched_tokens, self.max_num_seqs or 0)
        return StepLimits(self.max_num_seqs or min(defaults.max_num_seqs, tokens), tokens)

    @property
    def kv_codes(self) -> KVKind | None:
        """What keys and values are kept as, if not in the type of activations."""
        if self.kv_cache_dtype == "auto":
            return None
        return "int8" if self.kv_cache_dtype == "int8" else "fp8"

    def problems(self) -> list[tuple[str, str]]:
        """(field, what is wrong with it and what to do) of every field that cannot be served."""
        found: list[tuple[str, str]] = []
        for name, low, high in _INT_RANGES:
            found += _int_problem(name, getattr(self, name), low, high)
        named = (
            "device",
            "cuda_arch",
            "dtype",
            "kv_cache_dtype",
            "w4a8",
            "load_format",
            "split",
            "allreduce",
            "dual_stream",
        )
        for name in named:
            choices = get_args(get_type_hints(EngineConfig)[name])
            if getattr(self, name) not in choices:
                found.append((name, f"is {getattr(self, name)!r}; it must be one of {', '.join(choices)}"))
        if not self.model:
            found.append(("model", "is empty; give a folder, a .gguf file, a repo id or starter"))
        for name in ("served_model_name", "api_key", "allowed_origins"):
            if not all(getattr(self, name)):
                found.append((name, "has an empty entry; leave it out or give a name"))
        if not self.host:
            found.append(("host", "is empty; use 127.0.0.1 for this machine only, 0.0.0.0 for all interfaces"))
        if self.root_path and (not self.root_path.startswith("/") or self.root_path.endswith("/")):
            found.append(("root_path", f"is {self.root_path!r}; it must begin with / and not end with it"))
        share = self.gpu_memory_utilization
        if not isinstance(share, int | float) or not 0 < share <= 1:
            found.append(("gpu_memory_utilization", f"is {share!r}; it must be a share above 0 and at most 1"))
        swap = self.swap_space_gb
        if not isinstance(swap, int | float) or not 0 <= swap <= MAX_SWAP_GB:
            found.append(("swap_space_gb", f"is {swap!r}; it must be a number from 0 to {MAX_SWAP_GB}"))
        grace = self.shutdown_grace_s
        if not isinstance(grace, int | float) or not math.isfinite(grace) or grace < 0:
            found.append(("shutdown_grace_s", f"is {grace!r}; it must be a number of seconds, 0 or more"))
        tokens, seqs = self.max_num_batched_tokens, self.max_num_seqs
        if not found and tokens is not None and seqs is not None and tokens < seqs:
            found.append(
                (
                    "max_num_batched_tokens",
                    f"is {tokens}, below max_num_seqs {seqs}: a step holds one token "
                    "of every running sequence; raise the first or lower the second",
                )
            )
        return found


MAX_SWAP_GB = 2**20
_INT_RANGES: tuple[tuple[str, int, int], ...] = (  # the upper ends keep a slip of the pen from stalling the start
    ("port", 0, 65535),
    ("seed", 0, 2**63 - 1),
    ("max_model_len", 2, 2**28),
    ("block_size", 1, 1024),
    ("num_gpu_blocks_override", 1, 2**24),
    ("reserve_memory_mb", 0, 2**24),
    ("max_num_seqs", 1, 2**16),
    ("max_num_batched_tokens", 1, 2**24),
    ("max_waiting", 1, 2**31 - 1),
    ("max_logprobs", 0, 2**24),
    ("num_threads", 1, 1024),
    ("tensor_parallel_size", 1, 4096),
    ("pipeline_parallel_size", 1, 4096),
)
_MAY_BE_NONE = (
    "max_model_len",
    "num_gpu_blocks_override",
    "num_threads",
    "max_num_seqs",
    "max_num_batched_tokens",
    "tensor_parallel_size",
    "pipeline_parallel_size",
)


def _int_problem(name: str, value: object, low: int, high: int) -> list[tuple[str, str]]:
    if value is None and name in _MAY_BE_NONE:
        return []
    wanted = f"{low} to {high}"
    if isinstance(value, bool) or not isinstance(value, int):
        return [(name, f"is {value!r}; it must be an integer, {wanted}")]
    if not low <= value <= high:
        return [(name, f"is {value}; it must be {wanted}")]
    return []
