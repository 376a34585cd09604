"""A model's shapes with random weights, on the machine's GPU: the engine whole, scheduling and sampling included.

start: from the call to an engine that takes requests, imports excluded, its kernels in the cache; cold start: the same
in a process of its own with all caches empty. prefill: one prompt, one token out. decode: (129 tokens − 1 token) / 128
from a context of 1024, for a batch that starts together. throughput: 256 requests of 512 tokens in and 256 out, all
there at the start. Medians of three after a first run that is not counted; starts once. The peer's figures are those of
vLLM 0.26.0 on one H200 with the same definitions; they mean nothing on another GPU, and are left out there.
"""

from __future__ import annotations

import contextlib
import importlib
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np

from engine.api import GenerationRequest, SamplingParams
from engine.bench.machine import about
from engine.bench.model_shapes import QUANTS, SHAPES
from engine.build import build_engine
from engine.comm.ways import may_use_peer
from engine.config import AllReduce, CudaArch, DualStream, EngineConfig
from engine.errors import ConfigError
from engine.loop import Engine, drain

W4A8: dict[str, tuple[float | None, float | None, float | None]] = {  # the limit at 1250 TFLOP/s
    "prefill 512": (58.0, 80.0, 107.0),
    "prefill 2048": (235.0, 320.0, 423.0),
    "prefill 8192": (994.0, 1400.0, 1894.0),
}
# (limit, first goal, peer) of each figure on one H200; prefill and decode in ms, throughput in tokens/s, start in s
H200: dict[str, dict[str, tuple[float | None, float | None, float | None]]] = {
    "llama-3.1-8b": {
        "cold start": (None, 60.0, None),
        "start": (None, 20.0, 60.0),
        "prefill 512": (11.0, 14.0, 14.7),
        "prefill 2048": (44.0, 49.0, 50.3),
        "prefill 8192": (197.0, 215.0, 217.0),
        "decode 1": (3.47, 4.4, 4.98),
        "decode 8": (3.7, 4.7, 5.26),
        "decode 32": (4.4, 5.8, 6.31),
        "decode 64": (5.4, 7.1, 7.82),
        "decode 128": (7.4, 9.8, 10.81),
        "throughput": (12280.0, 10200.0, 9727.0),
    },
    "llama-3.1-8b int8": {"decode 1": (1.9, 2.6, None)},
    "llama-3.1-8b fp8": {"decode 1": (1.9, 2.6, None)},
    "llama-3.1-8b fp8-block": {"decode 1": (1.9, 2.6, None)},
    "qwen2-72b gptq-int4": {
        "prefill 512": (99.0, 103.0, 107.0),
        "prefill 2048": (403.0, 405.0, 423.0),
        "prefill 8192": (1702.0, 1800.0, 1894.0),
        "decode 1": (8.9, 13.0, 20.1),
        "decode 16": (10.1, 14.5, 21.6),
    },
    **{f"qwen2-72b gptq-int4 w4a8={kind}": W4A8 for kind in ("fp8", "int8")},
    "llama-3.1-70b TP 2, no P2P": {
        "prefill 512": (55.0, 100.0, 119.0),
        "prefill 2048": (212.0, 290.0, 389.0),
        "prefill 8192": (926.0, 1180.0, 1566.0),
        "decode 1": (15.9, 19.5, 22.7),
        "decode 16": (16.5, 23.0, 26.7),
        "decode 64": (18.4, 30.0, 36.5),
    },
    "llama-3.1-70b TP 2": {
        "prefill 512": (55.0, None, 92.0),
        "prefill 2048": (212.0, None, 252.0),
        "prefill 8192": (926.0, None, 1030.0),
        "decode 1": (15.9, None, 21.0),
        "decode 16": (16.5, None, 21.5),
    },
    "qwen2-72b gptq-int4 TP 2, no P2P": {"prefill 2048": (208.0, 255.0, None), "decode 1": (5.3, 7.7, None)},
}
MORE_IS_BETTER = ("throughput",)
CONTEXT, DECODED = 1024, 128
PREFILLS, BATCHES = (512, 2048, 8192), (1, 8, 16, 32, 64, 128)
SMALL = "small random weights"
COLD, START, THROUGHPUT = "cold start", "start", "throughput"
CACHES = ("XDG_CACHE_HOME", "CUPY_CACHE_DIR", "CUDA_CACHE_PATH")  # of our kernels, CuPy's, and the driver's


