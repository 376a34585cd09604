"""What a checkpoint holds, as values: specs that a model asks for, and weights that the loader gives.

A model states its tensors once, as a WeightMap; the loader reads exactly those, and refuses a checkpoint that
lacks one or holds one more. Models never look inside a LinearWeight: its format and the op table do.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

from engine.packed4 import PACKED, PACKED_GATED
from ref.quant.scheme_config import QuantConfig

EMBEDDING, HEAD = "embed_tokens", "lm_head"  # dest names that tied weights share

ActivationKind = Literal["", "int8", "fp8"]  # of activations that a layer quantizes; "": it does not

Array = Any  # numpy.ndarray on a CPU, cupy.ndarray on a GPU


@dataclass(frozen=True, slots=True)
class Packed:
    """That a weight is kept in groups of 4-bit integers (engine.packed4), not in floating point."""

    group_size: int  # columns
    zeros: bool  # False: all are 8
    # groups are of neighbours as the file has them; or once columns are gathered in an order, which the tensor "order"
    # says to who multiplies; or once the layer before puts its rows out in that order; or the norm before its columns,
    # to which the array NORM.order says it
    order: Literal["stored", "gathered", "folded", "normed"] = "stored"


@dataclass(frozen=True, slots=True)
class Coded:
    """That a weight is kept in 8 bits a number (engine.coded8), and multiplied by activations of 8 bits."""

    kind: Literal["int8", "fp8"]
    scale: Literal["tensor", "channel", "block"]  # one, one a row, one for 128 rows and columns
    static: bool  # activations have a scale from the checkpoint, else one of their own for each token (and 128 of it)


@dataclass(frozen=True, slots=True)
class Cut:
    """Which run of an axis a rank has: from `first` on, of `whole`. What it has past the end is zeros."""

    first: int
    whole: int

    def part(self, size: int) -> range:
        """What there is of the first `size` places."""
        return range(min(self.first, self.whole), min(self.first + size, self.whole))


@dataclass(frozen=True, slots=True)
class StoredModule:
    """A module of the checkpoint as a part of a LinearSpec."""

    name: str
    expert: int | None
    place: slice  # rows of the layer's weight; those past what is read are zeros
    shape: tuple[int, int]  # of the whole module
    rows: range  # that are read
    columns: range

    @property
    def is_whole(self) -> bool:
        return (len(self.rows), len(self.columns)) == self.shape

    @property
    def part_shape(self) -> tuple[int, int]:
        """Of what is read."""
        return len(self.rows), len(self.columns)

    @property
    def is_padded(self) -> bool:
        return self.part_shape[0] < int(self.place.stop - self.place.start)


@dataclass(frozen=True, slots=True)
class LinearSpec:
    """One linear layer of the engine, made of one or more modules of the checkpoint stacked along `out`.

    dest "layers.0.qkv_proj" with parts ("model.layers.0.self_attn.q_proj", 576), (…k_proj, 192), (…v_proj, 192)
    reads three modules into one [960, in_features] weight. With n_experts the names of parts hold "{expert}", and
    the weights of all experts are stacked: [n_experts, out_features, in_features]. transposed: the checkpoint has
    [in_features, out_features]. gated: its first half are gates and it is read by linear_gate_up_act alone. feeds: the
    layer that alone reads what this gives, so that its rows may be put out in any order that suits that one. norm: the
    rmsnorm whose result this layer reads, and nothing else does, so that it too may put out any order.
    """

    dest: str
    parts: tuple[tuple[str, int], ...]  # (module name in the checkpoint, its out_features)
    in_features: int
    bias: bool = False
    n_experts: int = 0
    transposed: bool = False
    latent: tuple[int, int] | None = None  # of kv_b_proj in latent attention: n_heads and qk_nope_head_dim
    gated: bool = False
    feeds: str = ""  # a dest
    norm: str = ""  # a dest
    packed: Packed | None = None
    coded: Coded | None = None
    row_cuts: tuple[Cut, ...] = ()  # empty: whole
    column_cut: Cut | None = None

    @property
    def out_features(self) -> int:
        return sum(out_features for _, out_features in self.parts)

    def modules(self) -> Iterator[tuple[str, int | None, slice]]:
        """(module name in the checkpoint, its expert if there are experts, its rows of out) of all that are read."""
        for expert in range(self.n_experts) if self.n_experts else (None,):
            first = 0
            for name, out_features in self.parts:
                yield name.format(expert=expert), expert, slice(first, first + out_features)
                first += out_features

    def stored(self) -> Iterator[StoredModule]:
        """The same modules, and what of each is read."""
        columns = range(self.in_features) if self.column_cut is None else self.column_cut.part(self.in_features)
        whole_columns = self.in_features if self.column_cut is None else self.column_cut.whole
        cuts = self.row_cuts or tuple(Cut(0, size) for _, size in self.parts)
        for number, (name, expert, rows) in enumerate(self.modules()):
            cut = cuts[number % len(cuts)]
            kept = cut.part(rows.stop - rows.start)
            yield StoredModule(name, expert, rows, (cut.whole, whole_columns), kept, columns)


@dataclass(frozen=True, slots=True)
class ArraySpec:
    """A tensor that is used as it is: a norm's scale, the token embedding."""

    dest: str
    name: str  # full tensor name in the checkpoint
    shape: tuple[int, ...]
    axis: int = 0  # that a rank has a part of
    cut: Cut | None = None  # of that axis


