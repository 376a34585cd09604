"""The rotary embedding that a config asks for: one meaning for all spellings of transformers 4 and 5."""

from __future__ import annotations

import math
import reprlib
from collections.abc import Mapping
from typing import Any

from engine.config import RopeConfig
from engine.model_config.fields import LARGEST_NUMBER, Fields, is_number

ROPE_NUMBERS: dict[str, tuple[str, ...]] = {  # what each kind must have besides its base
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": (),
}
ROPE_LENGTH = "original_max_position_embeddings"  # beside a kind that does not need it it has no effect
NEEDS_LENGTH = ("llama3", "yarn", "longrope")
MSCALES = ("mscale", "mscale_all_dim")
FACTOR_LISTS = ("short_factor", "long_factor")
ROPE_OPTIONS: dict[str, tuple[str, ...]] = {  # and what it may have
    "yarn": ("attention_factor", "beta_fast", "beta_slow", "truncate", *MSCALES),
    "longrope": ("attention_factor", "factor", *FACTOR_LISTS),
}


def read_rope(fields: Fields, max_position_embeddings: int, rotary_dim: int) -> RopeConfig:
    """One meaning for all spellings; a problem noted for whatever has none.

    Dynamic NTK starts to stretch at max_position_embeddings, as transformers does; for it that is the original length.
    The other kinds that need one must say it: transformers would take max_position_embeddings, which in one checkpoint
    is the length before and in another that after the stretching.
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
    known = {*ROPE_NUMBERS[kind], *ROPE_OPTIONS.get(kind, ()), "finetuned", ROPE_LENGTH}
    if unknown := settings - known:
        fields.problem(f"rope_type {kind!r} does not take {', '.join(sorted(unknown))}")
    if values.get("rope_theta") is None:  # Llama 1 and 2 have none at all; the base of their paper is the usual default
        values["rope_theta"] = fields.defaults.get("rope_theta", 10000.0)
    theta = fields.number("rope_theta", values, fields.name("rope_theta"))
    numbers: dict[str, Any] = {key: _number(fields, values, key, kind) for key in ROPE_NUMBERS[kind]}
    original = max_position_embeddings if kind == "dynamic" else 0
    if kind in NEEDS_LENGTH:
        original = fields.integer(ROPE_LENGTH, values.get(ROPE_LENGTH))
    if numbers.get("factor", 1.0) < 1:
        fields.problem(f"factor of rope_type {kind!r} must be at least 1, found {numbers['factor']:g}")
    if kind == "llama3" and numbers["low_freq_factor"] >= numbers["high_freq_factor"]:
        fields.problem("low_freq_factor must be below high_freq_factor")
    if kind == "yarn":
        numbers |= _yarn(fields, values, numbers["factor"], theta)
    if kind == "longrope":
        numbers |= _longrope(fields, values, max_position_embeddings, original, rotary_dim)
    return RopeConfig(kind, theta, original_max_position_embeddings=original, **numbers)  # type: ignore[arg-type]


def latent_sm_scale(fields: Fields, head_dim: int) -> float:
    """The scale of scores with latent attention, yarn's mscale_all_dim in it: defined by ref.mla.mla_sm_scale."""
    values = _rope_values(fields)
    mscale = 1.0
    if values.get("mscale_all_dim") is not None:
        mscale = _mscale(*(_number(fields, values, key, "yarn") for key in ("factor", "mscale_all_dim")))
    return float(mscale**2 / math.sqrt(head_dim))