@dataclass(frozen=True, slots=True)
class Split:
    """EngineConfig's fields of these names."""

    tensor_parallel_size: int = 1
    pipeline_parallel_size: int = 1
    allreduce: AllReduce = "auto"
    dual_stream: DualStream = "auto"

    @property
    def text(self) -> str:
        """ "TP 2, no P2P"; "" for one GPU."""
        sizes = (("TP", self.tensor_parallel_size), ("PP", self.pipeline_parallel_size))
        words = [f"{name} {size}" for name, size in sizes if size > 1]
        return "".join([" × ".join(words), "" if may_use_peer(os.environ) else ", no P2P"]) if words else ""


ONE_GPU = Split()


@dataclass(frozen=True, slots=True)
class Figure:
    name: str
    value: float
    limit: float | None
    goal: float | None
    peer: float | None
    tflops: float | None = None  # TFLOP/s, of a prefill

    @property
    def share(self) -> float | None:
        """Of what the limit allows."""
        if self.limit is None:
            return None
        return self.value / self.limit if self.name in MORE_IS_BETTER else self.limit / self.value

    @property
    def verdict(self) -> str:
        """met; missed, but ahead of the peer if there is one; BEHIND it; "" where there is nothing to compare with."""
        sign = -1 if self.name in MORE_IS_BETTER else 1
        if self.goal is not None and sign * self.value <= sign * self.goal:
            return "met"
        if self.peer is None:
            return "" if self.goal is None else "missed"
        return "ahead of the peer" if sign * self.value < sign * self.peer else "BEHIND"


def measure(
    shape: str,
    arch: CudaArch = "auto",
    cold: bool = False,
    only: Sequence[str] = (),
    quant: str = "",
    w4a8: Literal["off", "int8", "fp8"] = "off",
    is_small: bool = False,
    split: Split = ONE_GPU,
    say: Callable[[str], None] = lambda line: None,
) -> tuple[dict[str, str], list[Figure]]:
    """(machine and settings, figures) of a model of these shapes.

    Args:
        shape: a key of SHAPES.
        arch: EngineConfig.cuda_arch; figures of another than the GPU's own are compared with nothing.
        cold: measure a cold start too; the start after it then finds what that one has compiled, and nothing else.
        only: which figures to measure, by name or the first word of it; none = those that have a goal, or all.
        quant: a key of QUANTS; "" = not quantized.
        w4a8: EngineConfig.w4a8.
        is_small: weights as small as those with which the peer was timed: --load-format dummy-small.
        split: over how many ranks, and how they add up.
        say: told each figure once it is known: all of them take minutes.
    Raises:
        ConfigError: no GPU here, or one that this model does not fit.
        Followed: on ranks other than 0.
    """
    values: list[tuple[str, float]] = []
    words = shape, quant, "" if w4a8 == "off" else f"w4a8={w4a8}", split.text
    name_of_all = " ".join(filter(None, words))
    goals = H200.get(name_of_all, {})
    with tempfile.TemporaryDirectory() as folder:
        if cold:
            os.environ |= {name: str(Path(folder, name)) for name in CACHES}
            values.append((COLD, _cold_start(shape, arch, quant)))
        stored = {"quantization_config": QUANTS[quant]} if quant else {}
        Path(folder, "config.json").write_text(json.dumps(SHAPES[shape] | stored), encoding="utf-8")
        config = EngineConfig(
            model=folder,
            device="cuda",
            cuda_arch=arch,
            w4a8=w4a8,
            load_format="dummy-small" if is_small else "dummy",
            max_model_len=16384,
            enable_prefix_caching=False,
            tensor_parallel_size=split.tensor_parallel_size,
            pipeline_parallel_size=split.pipeline_parallel_size,
            allreduce=split.allreduce,
            dual_stream=split.dual_stream,
        )
        with contextlib.suppress(ImportError):  # build_engine says what is missing
            importlib.import_module("engine.backends.cuda")
        started = time.perf_counter()
        built = build_engine(config, progress=False)
        values.append((START, time.perf_counter() - started))
        asked = only or [name for name in MEASURES if name in goals]
        wanted = [name for name in MEASURES if not asked or any(f"{name} ".startswith(f"{one} ") for one in asked)]
        for name in wanted:
            say(f"{values[-1][0]}: {values[-1][1]:.5g}")
            values.append((name, MEASURES[name](built.engine)))
    known = goals if "H200 (sm_90," in built.device else {}
    figures = []
    for name, value in values:
        limit, goal, peer = known.get(name, (None, None, None))
        figures.append(Figure(name, value, limit, goal, peer, _tflops(shape, name, value)))
    settings = {"shape": name_of_all, **({"weights": SMALL} if is_small else {}), **about(built.device)}
    return settings | ({"allreduce": split.allreduce, "dual_stream": split.dual_stream} if split.text else {}), figures


