"""Architecture name in config.json → the file that knows it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

from engine.config import ModelConfig
from engine.models import command_r, cpm1, cpm_ant, deepseek, deepseek_vl, llama, minicpm, minicpm3, qwen1
from engine.models.model import Model
from engine.models.moe import MIXTRAL, QWEN
from engine.ops import OpTable
from engine.weights import WeightMap, Weights


@dataclass(frozen=True, slots=True)
class Architecture:
    tensors: Callable[[ModelConfig], WeightMap]
    build: Callable[[ModelConfig, Weights, OpTable], Model]

    def weight_map(self, config: ModelConfig) -> WeightMap:
        """Every tensor of a checkpoint with this config, quantized or not."""
        return replace(self.tensors(config), quantization=config.quantization)


LLAMA = Architecture(llama.weight_map, llama.build)
QWEN_MOE = Architecture(partial(llama.weight_map, names=QWEN), llama.build)
DEEPSEEK = Architecture(deepseek.weight_map, deepseek.build)
DEEPSEEK_VL = Architecture(deepseek_vl.weight_map, llama.build)

ARCHITECTURES: Mapping[str, Architecture] = {
    "LlamaForCausalLM": LLAMA,
    "MistralForCausalLM": LLAMA,
    "Qwen2ForCausalLM": LLAMA,
    "Qwen3ForCausalLM": LLAMA,
    "MixtralForCausalLM": Architecture(partial(llama.weight_map, names=MIXTRAL), llama.build),
    "Qwen2MoeForCausalLM": QWEN_MOE,
    "Qwen3MoeForCausalLM": QWEN_MOE,
    "DeepseekForCausalLM": LLAMA,
    "DeepseekV2ForCausalLM": DEEPSEEK,
    "DeepseekV3ForCausalLM": DEEPSEEK,
    "DeepseekVLForConditionalGeneration": DEEPSEEK_VL,
    "MultiModalityCausalLM": DEEPSEEK_VL,
    "CohereForCausalLM": Architecture(command_r.weight_map, command_r.build),
    "MiniCPMForCausalLM": Architecture(minicpm.weight_map, minicpm.build),
    "MiniCPM3ForCausalLM": Architecture(minicpm3.weight_map, minicpm3.build),
    "QWenLMHeadModel": Architecture(qwen1.weight_map, qwen1.build),
    "GPT2LMHeadModel": Architecture(cpm1.weight_map, cpm1.build),
    "CpmAntForCausalLM": Architecture(cpm_ant.weight_map, cpm_ant.build),
}
