"""DeepSeek-VL's language part: a Llama under other names. Pictures are not served. Defined by ref.model.deepseek_vl."""

from __future__ import annotations

from dataclasses import replace

from engine.config import ModelConfig
from engine.models import llama
from engine.weights import WeightMap

LAYOUTS = {  # architecture → prefixes of its Llama's model and head, and the names of all that sees
    "DeepseekVLForConditionalGeneration": (
        "model.language_model.",
        "lm_head",
        r"model\.(vision_model|high_res_vision\w*|aligner)\..*",
    ),
    "MultiModalityCausalLM": (
        "language_model.model.",
        "language_model.lm_head",
        r"(vision_model|aligner|gen_\w+)\..*",
    ),
}


def weight_map(config: ModelConfig) -> WeightMap:
    """Every tensor of a checkpoint with this config."""
    model, head, vision = LAYOUTS[config.architecture]

    def stored(name: str) -> str:
        return head if name == "lm_head" else name.replace("model.", model, 1)

    plain = llama.weight_map(config)
    buffers = model.replace(".", r"\.") + r"layers\.\d+\.self_attn\.rotary_emb\.inv_freq"
    spare_head = head.replace(".", r"\.") + r"\.weight"  # where it is tied
    return replace(
        plain,
        linears=tuple(
            replace(linear, parts=tuple((stored(name), size) for name, size in linear.parts))
            for linear in plain.linears
        ),
        arrays=tuple(replace(array, name=stored(array.name)) for array in plain.arrays),
        ignored=(vision, buffers, *((spare_head,) if config.tie_word_embeddings else ())),
    )
