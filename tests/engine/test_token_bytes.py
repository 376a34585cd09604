"""engine/token_bytes.py: the table must decode what the tokenizers library decodes."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tokenizers import AddedToken, Tokenizer, decoders, models

from engine.errors import ConfigError
from engine.token_bytes import ByteStream, TokenBytes, build_token_bytes, byte_level_alphabet
from tests.engine.tiny_tokenizers import byte_characters, byte_fallback_tokenizer, byte_id, byte_level_tokenizer


def _table(tokenizer: Tokenizer) -> TokenBytes:
    tokens = [tokenizer.id_to_token(token_id) for token_id in range(tokenizer.get_vocab_size())]
    return build_token_bytes(json.loads(tokenizer.decoder.__getstate__()), tokens, "tiny")


def _decode(table: TokenBytes, token_ids: list[int], skipped: frozenset[int] = frozenset()) -> str:
    stream = ByteStream(table, skipped)
    return b"".join(map(stream.next, token_ids)).decode("utf-8", "replace")


def _vocab_tokenizer(tokens: list[str], decoder: Any) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE(vocab={token: index for index, token in enumerate(tokens)}, merges=[]))
    tokenizer.decoder = decoder
    return tokenizer


def test_alphabet_gives_each_byte_its_own_character() -> None:
    alphabet = byte_level_alphabet()
    assert alphabet == {character: byte for byte, character in enumerate(byte_characters())}
    assert sorted(alphabet.values()) == list(range(256))
    assert (alphabet["Ġ"], alphabet["Ċ"], alphabet["A"]) == (0x20, 0x0A, 0x41)


def test_byte_level_bytes_and_added_tokens() -> None:
    tokenizer = byte_level_tokenizer()
    tokenizer.add_tokens([AddedToken(text, normalized=False) for text in ("  ", "é", "｜▁", "Ġx")])
    table = _table(tokenizer)
    assert table[byte_id(0xE2)] == b"\xe2"
    assert table[tokenizer.token_to_id("Ġworld")] == b" world"
    # As the library does: an added token goes through the decoder too, and is taken as it is only if it has a
    # character that stands for no byte.
    wanted = {"  ": b"  ", "é": b"\xe9", "｜▁": "｜▁".encode(), "Ġx": b" x", "<|im_end|>": b"<|im_end|>"}
    for text, data in wanted.items():
        token_id = tokenizer.token_to_id(text)
        assert table[token_id] == data
        assert _decode(table, [token_id]) == tokenizer.decode([token_id], skip_special_tokens=False)


@pytest.mark.parametrize("skip", [False, True])
def test_byte_level_equals_the_library_on_random_ids(skip: bool) -> None:
    """TOK-02: 2000 sequences of 200 ids, gap ids among them."""
    tokenizer = byte_level_tokenizer()
    table, rng = _table(tokenizer), random.Random(0)
    skipped = frozenset((0, 1, 2)) if skip else frozenset()
    for _ in range(2000):
        token_ids = [rng.randrange(tokenizer.get_vocab_size() + 16) for _ in range(200)]
        assert _decode(table, token_ids, skipped) == tokenizer.decode(token_ids, skip_special_tokens=skip)


def _random_text_ids(tokenizer: Tokenizer, rng: random.Random) -> list[int]:
    """Words and special tokens in any order, and byte tokens only as whole characters."""
    others = [token_id for token_id in range(tokenizer.get_vocab_size()) if not 3 <= token_id < 259]
    token_ids: list[int] = []
    while len(token_ids) < 200:
        if rng.random() < 0.3:
            token_ids += [byte_id(byte) for byte in rng.choice("aé漢😀\n ").encode()]
        else:
            token_ids.append(rng.choice(others))
    return token_ids


@pytest.mark.parametrize("skip", [False, True])
def test_byte_fallback_equals_the_library_on_whole_characters(skip: bool) -> None:
    """TOK-02, TOK-04: the first space is taken away as the library does."""
    tokenizer = byte_fallback_tokenizer()
    table, rng = _table(tokenizer), random.Random(1)
    skipped = frozenset((0, 1, 2)) if skip else frozenset()
    for _ in range(2000):
        token_ids = _random_text_ids(tokenizer, rng)
        assert _decode(table, token_ids, skipped) == tokenizer.decode(token_ids, skip_special_tokens=skip)


def test_byte_fallback_replaces_bad_bytes_only() -> None:
    """TOK-01: the documented difference from the library, which gives up the whole run of byte tokens."""
    tokenizer = byte_fallback_tokenizer()
    table = _table(tokenizer)
    token_ids = [byte_id(byte) for byte in b"A\xffB\xe2\x82"] + [tokenizer.token_to_id("▁cat")]
    assert tokenizer.decode(token_ids) == "\ufffd" * 5 + " cat"
    assert _decode(table, token_ids) == "A\ufffdB\ufffd cat"


def test_byte_fallback_random_bytes_follow_unicode() -> None:
    tokenizer = byte_fallback_tokenizer()
    table, rng = _table(tokenizer), random.Random(2)
    for _ in range(500):
        data = bytes(rng.randrange(256) for _ in range(50))
        expected = data.decode("utf-8", "replace").removeprefix(" ")
        assert _decode(table, [byte_id(byte) for byte in data]) == expected


TOKENS = ["▁", "▁▁", "▁a", "a▁b", "b", "<0x41>", "<0xZZ>", "<0x4>", " c"]


@pytest.mark.parametrize(
    "decoder",
    [
        decoders.Metaspace(),
        decoders.Metaspace(prepend_scheme="never"),
        decoders.Metaspace(replacement="_", prepend_scheme="first"),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]),
        decoders.Sequence([decoders.ByteFallback(), decoders.Metaspace()]),
        decoders.Sequence([decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 2, 0)]),
        decoders.Sequence([decoders.ByteLevel(), decoders.Strip(" ", 1, 0)]),
        decoders.Sequence([decoders.Metaspace(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]),
        decoders.Fuse(),
    ],
    ids=str,
)
def test_other_decoders_equal_the_library(decoder: Any) -> None:
    """TOK-04: the rules for the first token of a text, whatever the decoder."""
    tokenizer = _vocab_tokenizer(TOKENS, decoder)
    table, rng = _table(tokenizer), random.Random(3)
    for _ in range(1000):
        token_ids = [rng.randrange(len(TOKENS) + 2) for _ in range(rng.randrange(1, 7))]
        assert _decode(table, token_ids) == tokenizer.decode(token_ids), token_ids


def test_ids_that_the_table_lacks_have_no_bytes() -> None:
    """TOK-03."""
    table = build_token_bytes({"type": "ByteLevel"}, ["a", None, "c"], "x")
    assert [table[token_id] for token_id in (-1, 0, 1, 2, 3, 10**9)] == [b"", b"a", b"", b"c", b"", b""]


@pytest.mark.parametrize(
    ("decoder", "words"),
    [
        ({"type": "WordPiece", "prefix": "##", "cleanup": True}, "WordPiece"),
        ({"type": "Sequence", "decoders": [{"type": "CTC"}]}, "CTC"),
        ({"type": "Strip", "content": " ", "start": 1, "stop": 0}, "Strip before Fuse"),
        (
            {
                "type": "Sequence",
                "decoders": [{"type": "Fuse"}, {"type": "Strip", "content": "x", "start": 0, "stop": 1}],
            },
            "stop 1",
        ),
        ({"type": "Sequence", "decoders": [{"type": "Fuse"}, {"type": "ByteFallback"}]}, "ByteFallback after Fuse"),
        ({"type": "Replace", "pattern": {"Regex": "a+"}, "content": ""}, "plain string"),
        (None, "no decoder"),
    ],
)
def test_unknown_decoders_are_refused_by_name(decoder: dict[str, Any] | None, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as caught:
        build_token_bytes(decoder, ["a"], "folder/tokenizer.json")
    assert "folder/tokenizer.json" in str(caught.value)
