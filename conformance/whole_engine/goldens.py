"""Every golden of a dense family through the whole engine: scheduler, preemption, graphs, sampler and all.

Greedy answers to three prompts at once from a pool that is too small for their ends. The logprobs of all tokens, of the
prompts too, are held to ref over the same tokens by the rule of conformance.tolerance; and no token is chosen that ref
puts below another by more than both may err.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import numpy as np
from numpy.typing import NDArray

from conformance.case import HALVES
from conformance.compare import compare
from conformance.golden_families import family_tensors
from conformance.golden_models import GOLDEN_SEED, random_ids
from conformance.kernel_models import MODELS, PROMPT_LENGTHS, write_model
from conformance.tolerance import FACTOR, RULE
from conformance.whole_engine.cases import Device, Output, run
from ref.config import parse_config
from ref.model.cache import Cache
from ref.model.registry import forward
from ref.numerics import round_to
from ref.sampling import log_softmax

Array = NDArray[Any]

NUM_OUTPUT, BLOCK_SIZE = 12, 4
NUM_BLOCKS = 20  # the prompts take 2 + 6 + 10, with their ends 5 + 9 + 13


def golden(name: str, device: Device) -> list[str]:
    """A model of MODELS."""
    config = parse_config(MODELS[name])
    prompts = random_ids(config.vocab_size, PROMPT_LENGTHS)
    weights = family_tensors(MODELS[name], GOLDEN_SEED)
    with tempfile.TemporaryDirectory() as folder:
        engine = device.engine(
            write_model(folder, name, weights),
            block_size=BLOCK_SIZE,
            num_gpu_blocks_override=NUM_BLOCKS,
            max_model_len=max(PROMPT_LENGTHS) + NUM_OUTPUT,
            max_num_seqs=len(prompts),
            max_num_batched_tokens=32,
        )
    named = {str(i): prompt for i, prompt in enumerate(prompts)}
    outputs = run(engine, named, NUM_OUTPUT, logprobs=0, prompt_logprobs=0)
    stats = engine.stats()
    wrong = [f"{stats.failed_steps} steps failed"] * bool(stats.failed_steps)
    wrong += ["nothing was preempted"] * (not stats.preemptions)
    stored = {key: round_to(value, device.dtype) for key, value in weights.items()}
    for number, prompt in named.items():
        said = _judge(partial(_logits, config, stored, len(prompt)), prompt, outputs[number], device.dtype)
        wrong += [f"prompt of {len(prompt)}: {problem}" for problem in said]
    return wrong


def _logits(
    config: Any, weights: dict[str, Array], num_prompt: int, ids: Sequence[int], dtype: Any, storage: Any
) -> Array:
    """Of ref, [num_tokens, vocab_size], with the rope table that the prompt chooses."""
    cache = Cache(len(ids), BLOCK_SIZE, table_tokens=num_prompt)
    converted = {name: value.astype(dtype) for name, value in weights.items()}
    return forward(config, converted, ids, cache=cache, storage=storage)


def _judge(logits: Callable[..., Array], prompt: Sequence[int], output: Output, dtype: str) -> list[str]:
    """What is wrong with the answer to a prompt."""
    if output.error is not None or len(output.answer.token_ids) != NUM_OUTPUT:
        return [f"{len(output.answer.token_ids)} tokens, error {output.error}"]
    ids = [*prompt, *output.answer.token_ids]
    truth = logits(ids, np.float64, None)
    rounded = logits(ids, np.float32, dtype if dtype in HALVES else None)
    rows = np.arange(len(ids) - 1)
    truth_logprobs, yardstick = (log_softmax(found)[rows, ids[1:]] for found in (truth, rounded))
    told = [entry.logprob for entry in output.prompt_logprobs if entry is not None] + output.answer.logprobs
    result = compare(np.array(told, np.float32), truth_logprobs, yardstick.astype(np.float32), RULE, dtype)
    wrong = [f"logprobs: {result.problem}"] if result.problem else []
    for row in rows[len(prompt) - 1 :]:
        short = truth[row].max() - truth[row, ids[row + 1]]
        margin = 2 * FACTOR * np.abs(rounded[row] - truth[row]).max()
        if short > margin:
            wrong.append(f"token {ids[row + 1]} at {row + 1} is {short:.3g} below the best, margin {margin:.3g}")
    return wrong


CASES: dict[str, Callable[[Device], list[str]]] = {f"golden {name}": partial(golden, name) for name in MODELS}
