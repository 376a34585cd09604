"""The cases: each builds engines of its own on the device that is asked for, and says in words what is wrong."""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from conformance.golden_models import Config, llama_config, llama_tensors, rand_model, write_checkpoint
from conformance.whole_engine.needle import VALUES, needle_model, needle_prompt
from engine.api import GenerationRequest, SamplingParams, TokenLogprob
from engine.bench.answers import Answer, compare
from engine.build import build_engine
from engine.config import EngineConfig
from engine.errors import RequestFailedError
from engine.loop import Engine, drain

TOLERANCES = {"float32": 1e-4, "bfloat16": 0.05, "float16": 0.05}  # of logprobs between shapes of a step
SIZES: Config = {
    "vocab_size": 1000,
    "hidden_size": 256,
    "intermediate_size": 512,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
}
SHARES = (0.01, 0.25, 0.5, 0.75, 0.99)
NUM_OTHERS = (1, 7, 31, 63)
REPEATS = 5
BAD_ID, BAD_WEIGHT = 999, np.nan  # a token whose embedding is nothing to compute with


@dataclass(frozen=True, slots=True)
class Device:
    """What engines are built for; length: tokens of the longest prompt."""

    name: str
    dtype: str
    length: int

    @property
    def tolerance(self) -> float:
        return TOLERANCES[self.dtype]

    def engine(self, folder: Path, **settings: Any) -> Engine:
        common = {"model": str(folder), "device": self.name, "dtype": self.dtype}
        return build_engine(EngineConfig(**(common | settings)), progress=False).engine


@dataclass(slots=True)
class Output:
    answer: Answer
    prompt_logprobs: Sequence[TokenLogprob | None] = ()
    num_cached_tokens: int = 0
    error: str | None = None


def run(engine: Engine, prompts: Mapping[str, Sequence[int]], num_output: int, **sampling: Any) -> dict[str, Output]:
    """Greedy answers to prompts that all are there at the start."""
    for name, prompt in prompts.items():
        params: dict[str, Any] = {"temperature": 0.0, "max_tokens": num_output, "ignore_eos": True, "logprobs": 2}
        engine.add(GenerationRequest(name, tuple(prompt), SamplingParams(**(params | sampling))))
    outputs = {name: Output(Answer()) for name in prompts}
    for event in drain(engine):
        output = outputs[event.request_id]
        output.answer.token_ids += event.token_ids
        output.answer.logprobs += [entry.logprob for entry in event.logprobs or ()]
        output.answer.alternatives += [[logprob for _, logprob in entry.top] for entry in event.logprobs or ()]
        output.answer.finish_reason = event.finish_reason
        output.num_cached_tokens = event.num_cached_tokens
        output.prompt_logprobs = event.prompt_logprobs or output.prompt_logprobs
        output.error = event.error
    return outputs


def unequal(quiet: Answer, other: Answer, tolerance: float) -> str:
    """What is wrong with another run of the same request, as the project defines equal; "" if nothing is."""
    try:
        found = compare(quiet, other)
    except RequestFailedError as error:
        return str(error)
    worst = max(found.differences, default=0.0)
    if worst > tolerance:
        return f"logprobs differ by {worst:.4g}, tolerance {tolerance}"
    if found.gap is not None and found.gap >= tolerance:
        return f"another token at {found.num_equal}, where the two best are {found.gap:.4g} apart"
    return ""


def neighbours(device: Device) -> list[str]:
    """KRN-01: one request alone and among others, with logprobs and without (then steps overlap), five times each."""
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = rand_model(scratch, dtype=device.dtype, **SIZES)
        engine = device.engine(folder, num_gpu_blocks_override=1200, max_num_seqs=64, enable_prefix_caching=False)
        quiet = run(engine, {"one": _ids(19, 0)}, 40)["one"].answer
        for num_others in NUM_OTHERS:
            others = {str(i): _ids(3 + 5 * i % 60, i + 1) for i in range(num_others)}
            for logprobs in (2, None):
                runs = [run(engine, others | {"one": _ids(19, 0)}, 40, logprobs=logprobs) for _ in range(REPEATS)]
                name = f"{num_others} others, {'with' if logprobs else 'without'} logprobs"
                if any(again != runs[0] for again in runs[1:]):
                    wrong.append(f"{name}: the same traffic gave other bits")
                if said := unequal(quiet, runs[0]["one"].answer, device.tolerance):
                    wrong.append(f"{name}: {said}")
    return wrong


