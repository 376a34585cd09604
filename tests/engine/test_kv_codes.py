"""--kv-cache-dtype: how much a cache of codes holds, what an engine over it says, and who cannot have one."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from conformance.end_to_end import family_tensors
from conformance.golden_families import FAMILY_GOLDENS
from conformance.golden_models import GOLDEN_SEED, rand_model, write_checkpoint
from engine.build import build_engine
from engine.coded_kv import CodedKV, KVKind
from engine.config import EngineConfig, StepLimits
from engine.errors import ConfigError
from engine.gpu_memory import GpuRoom, plan_gpu_memory
from engine.kv_cache import CacheSpec, make_kv_cache
from engine.loop import drain
from tests.engine.engines import SMALL, request, tiny_engine

LLAMA_8B = CacheSpec("full", tuple(range(32)), n_kv_heads=8, head_dim=128)
CODES: tuple[KVKind, ...] = ("fp8", "int8")


@pytest.mark.parametrize("codes", CODES)
def test_the_cache_has_what_its_specs_say(codes: KVKind) -> None:
    spec = CacheSpec("full", (0, 2), n_kv_heads=2, head_dim=8)
    assert spec.bytes_per_block(4, 2, codes) == 2 * 2 * 4 * 2 * (8 + 4)
    cache = make_kv_cache((spec,), 5, 4, np.float16, codes=codes)
    assert cache.num_bytes == 5 * spec.bytes_per_block(4, 2, codes)
    for layers in (cache.k_cache, cache.v_cache):
        assert sorted(layers) == [0, 2]
        for cached in layers.values():
            assert isinstance(cached, CodedKV)
            assert (cached.codes.shape, cached.scales.shape) == ((5, 4, 2, 8), (5, 4, 2))
            assert cached.codes.dtype == {"fp8": np.uint8, "int8": np.int8}[codes]
    assert (spec.num_arrays(), spec.num_arrays(codes)) == (4, 8)


@pytest.mark.parametrize("codes", CODES)
def test_a_gpu_gets_nearly_twice_the_blocks(codes: KVKind) -> None:
    """Of 256 bytes a head 132 are left: 1.94 times as many, but for what twice the arrays are rounded up by."""
    counts = []
    for kind in (None, codes):
        room = GpuRoom("Card", 24 * 10**9, (), LLAMA_8B.num_arrays(kind), LLAMA_8B.bytes_per_block(16, 2, kind))
        counts.append(plan_gpu_memory(EngineConfig(), StepLimits(256, 8192), room, 131072).num_blocks)
    assert counts[0] > 10_000
    assert 1.91 < counts[1] / counts[0] < 256 / 132


def test_a_cpu_plans_its_pool_by_codes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("engine.memory.available_memory", lambda: 50_000_000)
    config = EngineConfig(model=str(rand_model(tmp_path / "model", max_position_embeddings=1024)), num_threads=1)
    whole, coded = (
        build_engine(replace(config, kv_cache_dtype=kind), progress=False).memory.num_blocks
        for kind in ("auto", "fp8")  # type: ignore[arg-type]
    )
    assert coded == pytest.approx(whole * 128 / 36, rel=0.01)  # heads of 32 numbers


@pytest.mark.parametrize("kind", ["fp8", "int8"])
def test_an_engine_over_codes_says_nearly_the_same(tmp_path: Path, kind: str) -> None:
    """Its logprobs are near those of a cache in float32, and not the same; shared prompts work as ever."""
    folder = rand_model(tmp_path / "model", max_position_embeddings=160)
    prompt = [5 + 7 * i % 90 for i in range(40)]
    found = []
    for settings in ({}, {"kv_cache_dtype": kind}):
        engine = tiny_engine(folder, **settings)
        logprobs = []
        for number in range(2):  # the second one's prompt is cached
            engine.add(request(str(number), prompt, max_tokens=1))
            events = list(drain(engine))
            logprobs.append(events[0].logprobs[0].logprob)
            assert (events[0].num_cached_tokens > 0) == (number == 1)
        assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
        found.append(logprobs[0])
    assert 0 < abs(found[0] - found[1]) < 0.5


@pytest.mark.parametrize(
    ("golden", "what"), [("deepseek_v2_lite", "latent attention"), ("cpm_ant", "prompts read both ways")]
)
def test_who_cannot_have_one_is_told_by_name(tmp_path: Path, golden: str, what: str) -> None:
    config = FAMILY_GOLDENS[golden]
    folder = write_checkpoint(str(tmp_path), config, family_tensors(config, GOLDEN_SEED))
    settings: dict[str, Any] = SMALL | {"kv_cache_dtype": "fp8_e4m3"}
    with pytest.raises(ConfigError, match=f"--kv-cache-dtype fp8_e4m3: the cache of a model with {what} has the type"):
        build_engine(EngineConfig(model=str(folder), **settings), progress=False)
