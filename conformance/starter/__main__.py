"""`python -m conformance.starter [--device cpu|cuda] [--dtype …] [--json FILE]`: the starter model, served as always,
against transformers: in one batch, alone with a warm prefix cache, without logprobs so that steps overlap, as a prompt,
in small blocks and chunks, and preempted. A line a run; exit status 1 where one is too far off.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from conformance.case import HALVES
from conformance.starter.follow import CLAIM, GOLDEN, Bound, Deviation, bound_for, follow, score, yardstick
from engine.build import build_engine
from engine.config import EngineConfig
from engine.errors import GlintError
from engine.faults import Faults

NUM_BLOCKS = 512
CHUNKED = ("raw_long", "raw_code", "chat_capital", "raw_chinese")


def runs(device: str, dtype: str) -> Iterator[tuple[str, Deviation]]:
    """Every run and what it gave. Raises ConfigError where the machine cannot be had."""
    common: dict[str, Any] = {"device": device, "dtype": dtype, "num_gpu_blocks_override": NUM_BLOCKS}
    engine = build_engine(EngineConfig(**common)).engine
    yield "one batch", follow(engine, GOLDEN)
    alone = Deviation()
    for entry in GOLDEN:
        one = follow(engine, [entry])
        alone.differences += one.differences
        alone.gaps += one.gaps
        alone.num_places += one.num_places
    assert engine.stats().prefix_hit_tokens, "the prefix cache was to be warm"
    yield "alone, warm prefix cache", alone
    yield "one batch, steps that overlap", follow(engine, GOLDEN, with_logprobs=False)
    yield "as prompts", score(engine, GOLDEN)
    del engine
    entries = [entry for entry in GOLDEN if entry["name"] in CHUNKED]
    small = EngineConfig(**common, block_size=5, max_num_batched_tokens=33, max_num_seqs=4)
    yield "blocks of 5, chunks of 33", follow(build_engine(small).engine, entries)
    faults = Faults(preempt_at={"raw_long": {250, 260}, "raw_code": {20}})
    engine = build_engine(EngineConfig(**common, enable_prefix_caching=False), faults).engine
    yield "preempted, no prefix cache", follow(engine, entries)
    assert engine.stats().preemptions == 3


def line(name: str, found: Deviation, bound: Bound | None) -> str:
    """One run for people."""
    wrong = [] if bound is None else bound.faults(found)
    verdict = "" if bound is None else f"  FAILED: {', '.join(wrong)}" if wrong else "  ok"
    return (
        f"{name:<30} {len(found.differences):5d} logprobs: rms {found.rms:.5f}, worst {found.worst:.5f}, "
        f"{found.share_within(CLAIM):6.1%} within {CLAIM}; {len(found.gaps):2d} other tokens, "
        f"from gaps of at most {found.largest_gap:.5f}{verdict}"
    )


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m conformance.starter", description=__doc__)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument(
        "--dtype", choices=("float32", "bfloat16", "float16"), help="default: float32, bfloat16 on a GPU"
    )
    parser.add_argument("--json", help="file for the report")
    args = parser.parse_args(arguments)
    dtype = args.dtype or ("float32" if args.device == "cpu" else "bfloat16")
    bound = bound_for(dtype)
    if dtype in HALVES:
        print(line(f"transformers in {dtype}", yardstick(dtype), None))
    print(f"{args.device}, {dtype}: passes up to rms {bound.rms:.4f}, worst {bound.worst:.4f}")
    report, failed = {}, False
    try:
        for name, found in runs(args.device, dtype):
            print(line(name, found, bound), flush=True)
            failed |= bool(bound.faults(found))
            report[name] = {
                "rms": found.rms,
                "worst": found.worst,
                "within_claim": found.share_within(CLAIM),
                "largest_gap": found.largest_gap,
            }
    except GlintError as error:
        print(f"python -m conformance.starter: {error}", file=sys.stderr)
        return 2
    if args.json:
        whole = {"device": args.device, "dtype": dtype, "bound": [bound.rms, bound.worst], "runs": report}
        Path(args.json).write_text(json.dumps(whole, indent=1) + "\n", encoding="utf-8")
    return int(failed)


if __name__ == "__main__":
    sys.exit(main())
