"""engine/gguf_tokenizer.py: vocabularies in GGUF metadata, made by hand or from the tiny tokenizers."""

from __future__ import annotations

import json
import random
from typing import Any

import pytest
from tokenizers import Tokenizer

from engine.errors import ConfigError
from engine.gguf_tokenizer import BYTE, CONTROL, UNKNOWN, USER_DEFINED, build_gguf_tokenizer, merges_from_scores
from tests.engine.tiny_tokenizers import byte_fallback_tokenizer, byte_id, byte_ids, byte_level_tokenizer

TEXTS = [
    "hello world",
    "  the cat\n\n😀 é 12 don't",
    "<|im_start|>user\nhello<|im_end|>",
    "",
    " ",
    "\n",
    "==\t== the the",
    "漢字 \u200d שלום",
]


def _vocab_in_order(tokenizer: Tokenizer) -> list[str]:
    return [tokenizer.id_to_token(token_id) for token_id in range(tokenizer.get_vocab_size())]


def byte_level_metadata(**changes: Any) -> dict[str, Any]:
    """The tiny byte-level tokenizer as a GGUF file would hold it."""
    tokens = _vocab_in_order(byte_level_tokenizer())
    merges = json.loads(byte_level_tokenizer().to_str())["model"]["merges"]
    metadata = {
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [CONTROL] * 3 + [1] * (len(tokens) - 3),
        "tokenizer.ggml.merges": [" ".join(merge) for merge in merges],
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
    }
    return metadata | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def sentencepiece_metadata(**changes: Any) -> dict[str, Any]:
    """The tiny byte-fallback tokenizer as a GGUF file would hold it: scores fall with the id."""
    tokens = _vocab_in_order(byte_fallback_tokenizer())
    metadata = {
        "tokenizer.ggml.model": "llama",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.scores": [-float(token_id) for token_id in range(len(tokens))],
        "tokenizer.ggml.token_type": [UNKNOWN, CONTROL, CONTROL] + [BYTE] * 256 + [1] * (len(tokens) - 259),
        "tokenizer.ggml.bos_token_id": 1,
        "tokenizer.ggml.eos_token_id": 2,
        "tokenizer.ggml.unknown_token_id": 0,
    }
    return metadata | {f"tokenizer.ggml.{name}": value for name, value in changes.items()}


def test_byte_level_gives_the_ids_of_the_tokenizer_it_was_made_from() -> None:
    built, original = build_gguf_tokenizer(byte_level_metadata()), byte_level_tokenizer()
    for text in TEXTS:
        ids = built.encode(text).ids
        assert ids == original.encode(text).ids, text
        assert built.decode(ids, skip_special_tokens=False) == text


def test_control_tokens_in_text_are_control_tokens() -> None:
    built = build_gguf_tokenizer(byte_level_metadata())
    assert built.encode("<|im_start|>hello<|im_end|>").ids == [1, built.token_to_id("hello"), 2]
    assert built.decode([1, built.token_to_id("hello"), 2]) == "hello"


def test_sentencepiece_gives_the_ids_of_the_tokenizer_it_was_made_from() -> None:
    """TOK-04: the dummy space at the start, byte fallback for what the vocabulary lacks."""
    built, original = build_gguf_tokenizer(sentencepiece_metadata()), byte_fallback_tokenizer()
    rng = random.Random(0)
    texts = TEXTS + ["".join(rng.choices("helo wrdcat=é漢\n ", k=60)) for _ in range(200)]
    for text in texts:
        ids = built.encode(text).ids
        assert ids == original.encode(text).ids, text
        assert built.decode(ids) == original.decode(ids)
    assert built.encode("hello 漢").ids[-3:] == [byte_id(byte) for byte in "漢".encode()]


def test_sentencepiece_without_space_prefix() -> None:
    built = build_gguf_tokenizer(sentencepiece_metadata(add_space_prefix=False))
    ids = built.encode("hello world").ids
    assert [built.id_to_token(token_id) for token_id in ids] == ["<s>", "hello", "▁world"]
    assert built.decode(built.encode(" hello").ids) == " hello"


def test_merges_follow_scores() -> None:
    """Worked by hand: "bc" (-1) beats "ab" (-2), so "abc" is a + bc; the piece with the best score comes first."""
    tokens = ["a", "b", "c", "ab", "bc", "abc", "<x>"]
    scores = [0.0, 0.0, 0.0, -2.0, -1.0, -3.0, 5.0]
    merges = merges_from_scores(tokens, scores, [1] * 6 + [CONTROL])
    assert merges == [("b", "c"), ("a", "b"), ("a", "bc"), ("ab", "c")]


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, [0]),
        ({"add_bos_token": True}, [1, 0]),
        ({"add_bos_token": True, "add_eos_token": True}, [1, 0, 2]),
        ({"pre": "llama-bpe"}, [1, 0]),
        ({"pre": "llama-bpe", "add_bos_token": False}, [0]),
        ({"add_bos_token": True, "bos_token_id": None}, [0]),
    ],
)
def test_bos_and_eos_as_the_file_says(changes: dict[str, Any], expected: list[int]) -> None:
    """API-20: 0 stands for the text."""
    built = build_gguf_tokenizer(byte_level_metadata(**changes))
    text = built.encode("hello", add_special_tokens=False).ids
    wanted = [token_id for part in expected for token_id in (text if part == 0 else [part])]
    assert built.encode("hello").ids == wanted


