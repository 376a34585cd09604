"""engine/detokenizer.py: token events become whole characters, logprobs get text."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from engine.api import OutputDelta, SamplingParams, TokenEvent, TokenLogprob
from engine.detokenizer import IncrementalDetokenizer, TextStream, lone_token_text, prompt_pieces
from engine.errors import RequestError
from engine.tokenizer import Tokenizer
from tests.engine.text_events import (
    BOTH,
    BYTE_FALLBACK,
    BYTE_LEVEL,
    EOS,
    PROMPT,
    event,
    one_by_one,
    rome_id,
    run,
    text_of,
)
from tests.engine.tiny_tokenizers import byte_id, byte_ids


@BOTH
def test_str_01_characters_of_several_tokens(tokenizer: Tokenizer) -> None:
    """STR-01: byte tokens one a step, two requests interleaved: no U+FFFD, and no state shared."""
    texts = ("řetěz 😀👨‍👩‍👧 שלום 漢字 =", "漢字é😀 other")
    streams = [TextStream(tokenizer, SamplingParams(), PROMPT) for _ in texts]
    deltas: list[list[str]] = [[], []]
    ids = [byte_ids(text) for text in texts]
    for step in range(max(map(len, ids))):
        for which, stream in enumerate(streams):
            if step < len(ids[which]):
                delta = stream.push(event([ids[which][step]]))
                assert delta.text is not None
                assert "\ufffd" not in delta.text
                delta.text.encode()
                deltas[which].append(delta.text)
    assert ["".join(parts) for parts in deltas] == list(texts)


@BOTH
@pytest.mark.parametrize("num_tokens", [1, 2, 3, 4])
def test_tok_01_cut_in_the_middle_of_a_character(tokenizer: Tokenizer, num_tokens: int) -> None:
    """TOK-01: an emoji cut by max_tokens gives one U+FFFD at the end, streamed or at once."""
    ids = byte_ids("😀")[:num_tokens]
    expected = "😀" if num_tokens == 4 else "\ufffd"
    assert text_of(run(tokenizer, one_by_one(ids, "length"))) == expected
    assert text_of(run(tokenizer, [event(ids, "length")])) == expected
    assert tokenizer.decode([*PROMPT, *ids]) == "x" + expected


@BOTH
@pytest.mark.parametrize(
    ("data", "text"),
    [
        (b"\xe2\x82a", "\ufffda"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"\xff\xfeok", "\ufffd\ufffdok"),
        (b"\xf0\x9f\x98\xe6\xbc\xa2", "\ufffd漢"),
        (b"\xf0\x9f\x98 b", "\ufffd b"),
        (b"\xed\xa0\x80", "\ufffd\ufffd\ufffd"),
    ],
)
def test_tok_01_bad_bytes(tokenizer: Tokenizer, data: bytes, text: str) -> None:
    """TOK-01: U+FFFD for the bad bytes only; what follows is whole."""
    ids = [byte_id(byte) for byte in data]
    assert text_of(run(tokenizer, one_by_one(ids, "length"))) == text
    assert text_of(run(tokenizer, [event(ids, "length")])) == text


def test_tok_01_a_spaced_token_after_half_a_character() -> None:
    for tokenizer, word in ((BYTE_LEVEL, "Ġworld"), (BYTE_FALLBACK, "▁world")):
        word_id = next(i for i in range(tokenizer.vocab_size) if tokenizer.token_string(i) == word)
        assert text_of(run(tokenizer, one_by_one([byte_id(0xE2), byte_id(0x82), word_id], "length"))) == "\ufffd world"


@BOTH
def test_tok_02_pieces_are_the_whole_decode(tokenizer: Tokenizer) -> None:
    """TOK-02: 2000 random sequences of 200 ids, each also seeded with the last 5 ids of a prompt."""
    rng = random.Random(0)
    for _ in range(2000):
        ids = [rng.randrange(tokenizer.vocab_size + 8) for _ in range(200)]
        for skip in (False, True):
            detokenizer = IncrementalDetokenizer(tokenizer, skip)
            whole = "".join(map(detokenizer.push, ids)) + detokenizer.flush()
            assert whole == tokenizer.decode(ids, skip)
            seeded = IncrementalDetokenizer(tokenizer, skip, ids[:5])
            rest = "".join(map(seeded.push, ids[5:])) + seeded.flush()
            fed = IncrementalDetokenizer(tokenizer, skip)
            before = "".join(map(fed.push, ids[:5]))
            assert before + rest == whole


@BOTH
@pytest.mark.parametrize(
    "text", ["{% for x in y %}`a`|b|```{{ }}", "| a | b |\n|---|---|\n", "\n" * 40, "abc שלום 12 عربى"]
)
def test_tok_02_awkward_texts(tokenizer: Tokenizer, text: str) -> None:
    ids = tokenizer.encode("hello " + text, add_special_tokens=False)
    for cut in range(len(ids) + 1):
        prompt_text = IncrementalDetokenizer(tokenizer, True)
        shown = "".join(map(prompt_text.push, ids[:cut]))
        detokenizer = IncrementalDetokenizer(tokenizer, True, ids[:cut])
        assert shown + "".join(map(detokenizer.push, ids[cut:])) == "hello " + text


@BOTH
@pytest.mark.parametrize(
    ("begun", "rest", "text"),
    [
        (b"\xf0", b"\x9f\x98\x80", "😀"),
        (b"\xf0\x9f", b"\x98\x80", "😀"),
        (b"\xf0\x9f\x98", b"\x80", "😀"),
        (b"\xe6\xbc", b"\xa2", "漢"),
        (b"", b"\x80", "\ufffd"),
    ],
)
def test_tok_02_a_long_prompt_may_end_inside_a_character(
    tokenizer: Tokenizer, begun: bytes, rest: bytes, text: str
) -> None:
    """Also with a special and an unknown id behind its first bytes; the output completes it."""
    prompt = [*byte_ids("é" * 3000), *map(byte_id, begun), EOS, tokenizer.vocab_size + 5]
    detokenizer = IncrementalDetokenizer(tokenizer, True, prompt)
    assert "".join(detokenizer.push(byte_id(byte)) for byte in rest) + detokenizer.flush() == text


@BOTH
def test_tok_03_gap_ids_in_a_stream(tokenizer: Tokenizer) -> None:
    """TOK-03: an id without an entry gives no text, also inside a character, and has its logprobs entry."""
    gap = tokenizer.vocab_size + 10
    first, *rest = byte_ids("é")
    logprobs = tuple(
        TokenLogprob(token_id, -1.0, ((gap, -1.0), (byte_id(0x41), -2.0))) for token_id in (first, gap, *rest)
    )
    [delta] = run(tokenizer, [event([first, gap, *rest], "length", logprobs=logprobs)])
    assert delta.text == "é"
    assert delta.logprobs is not None
    assert [entry.token for entry in delta.logprobs] == ["", "", "é"]
    assert [entry.bytes for entry in delta.logprobs] == [b"\xc3", b"", b"\xa9"]
    assert [(top.token_id, top.token, top.bytes) for top in delta.logprobs[1].top] == [
        (gap, "", b""),
        (byte_id(0x41), "A", b"A"),
    ]


OUTPUTS = [
    " hello",
    "hello",
    "\nhello",
    "  hello",
    "    if x:\n        y",
    "don 't , x",
    "<|im_end|> hello",
    "</s> hello",
]


@BOTH
@pytest.mark.parametrize("prompt", ["hello", "hello ", "the\n"])
@pytest.mark.parametrize("output", OUTPUTS)
@pytest.mark.parametrize("skip", [False, True])
def test_tok_04_prompt_and_stream_are_the_whole_text(
    tokenizer: Tokenizer, prompt: str, output: str, skip: bool
) -> None:
    """TOK-04: no first space lost or doubled; special and added tokens in the output too."""
    prompt_ids = tokenizer.encode(prompt)
    output_ids = tokenizer.encode(output, add_special_tokens=False)
    deltas = run(tokenizer, one_by_one(output_ids, "length"), prompt_ids, skip_special_tokens=skip)
    assert tokenizer.decode(prompt_ids, skip) + text_of(deltas) == tokenizer.decode(prompt_ids + output_ids, skip)


def test_tok_04_the_first_space_goes_only_at_the_start_of_all_text() -> None:
    """TOK-04: as the library decodes prompt and output together: after a bare BOS the text begins with the output."""
    hello = BYTE_FALLBACK.encode("hello", add_special_tokens=False)
    assert BYTE_FALLBACK.token_string(hello[0]) == "▁hello"
    for prompt_ids, skip, text in (((1,), True, "hello"), ((1,), False, " hello"), ((1, *hello), True, " hello")):
        assert text_of(run(BYTE_FALLBACK, [event(hello, "length")], prompt_ids, skip_special_tokens=skip)) == text


@BOTH
def test_tok_05_bytes_of_logprobs_join_to_the_content(tokenizer: Tokenizer) -> None:
    """TOK-05: also across skipped special tokens and the stop token; alternatives keep different keys."""
    ids = [*byte_ids("a😀"), 0, *byte_ids("é "), EOS]
    halves = ((byte_id(0xF0), -1.0), (byte_id(0xF1), -2.0), (EOS, -3.0))
    events = [
        event([token_id], "stop" if index == len(ids) - 1 else None, logprobs=(TokenLogprob(token_id, -0.5, halves),))
        for index, token_id in enumerate(ids)
    ]
    deltas = run(tokenizer, events)
    entries = [entry for delta in deltas for entry in delta.logprobs or ()]
    assert [entry.token_id for entry in entries] == ids
    assert b"".join(entry.bytes for entry in entries).decode() == text_of(deltas) == "a😀é "
    assert "".join(entry.token for entry in entries) == text_of(deltas)
    assert len({top.token for top in entries[0].top}) == 3
    assert [list(top.bytes) for top in entries[0].top][:2] == [[0xF0], [0xF1]]
    assert entries[0].top[2].token == tokenizer.token_string(EOS)


@BOTH
def test_tok_05_half_a_character_at_the_end_belongs_to_the_last_token(tokenizer: Tokenizer) -> None:
    ids = [*byte_ids("a"), *byte_ids("😀")[:2]]
    logprobs = tuple(TokenLogprob(token_id, -1.0) for token_id in ids)
    [delta] = run(tokenizer, [event(ids, "length", logprobs=logprobs)])
    assert delta.logprobs is not None
    assert [entry.token for entry in delta.logprobs] == ["a", "", "\ufffd"]
    assert "".join(entry.token for entry in delta.logprobs) == delta.text


def test_lone_token_text() -> None:
    assert lone_token_text("é".encode()) == "é"
    assert lone_token_text(b"\xf0\x9f") == "bytes:\\xf0\\x9f"
    assert lone_token_text(b"a\xff") == "bytes:\\x61\\xff"


@BOTH
@pytest.mark.parametrize("skip", [False, True])
@pytest.mark.parametrize(("token", "reason"), [(EOS, None), (0, 0), (byte_id(0x37), byte_id(0x37))])
def test_tok_06_the_stop_token_is_not_text(tokenizer: Tokenizer, skip: bool, token: int, reason: int | None) -> None:
    """TOK-06: A B <stop>: text AB with either value of skip_special_tokens; nothing else is trimmed."""
    ids = [*byte_ids("AB"), token]
    for events in (one_by_one(ids, "stop"), [event(ids, "stop")]):
        events[-1] = replace(events[-1], stop_reason=reason)
        deltas = run(tokenizer, events, skip_special_tokens=skip)
        assert text_of(deltas) == "AB"
        assert (deltas[-1].finish_reason, deltas[-1].stop_reason) == ("stop", reason)
        assert [token_id for delta in deltas for token_id in delta.token_ids] == ids


@BOTH
def test_tok_06_special_tokens_in_the_middle(tokenizer: Tokenizer) -> None:
    """TOK-06: with ignore_eos an EOS id is a token like others: shown unless skipped."""
    ids = [*byte_ids("A"), EOS, *byte_ids("B")]
    assert text_of(run(tokenizer, [event(ids, "length")], skip_special_tokens=True)) == "AB"
    shown = text_of(run(tokenizer, [event(ids, "length")], skip_special_tokens=False))
    assert shown == f"A{tokenizer.token_string(EOS)}B"


def test_without_a_tokenizer_text_is_none() -> None:
    logprobs = (TokenLogprob(5, -1.0, ((5, -1.0), (6, -2.0))),)
    [delta] = run(
        None, [event([5], "length", logprobs=logprobs, prompt_logprobs=(None, TokenLogprob(3, -2.0)))], (1, 3)
    )
    assert (delta.text, delta.token_ids, delta.finish_reason) == (None, (5,), "length")
    assert delta.logprobs is not None
    assert delta.prompt_logprobs is not None
    assert [(entry.token, entry.bytes, entry.token_id) for entry in delta.logprobs] == [("", b"", 5)]
    assert delta.prompt_logprobs[0] is None
    with pytest.raises(RequestError, match="no tokenizer") as caught:
        TextStream(None, SamplingParams(stop=("x",)))
    assert caught.value.param == "stop"


@BOTH
def test_prompt_pieces_join_to_the_prompt(tokenizer: Tokenizer) -> None:
    for ids in (tokenizer.encode("hello 😀 the"), [], [1], [1, 2, tokenizer.vocab_size + 1], byte_ids("漢")[:2]):
        pieces = prompt_pieces(tokenizer, ids)
        assert len(pieces) == len(ids)
        assert "".join(pieces) == tokenizer.decode(ids)


@BOTH
def test_prompt_logprobs_have_text(tokenizer: Tokenizer) -> None:
    prompt = [1, *byte_ids("é"), rome_id(tokenizer)]
    entries = (None, *(TokenLogprob(token_id, -1.0, ((EOS, -0.5),)) for token_id in prompt[1:]))
    [delta] = run(tokenizer, [event([], prompt_logprobs=entries)], prompt)
    assert delta.prompt_logprobs is not None
    assert [entry and (entry.token, entry.bytes) for entry in delta.prompt_logprobs] == [
        None,
        ("", b"\xc3"),
        ("é", b"\xa9"),
        (" Rome", b" Rome"),
    ]
    assert delta.prompt_logprobs[1] is not None
    assert delta.prompt_logprobs[1].top[0].token == tokenizer.token_string(EOS)


def test_other_fields_pass_through() -> None:
    one = TokenEvent("r", 3, (byte_id(0x41),), num_cached_tokens=7, finish_reason="length")
    [delta] = run(BYTE_LEVEL, [one])
    assert delta == OutputDelta(3, "A", (byte_id(0x41),), finish_reason="length", num_cached_tokens=7)
