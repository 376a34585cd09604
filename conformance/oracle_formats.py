"""Quantized checkpoints as torch reads them: a second opinion on every format, for conformance.regenerate alone.

Nothing of ref is used. GPTQ, AWQ and DeepSeek's tiles are decoded here from the definition of the format, by shifts of
int32 words and torch's own float8_e4m3fn; compressed-tensors by the package of that name.

With 8-bit activations (`quantize_activations`) each linear layer is replaced by one that quantizes its input per token,
or per token and 128 inputs, and multiplies codes: int8 in int32, fp8 exactly in float64. That is what kernels do, and
compressed-tensors' own forward differs from it in two ways: its int8 scale is max / 127.5, so that −128 is used, and
it multiplies dequantized numbers. kv_b_proj of latent attention keeps floating-point input, for decoding never runs
it: its halves are absorbed in the query and the output.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from compressed_tensors.compressors import BaseCompressor
from compressed_tensors.quantization import QuantizationScheme
from safetensors.torch import load_file

from conformance.golden_models import Config

Tensors = dict[str, torch.Tensor]

CODED = ("weight_scale", "weight_scale_inv", "qweight")  # one of them marks a quantized module
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)  # the output that stands in each nibble of a word, the lowest first
EXPERT_NAMES = {"mixtral": ("w1", "w3", "w2")}
TILE = 128
FP8_LARGEST = 448.0


def quantized_modules(folder: Path) -> tuple[Tensors, dict[str, Tensors]]:
    """The floating-point tensors of a checkpoint by name, in float32, and what is stored of each quantized module."""
    tensors = load_file(folder / "model.safetensors")
    names = {name.rpartition(".")[0] for name in tensors if name.rpartition(".")[2] in CODED}
    modules: dict[str, Tensors] = {name: {} for name in names}
    plain: Tensors = {}
    for name, tensor in tensors.items():
        module, _, suffix = name.rpartition(".")
        if module in names and suffix != "bias":
            modules[module][suffix] = tensor
        else:
            plain[name] = tensor.float()
    return plain, modules


def decoded(folder: Path, config: Config) -> Tensors:
    """Every weight in float32, by the name that it has in a checkpoint without quantization."""
    weights, modules = quantized_modules(folder)
    return weights | {f"{name}.weight": decode(tensors, config) for name, tensors in modules.items()}


def decode(tensors: Tensors, config: Config) -> torch.Tensor:
    """[out, in] float32. config: the quantization_config."""
    method = config["quant_method"]
    if method == "gptq":
        return decode_gptq(tensors, config["bits"], config["checkpoint_format"] == "gptq")
    if method == "awq":
        return decode_awq(tensors, config["group_size"])
    if method == "fp8":
        return tensors["weight"].float() * tile_scale(tensors["weight_scale_inv"], tensors["weight"])
    scheme = QuantizationScheme(**config["config_groups"]["group_0"])
    compressor = BaseCompressor.get_value_from_registry(config["format"])
    wide = {key: value.float() if "scale" in key else value for key, value in tensors.items()}  # it computes as scales
    found: torch.Tensor = compressor.decompress(wide, scheme)["weight"]
    return found.float()


def decode_gptq(tensors: Tensors, bits: int, is_v1: bool) -> torch.Tensor:
    """Words run along the inputs; zeros, one less than they mean in v1, along the outputs."""
    shifts, mask = torch.arange(0, 32, bits, dtype=torch.int32), (1 << bits) - 1
    q = (tensors["qweight"].unsqueeze(1) >> shifts.view(1, -1, 1) & mask).flatten(0, 1)  # [in, out]
    zeros = (tensors["qzeros"].unsqueeze(2) >> shifts & mask).flatten(1)  # [num_groups, out]
    if is_v1:
        zeros = zeros + 1 & mask
    group = tensors["g_idx"].long()
    return ((q - zeros[group]) * tensors["scales"].float()[group]).T.contiguous()


def decode_awq(tensors: Tensors, group_size: int) -> torch.Tensor:
    """Words run along the outputs, in an order of their own, for weights and zeros."""
    unpacked = []
    for words in (tensors["qweight"], tensors["qzeros"]):
        values = torch.empty(*words.shape, 8, dtype=torch.int32)
        for nibble, output in enumerate(AWQ_ORDER):
            values[..., output] = words >> 4 * nibble & 15
        unpacked.append(values.flatten(1))
    q, zeros = unpacked
    zeros, scales = (part.repeat_interleave(group_size, 0) for part in (zeros, tensors["scales"].float()))
    return ((q - zeros) * scales).T.contiguous()


def tile_scale(scale: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """The scale of each element of a weight in tiles."""
    rows, columns = (torch.arange(n) // TILE for n in like.shape)
    return scale[rows][:, columns]


class CodedLinear(torch.nn.Module):
    """A linear layer that quantizes its input as its weight is quantized, and multiplies the codes."""

    def __init__(self, tensors: Tensors, bias: torch.Tensor | None) -> None:
        super().__init__()
        self.codes, self.bias = tensors["weight"], bias
        self.tiles = tensors.get("weight_scale_inv")
        self.input_scale = tensors.get("input_scale")
        self.scale = tensors["weight_scale"].double().flatten() if self.tiles is None else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """[..., in] → [..., out], in x's dtype; scales and their products in float64."""
        wide = x.double().flatten(0, -2)
        if self.tiles is not None:
            y = self.in_tiles(wide)
        elif self.codes.dtype == torch.int8:
            scale = step(wide, 127)
            codes = (wide / scale).round().clamp(-127, 127).int()
            y = (codes @ self.codes.int().T).double() * scale * self.scale
        else:
            scale = step(wide, FP8_LARGEST) if self.input_scale is None else self.input_scale.double()
            y = to_fp8(wide / scale) @ self.codes.double().T * scale * self.scale
        if self.bias is not None:
            y = y + self.bias
        return y.to(x.dtype).unflatten(0, x.shape[:-1])

    def in_tiles(self, x: torch.Tensor) -> torch.Tensor:
        """Each tile of inputs has a scale of its own, so the sum is cut there."""
        y = torch.zeros(len(x), len(self.codes), dtype=x.dtype)
        scale = tile_scale(self.tiles, self.codes).double()  # type: ignore[arg-type]
        for part, weight, weight_scale in zip(
            x.split(TILE, 1), self.codes.double().split(TILE, 1), scale.split(TILE, 1), strict=True
        ):
            part_scale = step(part, FP8_LARGEST)
            y += to_fp8(part / part_scale) @ weight.T * part_scale * weight_scale[:, 0]
        return y


