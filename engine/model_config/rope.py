"""The rotary embedding that a config asks for: one meaning for all spellings of transformers 4 and 5."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from engine.config import RopeConfig
from engine.model_config.fields import Fields

ROPE_NUMBERS: dict[str, tuple[str, ...]] = {  # what each kind must have besides its base
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
ROPE_LENGTH = "original_max_position_embeddings"  # llama3 must have it; beside another kind it has no effect


def read_rope(fields: Fields, max_position_embeddings: int) -> RopeConfig:
    """One meaning for all spellings; a problem noted for whatever has none.

    Dynamic NTK starts to stretch at max_position_embeddings, as transformers does; for it that is the original length.
    """
    values = _rope_values(fields)
    if (rotated := values.pop("partial_rotary_factor")) not in (None, 1):
        fields.problem(f"{fields.name('partial_rotary_factor')} {rotated!r} is not supported; only 1 is")
    kinds = {str(values[key]) for key in ("type", "rope_type") if values.get(key) is not None}
    if len(kinds) > 1:
        fields.problem(f"rope type is {values['type']!r} but rope_type is {values['rope_type']!r}")
        return RopeConfig()
    settings = {key for key, value in values.items() if value is not None} - {"type", "rope_type", "rope_theta"}
    if not kinds and settings:
        fields.problem(f"rope_type is missing beside {', '.join(sorted(settings))}")
        return RopeConfig()
    kind = min(kinds, default="default")
    if kind not in ROPE_NUMBERS:
        fields.problem(f"rope_type {kind!r} is not supported; supported are {', '.join(ROPE_NUMBERS)}")
        return RopeConfig()
    if unknown := settings - set(ROPE_NUMBERS[kind]) - {"finetuned", ROPE_LENGTH}:
        fields.problem(f"rope_type {kind!r} does not take {', '.join(sorted(unknown))}")
    if values.get("rope_theta") is None:  # Llama 1 and 2 have none at all; the base of their paper is the usual default
        values["rope_theta"] = fields.defaults.get("rope_theta", 10000.0)
    theta = fields.number("rope_theta", values)
    numbers = {key: fields.number(key, values, f"{key} of rope_type {kind!r}") for key in ROPE_NUMBERS[kind]}
    original = max_position_embeddings if kind == "dynamic" else 0
    if kind == "llama3":
        original = fields.integer(ROPE_LENGTH, values.get(ROPE_LENGTH))
    if numbers.get("factor", 1.0) < 1:
        fields.problem(f"factor of rope_type {kind!r} must be at least 1, found {numbers['factor']:g}")
    if kind == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        fields.problem("low_freq_factor must be below high_freq_factor")
    return RopeConfig(kind, theta, original_max_position_embeddings=original, **numbers)  # type: ignore[arg-type]


def _rope_values(fields: Fields) -> dict[str, Any]:
    """rope_theta, rope_scaling (4.x) and rope_parameters (5.x) as one table; they must not contradict each other."""
    merged = {key: fields.values.get(fields.name(key)) for key in ("rope_theta", "partial_rotary_factor")}
    for group in ("rope_scaling", "rope_parameters"):
        values = fields.values.get(group) or {}
        if not isinstance(values, Mapping):
            fields.problem(f"{group} must be an object, found {values!r}")
            continue
        if nested := [key for key, value in values.items() if isinstance(value, Mapping)]:
            fields.problem(f"{group} has a table for each layer type ({', '.join(nested)}), which is not supported")
            continue
        for key, value in values.items():
            if merged.get(key) not in (None, value):
                fields.problem(f"{key} is {merged[key]!r} in one place and {value!r} in {group}")
            merged[key] = value if value is not None else merged.get(key)
    return merged
