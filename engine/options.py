"""The flags of `python -m engine.serve`: one table makes the command line, --help, the config file and the docs.

A flag has the name of its EngineConfig field, and its default. `python -m engine.options` prints the table that the
README shows between `<!-- flags -->` and `<!-- /flags -->`.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import sys
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, NoReturn

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.option_values import integer, number, switch, text, texts
from engine.vllm_flags import LACKING

DEFAULTS = {f.name: f.default for f in fields(EngineConfig)}
Convert = Callable[[object], Any]


@dataclass(frozen=True, slots=True)
class Option:
    """One flag. Where it is no field of EngineConfig, only the values in served are accepted, and change nothing."""

    name: str  # of the EngineConfig field
    convert: Convert  # from a text of the command line or a value of a config file; ValueError says what is wrong
    help: str
    aliases: tuple[str, ...] = ()
    metavar: str = ""
    served: tuple[object, ...] = ()  # of a flag that is no field
    instead: str = ""  # for a value that is not served: what there is

    @property
    def flag(self) -> str:
        return "--" + self.name.replace("_", "-")

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.flag, *self.aliases)

    @property
    def is_field(self) -> bool:
        return self.name in DEFAULTS

    @property
    def shown_default(self) -> str:
        """The default as it would be typed; empty where there is none."""
        default = DEFAULTS.get(self.name, self.served[0] if self.served else None)
        if self.convert is switch:
            return "on" if default else "off"
        return "" if default in (None, (), "") else str(default)


OPTIONS = (
    Option("model", text, "a folder, a .gguf file, a Hugging Face repo id, or starter (SmolLM2-135M-Instruct)"),
    Option("served_model_name", texts, "names accepted as model in requests; the first is the default", metavar="NAME"),
    Option("host", text, "address to listen on; 0.0.0.0 for all interfaces"),
    Option("port", integer, "port to listen on; 0 takes a free one"),
    Option("root_path", text, "path under which a proxy shows the server", metavar="PATH"),
    Option("api_key", texts, "keys of which a client must send one; without any, everybody may ask", metavar="KEY"),
    Option("allowed_origins", texts, "origins of web pages that may call the server (CORS); none", metavar="ORIGIN"),
    Option("chat_template", text, "a Jinja chat template or the file of one, in place of the model's"),
    Option("device", text, "where the model runs; auto: on a GPU if one can run it", metavar="auto|cuda|cpu"),
    Option(
        "cuda_arch",
        text,
        "the kernels of an older kind of GPU, as it would run them; by default those of the GPU that is there",
        metavar="auto|sm_80|sm_86|sm_89|sm_90|sm_100|sm_120",
    ),
    Option(
        "dtype",
        text,
        "type of weights and activations; a CPU takes only float32, which is auto there",
        metavar="auto|float32|bfloat16|float16",
    ),
    Option(
        "kv_cache_dtype",
        text,
        "type of the KV cache; auto: that of activations. The others are of 8 bits, with a scale for each head of each "
        "token, and hold nearly twice the tokens; fp8 is fp8_e4m3",
        metavar="auto|fp8|fp8_e4m3|int8",
    ),
    Option(
        "w4a8",
        text,
        "quantize the activations of steps of 256 tokens and more where weights have 4 bits, on a GPU of compute "
        "capability 9.0: quicker, as measured",
        metavar="off|int8|fp8",
    ),
    Option(
        "load_format",
        text,
        "dummy fills the weights from the seed instead of the files, dummy-small with small numbers",
        metavar="auto|dummy|dummy-small",
    ),
    Option("seed", integer, "seed of dummy weights and of requests that bring none"),
    Option("max_model_len", integer, "longest prompt and output together, in tokens; the model's own limit by default"),
    Option("block_size", integer, "tokens in a block of the KV cache"),
    Option("num_gpu_blocks_override", integer, "blocks in the KV cache, on a CPU too; sized from memory by default"),
    Option("gpu_memory_utilization", number, "share of a GPU's memory to use; on a CPU it has no effect"),
    Option(
        "reserve_memory_mb",
        integer,
        "GPU memory in MB that is left free at least, for other programs, whatever --gpu-memory-utilization is",
    ),
    Option(
        "swap_space_gb",
        number,
        "GB of the host's memory for the KV cache of preempted sequences, which is copied back then; with 0 it is "
        "computed again",
    ),
    Option("max_num_seqs", integer, "sequences that run at the same time; by default 64 on a CPU, 256 on a GPU"),
    Option(
        "max_num_batched_tokens",
        integer,
        "tokens computed in a step, longer prompts are cut in chunks; by default 512 on a CPU, 8192 on a GPU",
    ),
    Option("max_waiting", integer, "requests that may wait; one more gets 429", ("--max-queued-requests",)),
    Option("max_logprobs", integer, "most alternatives that a request may ask for at each token"),
    Option("enable_prefix_caching", switch, "keep the KV blocks of earlier prompts and share equal ones"),
    Option("num_threads", integer, "threads of the matrix products on a CPU; the cores of this process by default"),
    Option("shutdown_grace_s", number, "seconds that running requests get after SIGTERM", ("--shutdown-timeout",)),
    Option(
        "tensor_parallel_size",
        integer,
        "ranks that share each layer; by default the engine chooses for the ranks that MPI has started",
        ("-tp", "--tensor-parallel"),
    ),
    Option(
        "pipeline_parallel_size",
        integer,
        "stages, each of which holds one run of layers on its own ranks; by default as above",
        ("-pp", "--pipeline-parallel"),
    ),
    Option("check_ranks", switch, "compare what ranks compute after every step, for hunting faults; slow"),
    Option("split", text, "how uneven cards share the model", instead="the model runs on one rank"),
    Option(
        "allreduce",
        text,
        "what ranks send each other when they add up: auto is exact; int8 and int8-plain where it is quicker; of CPUs "
        "float32 or bfloat16; of GPUs one of the ways that are measured at start: the host's window, peer memory, NCCL",
        metavar="auto|float32|bfloat16|int8|int8-plain|window|peer|nccl",
    ),
    Option(
        "dual_stream",
        text,
        "compute large steps in two halves, so that ranks add up one while the other is computed; auto: on GPUs, from "
        "the number of tokens on from which that is found quicker at start",
        metavar="auto|on|off",
    ),
    Option(
        "enable_chunked_prefill",
        switch,
        "cut long prompts in chunks",
        served=(True,),
        instead="long prompts are always cut",
    ),
    Option("tool_call_parser", text, "how tool calls are found in the text", instead="tools are not there yet"),
    Option("reasoning_parser", text, "how reasoning is found in the text", instead="it stays part of the text"),
)
CONFIG_FLAG = "--config"
_BY_NAME = {option.name: option for option in OPTIONS}
_BY_SPELLING = {spelling: option for option in OPTIONS for spelling in option.spellings}


class _Parser(argparse.ArgumentParser):
    """Raises where argparse would end the process."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(f"{message}; --help lists the flags")


