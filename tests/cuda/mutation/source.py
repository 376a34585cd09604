"""A .cu or .cuh file as tokens: as much of C++ as finding places for faults takes, and no more.

Comparisons are told from template brackets by the spaces around them, which the format of the tree always has.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

TOKEN = re.compile(
    r"(?P<name>[A-Za-z_]\w*)|(?P<number>\.?\d(?:[eEpP][+-]|[\w.])*)|(?P<text>\"(?:\\.|[^\"\\])*\"|'(?:\\.|[^'\\])*')"
    r"|(?P<mark><<=|>>=|\.\.\.|->|::|\+\+|--|<<|>>|&&|\|\||[-+*/%&|^<>=!]=|[^\s\w])"
)
HIDDEN = re.compile(  # what is no code, and what g++ does not see
    r"//[^\n]*|/\*.*?\*/|^#if defined\(__CUDACC__\)$.*?^#(?:else|endif)$|^#(?:[^\n]*\\\n)*[^\n]*",
    re.DOTALL | re.MULTILINE,
)
OPENING, CLOSING = {"(": ")", "[": "]", "{": "}"}, {")", "]", "}"}
TYPES = {
    *("const", "constexpr", "static", "unsigned", "signed", "int", "long", "short", "char", "bool", "float", "double"),
    *("auto", "T", "Y", "u64", "index_t", "uint4", "float4", "bf16", "fp16", "__shared__"),
    *("Row", "Measure", "Segment", "Head", "Cut", "Pieces", "Strides", "RankShared"),
}
NOT_CALLED = {"if", "for", "while", "switch", "return", "sizeof", "static_assert", "constexpr"}


@dataclass(frozen=True, slots=True)
class Token:
    text: str
    kind: str  # "name", "number", "text" or "mark"
    begin: int  # in the file
    end: int


@dataclass(slots=True)
class Source:
    """The tokens inside functions, and which brackets belong together (by number of token)."""

    text: str
    tokens: list[Token] = field(init=False)
    partner: dict[int, int] = field(init=False)

    def __post_init__(self) -> None:
        seen = HIDDEN.sub(lambda hidden: re.sub(r"[^\n]", " ", hidden[0]), self.text)
        self.tokens = [Token(m[0], m.lastgroup or "", m.start(), m.end()) for m in TOKEN.finditer(seen)]
        self.partner = self._partners()
        inside = self._inside_functions()
        self.tokens = [token for number, token in enumerate(self.tokens) if number in inside]
        self.partner = self._partners()

    def at(self, number: int) -> str:
        """The text of a token; "" before the first and behind the last."""
        return self.tokens[number].text if 0 <= number < len(self.tokens) else ""

    def kind(self, number: int) -> str:
        return self.tokens[number].kind if 0 <= number < len(self.tokens) else ""

    def between(self, first: int, end: int) -> str:
        """The text of tokens [first, end)."""
        return self.text[self.tokens[first].begin : self.tokens[end - 1].end] if first < end else ""

    def ends_operand(self, number: int) -> bool:
        return (self.kind(number) in ("name", "number") and self.at(number) != "return") or self.at(number) in (
            ")",
            "]",
        )

    def is_binary(self, number: int) -> bool:
        """An operator between two operands, which has spaces around it."""
        begin, end = self.tokens[number].begin, self.tokens[number].end
        return self.ends_operand(number - 1) and self.text[begin - 1].isspace() and self.text[end].isspace()

    def operand_end(self, number: int) -> int:
        """Behind the last token of the operand that begins here: a name or number with what is applied to it."""
        while self.at(number) in ("-", "!", "~", "*", "&"):
            number += 1
        number = self.partner[number] + 1 if number in self.partner else number + 1
        while self.at(number) in ("(", "[", ".", "->", "::", "<") and (
            self.at(number) != "<" or number in self.partner
        ):
            number = self.partner[number] + 1 if number in self.partner else number + 2
        return number

    def parts(self, opening: int) -> list[tuple[int, int]]:
        """What commas part within a pair of brackets, as [first, end) of tokens."""
        return self.split(opening + 1, self.partner[opening], ",")

    def split(self, first: int, end: int, mark: str) -> list[tuple[int, int]]:
        """[first, end) at each `mark` that is in no brackets of its own."""
        found, number, start = [], first, first
        while number < end:
            if self.at(number) == mark:
                found.append((start, number))
                start = number + 1
            number = self.partner[number] + 1 if self.partner.get(number, -1) > number else number + 1
        return [*found, (start, end)]

    def is_call(self, opening: int) -> bool:
        """Whether this ( follows the name of a function, with template arguments or without."""
        before = opening - 1
        if self.at(before) == ">" and before in self.partner:
            before = self.partner[before] - 1
        return self.at(opening) == "(" and self.kind(before) == "name" and self.at(before) not in NOT_CALLED | TYPES

    def called(self, opening: int) -> str:
        before = opening - 1
        return self.at(self.partner[before] - 1 if before in self.partner else before)

    def is_subscript(self, opening: int) -> bool:
        """Whether this [ takes an element, and neither declares an array nor begins a lambda."""
        if self.at(opening) != "[" or not self.ends_operand(opening - 1) or self.at(opening - 1) == ")":
            return False
        first = opening  # of the declarator, if it is in one
        while first > 0 and self.at(first - 1) not in (";", "{", "}", ","):
            if self.at(first - 1) in ("=", "+=", "*=", "-=", "("):
                return True
            first = self.partner[first - 1] if self.at(first - 1) in CLOSING else first - 1
        while first > 0 and self.at(first - 1) not in (";", "{", "("):
            if self.at(first - 1) == "}" and self.at(first) != ",":  # not behind what an array begins with
                break
            first = self.partner[first - 1] if self.at(first - 1) in CLOSING else first - 1
        return self.at(first) not in TYPES

    def _partners(self) -> dict[int, int]:
        """Of (, [ and {, and of < without a space before it."""
        found: dict[int, int] = {}
        stack: list[int] = []
        for number, token in enumerate(self.tokens):
            is_angle = token.text == "<" and self.kind(number - 1) == "name" and self._touches(number)
            if token.text in OPENING or is_angle:
                stack.append(number)
            elif token.text in CLOSING or (token.text == ">" and stack and self.at(stack[-1]) == "<"):
                while stack and token.text in CLOSING and self.at(stack[-1]) == "<":
                    stack.pop()  # was none
                if stack:
                    found[number] = stack.pop()
                    found[found[number]] = number
        return found

    def _touches(self, number: int) -> bool:
        return self.tokens[number - 1].end == self.tokens[number].begin or self.at(number - 1) == "template"

    def _inside_functions(self) -> set[int]:
        """Numbers of the tokens between the braces of functions, without what static_assert says."""
        inside: set[int] = set()
        for number in range(len(self.tokens)):
            behind = number - 1 if self.at(number - 1) == "const" else number
            if self.at(number) == "{" and self.at(behind - 1) == ")" and number not in inside:
                inside |= set(range(number, self.partner[number] + 1))
        for number in sorted(inside):
            if self.at(number) == "static_assert":
                inside -= set(range(number, self.partner[number + 1] + 2))
        return inside
