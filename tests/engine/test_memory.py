"""engine.memory and engine.kv_cache: what is planned before anything is allocated, and that no request needs more."""

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import engine.cpu.attention as cpu_attention
import engine.memory as memory_module
from conformance.golden_models import rand_model
from engine.api import GenerationRequest, SamplingParams
from engine.build import BuiltEngine, build_engine
from engine.config import EngineConfig
from engine.cpu.attention import DECODE_TILE, attention_decode
from engine.errors import ConfigError
from engine.kv_cache import CacheSpec, make_kv_cache
from engine.loop import drain

CTX, VOCAB = 1024, 4000


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return rand_model(tmp_path_factory.mktemp("rand"), vocab_size=VOCAB, max_position_embeddings=CTX)


def build(folder: Path, **settings: Any) -> BuiltEngine:
    return build_engine(EngineConfig(model=str(folder), num_threads=1, **settings), progress=False)


# ---- the plan


def test_the_pool_is_sized_from_what_is_free(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "available_memory", lambda: 100_000_000)
    plan = build(folder).memory
    block_bytes = 2 * 2 * 16 * 2 * 32 * 4  # k and v, layers, block size, KV heads, head dim, float32
    assert plan.num_blocks == int(0.4 * (100_000_000 - plan.workspace)) // block_bytes
    assert plan.kv_pool == plan.num_blocks * block_bytes
    assert plan.num_kv_tokens == plan.num_blocks * 16


