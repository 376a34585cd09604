"""What becomes of the linear layers that a config calls quantized, before their files are opened.

ref.quant knows the formats: which modules a quantization_config speaks of, and how each is decoded. A layer of 4-bit
integers in groups can stay so (engine.packed4), one of 8-bit codes whose activations have 8 bits too as well
(engine.coded8), where every module of it is alike; all others are decoded when they are loaded.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from engine.checkpoint.folder import read_json
from engine.checkpoint.quantized_cuts import SPREAD, is_between
from engine.coded8 import COLUMNS, FP8, INT8, TILE
from engine.errors import ConfigError
from engine.packed4 import is_group_size
from engine.weights import Coded, LinearSpec, Packed, WeightMap
from ref.quant.awq import AwqConfig
from ref.quant.compressed_tensors_config import CtScheme
from ref.quant.gptq import GptqConfig
from ref.quant.scheme_config import QuantConfig, Scheme, module_scheme, parse_quantization_config

BITS = 4
OWN_FILES = {"quantize_config.json": "gptq", "quant_config.json": "awq"}


def quantization_of(folder: Path) -> QuantConfig | None:
    """What old quantizers' own files beside config.json say of the weights; None: there is no such file.

    Raises:
        ConfigError: a method or a setting that is not known; says which are.
    """
    for name, method in OWN_FILES.items():
        path = folder / name
        if path.exists():
            try:
                return parse_quantization_config({"quant_method": method} | read_json(path))
            except ValueError as error:
                raise ConfigError(f"{path}: {error}") from error
    return None


def keep_packed(weight_map: WeightMap) -> WeightMap:
    """With `packed` or `coded` set for the layers that stay as integers or codes."""
    quantization = weight_map.quantization
    if quantization is None:
        return weight_map
    return fold_orders(replace(weight_map, linears=tuple(_kept(spec, quantization) for spec in weight_map.linears)))


def fold_orders(weight_map: WeightMap) -> WeightMap:
    """With the order of columns of a packed layer left to the rows of the layer before, or to the norm before, where
    there is one that can take it."""
    sources = {spec.feeds for spec in weight_map.linears if spec.packed is not None and not spec.bias}

    def folded(spec: LinearSpec) -> LinearSpec:
        if spec.packed is None or spec.packed.order == "stored":
            return spec
        if spec.dest in sources:
            return replace(spec, packed=replace(spec.packed, order="folded"))
        if spec.norm:  # a rank has all of its columns
            return replace(spec, packed=replace(spec.packed, order="normed"))
        packed = replace(spec.packed, order="gathered")
        if spec.column_cut is not None:  # each rank has some columns of every group
            packed = replace(spec.packed, order="gathered", group_size=SPREAD)
        return replace(spec, packed=packed)

    return replace(weight_map, linears=tuple(map(folded, weight_map.linears)))


def _kept(spec: LinearSpec, quantization: QuantConfig) -> LinearSpec:
    schemes = {module_scheme(quantization, name) for name, _, _ in spec.modules()}
    if spec.n_experts or spec.latent or len(schemes) > 1 or any(module.is_padded for module in spec.stored()):
        return spec
    scheme = schemes.pop()
    return replace(spec, packed=_packed(spec, scheme), coded=_coded(spec, scheme))


def _packed(spec: LinearSpec, scheme: Scheme | None) -> Packed | None:
    facts = _group_facts(scheme)
    if facts is None or spec.in_features % 8:
        return None
    if (spec.gated and spec.out_features % 16) or any(rows % 8 for _, rows in spec.parts):
        return None
    group_size, zeros, act_order = facts
    size = spec.in_features if group_size == -1 else group_size
    columns = spec.in_features if spec.column_cut is None else spec.column_cut.whole
    is_between_groups = spec.in_features % size == 0 and is_between(next(spec.stored()), group_size)
    if spec.column_cut is not None and not is_between_groups:
        return Packed(SPREAD, zeros, "stored") if size % SPREAD == 0 and spec.in_features % SPREAD == 0 else None
    if not is_group_size(size, spec.in_features):
        return None
    has_order = act_order and group_size != -1 and size < columns
    return Packed(size, zeros, "gathered" if has_order else "stored")


def _group_facts(scheme: Scheme | None) -> tuple[int, bool, bool] | None:
    """Size of groups, whether they have zeros, and whether their columns may lie anywhere, of 4-bit integers."""
    if isinstance(scheme, AwqConfig):
        return scheme.group_size, True, False
    if isinstance(scheme, GptqConfig) and scheme.bits == BITS:
        return scheme.group_size, not scheme.symmetric, scheme.desc_act
    if isinstance(scheme, CtScheme) and scheme.format == "pack-quantized" and scheme.bits == BITS:
        if scheme.strategy == "tensor":
            return None
        return (scheme.group_size if scheme.strategy == "group" else -1), not scheme.symmetric, scheme.act_order
    return None


def _coded(spec: LinearSpec, scheme: Scheme | None) -> Coded | None:
    """Modules with a scale each are a layer with a scale for each row."""
    if not isinstance(scheme, CtScheme) or scheme.format == "pack-quantized" or spec.in_features % COLUMNS:
        return None
    static = scheme.activations == "static"
    if scheme.type == "int":
        return Coded(INT8, "channel", static) if scheme.activations in ("token", "static") else None
    if scheme.strategy == "block":
        ends = any(rows % TILE for _, rows in spec.parts[:-1])  # of modules within a tile
        fits = scheme.block == (TILE, TILE) and scheme.activations == "group" and not ends
        return Coded(FP8, "block", False) if fits else None
    if scheme.activations not in ("token", "static"):
        return None
    return Coded(FP8, "tensor" if scheme.strategy == "tensor" and len(spec.parts) == 1 else "channel", static)
