"""Token events by hand, and the deltas that a TextStream makes of them, for both kinds of tokenizer."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from engine.api import FinishReason, OutputDelta, SamplingParams, TokenEvent
from engine.detokenizer import TextStream
from engine.tokenizer import Tokenizer
from tests.engine.tiny_tokenizers import byte_fallback_tokenizer, byte_ids, byte_level_tokenizer

BYTE_LEVEL = Tokenizer(byte_level_tokenizer(), {"eos_token": "<|im_end|>"}, "byte level")
BYTE_FALLBACK = Tokenizer(byte_fallback_tokenizer(), {"bos_token": "<s>", "eos_token": "</s>"}, "byte fallback")
BOTH = pytest.mark.parametrize("tokenizer", [BYTE_LEVEL, BYTE_FALLBACK], ids=["byte_level", "byte_fallback"])
EOS = 2
PROMPT = tuple(byte_ids("x"))


def event(token_ids: Sequence[int], finish: FinishReason | None = None, **fields: Any) -> TokenEvent:
    return replace(TokenEvent("r", 0, tuple(token_ids), finish_reason=finish), **fields)


def one_by_one(token_ids: Sequence[int], finish: FinishReason | None) -> list[TokenEvent]:
    """One event a token; the last carries the reason."""
    last = len(token_ids) - 1
    return [event([token_id], finish if index == last else None) for index, token_id in enumerate(token_ids)]


def run(
    tokenizer: Tokenizer | None,
    events: Sequence[TokenEvent],
    prompt_ids: Sequence[int] = PROMPT,
    **sampling: Any,
) -> list[OutputDelta]:
    """The deltas up to the one that ends the choice."""
    stream = TextStream(tokenizer, replace(SamplingParams(), **sampling), prompt_ids)
    deltas = []
    for one in events:
        deltas.append(stream.push(one))
        if deltas[-1].finish_reason is not None:
            break
    return deltas


def text_of(deltas: Sequence[OutputDelta]) -> str:
    return "".join(delta.text or "" for delta in deltas)


def rome_id(tokenizer: Tokenizer) -> int:
    """The token " Rome"."""
    return next(i for i in range(tokenizer.vocab_size) if tokenizer.token_string(i) in ("ĠRome", "▁Rome"))
