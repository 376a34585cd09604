"""Caches of codes on the host's kernels: every code and every rounding, what spoils what, and planted faults."""

from __future__ import annotations

import shutil
from functools import cache
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from conformance.host import KernelFault
from conformance.host_build import CUDA
from conformance.host_device import HostDevice
from engine.coded_kv import CODES, CodedKV, KVKind
from engine.errors import KernelError
from engine.kernels.attention import attention_decode, attention_prefill
from engine.kernels.kv_cache import kv_cache_copy
from engine.kernels.rope import kv_cache_write, rope_kv_write
from ref import attention
from ref.numerics import round_to
from ref.quant.kv import kv_dequantize, kv_quantize
from ref.rope import rope
from tests.cuda.conftest import Verdict
from tests.cuda.isolated import planted

Array = NDArray[Any]
KINDS: tuple[KVKind, ...] = ("fp8", "int8")
TYPES = (ml_dtypes.bfloat16, np.float16)
HEAD_DIM, BLOCK_SIZE = 64, 4


def blank(kind: KVKind, num_tokens: int, n_kv_heads: int = 1, head_dim: int = HEAD_DIM) -> CodedKV:
    shape = (-(-num_tokens // BLOCK_SIZE), BLOCK_SIZE, n_kv_heads, head_dim)
    return CodedKV(np.zeros(shape, CODES[kind]), np.full(shape[:3], np.nan, np.float32))


def in_order(cached: CodedKV, num_tokens: int) -> tuple[Array, Array]:
    codes, scales = cached.codes, cached.scales
    return codes.reshape(-1, *codes.shape[2:])[:num_tokens], scales.reshape(-1, scales.shape[2])[:num_tokens]


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_every_number_of_sixteen_bits_has_the_code_of_ref(kind: KVKind, type_: Any) -> None:
    """All finite ones, beside the largest of their head, which has each of a few sizes: ties and subnormals are met."""
    numbers = np.arange(2**16, dtype=np.uint16).view(type_)
    numbers = numbers[np.isfinite(numbers.astype(np.float32)) & (np.abs(numbers.astype(np.float32)) <= 448)]
    tokens = []
    for largest in (448.0, 127.0, 63.5, 3.0):
        fitting = numbers[np.abs(numbers.astype(np.float32)) <= largest]
        rows = np.resize(fitting, (-(-len(fitting) // (HEAD_DIM - 1)), HEAD_DIM - 1))
        tokens.append(np.concatenate([np.full((len(rows), 1), largest, type_), rows], axis=1))
    x = np.concatenate(tokens)[:, None]
    k, v = blank(kind, len(x)), blank(kind, len(x))
    kv_cache_write(x, x[::-1].copy(), np.arange(len(x), dtype=np.int32), k, v, device=HostDevice())
    for cached, given in ((k, x), (v, x[::-1])):
        codes, scales = in_order(cached, len(x))
        expected, expected_scales = kv_quantize(given.astype(np.float32), kind)
        np.testing.assert_array_equal(scales, expected_scales)
        np.testing.assert_array_equal(codes, expected)


@pytest.mark.parametrize("type_", TYPES)
@pytest.mark.parametrize("kind", KINDS)
def test_what_is_turned_is_rounded_before_it_is_coded(kind: KVKind, type_: Any) -> None:
    """By cosines and sines of two bits, so that a turned number is exact before it is rounded to its type."""
    rng = np.random.default_rng(0)
    num_tokens = 200
    q, k, v = (rng.standard_normal((num_tokens, heads, HEAD_DIM), np.float32).astype(type_) for heads in (1, 2, 2))
    cos_sin = rng.integers(-3, 4, (num_tokens, HEAD_DIM)).astype(np.float32) / 4
    k_cache, v_cache = blank(kind, num_tokens, 2), blank(kind, num_tokens, 2)
    slots = np.arange(num_tokens, dtype=np.int32)
    rope_kv_write(q, k, v, cos_sin, slots, k_cache, v_cache, device=HostDevice())
    turned = round_to(rope(k.astype(np.float32), cos_sin), np.dtype(type_).name)
    expected, expected_scales = kv_quantize(turned, kind)
    codes, scales = in_order(k_cache, num_tokens)
    np.testing.assert_array_equal(scales, expected_scales)
    np.testing.assert_array_equal(codes, expected)
    np.testing.assert_array_equal(in_order(v_cache, num_tokens)[0], kv_quantize(v.astype(np.float32), kind)[0])


NUM_TOKENS, NUM_QUERIES = 700, 100


@cache
def paged(kind: KVKind) -> dict[str, Any]:
    """One sequence; the sizes of its values grow, so that the unit of what is added up changes often; those of queries
    differ from head to head."""
    rng = np.random.default_rng(5)
    caches = {}
    for name, largest in (("k_cache", 1.0), ("v_cache", 20.0)):
        sizes = np.linspace(1, largest, NUM_TOKENS, dtype=np.float32)[:, None, None]
        numbers = rng.standard_normal((NUM_TOKENS, 1, HEAD_DIM), np.float32) * sizes
        cached = blank(kind, NUM_TOKENS)
        for whole, part in zip((cached.codes, cached.scales), kv_quantize(numbers, kind), strict=True):
            whole.reshape(-1, *part.shape[1:])[:NUM_TOKENS] = part
        caches[name] = cached
    q = rng.standard_normal((NUM_QUERIES, 8, HEAD_DIM), np.float32) * np.float32(2.0) ** -np.arange(8)[:, None]
    table = np.arange(len(caches["k_cache"].codes), dtype=np.int32)[None]
    return {"q": q.astype(ml_dtypes.bfloat16), **caches, "block_table": table}


def problem(device: HostDevice, kind: KVKind) -> str:
    """What is wrong with the last queries by attention_prefill, and with the very last by attention_decode.

    The latter is asked by more sequences than there are SMs, so that a warp has several chunks, one after the other.
    """
    given, lens, bounds = paged(kind), np.array([NUM_TOKENS], np.int32), np.array([0, NUM_QUERIES], np.int32)
    q, table = given["q"], given["block_table"]
    caches = given["k_cache"], given["v_cache"]
    same = device.num_sms + 1
    decoded = attention_decode(
        q[-1:].repeat(same, 0), *caches, table.repeat(same, 0), lens.repeat(same), 0.125, device=device
    )
    prefilled = attention_prefill(q, *caches, table, bounds, lens, 0.125, device=device)
    numbers = [kv_dequantize(x.codes, x.scales).astype(np.float64) for x in caches]
    truth = attention.attention_prefill(q.astype(np.float64), *numbers, table, bounds, lens, 0.125)
    with np.errstate(invalid="ignore"):
        errors = [
            np.abs(answer.astype(np.float64) - right).max() / np.abs(right).max()
            for answer, right in ((decoded, truth[-1:]), (prefilled, truth))
        ]
    return "" if np.max(errors) <= 3 * 2**-8 else f"errors {errors}"


@pytest.mark.parametrize("kind", KINDS)
def test_values_of_all_sizes(kind: KVKind) -> None:
    assert problem(HostDevice(), kind) == ""


@pytest.mark.parametrize("kind", KINDS)
def test_infinity_and_nan_spoil_their_own_head_of_their_own_sequence_only(kind: KVKind) -> None:
    rng = np.random.default_rng(1)
    x = rng.standard_normal((12, 2, HEAD_DIM), np.float32).astype(ml_dtypes.bfloat16)
    k, v = x.copy(), x.copy()
    k[1, 0, 3], v[6, 1, 5] = np.inf, np.nan  # of the first and second sequence of four tokens
    k_cache, v_cache = blank(kind, 12, 2), blank(kind, 12, 2)
    kv_cache_write(k, v, np.arange(12, dtype=np.int32), k_cache, v_cache, device=HostDevice())
    table, lens = np.arange(3, dtype=np.int32)[:, None], np.full(3, 4, np.int32)
    q = rng.standard_normal((3, 4, HEAD_DIM), np.float32).astype(ml_dtypes.bfloat16)
    bounds = np.arange(4, dtype=np.int32)
    for out in (
        attention_decode(q, k_cache, v_cache, table, lens, 0.125, device=HostDevice()),
        attention_prefill(q, k_cache, v_cache, table, bounds, lens, 0.125, device=HostDevice()),
    ):
        spoiled = np.isnan(out.astype(np.float32)).any(axis=2)
        assert spoiled.tolist() == [[True, True, False, False], [False, False, True, True], [False] * 4]


def test_refusals() -> None:
    numbers = np.zeros((3, BLOCK_SIZE, 1, HEAD_DIM), ml_dtypes.bfloat16)
    codes = blank("fp8", 12)
    q, lens, table = np.zeros((1, 1, HEAD_DIM), numbers.dtype), np.ones(1, np.int32), np.zeros((1, 1), np.int32)

    def refused(k_cache: Any, v_cache: Any) -> str:
        with pytest.raises(KernelError) as caught:
            attention_decode(q, k_cache, v_cache, table, lens, 0.1, device=HostDevice())
        return str(caught.value)

    assert "v_cache is uint8; expected bfloat16" in refused(numbers, codes)
    assert "v_cache is int8; expected uint8" in refused(codes, blank("int8", 12))
    assert "k_cache is of bfloat16; codes are uint8 (of e4m3) or int8" in refused(CodedKV(numbers, codes.scales), codes)
    wrong = CodedKV(codes.codes, codes.scales[:2])
    assert "k_cache's scales has shape [2, 4, 1]; expected [3, 4, 1]" in refused(wrong, codes)
    assert "k_cache is uint8; expected bfloat16" in refused(codes.codes, codes.codes)
    blocks = np.zeros(1, np.int32)
    with pytest.raises(KernelError, match="all caches hold codes with scales, or none does"):
        kv_cache_copy(codes, numbers.view(np.uint8)[..., :HEAD_DIM].copy(), blocks, blocks, device=HostDevice())


DECODE, PREFILL = "attention_decode.cu", "attention_prefill.cu"
K_SCALE = "usable_scale(scales[8 * i + group])"
FAULTS = {  # file, text found once in it, what replaces it
    "sums keep their old unit": (DECODE, "growth[tile][head] *= kept;", ""),
    "unit of values forgotten": (DECODE, "v_unit / 32768.0f * kQuickUnit<C>", "kQuickUnit<C> / 32768.0f"),
    "queries keep a unit": (DECODE, "score * q_unit[tile][head] *", "score *"),
    "unit of another head": (DECODE, "4 * (2 * pair + i))", "4 * (2 * pair))"),
    "scales of keys for values": (DECODE, "usable_scale(scales[32 + 8 * i + group])", K_SCALE),
    "scale of the token beside": (DECODE, K_SCALE, "usable_scale(scales[8 * i + (group ^ 1)])"),
    "total over scaled weights": (DECODE, "added += score;\n          score *= v_scale", "score *= v_scale"),
    "elements in another order": (DECODE, "(numbers[0], numbers[2])", "(numbers[0], numbers[1])"),
    "prefill: scales of the next tile": (
        PREFILL,
        "if (token + kTile <= of_block.newest) load_codes(buffer ^ 1);",
        "load_codes(buffer ^ 1), decode_tiles();",
    ),
    "prefill: values unscaled": (PREFILL, "(kCoded) score *= scales[", "(false) score *= scales["),
    "prefill: nobody waits": (PREFILL, "decode_tiles();\n      __syncthreads();", "decode_tiles();"),
    "code of another byte": ("include/kv_codes.cuh", "(codes << 7 & 0x3f803f80u)", "(codes << 6 & 0x3f803f80u)"),
}


def judge(fault: str, folder: Path) -> str:
    file, text, replacement = FAULTS[fault]
    shutil.copytree(CUDA / "include", folder / "include")
    (folder / "host").symlink_to(CUDA / "host")
    for name in ("attention_decode.cu", "attention_prefill.cu"):
        shutil.copy(CUDA / name, folder / name)
    (folder / file).write_text(planted((folder / file).read_text("utf-8"), text, replacement), "utf-8")
    for order in (("in_step", 0), ("greedy", 0), ("random", 1)):
        try:
            if found := problem(HostDevice(*order, folder=folder), "fp8"):
                return found
        except KernelFault as fault_:
            return str(fault_)
    return ""


@pytest.mark.parametrize("fault", FAULTS)
def test_planted_fault_is_seen(fault: str, verdict: Verdict) -> None:
    assert verdict(judge), "nothing is noticed"