def _cold_start(shape: str, arch: str, quant: str) -> float:
    """Seconds, in a process of its own that has the caches of this one."""
    options = ["--model-shape", shape, "--arch", arch, "--only", START, "--json", "-"]
    options += ["--quant", quant] if quant else []
    command = [sys.executable, "-m", "engine.bench", "offline", *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise ConfigError(f"the cold start failed: {done.stderr.strip()}")
    return float(json.loads(done.stdout)["figures"][0]["value"])


def prefill_flops(shape: str, num_tokens: int) -> int:
    """Multiplications and additions of one prompt: linear layers, causal attention, the head for one token."""
    values = SHAPES[shape]
    hidden, heads, kv_heads = values["hidden_size"], values["num_attention_heads"], values["num_key_value_heads"]
    head_dim = hidden // heads
    weights = hidden * head_dim * (2 * heads + 2 * kv_heads) + 3 * hidden * values["intermediate_size"]
    attention = 2 * num_tokens * num_tokens * heads * head_dim
    layers = values["num_hidden_layers"] * (2 * num_tokens * weights + attention)
    return int(layers + 2 * hidden * values["vocab_size"])


def _tflops(shape: str, name: str, value: float) -> float | None:
    kind, _, count = name.partition(" ")
    return prefill_flops(shape, int(count)) / value * 1e-9 if kind == "prefill" else None


def table(about: dict[str, str], figures: list[Figure]) -> str:
    """The figures for people."""
    lines = [f"{about['shape']}, {about.get('weights', 'random weights')}; {about['device']}"]
    lines.append(f"{'':<14}{'measured':>10}{'limit':>10}{'share':>8}{'goal':>10}{'peer':>10}{'TFLOP/s':>9}")
    for figure in figures:
        limit, goal, peer = ("" if x is None else f"{x:,.5g}" for x in (figure.limit, figure.goal, figure.peer))
        share = "" if figure.share is None else f"{figure.share:.0%}"
        tflops = "" if figure.tflops is None else f"{figure.tflops:.0f}"
        lines.append(
            f"{figure.name:<14}{figure.value:>10,.5g}{limit:>10}{share:>8}{goal:>10}{peer:>10}{tflops:>9}"
            f"  {figure.verdict}".rstrip()
        )
    return "\n".join(lines)


def as_json(about: dict[str, str], figures: list[Figure]) -> str:
    records = [{**asdict(one), "share": one.share, "verdict": one.verdict} for one in figures]
    return json.dumps({**about, "figures": records}, indent=1)


def _prefill(length: int, engine: Engine) -> float:
    return 1e3 * _median(engine, 1, length, 1)


def _decode(batch: int, engine: Engine) -> float:
    whole, first = (_median(engine, batch, CONTEXT, num_tokens) for num_tokens in (DECODED + 1, 1))
    return 1e3 * (whole - first) / DECODED


def _throughput(engine: Engine) -> float:
    return 256 * 256 / _median(engine, 256, 512, 256)


MEASURES: dict[str, Callable[[Engine], float]] = {
    **{f"prefill {length}": partial(_prefill, length) for length in PREFILLS},
    **{f"decode {batch}": partial(_decode, batch) for batch in BATCHES},
    THROUGHPUT: _throughput,
}


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
