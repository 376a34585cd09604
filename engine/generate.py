"""`python -m engine.generate --prompt TEXT`: complete prompts offline, without a server.

Takes the flags of engine.serve that make sense without one, such as --model; --chat sends the prompt as a user's
message. Text (token ids, if the model has no tokenizer) goes to standard output, everything else to standard error.
"""

from __future__ import annotations

import argparse
import os
import sys
from dataclasses import replace

from engine.env import launched_rank
from engine.errors import ConfigError, GlintError
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
    parser.add_argument("--prompt", action="append", default=[], help="text to complete; may be given several times")
    parser.add_argument("--ids", action="append", default=[], type=_ids, help="token ids to complete, such as 1,2,3")
    parser.add_argument("--chat", action="store_true", help="send each prompt as a user's message")
    parser.add_argument("--max-tokens", type=int, default=128, help="longest output, in tokens")
    parser.add_argument("--temperature", type=float, default=None, help="0 for greedy; the model's own by default")
    parser.add_argument("--sampling-seed", type=int, default=None, help="seed of the draws")
    arguments, rest = parser.parse_known_args(argv)
    set_up_logging("generate", "WARNING")
    try:
        config = parse_args(rest, PROG, [action.option_strings[0] for action in parser._actions])
        if not arguments.prompt and not arguments.ids:
            raise ConfigError("nothing to complete: give --prompt TEXT or --ids 1,2,3")
        llm = LLM.from_config(config)
        sampling = replace(default_sampling(llm.info), max_tokens=arguments.max_tokens, seed=arguments.sampling_seed)
        if arguments.temperature is not None:
            sampling = replace(sampling, temperature=arguments.temperature)
        if arguments.chat:
            outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in arguments.prompt], sampling)
        else:
            outputs = llm.generate([*arguments.prompt, *arguments.ids], sampling)
    except GlintError as error:
        if launched_rank(os.environ) == 0:
            print(f"engine.generate: {error}", file=sys.stderr)
        return 1
    for output in outputs:
        print(",".join(map(str, output.token_ids)) if output.text is None else output.text)
    return 0


def _ids(text: str) -> tuple[int, ...]:
    try:
        return tuple(int(part) for part in text.split(","))
    except ValueError:
        raise argparse.ArgumentTypeError(f"{text!r} is no list of token ids such as 1,2,3") from None


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