def _yarn(fields: Fields, values: Mapping[str, Any], factor: float, theta: float) -> dict[str, Any]:
    """The settings of yarn by the names of RopeConfig; an attention_factor stands above the two mscales."""
    betas = {
        key: default if values.get(key) is None else _number(fields, values, key, "yarn")
        for key, default in (("beta_fast", 32.0), ("beta_slow", 1.0))
    }
    if betas["beta_fast"] < betas["beta_slow"]:
        fields.problem(f"beta_fast ({betas['beta_fast']:g}) must be at least beta_slow ({betas['beta_slow']:g})")
    if theta <= 1:
        fields.problem(f"rope_theta must be above 1 with rope_type 'yarn', found {theta:g}")
    truncate = True if values.get("truncate") is None else values["truncate"]
    if not isinstance(truncate, bool):
        fields.problem(f"truncate of rope_type 'yarn' must be true or false, found {truncate!r}")
    given = [key for key in MSCALES if values.get(key) is not None]
    mscales = [_number(fields, values, key, "yarn") for key in given]
    if len(given) == 1:
        # DeepSeek's own code then takes 1 and 0 for the other, transformers leaves out the one that is there
        fields.problem(f"{given[0]} of rope_type 'yarn' is there alone; give both of {' and '.join(MSCALES)}, or none")
    if values.get("attention_factor") is not None:
        attention_factor = _number(fields, values, "attention_factor", "yarn")
    else:
        scale, scale_all = mscales if len(mscales) == 2 else (1.0, 0.0)
        attention_factor = _mscale(factor, scale) / _mscale(factor, scale_all)
    return {**betas, "truncate": truncate, "attention_factor": attention_factor}


def _mscale(factor: float, mscale: float) -> float:
    """Defined by ref.rope_scaling.yarn_mscale."""
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(
    fields: Fields, values: Mapping[str, Any], max_position_embeddings: int, original: int, rotary_dim: int
) -> dict[str, Any]:
    """The settings of longrope by the names of RopeConfig; a factor takes the place of the quotient of lengths."""
    lists = {key: _factors(fields, key, values.get(key), rotary_dim // 2) for key in FACTOR_LISTS}
    if original > max_position_embeddings:
        fields.problem(f"{ROPE_LENGTH} ({original}) is above max_position_embeddings ({max_position_embeddings})")
    factor = 1.0 if values.get("factor") is None else _number(fields, values, "factor", "longrope")
    stretch = max_position_embeddings / max(original, 1) if values.get("factor") is None else factor
    attention_factor = 1.0
    if values.get("attention_factor") is not None:
        attention_factor = _number(fields, values, "attention_factor", "longrope")
    elif original == 1:
        fields.problem(f"{ROPE_LENGTH} of rope_type 'longrope' must be at least 2, found 1")
    elif stretch > 1 and original:
        attention_factor = math.sqrt(1 + math.log(stretch) / math.log(original))
    return {**lists, "factor": factor, "attention_factor": attention_factor}


def _factors(fields: Fields, key: str, value: Any, num_pairs: int) -> tuple[float, ...]:
    """A number above 0 for each pair of elements that rotates."""
    name = f"{key} of rope_type 'longrope'"
    if value is None:
        fields.problem(f"{name} is missing")
    elif not isinstance(value, list) or len(value) != num_pairs:
        found = f"{len(value)} of them" if isinstance(value, list) else reprlib.repr(value)
        fields.problem(f"{name} must be a list of {num_pairs} numbers, one for each pair that rotates, found {found}")
    elif wrong := [number for number in value if not is_number(number) or not 0 < number <= LARGEST_NUMBER]:
        fields.problem(f"{name} must hold numbers, finite and above 0, found {reprlib.repr(wrong[0])}")
    else:
        return tuple(map(float, value))
    return ()


def _number(fields: Fields, values: Mapping[str, Any], key: str, kind: str) -> float:
    return fields.number(key, values, f"{key} of rope_type {kind!r}")


def _rope_values(fields: Fields) -> dict[str, Any]:
    """rope_theta, rope_scaling (4.x) and rope_parameters (5.x) as one table; they must not contradict each other.

    Phi and its kin have the original length beside the table instead of in it.
    """
    merged = {key: fields.values.get(fields.name(key)) for key in ("rope_theta", "partial_rotary_factor")}
    groups = {group: fields.values.get(group) or {} for group in ("rope_scaling", "rope_parameters")}
    if any(groups.values()) and fields.values.get(ROPE_LENGTH) is not None:
        merged[ROPE_LENGTH] = fields.values[ROPE_LENGTH]
    for group, values in groups.items():
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