def needle(device: Device) -> list[str]:
    """KRN-09: a value that stands far before the question, in chunks, with a cached first half, and four at once."""
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = needle_model(scratch, device.length + 16, device.dtype)
        num_blocks = 4 * (-(-device.length // 16) + 2)
        engine = device.engine(folder, num_gpu_blocks_override=num_blocks, max_num_seqs=4)

        def ask(name: str, prompts: Mapping[str, Sequence[int]], wanted: Sequence[int]) -> list[Output]:
            found = list(run(engine, prompts, 3, logprobs=None).values())
            for output, value in zip(found, wanted, strict=True):
                if output.answer.token_ids != [value] * 3:
                    wrong.append(f"{name}: found {output.answer.token_ids}, expected {value}; {output.error or ''}")
            return found

        for share, value in zip(SHARES, VALUES, strict=False):
            ask(f"at {share:.0%}", {"one": needle_prompt(device.length, share, value)}, [value])
        prompt = needle_prompt(device.length, 0.25, VALUES[5])
        half = device.length // 2
        changed = prompt[:half] + needle_prompt(device.length - half, 0.1, VALUES[6], seed=1)[:-1] + prompt[-1:]
        changed[changed.index(VALUES[6])] = changed[-2]  # the needle is in the first half alone
        ask("at 25 %", {"one": prompt}, [VALUES[5]])
        (cached,) = ask("first half cached", {"one": changed}, [VALUES[5]])
        if cached.num_cached_tokens < half - 16:
            wrong.append(f"first half cached: {cached.num_cached_tokens} tokens were found, expected {half}")
        four = {
            str(value): needle_prompt(device.length, share, value, value)
            for share, value in zip(SHARES, VALUES[:4], strict=False)
        }
        ask("four at once", four, VALUES[:4])
    return wrong


def bad_logits(device: Device) -> list[str]:
    """SAM-05: a token whose embedding is NaN ends its own request with an error, also while steps overlap; the blocks
    that it leaves hurt nobody.
    """
    wrong: list[str] = []
    config = llama_config(**SIZES, torch_dtype=device.dtype)
    tensors = llama_tensors(config, seed=0)
    tensors["model.embed_tokens.weight"][BAD_ID] = BAD_WEIGHT
    tensors["lm_head.weight"][BAD_ID] = 0.0  # nobody says it
    with tempfile.TemporaryDirectory() as scratch:
        folder = write_checkpoint(scratch, config, tensors)
        engine = device.engine(folder, num_gpu_blocks_override=24, max_num_seqs=8)
        healthy = {str(i): _ids(9 + i, i) for i in range(3)}
        quiet = {name: run(engine, {name: prompt}, 12)[name].answer for name, prompt in healthy.items()}
        bad = {"bad": [*_ids(30, 9), BAD_ID, 5], "bad at its end": [*_ids(30, 9), BAD_ID]}
        for logprobs in (2, None, 2):
            before = engine.stats()
            outputs = run(engine, healthy | bad, 12, logprobs=logprobs)
            for name in bad:
                if "NaN or infinite" not in (outputs[name].error or ""):
                    wrong.append(f"{name}: error {outputs[name].error!r}")
            for name, answer in quiet.items():
                if said := unequal(answer, outputs[name].answer, device.tolerance):
                    wrong.append(f"beside a bad request: {said}")
            after = engine.stats()
            if (after.bad_rows - before.bad_rows, after.failed_steps) != (2, 0):
                wrong.append(f"{after.bad_rows - before.bad_rows} bad rows, {after.failed_steps} failed steps")
        after_it = run(engine, {"late": _ids(200, 11)}, 12)["late"]  # over blocks that held NaN
        alone = run(device.engine(folder, num_gpu_blocks_override=24), {"late": _ids(200, 11)}, 12)["late"]
        if said := unequal(alone.answer, after_it.answer, device.tolerance):
            wrong.append(f"blocks that held NaN: {said}")
    return wrong


def prompt_logprobs(device: Device) -> list[str]:
    """API-09 and PFX-08: complete, and the same cold, warm and in chunks."""
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as scratch:
        folder = rand_model(scratch, dtype=device.dtype, **SIZES)
        whole = device.engine(folder, num_gpu_blocks_override=64)
        chunked = device.engine(folder, num_gpu_blocks_override=64, max_num_batched_tokens=32, max_num_seqs=4)
        prompt = {"one": _ids(150, 3)}
        cold = run(whole, prompt, 1, prompt_logprobs=2)["one"].prompt_logprobs
        run(whole, prompt, 1)
        for name, engine in (("warm", whole), ("in chunks", chunked)):
            found = run(engine, prompt, 1, prompt_logprobs=2)["one"].prompt_logprobs
            if [entry and entry.token_id for entry in found] != [None, *prompt["one"][1:]]:
                wrong.append(f"{name}: not the prompt's tokens in order")
                continue
            pairs = list(zip(cold[1:], found[1:], strict=True))
            worst = max(abs(a.logprob - b.logprob) for a, b in pairs if a is not None and b is not None)
            if worst > device.tolerance:
                wrong.append(f"{name}: logprobs differ by {worst:.4g}")
    return wrong


CASES: dict[str, Callable[[Device], list[str]]] = {
    "KRN-01 neighbours": neighbours,
    "KRN-09 needle": needle,
    "SAM-05 bad logits": bad_logits,
    "API-09 PFX-08 prompt logprobs": prompt_logprobs,
}


def _ids(count: int, seed: int) -> list[int]:
    found: list[int] = np.random.default_rng([seed, 5]).integers(3, BAD_ID, count).tolist()
    return found
