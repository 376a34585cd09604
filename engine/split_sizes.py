"""What must stay together where a model is cut: runs of heads, of intermediate elements, of rows of the vocabulary.

A number format keeps values together that share a scale or a word. Source: as ref.tensor_parallel_sizes.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, field

from engine.checkpoint.quantized_cuts import SPREAD
from engine.config import ModelConfig
from engine.weights import HEAD, LinearSpec, WeightMap
from ref.collectives import split_ranges, split_sizes
from ref.quant.awq import AwqConfig
from ref.quant.gptq import GptqConfig
from ref.quant.scheme_config import Scheme, module_scheme
from ref.tensor_parallel_sizes import FLOAT, WeightFormat, awq_format, gptq_format

EVEN_FOR_KERNELS = (128, 64, 32)  # shares that kernels like, the blocks of GGUF files among them
SMALLER = (16, 8, 4, 2)
INNER = {"experts": "moe_intermediate_size", "shared_expert": "shared_intermediate_size"}  # by the middle of a dest


@dataclass(slots=True)
class Units:
    """Sizes of what stays together, and of what is cut."""

    heads: int = 1
    fewer_heads: int = 1  # where a group of o_proj may be on two ranks, with its scale on both
    kv_heads: int = 1
    vocab: int = 1
    inner: dict[str, int] = field(default_factory=lambda: defaultdict(lambda: 1))
    sizes: dict[str, int] = field(default_factory=dict)  # of intermediate axes, by name


def units_of(config: ModelConfig, weight_map: WeightMap) -> Units:
    """Of a whole model: what the formats of all its layers ask for together."""
    units = Units()
    for spec in weight_map.linears:
        name = spec.dest.rpartition(".")[2]
        formats = {_format(module_scheme(weight_map.quantization, module), name) for module, _ in spec.parts}
        out_unit = math.lcm(*(one.units[0] for one in formats))
        in_unit = math.lcm(*(one.units[1] for one in formats))
        if name in ("gate_up_proj", "up_proj", "down_proj"):
            inner = INNER.get(spec.dest.split(".")[2], "intermediate_size")
            units.sizes[inner] = spec.in_features if name == "down_proj" else spec.parts[0][1]
            units.inner[inner] = math.lcm(units.inner[inner], in_unit if name == "down_proj" else out_unit)
        elif name == HEAD:
            units.vocab = math.lcm(units.vocab, out_unit)
        else:
            is_grouped = all(one.block[0] == 1 for one in formats)
            _add_heads(units, config, spec, out_unit, in_unit, is_grouped)
    return units


def _add_heads(
    units: Units, config: ModelConfig, spec: LinearSpec, out_unit: int, in_unit: int, is_grouped: bool
) -> None:
    name = spec.dest.rpartition(".")[2]
    if name in ("qkv_proj", "q_proj", "q_b_proj"):
        run = _heads_in(config.head_dim, out_unit)
        units.heads, units.fewer_heads = math.lcm(units.heads, run), math.lcm(units.fewer_heads, run)
        if name == "qkv_proj":
            units.kv_heads = math.lcm(units.kv_heads, run)
    elif name == "kv_b_proj":
        units.kv_heads = math.lcm(units.kv_heads, _heads_in(spec.out_features // config.n_heads, out_unit))
    elif name == "o_proj":
        head_dim = spec.in_features // config.n_heads
        units.heads = math.lcm(units.heads, _heads_in(head_dim, in_unit))
        fewer = SPREAD if is_grouped and in_unit % SPREAD == 0 else in_unit
        units.fewer_heads = math.lcm(units.fewer_heads, _heads_in(head_dim, fewer))


def _heads_in(head_dim: int, unit: int) -> int:
    return math.lcm(head_dim, unit) // head_dim


def _format(scheme: Scheme | None, name: str) -> WeightFormat:
    """name: of the layer. Act-order: the inputs of down_proj are cut in the order of their groups, those of o_proj by
    heads, which leaves no group whole."""
    if scheme is None:
        return FLOAT
    if isinstance(scheme, AwqConfig):
        return awq_format(scheme.group_size)
    if isinstance(scheme, GptqConfig):
        return gptq_format(scheme.group_size, scheme.bits, scheme.desc_act and name == "o_proj")
    if scheme.format == "pack-quantized":
        group = scheme.group_size if scheme.strategy == "group" and not (scheme.act_order and name == "o_proj") else -1
        return gptq_format(group, scheme.bits)
    return WeightFormat("8 bits", scheme.block) if scheme.strategy == "block" else FLOAT


def split_units(size: int, tp: int, unit: int) -> list[range]:
    """How `size` elements are dealt out, runs of `unit` together: in runs of a size that kernels like, the one with
    which the largest share is smallest; in smaller ones only where a rank would be left without."""
    runs = [math.lcm(unit, even) for even in EVEN_FOR_KERNELS]
    fitting = [run for run in runs if -(-size // run) >= tp]
    if fitting:
        run = min(fitting, key=lambda one: (max(split_sizes(size, tp, one)), -one))
    else:
        smaller = [math.lcm(unit, even) for even in SMALLER]
        run = next((one for one in smaller if -(-size // one) >= tp), unit)
    return split_ranges(size, tp, run)


def layers_by_room(num_layers: int, room: Sequence[int]) -> tuple[int, ...]:
    """Layers of each stage, by number, at least one each: shares in proportion to room, rounded by largest remainders,
    the first of equal ones first. Room for weights is room for the KV cache too, as every layer has the same of it.

    Args:
        num_layers: as many as there are stages, or more.
        room: bytes that each stage has for layers, behind all else that it holds (embedding, head); below 0 is none.
    """
    weights = [max(bytes_free, 0) for bytes_free in room]
    total = sum(weights)
    if total == 0:
        return tuple(split_sizes(num_layers, len(room)))
    shares = [divmod(num_layers * weight, total) for weight in weights]
    counts = [count for count, _ in shares]
    by_remainder = sorted(range(len(room)), key=lambda stage: (-shares[stage][1], stage))
    for stage in by_remainder[: num_layers - sum(counts)]:
        counts[stage] += 1
    while 0 in counts:
        giver = max(range(len(room)), key=lambda stage: (counts[stage], -weights[stage]))
        counts[giver] -= 1
        counts[counts.index(0)] += 1
    return tuple(counts)
