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
from pathlib import Path
from typing import Any, NoReturn

from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.option_table import OPTIONS, Option
from engine.option_values import Convert, integer, number, switch, text, texts
from engine.vllm_flags import LACKING

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