def test_no_more_blocks_than_all_sequences_could_fill(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(memory_module, "available_memory", lambda: 1 << 40)
    assert build(folder, max_num_seqs=3, max_model_len=100).memory.num_blocks == 3 * 7


def test_the_override_is_taken_as_it_is(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    built = build(folder, num_gpu_blocks_override=5, block_size=3)
    assert (built.memory.num_blocks, built.engine.scheduler.blocks.num_blocks) == (5, 5)
    assert built.memory.num_kv_tokens == 15
    needed = built.memory.workspace + built.memory.kv_pool
    monkeypatch.setattr(memory_module, "available_memory", lambda: needed)
    assert build(folder, num_gpu_blocks_override=5, block_size=3).memory.num_blocks == 5
    with pytest.raises(ConfigError, match=r"--num-gpu-blocks-override 6: .* use at most 5"):
        build(folder, num_gpu_blocks_override=6, block_size=3)


@pytest.mark.parametrize(
    ("settings", "says"),
    [
        ({"max_num_batched_tokens": 1 << 24}, "--max-num-batched-tokens 16777216"),
        ({"max_num_seqs": 1 << 16, "max_num_batched_tokens": 1 << 16, "max_model_len": 16}, "--max-num-seqs 65536"),
        ({"max_model_len": 1 << 20}, "--max-model-len 1048576"),
        ({"max_model_len": 1 << 20, "num_gpu_blocks_override": 1}, "rotary table for --max-model-len 1048576"),
    ],
)
def test_a_step_that_cannot_fit_names_what_is_too_large(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, settings: dict[str, Any], says: str
) -> None:
    """0.7 GB are free; each setting alone needs more."""
    monkeypatch.setattr(memory_module, "available_memory", lambda: 700_000_000)
    long = rand_model(tmp_path, vocab_size=VOCAB, max_position_embeddings=1 << 20)
    with pytest.raises(ConfigError) as caught:
        build(long, **settings)
    assert says in str(caught.value)
    assert " -" not in str(caught.value).replace(" --", ""), "no memory below zero"


def test_too_little_memory_for_one_block_is_a_clear_error(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    workspace = build(folder).memory.workspace
    monkeypatch.setattr(memory_module, "available_memory", lambda: workspace + 1000)
    with pytest.raises(ConfigError, match="no memory is left for the KV cache"):
        build(folder)


def test_the_table_names_all_uses(folder: Path) -> None:
    """Name, size, place and lifetime of each buffer, then what the cache holds."""
    plan = build(folder, num_gpu_blocks_override=64, max_num_seqs=2).memory
    *lines, last = plan.table().splitlines()
    names = ["weights", "rope table", "activations, logits", "KV cache"]
    assert [line.split("  ")[1].strip() for line in lines] == names
    assert all(f" {buffer.num_bytes / 1e6:,.1f} MB " in line for buffer, line in zip(plan.buffers, lines, strict=True))
    lifetimes = [line.split("host  ")[1].split("  ")[0] for line in lines]
    assert lifetimes == ["from start to end", "from start to end", "during a step", "from start to end"]
    assert plan.bytes_of("rope table") == CTX * 32 * 4
    assert "1,024 tokens in 64 blocks: 1.0 sequences of 1,024 tokens" in last


def test_the_cache_has_what_its_specs_say() -> None:
    spec = CacheSpec("full", (0, 2), n_kv_heads=2, head_dim=8)
    assert spec.bytes_per_block(block_size=4, itemsize=4) == 2 * 2 * 4 * 2 * 8 * 4
    cache = make_kv_cache((spec,), num_blocks=5, block_size=4)
    assert sorted(cache.k_cache) == sorted(cache.v_cache) == [0, 2]
    assert {array.shape for arrays in (cache.k_cache, cache.v_cache) for array in arrays.values()} == {(5, 4, 2, 8)}
    total = sum(array.nbytes for arrays in (cache.k_cache, cache.v_cache) for array in arrays.values())
    assert total == 5 * spec.bytes_per_block(4, 4)


# ---- KVM-04

PROMPT = tuple(5 + 7 * i % 900 for i in range(CTX - 1))
WORST: dict[str, list[tuple[int, dict[str, Any]]]] = {  # requests: prompt length, sampling parameters
    "prompt logprobs of the longest prompt": [(CTX - 1, {"prompt_logprobs": 5, "logprobs": 5})],
    "two of them and a full batch": [(CTX - 1, {"prompt_logprobs": 5})] * 2 + [(3, {"max_tokens": 6})] * 62,
    "filters on all rows": [(3, {"top_k": 50, "top_p": 0.9, "min_p": 0.01, "max_tokens": 4})] * 64,
    "penalties and logprobs on all rows": [(3, {"frequency_penalty": 0.5, "logprobs": 20, "max_tokens": 4})] * 64,
    "n at its cap, all choices at the longest prompt": [(CTX - 8, {"n": 128, "max_tokens": 8})],
}


@pytest.mark.parametrize("name", WORST)
def test_kvm_04_the_largest_legal_requests_stay_within_the_plan(folder: Path, name: str) -> None:
    """KVM-04: default settings; the peak of all arrays and objects made while they run is within the workspace."""
    built = build(folder)
    for number, (num_prompt, params) in enumerate(WORST[name]):
        sampling = SamplingParams(**({"max_tokens": 1, "seed": 1} | params))
        built.engine.add(GenerationRequest(str(number), PROMPT[:num_prompt], sampling))
    tracemalloc.start()
    try:
        num_ends = sum(event.finish_reason == "length" for event in drain(built.engine))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert num_ends == sum(params.get("n", 1) for _, params in WORST[name])
    assert peak <= built.memory.workspace, f"{peak / 1e6:.1f} MB of {built.memory.workspace / 1e6:.1f} MB planned"


def test_prompt_logprobs_are_let_go_when_they_have_been_told(folder: Path) -> None:
    """Those of a long prompt take megabytes; a choice that runs on must not hold them."""
    engine = build(folder).engine
    sampling = SamplingParams(max_tokens=5, prompt_logprobs=20)
    engine.add(GenerationRequest("a", PROMPT[:100], sampling))
    first = engine.step()[0]
    assert first.prompt_logprobs is not None
    assert len(first.prompt_logprobs) == 100
    seq = engine.scheduler.running[0]
    assert seq.prompt_logprobs is None
    engine.scheduler.preempt(seq)
    events = list(drain(engine))
    assert len(events) == 4
    assert all(event.prompt_logprobs is None for event in events)


def test_decoding_in_tiles_gives_the_same_numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """Many sequences over the blocks of one long prompt are gathered a tile at a time."""
    rng = np.random.default_rng(0)
    num_seqs, block_size, head_dim = 12, 4, 8
    k_cache, v_cache = rng.normal(size=(2, 40, block_size, 2, head_dim)).astype(np.float32)
    q = rng.normal(size=(num_seqs, 4, head_dim)).astype(np.float32)
    seq_lens = np.array([33, 34, 60, 63, 5, 7, 33, 40, 50, 1, 36, 40], np.int32)
    table = np.stack([rng.permutation(40)[:16] for _ in range(num_seqs)]).astype(np.int32)
    sizes = []
    inner = cpu_attention._decode_group

    def note(q: Any, k: Any, v: Any, block_table: Any, lens: Any, *args: Any) -> Any:
        sizes.append(len(lens) * -(-int(lens.max()) // block_size) * block_size)
        return inner(q, k, v, block_table, lens, *args)

    monkeypatch.setattr(cpu_attention, "_decode_group", note)
    whole = attention_decode(q, k_cache, v_cache, table, seq_lens, 0.3)
    assert max(sizes) > 150
    sizes.clear()
    monkeypatch.setattr(cpu_attention, "DECODE_TILE", 150)
    tiled = attention_decode(q, k_cache, v_cache, table, seq_lens, 0.3)
    assert max(sizes) <= 150
    # sums of up to 63 products of size about 1, in another order
    np.testing.assert_allclose(tiled, whole, rtol=0, atol=64 * 2**-23)
    sizes.clear()
    monkeypatch.setattr(cpu_attention, "DECODE_TILE", 10)
    np.testing.assert_allclose(
        attention_decode(q, k_cache, v_cache, table, seq_lens, 0.3), whole, rtol=0, atol=64 * 2**-23
    )
    assert len(sizes) == num_seqs, "a sequence that is longer than a tile is one of its own"
    assert DECODE_TILE >= 8192
