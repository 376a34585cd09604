"""Faults made by rule: every place of a kernel at which one small and likely mistake can be made, and the mistake.

What the CPU cannot show is not planted (cuda/README.md): dependency_wait, dependency_launch, __threadfence, prefetches.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import pairwise

from tests.cuda.mutation.source import Source

Edit = tuple[int, int, str]  # what replaces the text [begin, end) of a file
Operator = Callable[[Source], Iterator[Edit]]

WAITS = {"__syncthreads", "__syncwarp", "cp_async_wait", "cp_async_commit", "named_barrier"}
NEIGHBOURS = {"<": "<=", "<=": "<", ">": ">=", ">=": ">", "==": "!=", "!=": "=="}
OPPOSITES = {"min": "max", "fminf": "fmaxf", "atomicMin": "atomicMax", "__reduce_min_sync": "__reduce_max_sync"}
OPPOSITES |= {right: left for left, right in OPPOSITES.items()}
SYMMETRIC = {*OPPOSITES, "__fmul_rn", "__fadd_rn", "__umulhi", "min", "max"}  # arguments can change places
STAGES = {"stage", "buffer", "next"}
JUMPS = {"return", "continue", "break"}


@dataclass(frozen=True, slots=True)
class Mutant:
    """A file of cuda/ with one fault.

    The id says where it is by the lines around it, so that it stays as it is while other lines change.
    """

    id: str  # "rmsnorm:barrier:1f3a77"
    file: str  # in cuda/
    operator: str
    line: int
    before: str  # the line of code before, and so on; without comments and the spaces around
    old: str
    new: str
    after: str
    text: str  # of the whole file

    @property
    def hunk(self) -> str:
        """What has changed, as a diff says it."""
        return "\n".join([self.file, f"  {self.before}", f"- {self.old}", f"+ {self.new}", f"  {self.after}"])


def drop_wait(source: Source) -> Iterator[Edit]:
    for number, token in enumerate(source.tokens):
        if token.text in WAITS and source.at(number - 1) in (";", "{", "}", ")"):
            yield token.begin, source.tokens[source.operand_end(number) - 1].end, ""


def weaken_wait(source: Source) -> Iterator[Edit]:
    for number, token in enumerate(source.tokens):
        if token.text == "cp_async_wait":
            yield _behind(source, source.partner[number + 1], " + 1")


def compare(source: Source) -> Iterator[Edit]:
    for number, token in enumerate(source.tokens):
        if token.text in NEIGHBOURS and source.is_binary(number):
            yield token.begin, token.end, NEIGHBOURS[token.text]


def lose_one(source: Source) -> Iterator[Edit]:
    """+ 1 and − 1 are forgotten."""
    for number, token in enumerate(source.tokens):
        is_one = source.at(number + 1).rstrip("ul") == "1" and source.at(number + 2) not in ("*", "/", "%", "<<")
        if token.text in ("+", "-") and source.is_binary(number) and is_one:
            yield source.tokens[number - 1].end, source.tokens[number + 1].end, ""


def next_index(source: Source) -> Iterator[Edit]:
    """The element behind the right one."""
    for number in range(len(source.tokens)):
        if source.is_subscript(number):
            first, end = number + 1, source.partner[number]
            index = source.between(first, end)
            index = index if end - first == 1 else f"({index})"
            yield source.tokens[first].begin, source.tokens[end - 1].end, f"{index} + 1"


def swap(source: Source) -> Iterator[Edit]:
    """Two neighbours of a call's arguments, of a list in braces, of indices, or of operands of / and %."""
    for number, token in enumerate(source.tokens):
        is_call = source.is_call(number) and source.called(number) not in SYMMETRIC
        if is_call or _is_list(source, number):
            parts = source.parts(number)
            for left, right in pairwise(parts):
                if all(_is_short(source, part) for part in (left, right)):
                    yield from _exchange(source, left, right)
        if source.is_subscript(number) and source.at(source.partner[number] + 1) == "[":
            second = source.partner[number] + 1
            yield from _exchange(source, (number + 1, second - 1), (second + 1, source.partner[second]))
        if token.text in ("/", "%") and source.is_binary(number):
            yield token.begin, token.end, "%" if token.text == "/" else "/"