class CodedExperts(torch.nn.Module):
    """In the place of the experts of transformers, whose weights stand in one tensor: a coded layer each."""

    def __init__(self, experts: list[tuple[CodedLinear, CodedLinear, CodedLinear]]) -> None:
        super().__init__()
        self.experts = experts

    def forward(self, x: torch.Tensor, chosen: torch.Tensor, weights: torch.Tensor) -> torch.Tensor:
        """x [num_tokens, hidden_size]; chosen and weights [num_tokens, top_k]."""
        y = torch.zeros_like(x)
        for number, (gate, up, down) in enumerate(self.experts):
            tokens, places = torch.where(chosen == number)
            if len(tokens):
                hidden = torch.nn.functional.silu(gate(x[tokens])) * up(x[tokens])
                y.index_add_(0, tokens, down(hidden) * weights[tokens, places, None])
        return y


def step(x: torch.Tensor, largest: float) -> torch.Tensor:
    """The scale of each row: [rows, 1]; 1 for a row of zeros."""
    absmax = x.abs().amax(1, keepdim=True)
    return torch.where(absmax > 0, absmax / largest, 1.0)


def to_fp8(x: torch.Tensor) -> torch.Tensor:
    """The nearest numbers of e4m3, saturating, as float64."""
    return x.clamp(-FP8_LARGEST, FP8_LARGEST).to(torch.float8_e4m3fn).double()


def quantize_activations(model: Any, folder: Path) -> None:
    """Replaces every linear layer of a model of transformers whose weight is coded in folder, kv_b_proj apart.

    Raises:
        ValueError: a quantized module of the checkpoint found no place.
    """
    plain, modules = quantized_modules(folder)
    layers = {
        name: CodedLinear(tensors, plain.get(f"{name}.bias"))
        for name, tensors in modules.items()
        if not name.endswith(".kv_b_proj")
    }
    unused = set(layers)
    for name, module in list(model.named_modules()):
        if name in layers:
            model.set_submodule(name, layers[name])
            unused.remove(name)
        elif name.endswith(".experts"):
            place = name.replace(".mlp.", ".block_sparse_moe.") if model.config.model_type == "mixtral" else name
            parts = EXPERT_NAMES.get(model.config.model_type, ("gate_proj", "up_proj", "down_proj"))
            keys = [[f"{place}.{number}.{part}" for part in parts] for number in range(module.num_experts)]
            model.set_submodule(name, CodedExperts([(layers[g], layers[u], layers[d]) for g, u, d in keys]))
            unused -= {key for row in keys for key in row}
    if unused:
        raise ValueError(f"{folder}: no place in {type(model).__name__} for {sorted(unused)}")
