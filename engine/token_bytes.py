"""Which bytes each token adds to a text.

The decoder section of tokenizer.json says how token strings become text. Worked out once per token, it turns
detokenizing into a table look-up that cannot fail and costs the same for each token, and it gives the `bytes` of
logprobs. A text is the bytes of its tokens in a row, decoded as UTF-8, with U+FFFD for what is not UTF-8. Two
rules touch only its start (see ByteStream).

For byte-level decoders this is exactly what the tokenizers library decodes. For byte-fallback decoders it is too,
save in runs of byte tokens that are not UTF-8: the library gives U+FFFD for each byte of the run, also for the good
ones; here only the bad bytes become U+FFFD, and the text around them stays whole.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from engine.errors import ConfigError

_SUPPORTED = "ByteLevel, ByteFallback, Replace, Metaspace, Fuse, Strip and a Sequence of them"

Step = Callable[[str], str | bytes]  # bytes end the chain for this token


@dataclass(frozen=True, slots=True)
class TokenBytes:
    """The table of one tokenizer; ids without an entry (gaps, ids past the end) have no bytes.

    Attributes:
        table: bytes of each id, [largest id + 1].
        at_start: bytes of ids that decode differently as the first token of a text.
        known: whether an id has an entry in the vocabulary, [largest id + 1].
        strip: the character that is removed from the start of a text, as bytes.
        num_strip: how many of them at most.
    """

    table: tuple[bytes, ...]
    known: tuple[bool, ...]
    at_start: Mapping[int, bytes] = field(default_factory=dict)
    strip: bytes = b""
    num_strip: int = 0

    def __getitem__(self, token_id: int) -> bytes:
        return self.table[token_id] if 0 <= token_id < len(self.table) else b""


class ByteStream:
    """Bytes of one text, token by token.

    The first token may have other bytes than later (Metaspace drops its spaces), and the text may lose spaces at
    its start (Strip). A text that continues a prompt must be fed the prompt first.
    """

    __slots__ = ("_first", "_num_strip", "_skipped", "_token_bytes")

    def __init__(self, token_bytes: TokenBytes, skipped: frozenset[int] = frozenset()) -> None:
        self._token_bytes = token_bytes
        self._skipped = skipped
        self._first = True
        self._num_strip = token_bytes.num_strip

    @property
    def at_start(self) -> bool:
        """True while the rules for the start of a text may still apply."""
        return self._first or self._num_strip > 0

    def next(self, token_id: int) -> bytes:
        """The bytes that token_id adds; b"" for a skipped or unknown id."""
        if token_id in self._skipped:
            return b""
        data = self._token_bytes[token_id]
        if self.at_start:
            data = self._start(token_id, data)
        return data

    def _start(self, token_id: int, data: bytes) -> bytes:
        token_bytes = self._token_bytes
        if self._first and 0 <= token_id < len(token_bytes.known) and token_bytes.known[token_id]:
            self._first = False
            data = token_bytes.at_start.get(token_id, data)
        while self._num_strip and data.startswith(token_bytes.strip):
            data = data[len(token_bytes.strip) :]
            self._num_strip -= 1
        if data:
            self._num_strip = 0
        return data


def build_token_bytes(decoder: Mapping[str, Any] | None, tokens: Sequence[str | None], source: str) -> TokenBytes:
    """Applies a decoder to every token by itself.

    Args:
        decoder: the "decoder" section of tokenizer.json.
        tokens: the string of each id, None for gaps, [largest id + 1].
        source: names the tokenizer in errors.

    Raises:
        ConfigError: a kind or an order of decoders that is not one of byte-level or sentencepiece-like.
    """
    steps: list[Step] = []
    start_steps: list[Step] = []
    strip, num_strip, fused = b"", 0, False
    for part in _flatten(decoder, source):
        kind = part["type"]
        if kind == "Strip":
            if not fused:
                raise ConfigError(f"{source}: decoder Strip before Fuse or ByteLevel is not supported")
            strip, num_strip = _strip_rule(part, source)
        elif kind == "Fuse":
            fused = True
        elif fused:
            raise ConfigError(f"{source}: decoder {kind} after Fuse or ByteLevel is not supported")
        elif kind == "ByteLevel":
            fused = True
            steps.append(_byte_level)
            start_steps.append(_byte_level)
        elif kind == "ByteFallback":
            steps.append(_byte_fallback)
            start_steps.append(_byte_fallback)
        elif kind == "Replace":
            steps.append(_replace_step(part, source))
            start_steps.append(steps[-1])
        elif kind == "Metaspace":
            replacement = part.get("replacement", "\u2581")
            steps.append(_Replace(replacement, " "))
            drops = part.get("prepend_scheme", "always") != "never"
            start_steps.append(_Replace(replacement, "" if drops else " "))
        else:
            raise ConfigError(f"{source}: decoder {kind!r} is not supported; supported are {_SUPPORTED}")
    table = tuple(b"" if token is None else _apply(steps, token) for token in tokens)
    at_start: dict[int, bytes] = {}
    if steps != start_steps:
        firsts = ((index, _apply(start_steps, token)) for index, token in enumerate(tokens) if token is not None)
        at_start = {index: first for index, first in firsts if first != table[index]}
    known = tuple(token is not None for token in tokens)
    return TokenBytes(table, known, at_start, strip, num_strip)


def _flatten(decoder: Mapping[str, Any] | None, source: str) -> list[Mapping[str, Any]]:
    if decoder is None:
        raise ConfigError(f"{source}: there is no decoder, so token ids cannot become text; supported are {_SUPPORTED}")
    if decoder.get("type") != "Sequence":
        return [decoder]
    return [part for inner in decoder["decoders"] for part in _flatten(inner, source)]


def _apply(steps: Sequence[Step], token: str) -> bytes:
    piece: str | bytes = token
    for step in steps:
        if isinstance(piece, bytes):
            break
        piece = step(piece)
    return piece if isinstance(piece, bytes) else piece.encode()


@dataclass(frozen=True, slots=True)
class _Replace:
    old: str
    new: str

    def __call__(self, token: str) -> str:
        return token.replace(self.old, self.new)


def _replace_step(part: Mapping[str, Any], source: str) -> _Replace:
    pattern = part["pattern"]
    if not pattern.get("String"):
        raise ConfigError(f"{source}: decoder Replace takes a plain string as pattern, got {pattern}")
    return _Replace(pattern["String"], part["content"])


def _strip_rule(part: Mapping[str, Any], source: str) -> tuple[bytes, int]:
    content, start, stop = part["content"], part["start"], part["stop"]
    if stop or not content.isascii():
        raise ConfigError(
            f"{source}: decoder Strip takes an ASCII character off the start only, got content {content!r}, stop {stop}"
        )
    return content.encode(), start


def byte_level_alphabet() -> dict[str, int]:
    """The character that stands for each byte in a byte-level vocabulary (GPT-2): character → byte.

    Printable Latin-1 characters stand for themselves; the other 68 bytes take U+0100 and up, in order.
    """
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = sorted(set(range(256)) - set(printable))
    return {chr(byte): byte for byte in printable} | {chr(0x100 + rank): byte for rank, byte in enumerate(moved)}


_BYTE_OF = byte_level_alphabet()


def _byte_level(token: str) -> bytes:
    """Added tokens with characters outside of the alphabet stand for their own UTF-8 bytes."""
    try:
        return bytes([_BYTE_OF[character] for character in token])
    except KeyError:
        return token.encode()


def _byte_fallback(token: str) -> str | bytes:
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        try:
            return bytes([int(token[3:5], 16)])
        except ValueError:
            return token
    return token