def lift_guard(source: Source) -> Iterator[Edit]:
    """What should be done under a condition is done always; a jump under a condition is never made."""
    for number, token in enumerate(source.tokens):
        if token.text == "if" and source.at(number + 1) == "(":
            end = source.partner[number + 1]
            jumps = source.at(end + 1) in JUMPS
            yield source.tokens[number + 2].begin, source.tokens[end - 1].end, "false" if jumps else "true"
        is_whole = source.kind(number - 1) == "name" and source.at(number - 2) in ("=", "(", "return", ",", "?", ":")
        if token.text == "?" and is_whole:
            yield source.tokens[number - 1].begin, source.tokens[number - 1].end, "true"


def logic(source: Source) -> Iterator[Edit]:
    for number, token in enumerate(source.tokens):
        if token.text in ("&&", "||") and source.is_binary(number):
            yield token.begin, token.end, "||" if token.text == "&&" else "&&"
        if token.text == "!":
            yield token.begin, token.end, ""


def other_stage(source: Source) -> Iterator[Edit]:
    for number, token in enumerate(source.tokens):
        is_read = source.at(number - 1) not in TYPES_BEFORE and source.at(number + 1) not in ("=", "^=", "+=", ";", "(")
        if token.text in STAGES and is_read and source.at(number - 1) not in (".", "->"):
            yield token.begin, token.end, f"({token.text} ^ 1)"


TYPES_BEFORE = {"int", "const", "char", "auto", "unsigned", "*", "T"}


def mask(source: Source) -> Iterator[Edit]:
    """Lanes that are left out, bits that are lost, shifts by one more, distances of a shuffle doubled."""
    for number, token in enumerate(source.tokens):
        if token.text == "kAllLanes":
            yield token.begin, token.end, "(kAllLanes >> 1)"
        before, is_integer = source.at(number - 1), re.fullmatch(r"0x[0-9a-fA-F]+u?|\d+u?", token.text)
        if is_integer and before in ("&", "^"):
            yield token.begin, token.end, f"({token.text} >> 1)"
        if is_integer and before in ("<<", ">>", "<<=", ">>="):
            yield token.begin, token.end, f"({token.text} + 1)"
        if source.at(number - 1) == "(" and source.called(number - 1).startswith("__shfl"):
            first, end = source.parts(number - 1)[-1]
            if source.kind(first) == "number" and end - first == 1:
                new = "1" if source.at(first) == "0" else f"(2 * {source.at(first)})"
                yield source.tokens[first].begin, source.tokens[first].end, new


def lose_factor(source: Source) -> Iterator[Edit]:
    for number, token in enumerate(source.tokens):
        if token.text == "*" and source.is_binary(number):
            yield source.tokens[number - 1].end, source.tokens[source.operand_end(number + 1) - 1].end, ""


def min_max(source: Source) -> Iterator[Edit]:
    for number, token in enumerate(source.tokens):
        if token.text in OPPOSITES and source.at(number + 1) == "(":
            yield token.begin, token.end, OPPOSITES[token.text]


def sign(source: Source) -> Iterator[Edit]:
    for number, token in enumerate(source.tokens):
        if token.text in ("+", "-") and source.is_binary(number) and source.at(number + 1).rstrip("ul") != "1":
            yield token.begin, token.end, "-" if token.text == "+" else "+"
        if token.text == "-" and not source.ends_operand(number - 1):
            yield token.begin, token.end, ""


def constant(source: Source) -> Iterator[Edit]:
    """A number of floating point that is another; of zeros those that something begins with, or is instead."""
    for number, token in enumerate(source.tokens):
        if token.kind == "number" and re.fullmatch(r"[\d.]+f|0x[\d.]+p[+-]?\d+f", token.text):
            if float_of(token.text):
                yield token.begin, token.end, f"({token.text} * 1.25f)"
            elif source.at(number - 1) in ("=", "?", ":"):
                yield token.begin, token.end, "1.0f"


def loop(source: Source) -> Iterator[Edit]:
    """The first turn of a loop is lost, or the last."""
    for number, token in enumerate(source.tokens):
        if token.text != "for":
            continue
        parts = source.split(number + 2, source.partner[number + 1], ";")
        (_, first_end), (test, test_end) = parts[0], parts[1]
        if source.at(first_end - 1) == "0" and source.at(first_end - 2) == "=":
            yield source.tokens[first_end - 1].begin, source.tokens[first_end - 1].end, "1"
        if source.at(test + 1) == "<" and source.is_binary(test + 1) and test_end > test:
            yield _behind(source, test_end, " - 1")