def test_sentencepiece_adds_bos_by_default() -> None:
    assert build_gguf_tokenizer(sentencepiece_metadata()).encode("cat").ids[0] == 1
    assert build_gguf_tokenizer(sentencepiece_metadata(add_bos_token=False)).encode("cat").ids[0] != 1


@pytest.mark.parametrize(
    ("pre", "text", "words"),
    [
        ("smollm", "a12 b", ["a", "1", "2", "Ġb"]),
        ("gpt-2", "a1234 b's", ["a", "1234", "Ġb", "'s"]),
        ("llama-bpe", "a1234 B'S\n\nc", ["a", "123", "4", "ĠB", "'S", "ĊĊ", "c"]),
        ("qwen2", "a12 b's x  y", ["a", "1", "2", "Ġb", "'s", "Ġx", "Ġ", "Ġy"]),
        ("default", "a1234!? b", ["a", "123", "4", "!?", "Ġb"]),
        (None, "a1234!? b", ["a", "123", "4", "!?", "Ġb"]),
    ],
)
def test_words_of_each_split_pattern(pre: str | None, text: str, words: list[str]) -> None:
    metadata = byte_level_metadata(pre=pre)
    if pre is None:
        del metadata["tokenizer.ggml.pre"]
    splitter = build_gguf_tokenizer(metadata).pre_tokenizer
    assert splitter is not None
    assert [word for word, _ in splitter.pre_tokenize_str(text)] == words


def test_user_defined_tokens_are_whole_but_not_special() -> None:
    tokens = [*byte_level_metadata()["tokenizer.ggml.tokens"], "<think>"]
    types = [CONTROL] * 3 + [1] * (len(tokens) - 4) + [USER_DEFINED]
    built = build_gguf_tokenizer(byte_level_metadata(tokens=tokens, token_type=types))
    assert built.encode("<think>").ids == [len(tokens) - 1]
    assert built.decode([2, len(tokens) - 1]) == "<think>"


@pytest.mark.parametrize(("pre", "whole"), [("llama-bpe", True), ("qwen2", False)])
def test_llama_3_takes_whole_words_that_no_merge_makes(pre: str, whole: bool) -> None:
    tokens = [*byte_level_metadata()["tokenizer.ggml.tokens"], "zzz"]
    types = [CONTROL] * 3 + [1] * (len(tokens) - 3)
    built = build_gguf_tokenizer(byte_level_metadata(tokens=tokens, token_type=types, pre=pre))
    ids = built.encode("zzz", add_special_tokens=False).ids
    assert ids == ([len(tokens) - 1] if whole else byte_ids("zzz"))


@pytest.mark.parametrize(("pre", "text"), [("qwen2", "\u00e9"), ("gpt-2", "e\u0301")])
def test_qwen_composes_characters(pre: str, text: str) -> None:
    built = build_gguf_tokenizer(byte_level_metadata(pre=pre))
    assert built.encode("e\u0301").ids == byte_ids(text)


@pytest.mark.parametrize(
    ("metadata", "words"),
    [
        (byte_level_metadata(model="rwkv"), "tokenizer.ggml.model is 'rwkv'; supported are gpt2, llama"),
        (byte_level_metadata(pre="klingon"), "tokenizer.ggml.pre is 'klingon'; supported are default, gpt-2"),
        (byte_level_metadata(tokens=None), "tokenizer.ggml.tokens must be a list, found nothing"),
        (byte_level_metadata(merges="a b"), "tokenizer.ggml.merges must be a list, found str"),
        (byte_level_metadata(token_type=[1, 2]), "token_type has 2 entries"),
        (byte_level_metadata(merges=["nope nope"]), "cannot be used"),
        (byte_level_metadata(bos_token_id=10**6, add_bos_token=True), "bos_token_id is 1000000"),
        (sentencepiece_metadata(scores=[0.0]), "scores has 1 entries"),
        ({}, "tokenizer.ggml.model must be a str, found nothing"),
    ],
)
def test_broken_metadata_is_refused_by_key(metadata: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        build_gguf_tokenizer(metadata)


@pytest.mark.parametrize(
    ("name", "value"),
    [("merges", ["ab"]), ("merges", [1]), ("merges", ["a b c"]), ("tokens", [1, 2]), ("token_type", 5)],
)
def test_lists_of_a_wrong_kind_name_their_key(name: str, value: object) -> None:
    with pytest.raises(ConfigError, match=f"tokenizer.ggml.{name} must be "):
        build_gguf_tokenizer(byte_level_metadata(**{name: value}))


def test_a_special_id_that_is_no_integer_names_its_key() -> None:
    with pytest.raises(ConfigError, match=r"tokenizer\.ggml\.bos_token_id is 'x'"):
        build_gguf_tokenizer(byte_level_metadata(bos_token_id="x"))