def _make_parser(prog: str) -> _Parser:
    parser = _Parser(prog=prog, allow_abbrev=False, description="Serves one model over the OpenAI API.")
    parser.add_argument(CONFIG_FLAG, metavar="FILE", help=_CONFIG_HELP)
    for option in OPTIONS:
        details: dict[str, Any] = {"dest": option.name, "default": argparse.SUPPRESS, "help": _full_help(option, "%%")}
        if option.convert is switch:
            details["action"] = argparse.BooleanOptionalAction
        else:
            details["metavar"] = option.metavar or _METAVARS[option.convert]
        if option.convert is texts:
            details |= {"nargs": "+", "action": "extend"}
        parser.add_argument(*option.spellings, **details)
    return parser


_METAVARS: dict[Convert, str] = {text: "TEXT", texts: "TEXT", integer: "N", number: "X"}
_CONFIG_HELP = "a .json or .toml file with flags as keys, without dashes in front; the command line wins over it"


def _full_help(option: Option, percent: str = "%") -> str:
    parts = [option.help]
    if not option.is_field:
        served = " or ".join(_typed(value) for value in option.served)
        parts.append(f"for now {'only ' + served if served else 'not served'}: {option.instead}")
    if option.shown_default:
        parts.append(f"default {option.shown_default}")
    return "; ".join(parts).replace("%", percent)


def _typed(value: object) -> str:
    return {True: "on", False: "off"}[value] if isinstance(value, bool) else str(value)


def parse_args(
    argv: Sequence[str], prog: str = "python -m engine.serve", other_flags: Sequence[str] = ()
) -> EngineConfig:
    """Command line (without the program's name) → a valid EngineConfig. --help prints and raises SystemExit(0).

    Raises:
        ConfigError: with all that is wrong, one a line, each line naming its flag.
    """
    given, unknown = _make_parser(prog).parse_known_args([_with_dashes(argument) for argument in argv])
    command_line = vars(given)
    file = command_line.pop("config")
    problems = _unknown_arguments(unknown, other_flags)
    values: dict[str, Any] = {}
    if file is not None:
        values = _convert_all(_read_config_file(Path(file), problems), problems, f" in {file}")
    values |= _convert_all(command_line, problems)
    return _checked(values, problems)


def config_from_keywords(**keywords: object) -> EngineConfig:
    """The same for callers in Python: LLM(model, max_model_len=4096). Names are the flags with underscores.

    Raises:
        ConfigError: with all that is wrong, one a line.
    """
    problems: list[str] = []
    known = {name: value for name, value in keywords.items() if name in _BY_NAME}
    for name in keywords.keys() - known.keys():
        near = difflib.get_close_matches(name, _BY_NAME, n=1)
        problems.append(f"{name} is no option" + (f"; did you mean {near[0]}?" if near else ""))
    return _checked(_convert_all(known, problems), problems)