def keep_last(source: Source) -> Iterator[Edit]:
    """A sum or product of which only the last part is left."""
    in_loop_heads = {
        inside
        for number, token in enumerate(source.tokens)
        if token.text == "for"
        for inside in range(number, source.partner[number + 1])
    }
    for number, token in enumerate(source.tokens):
        if token.text in ("+=", "*=", "-=", "|=") and number not in in_loop_heads:
            yield token.begin, token.end, "="


OPERATORS: dict[str, Operator] = {
    "barrier": drop_wait,
    "wait": weaken_wait,
    "compare": compare,
    "one": lose_one,
    "index": next_index,
    "swap": swap,
    "guard": lift_guard,
    "logic": logic,
    "stage": other_stage,
    "mask": mask,
    "factor": lose_factor,
    "minmax": min_max,
    "sign": sign,
    "constant": constant,
    "loop": loop,
    "sum": keep_last,
}


def float_of(literal: str) -> float:
    return float.fromhex(literal[:-1]) if literal.startswith("0x") else float(literal[:-1])


def _behind(source: Source, number: int, new: str) -> Edit:
    """Puts text before a token, right behind the one before it."""
    return source.tokens[number - 1].end, source.tokens[number - 1].end, new


def _exchange(source: Source, left: tuple[int, int], right: tuple[int, int]) -> Iterator[Edit]:
    texts = [source.between(*part) for part in (left, right)]
    if texts[0] != texts[1]:
        middle = source.text[source.tokens[left[1] - 1].end : source.tokens[right[0]].begin]
        yield source.tokens[left[0]].begin, source.tokens[right[1] - 1].end, f"{texts[1]}{middle}{texts[0]}"


def _is_short(source: Source, part: tuple[int, int]) -> bool:
    """An expression of a few tokens: a declaration has two names side by side."""
    first, end = part
    names = [source.kind(number) == "name" for number in range(first, end)]
    return 0 < end - first <= 6 and not any(a and b for a, b in pairwise(names))


def _is_list(source: Source, number: int) -> bool:
    """{0, 0}, Measure{0, 0} or Cut cut{0, 0}."""
    before = source.at(number - 1)
    is_typed = source.kind(number - 1) == "name" and before not in ("const", "else")
    return source.at(number) == "{" and (is_typed or before in ("=", "(", ","))


def mutants_of(file: str, text: str) -> list[Mutant]:
    """All mutants of a file, in the order of its lines; none is there twice."""
    source = Source(text)
    edits = {edit: name for name in reversed(OPERATORS) for edit in OPERATORS[name](source)}
    code = [_plain(line) for line in text.split("\n")]
    code = ["" if line.startswith("#") else line for line in code]
    seen: dict[str, int] = {}
    found: dict[str, Mutant] = {}
    stem = file.rpartition("/")[2].partition(".")[0] + ("" if file.endswith(".cu") else ".cuh")
    for (begin, end, new), name in sorted(edits.items()):
        first, last = text.rfind("\n", 0, begin) + 1, text.find("\n", max(begin, end - 1))
        line, last_line = text.count("\n", 0, begin), text.count("\n", 0, last)
        around = (
            next(filter(None, reversed(code[:line])), ""),
            _plain(text[first:last]),
            _plain(text[first:begin] + new + text[end:last]),
            next(filter(None, code[last_line + 1 :]), ""),
        )
        key = hashlib.sha256("\0".join([file, *around]).encode()).hexdigest()[:8]
        seen[key] = seen.get(key, 0) + 1
        number = f"-{seen[key]}" if seen[key] > 1 else ""
        mutated = text[:begin] + new + text[end:]
        found.setdefault(mutated, Mutant(f"{stem}:{name}:{key}{number}", file, name, line + 1, *around, mutated))
    return list(found.values())


def _plain(lines: str) -> str:
    """Without comments and indentation; of several lines one."""
    return " ".join(re.sub(r"//.*", "", line).strip() for line in lines.split("\n")).strip()