@dataclass(frozen=True, slots=True)
class WeightMap:
    """Every tensor of an architecture.

    ignored holds regular expressions (full match) for tensors that may be present and are not used. If tied is
    set, lm_head is the embedding, and an lm_head.weight in the checkpoint is ignored like transformers does.
    quantization: how modules are stored that are not in floating point. whole: of which this is a rank's part.
    """

    linears: tuple[LinearSpec, ...]
    arrays: tuple[ArraySpec, ...]
    ignored: tuple[str, ...] = ()
    tied: bool = False
    quantization: QuantConfig | None = None
    whole: WeightMap | None = None


def order_of(norm: str) -> str:
    """The dest of the array that is Norm.order, of a norm's own dest."""
    return f"{norm}.order"


def weight_bytes(weight_map: WeightMap, itemsize: int) -> int:
    """What these weights take, in bytes: itemsize a number, or as integers and codes with a scale for each run of them;
    scales of whole rows are not counted, nor biases."""
    total = float(itemsize * sum(math.prod(array.shape) for array in weight_map.arrays))
    for linear in weight_map.linears:
        size = max(1, linear.n_experts) * linear.out_features * linear.in_features
        if linear.packed is not None:
            total += size * (0.5 + (2.5 if linear.packed.zeros else 2.0) / linear.packed.group_size)
        else:
            total += size * (itemsize if linear.coded is None else 1)
    return int(total)


@dataclass(frozen=True, slots=True)
class LinearWeight:
    """The weight of y = x Wᵀ + bias as a value; what is in tensors is the format's business.

    format "dense": tensors["weight"] [out_features, in_features], floating point; of experts one axis more in front.
    format "packed4" and "packed4_gated": 4 bits a number, see engine.packed4.
    format "int8" and "fp8": 8 bits a number, see engine.coded8.
    activations: to what those of many tokens are quantized, per token, before they are multiplied by a packed4 weight.
    The op table's prepare, and mla_split_kv_b for a spec with `latent`, put others in its place.
    """

    format: str
    out_features: int
    in_features: int
    tensors: Mapping[str, Array]
    bias: Array | None = None  # [out_features]
    activations: ActivationKind = ""


@dataclass(frozen=True, slots=True)
class Norm:
    """Of [num_tokens, hidden_size]."""

    weight: Array  # [hidden_size]
    eps: float
    kind: Literal["rmsnorm", "layernorm"] = "rmsnorm"
    bias: Array | None = None  # [hidden_size], layernorm only
    into: LinearWeight | None = None  # an rmsnorm's: the one layer that takes it, if that quantizes what it takes
    order: Array | None = None  # [hidden_size] uint16, an rmsnorm's: which element stands at each place; None: its own

    @property
    def is_plain(self) -> bool:
        """An rmsnorm that gives what it computes as it is."""
        return self.kind == "rmsnorm" and self.into is None and self.order is None


@dataclass(frozen=True, slots=True)
class Weights:
    """A loaded checkpoint by dest names."""

    linears: Mapping[str, LinearWeight]
    arrays: Mapping[str, Array]

    @property
    def num_bytes(self) -> int:
        """Bytes held, each buffer counted once (tied weights share one)."""
        buffers = {id(array): int(array.nbytes) for array in self.arrays.values()}
        for weight in self.linears.values():
            buffers.update((id(tensor), int(tensor.nbytes)) for tensor in weight.tensors.values())
            if weight.bias is not None:
                buffers[id(weight.bias)] = int(weight.bias.nbytes)
        return sum(buffers.values())


def with_activations(weights: Weights, kind: ActivationKind) -> Weights:
    """The same, but that activations of packed layers are quantized to this kind where there are many tokens."""
    linears = {
        dest: replace(weight, activations=kind) if weight.format in (PACKED, PACKED_GATED) else weight
        for dest, weight in weights.linears.items()
    }
    return replace(weights, linears=linears)
