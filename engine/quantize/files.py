"""The files of a checkpoint before there is a byte of data: which tensor goes where, and their headers.

A .safetensors file is eight bytes with the length of its header, the header in JSON, then the data (see
engine.checkpoint.safetensors_file).
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from engine.checkpoint.safetensors_file import ITEM_BITS
from engine.quantize.encode import Layout

MADE_BY = "glint_quantize"  # key of a file's metadata


@dataclass(frozen=True, slots=True)
class Unit:
    """Tensors that are made together."""

    name: str
    tensors: Mapping[str, Layout]


@dataclass(frozen=True, slots=True)
class Place:
    """Where a tensor goes."""

    shard: int
    offset: int  # from the start of the file
    layout: Layout


def cut(units: Sequence[Unit], shard_bytes: int) -> dict[str, int]:
    """The file of each unit, in order; one is closed once it has shard_bytes."""
    shards: dict[str, int] = {}
    shard, held = 0, 0
    for unit in units:
        size = sum(map(num_bytes, unit.tensors.values()))
        if held and held + size > shard_bytes:
            shard, held = shard + 1, 0
        shards[unit.name], held = shard, held + size
    return shards


def headers(
    units: Sequence[Unit], shard_of: Mapping[str, int], fingerprint: str
) -> tuple[list[bytes], dict[str, Place]]:
    """The first bytes of each file, and where each tensor goes. Wide types come first, so that all are aligned."""
    made: list[bytes] = []
    places: dict[str, Place] = {}
    for shard in range(max(shard_of.values()) + 1):
        tensors = [entry for unit in units if shard_of[unit.name] == shard for entry in unit.tensors.items()]
        tensors.sort(key=lambda entry: -ITEM_BITS[entry[1].dtype])
        entries: dict[str, Any] = {"__metadata__": {"format": "pt", MADE_BY: fingerprint}}
        end = 0
        for name, layout in tensors:
            begin, end = end, end + num_bytes(layout)
            entries[name] = {"dtype": layout.dtype, "shape": list(layout.shape), "data_offsets": [begin, end]}
        text = json.dumps(entries, separators=(",", ":")).encode()
        text += b" " * (-len(text) % 8)
        header = len(text).to_bytes(8, "little") + text
        made.append(header)
        for name, layout in tensors:
            places[name] = Place(shard, len(header) + entries[name]["data_offsets"][0], layout)
    return made, places


def num_bytes(layout: Layout) -> int:
    return math.prod(layout.shape) * ITEM_BITS[layout.dtype] // 8
