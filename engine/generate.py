"""`python -m engine.generate --prompt TEXT`: complete prompts offline, without a server.

Takes the flags of engine.serve that make sense without one, such as --model; --chat sends the prompt as a user's
message. Text goes to standard output, everything else to standard error.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import fields, replace

from engine.config import EngineConfig
from engine.errors import GlintError
from engine.llm import LLM
from engine.log import set_up_logging
from engine.options import parse_args
from engine.text import default_sampling

PROG = "python -m engine.generate"


def main(argv: list[str]) -> int:
    """Returns the exit code."""
    parser = argparse.ArgumentParser(
        prog=PROG, description="Completes prompts offline. Other flags are those of engine.serve.", allow_abbrev=False
    )
    parser.add_argument("--prompt", action="append", required=True, help="text to complete; may be given several times")
    parser.add_argument("--chat", action="store_true", help="send each prompt as a user's message")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest output, in tokens")
    parser.add_argument("--temperature", type=float, default=None, help="0 for greedy; the model's own by default")
    parser.add_argument("--sampling-seed", type=int, default=None, help="seed of the draws")
    arguments, rest = parser.parse_known_args(argv)
    set_up_logging("generate", "WARNING")
    try:
        config = parse_args(rest, PROG)
        llm = LLM(**{field.name: getattr(config, field.name) for field in fields(EngineConfig)})
        sampling = replace(default_sampling(llm.info), max_tokens=arguments.max_tokens, seed=arguments.sampling_seed)
        if arguments.temperature is not None:
            sampling = replace(sampling, temperature=arguments.temperature)
        if arguments.chat:
            outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in arguments.prompt], sampling)
        else:
            outputs = llm.generate(arguments.prompt, sampling)
    except GlintError as error:
        print(f"engine.generate: {error}", file=sys.stderr)
        return 1
    for output in outputs:
        print(output.text)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
