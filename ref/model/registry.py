"""Which file reads, checks and computes which architecture.

Source: `architectures` in the config.json of Hugging Face checkpoints.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from numpy.typing import ArrayLike, NDArray

from ref.model import (
    command_r,
    cpm1,
    cpm_ant,
    deepseek,
    deepseek_moe,
    deepseek_vl,
    llama,
    minicpm,
    mixtral,
    qwen,
    qwen1,
    qwen_moe,
)
from ref.model.cache import Cache
from ref.model.fields import Config, ModelConfig
from ref.model.run import Shapes, Trace, Weights

Array = NDArray[Any]


class Forward(Protocol):
    def __call__(
        self,
        config: Any,
        weights: Weights,
        token_ids: ArrayLike,
        *,
        storage: str | None = None,
        trace: Trace | None = None,
        cache: Cache | None = None,
    ) -> Array: ...


class Family(NamedTuple):
    read: Callable[[Config], ModelConfig]
    weight_shapes: Callable[[Any], Shapes]  # of the config that read returns
    forward: Forward


LLAMA = Family(llama.read_llama, llama.weight_shapes, llama.llama)
QWEN = Family(qwen.read_qwen, qwen.weight_shapes, qwen.qwen)
QWEN_MOE = Family(qwen_moe.read_qwen_moe, qwen_moe.weight_shapes, qwen_moe.qwen_moe)
MIXTRAL = Family(mixtral.read_mixtral, mixtral.weight_shapes, mixtral.mixtral)
DEEPSEEK_MOE = Family(deepseek_moe.read_deepseek_moe, deepseek_moe.weight_shapes, deepseek_moe.deepseek_moe)
DEEPSEEK = Family(deepseek.read_deepseek, deepseek.weight_shapes, deepseek.deepseek)
COMMAND_R = Family(command_r.read_command_r, command_r.weight_shapes, command_r.command_r)
MINICPM = Family(minicpm.read_minicpm, minicpm.weight_shapes, minicpm.minicpm)
MINICPM3 = Family(minicpm.read_minicpm3, minicpm.minicpm3_weight_shapes, minicpm.minicpm3)
DEEPSEEK_VL = Family(deepseek_vl.read_deepseek_vl, deepseek_vl.weight_shapes, deepseek_vl.deepseek_vl)
QWEN1 = Family(qwen1.read_qwen1, qwen1.weight_shapes, qwen1.qwen1)
CPM1 = Family(cpm1.read_cpm1, cpm1.weight_shapes, cpm1.cpm1)
CPM_ANT = Family(cpm_ant.read_cpm_ant, cpm_ant.weight_shapes, cpm_ant.cpm_ant)

FAMILIES = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "Qwen2ForCausalLM": QWEN,
    "Qwen3ForCausalLM": QWEN,
    "MixtralForCausalLM": MIXTRAL,
    "Qwen2MoeForCausalLM": QWEN_MOE,
    "Qwen3MoeForCausalLM": QWEN_MOE,
    "DeepseekForCausalLM": DEEPSEEK_MOE,
    "DeepseekV2ForCausalLM": DEEPSEEK,
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "DeepseekVLForConditionalGeneration": DEEPSEEK_VL,
    "MultiModalityCausalLM": DEEPSEEK_VL,
    "CohereForCausalLM": COMMAND_R,
    "MiniCPMForCausalLM": MINICPM,
    "MiniCPM3ForCausalLM": MINICPM3,
    "QWenLMHeadModel": QWEN1,
    "GPT2LMHeadModel": CPM1,
    "CpmAntForCausalLM": CPM_ANT,
}


def family_of(architecture: str) -> Family:
    """Raises ValueError, with the names that are known, for another one."""
    if architecture not in FAMILIES:
        raise ValueError(f"architecture {architecture!r} is not supported; ref knows {', '.join(FAMILIES)}")
    return FAMILIES[architecture]


def weight_shapes(config: ModelConfig) -> Shapes:
    """Name and shape of every tensor that the model reads. Raises ValueError, see family_of."""
    return family_of(config.architecture).weight_shapes(config)


def forward(
    config: ModelConfig,
    weights: Weights,
    token_ids: ArrayLike,
    *,
    storage: str | None = None,
    trace: Trace | None = None,
    cache: Cache | None = None,
) -> Array:
    """Logits of any model, [num_tokens, vocab_size]; arguments, dtype, errors as in ref.model.llama.llama."""
    family = family_of(config.architecture)
    return family.forward(config, weights, token_ids, storage=storage, trace=trace, cache=cache)
