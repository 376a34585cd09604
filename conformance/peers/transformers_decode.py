"""Decode step times of transformers (torch CPU, float32) on a GGUF file or folder: needs the `oracle` extra.

    python -m conformance.peers.transformers_decode --model starter --batches 1,8

Greedy decoding with its dynamic KV cache, weights dequantized to float32, as many threads as cores.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import time
from pathlib import Path

import numpy as np
import torch
from transformers import AutoModelForCausalLM

PROMPT_TOKENS = 32
STARTER = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache"), "glint")


def load(model: str) -> torch.nn.Module:
    path = next(STARTER.glob("*.gguf")) if model == "starter" else Path(model)
    if path.suffix == ".gguf":
        folder, file = str(path.parent), path.name
        return AutoModelForCausalLM.from_pretrained(folder, gguf_file=file, dtype=torch.float32).eval()
    return AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32).eval()


@torch.inference_mode()
def decode(model: torch.nn.Module, batch: int, num_steps: int) -> float:
    """Median milliseconds a step."""
    rows = [
        np.random.default_rng(i + 1000 * batch).integers(3, model.config.vocab_size, PROMPT_TOKENS)
        for i in range(batch)
    ]
    out = model(input_ids=torch.from_numpy(np.stack(rows)), use_cache=True)
    times = []
    for _ in range(num_steps + 2):
        ids = out.logits[:, -1:].argmax(-1)
        started = time.perf_counter()
        out = model(input_ids=ids, past_key_values=out.past_key_values, use_cache=True)
        times.append((time.perf_counter() - started) * 1e3)
    return statistics.median(times[2:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="starter")
    parser.add_argument("--batches", default="1,8")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    model = load(args.model)
    rows = [
        {"batch": batch, "median_ms": decode(model, batch, args.steps)} for batch in map(int, args.batches.split(","))
    ]
    sys.stdout.write(json.dumps({"torch": torch.__version__, "decode": rows}) + "\n")


if __name__ == "__main__":
    main()
