"""A model's shapes with random weights, on the machine's GPU: the engine whole, scheduling and sampling included.

prefill: one prompt, one token out. decode: (129 tokens − 1 token) / 128 from a context of 1024, for a batch that starts
together. throughput: 256 requests of 512 tokens in and 256 out, all there at the start. Medians of three after a first
run that is not counted. The peer's figures are those of vLLM 0.26.0 on one H200 with the same definitions; they mean
nothing on another GPU, and are left out there.
"""

from __future__ import annotations

import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np

from engine.api import GenerationRequest, SamplingParams
from engine.build import build_engine
from engine.config import CudaArch, EngineConfig
from engine.loop import Engine, drain

SHAPES: dict[str, dict[str, Any]] = {
    "llama-3.1-8b": {
        "architectures": ["LlamaForCausalLM"],
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "num_hidden_layers": 32,
        "vocab_size": 128256,
        "max_position_embeddings": 131072,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "rope_scaling": {
            "rope_type": "llama3",
            "factor": 8.0,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
            "original_max_position_embeddings": 8192,
        },
        "torch_dtype": "bfloat16",
    }
}
# (limit, first goal, peer) of each figure on one H200; prefill and decode in ms, throughput in tokens/s, start in s
H200: dict[str, dict[str, tuple[float, float, float]]] = {
    "llama-3.1-8b": {
        "start": (0.0, 20.0, 60.0),
        "prefill 512": (11.0, 14.0, 14.7),
        "prefill 2048": (44.0, 49.0, 50.3),
        "prefill 8192": (197.0, 215.0, 217.0),
        "decode 1": (3.47, 4.4, 4.98),
        "decode 8": (3.7, 4.7, 5.26),
        "decode 32": (4.4, 5.8, 6.31),
        "decode 64": (5.4, 7.1, 7.82),
        "decode 128": (7.4, 9.8, 10.81),
        "throughput": (12280.0, 10200.0, 9727.0),
    }
}
MORE_IS_BETTER = ("throughput",)
CONTEXT, DECODED = 1024, 128


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    value: float
    limit: float | None
    goal: float | None
    peer: float | None

    @property
    def verdict(self) -> str:
        """met, ahead of the peer, or behind it; "" where there is nothing to compare with."""
        if self.goal is None or self.peer is None:
            return ""
        sign = -1 if self.name in MORE_IS_BETTER else 1
        if sign * self.value <= sign * self.goal:
            return "met"
        return "ahead of the peer" if sign * self.value < sign * self.peer else "BEHIND"


def measure(shape: str, arch: CudaArch = "auto") -> tuple[dict[str, str], list[Figure]]:
    """(machine and settings, figures) of a model of these shapes.

    Args:
        shape: a key of SHAPES.
        arch: EngineConfig.cuda_arch; figures of another than the GPU's own are compared with nothing.
    Raises:
        ConfigError: no GPU here, or one that this model does not fit.
    """
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(SHAPES[shape]), encoding="utf-8")
        config = EngineConfig(
            model=folder,
            device="cuda",
            cuda_arch=arch,
            load_format="dummy",
            max_model_len=16384,
            enable_prefix_caching=False,
        )
        started = time.perf_counter()
        built = build_engine(config, progress=False)
        start = time.perf_counter() - started
    known = H200[shape] if "H200 (sm_90," in built.device else {}
    figures = [
        Figure(name, value, *known.get(name, (None, None, None)))
        for name, value in [("start", start), *_figures(built.engine)]
    ]
    return {"shape": shape, "device": built.device}, figures


def table(about: dict[str, str], figures: list[Figure]) -> str:
    """The figures for people."""
    lines = [f"{about['shape']}, random weights; {about['device']}"]
    lines.append(f"{'':<14}{'measured':>10}{'limit':>10}{'goal':>10}{'peer':>10}")
    for figure in figures:
        beside = "".join(f"{'' if x is None else f'{x:,.5g}':>10}" for x in (figure.limit, figure.goal, figure.peer))
        lines.append(f"{figure.name:<14}{figure.value:>10,.5g}{beside}  {figure.verdict}")
    return "\n".join(lines)


def as_json(about: dict[str, str], figures: list[Figure]) -> str:
    return json.dumps({**about, "figures": [{**asdict(one), "verdict": one.verdict} for one in figures]}, indent=1)


def _figures(engine: Engine) -> Iterator[tuple[str, float]]:
    for length in (512, 2048, 8192):
        yield f"prefill {length}", 1e3 * _median(engine, 1, length, 1)
    for batch in (1, 8, 32, 64, 128):
        whole, first = (_median(engine, batch, CONTEXT, num_tokens) for num_tokens in (DECODED + 1, 1))
        yield f"decode {batch}", 1e3 * (whole - first) / DECODED
    yield "throughput", 256 * 256 / _seconds(engine, 256, 512, 256, seed=0)


def _median(engine: Engine, num_requests: int, num_prompt: int, num_output: int) -> float:
    return statistics.median([_seconds(engine, num_requests, num_prompt, num_output, seed) for seed in range(4)][1:])


def _seconds(engine: Engine, num_requests: int, num_prompt: int, num_output: int, seed: int) -> float:
    """Of greedy requests that are all there at once."""
    rng = np.random.default_rng(seed)
    sampling = SamplingParams(temperature=0.0, max_tokens=num_output, ignore_eos=True)
    vocab_size = engine.limits.vocab_size
    requests = [
        GenerationRequest(str(i), tuple(rng.integers(0, vocab_size, num_prompt).tolist()), sampling)
        for i in range(num_requests)
    ]
    started = time.perf_counter()
    for request in requests:
        engine.add(request)
    num_tokens = sum(len(event.token_ids) for event in drain(engine))
    assert num_tokens == num_requests * num_output, "a request has ended early"
    return time.perf_counter() - started