def _checked(values: Mapping[str, Any], problems: list[str]) -> EngineConfig:
    """The config of these values; raises ConfigError with the problems so far and those of the values."""
    config = EngineConfig(**values)
    problems += [f"{_BY_NAME[name].flag} {problem}" for name, problem in config.problems()]
    if problems:
        raise ConfigError("\n".join(problems))
    return config


def _with_dashes(argument: str) -> str:
    """--max_model_len=4k → --max-model-len=4k."""
    flag, equals, value = argument.partition("=")
    return (flag.replace("_", "-") if flag.startswith("--") else flag) + equals + value


def _convert_all(raw: Mapping[str, object], problems: list[str], where: str = "") -> dict[str, Any]:
    """Values of EngineConfig from raw ones, by option name; what cannot be served is added to problems."""
    values: dict[str, Any] = {}
    for name, raw_value in raw.items():
        option = _BY_NAME[name]
        try:
            value = option.convert(raw_value)
        except ValueError as error:
            shown = "what it is" if name == "api_key" else repr(raw_value)  # keys stay out of logs
            problems.append(f"{option.flag}{where} cannot be {shown}: {error}")
            continue
        if option.is_field:
            values[name] = value
        elif value not in option.served:
            served = " or ".join(_typed(good) for good in option.served)
            advice = f"leave it out or use {served}" if served else "leave it out"
            problems.append(f"{option.flag}{where} {_typed(value)} is not served yet: {option.instead}; {advice}")
    return values


def _unknown_arguments(arguments: Sequence[str], other_flags: Sequence[str]) -> list[str]:
    """What to say about each flag that argparse did not know, and about values that belong to none."""
    problems = []
    after_flag = False
    for argument in arguments:
        flag = argument.partition("=")[0]
        if flag.startswith("-") and not re.fullmatch(r"-[\d.]+", flag):
            after_flag = True
            problems.append(_unknown_flag(flag, other_flags))
        elif not after_flag:
            problems.append(f"{argument!r} belongs to no flag; a model is given by --model {argument}")
    return problems


def _unknown_flag(flag: str, other_flags: Sequence[str]) -> str:
    name = re.sub("^(--no-|-+)", "", flag)
    if name in LACKING:
        reason = LACKING[name]
        return f"{flag} is a vLLM flag that Glint does not have" + (f": {reason}" if reason else "")
    near = difflib.get_close_matches(flag, [*other_flags, *_BY_SPELLING, CONFIG_FLAG, "--help"], n=1)
    return f"{flag} is not a flag" + (f"; did you mean {near[0]}?" if near else "; --help lists the flags")


def _read_config_file(path: Path, problems: list[str]) -> dict[str, object]:
    """Values by option name; unknown and repeated keys are added to problems.

    Raises:
        ConfigError: the file cannot be read, or is no table of flags.
    """
    readers: dict[str, Callable[[str], object]] = {".json": json.loads, ".toml": tomllib.loads}
    if path.suffix not in readers:
        raise ConfigError(f"{CONFIG_FLAG} {path}: the name must end in .json or .toml (YAML is not read)")
    try:
        content = readers[path.suffix](path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"{CONFIG_FLAG} {path} cannot be read: {error.strerror}") from error
    except ValueError as error:  # what json, tomllib and the UTF-8 decoder raise
        raise ConfigError(f"{CONFIG_FLAG} {path} is not valid {path.suffix[1:].upper()}: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{CONFIG_FLAG} {path} must hold one table of flags, not {type(content).__name__}")
    values: dict[str, object] = {}
    for key, value in content.items():
        option = _BY_SPELLING.get("--" + key.replace("_", "-")) or _BY_SPELLING.get("-" + key)
        if key == "config":
            problems.append(f"a config file cannot name another (key 'config' in {path})")
        elif option is None:
            problems.append(f"{_unknown_flag('--' + key.replace('_', '-'), ())} (key {key!r} in {path})")
        elif option.name in values:
            problems.append(f"{option.flag} is given twice in {path}, the second time as {key!r}")
        else:
            values[option.name] = value
    return values


def markdown_table() -> str:
    """The flags as a Markdown table, one a line."""
    lines = ["| flag | default | meaning |", "|---|---|---|"]
    for option in OPTIONS:
        names = ", ".join(f"`{spelling}`" for spelling in option.spellings)
        if option.convert is switch:
            names += f", `--no-{option.flag[2:]}`"
        meaning = _full_help(option).removesuffix(f"; default {option.shown_default}")
        if "|" in option.metavar:
            meaning += ": " + ", ".join(f"`{choice}`" for choice in option.metavar.split("|"))
        default = f"`{option.shown_default}`" if option.shown_default else ""
        lines.append(f"| {names} | {default} | {meaning} |")
    lines.append(f"| `{CONFIG_FLAG}` | | {_CONFIG_HELP} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.stdout.write(markdown_table())
