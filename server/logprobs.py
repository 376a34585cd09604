"""Log-probabilities in the shapes of the two endpoints.

They are the model's own, taken before temperature, penalties and masks. What JSON cannot say (minus infinity)
is written as LOGPROB_FLOOR. Tokens whose text is held back or cut off by a stop string are listed as well, so
the number of entries is always the number of generated tokens.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from engine.api import TextLogprob
from server.wire import finite


def chat_logprobs(entries: Sequence[TextLogprob], num_top: int) -> dict[str, Any]:
    """The "logprobs" of a chat choice."""
    content = [
        {**_chat_entry(entry), "top_logprobs": [_chat_entry(other) for other in entry.top[:num_top]]}
        for entry in entries
    ]
    return {"content": content, "refusal": None}


def _chat_entry(entry: TextLogprob) -> dict[str, Any]:
    return {"token": entry.token, "logprob": finite(entry.logprob), "bytes": list(entry.bytes)}


def completion_logprobs(
    tokens: Sequence[str], entries: Sequence[TextLogprob | None], num_top: int, offset: int
) -> dict[str, Any]:
    """The "logprobs" of a text completion.

    Args:
        tokens: text of each token; joined they are the text.
        entries: one a token; None where there is nothing to condition on (the first token of an echoed prompt).
        num_top: alternatives a token; the token itself is always among its own.
        offset: characters of the choice before the first of these tokens.
    """
    offsets = []
    for token in tokens:
        offsets.append(offset)
        offset += len(token)
    return {
        "text_offset": offsets,
        "token_logprobs": [None if entry is None else finite(entry.logprob) for entry in entries],
        "tokens": list(tokens),
        "top_logprobs": [
            None if entry is None else _alternatives(token, entry, num_top)
            for token, entry in zip(tokens, entries, strict=True)
        ],
    }


def _alternatives(token: str, entry: TextLogprob, num_top: int) -> dict[str, float]:
    """Alternatives by their text, best first; two with the same text get keys of their own."""
    ranked = list(entry.top[:num_top])
    if all(other.token_id != entry.token_id for other in ranked):
        ranked.append(entry)
    ranked.sort(key=lambda other: -finite(other.logprob))
    keys: dict[str, float] = {}
    for other in ranked:
        own = other.token_id == entry.token_id
        key = token if own else other.token
        if not own and (key in keys or key in ("", token)):
            key = _byte_key(other.bytes)
        if key in keys or not (own or other.bytes):
            key = f"token_id:{other.token_id}"
        keys[key] = finite(other.logprob)
    return keys


def _byte_key(data: bytes) -> str:
    return "bytes:" + "".join(f"\\x{byte:02x}" for byte in data)


def prompt_logprobs(entries: Sequence[TextLogprob | None], num_top: int) -> list[dict[str, Any] | None]:
    """The "prompt_logprobs" of an answer: for each prompt token its own and the best, by token id; null first.

    The rank is 1 for the best token, and null for a token below the best ones asked for.
    """
    return [None if entry is None else _by_token_id(entry, num_top) for entry in entries]


def _by_token_id(entry: TextLogprob, num_top: int) -> dict[str, Any]:
    ranked: list[tuple[TextLogprob, int | None]] = [(other, i + 1) for i, other in enumerate(entry.top[:num_top])]
    if all(other.token_id != entry.token_id for other, _ in ranked):
        ranked.append((entry, None))
    return {
        str(other.token_id): {"logprob": finite(other.logprob), "rank": rank, "decoded_token": other.token}
        for other, rank in ranked
    }
