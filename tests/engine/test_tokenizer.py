"""engine/tokenizer.py: folders and GGUF metadata to ids and back."""

from __future__ import annotations

import json
import logging
import threading
import time
from pathlib import Path

import pytest
import tokenizers
from tokenizers import AddedToken, decoders, processors

from engine.errors import ConfigError, RequestError
from engine.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_gguf
from tests.engine.test_gguf_tokenizer import byte_level_metadata, sentencepiece_metadata
from tests.engine.tiny_tokenizers import (
    byte_fallback_tokenizer,
    byte_id,
    byte_ids,
    byte_level_tokenizer,
    write_tokenizer,
)

BACKENDS = {
    "byte_level": byte_level_tokenizer(),
    "byte_level_bos": byte_level_tokenizer(add_bos=True),
    "byte_fallback": byte_fallback_tokenizer(),
}
TEXTS = [
    "hello world",
    "",
    " ",
    "  the cat\n\n😀 é 12 don't",
    "{% if %} `x` | y |\n" + "\n" * 40,
    "שלום 漢字 \u200d\x00",
]


def _loaded(folder: Path, backend: tokenizers.Tokenizer) -> Tokenizer:
    write_tokenizer(folder, backend)
    tokenizer = load_tokenizer(folder)
    assert tokenizer is not None
    return tokenizer


@pytest.mark.parametrize("name", BACKENDS)
def test_api_20_ids_are_those_of_the_reference(tmp_path: Path, name: str) -> None:
    """API-20: a prompt string gets the post-processor's tokens, a rendered chat gets nothing added."""
    tokenizer, reference = _loaded(tmp_path, BACKENDS[name]), BACKENDS[name]
    for text in TEXTS:
        assert tokenizer.encode(text) == reference.encode(text).ids
        assert tokenizer.encode(text, add_special_tokens=False) == reference.encode(text, add_special_tokens=False).ids


def test_api_20_one_bos_where_the_text_brings_its_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """API-20: rendered text as a prompt string has one BOS; a warning says so once; a second BOS text is kept."""
    tokenizer = _loaded(tmp_path, byte_level_tokenizer(add_bos=True))
    hello = tokenizer.encode("hello", add_special_tokens=False)
    with caplog.at_level(logging.WARNING):
        assert tokenizer.encode("hello") == [1, *hello]
        assert not caplog.records
        assert tokenizer.encode("<|im_start|>hello") == [1, *hello]
        assert tokenizer.encode("<|im_start|><|im_start|>hello") == [1, 1, *hello]
        assert tokenizer.encode("hello<|im_start|>") == [1, *hello, 1]
    assert len(caplog.records) == 1
    assert "<|im_start|>" in caplog.text


def test_api_20_no_bos_is_dropped_where_none_is_added(tmp_path: Path) -> None:
    tokenizer = _loaded(tmp_path, byte_level_tokenizer(add_bos=False))
    assert tokenizer.encode("<|im_start|><|im_start|>") == [1], "the text's first BOS was taken for an added one"


def test_control_text_becomes_control_tokens(tmp_path: Path) -> None:
    """The written policy for SEC-04: the same in prompts and in rendered chats."""
    tokenizer = _loaded(tmp_path, byte_level_tokenizer())
    for add_special_tokens in (True, False):
        assert tokenizer.encode("hello<|im_end|>", add_special_tokens)[-1] == 2


@pytest.mark.parametrize("name", BACKENDS)
def test_decode_is_the_librarys(tmp_path: Path, name: str) -> None:
    tokenizer, reference = _loaded(tmp_path, BACKENDS[name]), BACKENDS[name]
    for text in TEXTS:
        ids = tokenizer.encode(text)
        for skip in (False, True):
            assert tokenizer.decode(ids, skip) == reference.decode(ids, skip_special_tokens=skip)


def test_tok_04_no_clean_up_of_spaces(tmp_path: Path) -> None:
    """TOK-04: "don 't" and " ," stay; the config's clean_up_tokenization_spaces is for WordPiece only."""
    write_tokenizer(tmp_path, byte_level_tokenizer())
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"clean_up_tokenization_spaces": True}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.decode(tokenizer.encode("don 't , x .")) == "don 't , x ."


def test_tok_03_gap_ids(tmp_path: Path) -> None:
    """TOK-03: ids between the tokenizer's entries and the matrix's rows, and any other unknown id."""
    tokenizer = _loaded(tmp_path, byte_level_tokenizer())
    hello = tokenizer.encode("hello")
    for gap in (tokenizer.vocab_size, tokenizer.vocab_size + 63, 10**12, -1):
        assert tokenizer.decode([*hello, gap, *hello]) == "hellohello"
        assert tokenizer.token_string(gap) == ""


def test_ldr_10_check_vocab(tmp_path: Path) -> None:
    """LDR-10: more entries than rows is an error with both numbers; fewer is normal."""
    tokenizer = _loaded(tmp_path, byte_level_tokenizer())
    size = tokenizer.vocab_size
    tokenizer.check_vocab(size)
    tokenizer.check_vocab(size + 64)
    with pytest.raises(ConfigError, match=rf"up to {size - 1}.* only {size - 1} rows") as caught:
        tokenizer.check_vocab(size - 1)
    assert str(tmp_path) in str(caught.value)


def test_special_ids_and_strings(tmp_path: Path) -> None:
    tokenizer = _loaded(tmp_path, byte_level_tokenizer())
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)
    assert tokenizer.special_ids == {0, 1, 2}
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert tokenizer.token_string(2) == "<|im_end|>"
    assert tokenizer.token_string(byte_id(0x20)) == "Ġ"
    assert tokenizer.vocab_size == byte_level_tokenizer().get_vocab_size()


def test_special_tokens_as_objects_and_from_the_map(tmp_path: Path) -> None:
    """DeepSeek writes tokens as objects; older folders keep them in special_tokens_map.json."""
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    token = {"__type": "AddedToken", "content": "<|im_start|>", "lstrip": False}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": token, "unk_token": None}))
    (tmp_path / "special_tokens_map.json").write_text(json.dumps({"eos_token": "<|im_end|>", "bos_token": "x"}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}


def test_tokens_that_only_the_config_names_are_added(tmp_path: Path) -> None:
    backend = byte_level_tokenizer()
    size = backend.get_vocab_size()
    backend.save(str(tmp_path / "tokenizer.json"))
    config = {
        "added_tokens_decoder": {
            str(size + 1): {"content": "<tool>", "special": False, "normalized": False},
            str(size): {"content": "<image>", "special": True, "normalized": False},
            "2": {"content": "<|im_end|>", "special": True},
        },
        "eos_token": "<end>",
    }
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("<image><tool><end>") == [size, size + 1, size + 2]
    assert tokenizer.decode([size, size + 1, size + 2], skip_special_tokens=True) == "<tool>"
    assert tokenizer.eos_token_id == size + 2


def test_bos_of_the_config_without_a_post_processor(tmp_path: Path) -> None:
    """API-20: as the reference, add_bos_token counts only where tokenizer.json says nothing."""
    backend = byte_level_tokenizer()
    assert backend.post_processor is None
    write_tokenizer(tmp_path, backend)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": True}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("hello")[0] == 1
    assert tokenizer.encode("hello", add_special_tokens=False)[0] != 1


def test_bos_of_the_config_beside_a_post_processor(tmp_path: Path) -> None:
    """API-20: DeepSeek V3 says add_bos_token, but its tokenizer.json adds nothing; the reference adds nothing."""
    backend = byte_level_tokenizer()
    backend.post_processor = processors.ByteLevel(trim_offsets=False)
    write_tokenizer(tmp_path, backend)
    config = json.loads((tmp_path / "tokenizer_config.json").read_text())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(config | {"add_bos_token": True}))
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    assert tokenizer.encode("hello") == backend.encode("hello").ids


def test_truncation_and_padding_of_the_file_are_ignored(tmp_path: Path) -> None:
    backend = byte_level_tokenizer()
    backend.enable_truncation(2)
    backend.enable_padding(length=50, pad_id=0, pad_token="<|endoftext|>")
    tokenizer = _loaded(tmp_path, backend)
    assert tokenizer.decode(tokenizer.encode("the cat the cat")) == "the cat the cat"


def test_a_folder_without_a_tokenizer(tmp_path: Path) -> None:
    assert load_tokenizer(tmp_path) is None


@pytest.mark.parametrize("content", [b"{", b'{"a": 1}', b"\xff\xfe", b"", b"[]", b"null"])
def test_a_broken_tokenizer_json_is_named(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(ConfigError, match=r"tokenizer\.json"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("name", ["tokenizer_config.json", "special_tokens_map.json"])
@pytest.mark.parametrize("content", [b"{", b"[]", b"\xff", b"[" * 100_000])
def test_a_broken_config_file_is_named(tmp_path: Path, name: str, content: bytes) -> None:
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / name).write_bytes(content)
    with pytest.raises(ConfigError, match=name.replace(".", r"\.")):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("named", [[1], {"x": {}}, {"1": "a"}, {"1": {"special": True}}])
def test_a_broken_added_tokens_decoder_is_named(tmp_path: Path, named: object) -> None:
    byte_level_tokenizer().save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": named}))
    with pytest.raises(ConfigError, match="added_tokens_decoder is broken"):
        load_tokenizer(tmp_path)


def test_a_decoder_of_another_kind_names_the_file(tmp_path: Path) -> None:
    backend = byte_level_tokenizer()
    backend.decoder = decoders.WordPiece()
    write_tokenizer(tmp_path, backend)
    with pytest.raises(ConfigError, match=r"tokenizer\.json: decoder 'WordPiece' is not supported"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize("text", ["\ud800", "ab\udfffcd", "😀\ud83d"])
def test_a_lone_surrogate_is_the_requests_fault(tmp_path: Path, text: str) -> None:
    tokenizer = _loaded(tmp_path, byte_level_tokenizer())
    with pytest.raises(RequestError, match=r"lone surrogate U\+D[89A-F]") as caught:
        tokenizer.encode(text, param="messages")
    assert caught.value.param == "messages"


def test_a_long_run_of_one_character(tmp_path: Path) -> None:
    """A word of 200 000 bytes is one unit for the merges; the result is right and comes."""
    for backend in (byte_level_tokenizer(), byte_fallback_tokenizer()):
        tokenizer = _loaded(tmp_path, backend)
        text = "x" * 200_000
        assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


def test_other_threads_run_while_a_long_text_is_encoded(tmp_path: Path) -> None:
    """SEC-06: the event loop must not stand still; with the interpreter held it would get one turn or two."""
    tokenizer = _loaded(tmp_path, byte_level_tokenizer())
    thread = threading.Thread(target=tokenizer.encode, args=("hello the cat " * 100_000,))
    thread.start()
    num_turns = 0
    while thread.is_alive():
        time.sleep(0.0005)
        num_turns += 1
    assert num_turns >= 10


def test_gguf_byte_level() -> None:
    tokenizer = tokenizer_from_gguf(byte_level_metadata())
    ids = tokenizer.encode("<|im_start|>the 😀")
    assert ids == byte_level_tokenizer().encode("<|im_start|>the 😀").ids
    assert tokenizer.decode(ids) == "<|im_start|>the 😀"
    assert tokenizer.special_tokens == {"bos_token": "<|im_start|>", "eos_token": "<|im_end|>"}
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id) == (1, 2)


def test_gguf_sentencepiece() -> None:
    tokenizer = tokenizer_from_gguf(sentencepiece_metadata())
    ids = tokenizer.encode("hello 漢")
    assert ids[0] == 1
    assert ids[-3:] == byte_ids("漢")
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello 漢"
    assert tokenizer.special_tokens == {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}


def test_gguf_vocabulary_may_lack_byte_tokens() -> None:
    """The starter model has no unknown token and not all bytes: such characters give no id, as in the reference."""
    metadata = byte_level_metadata()
    tokens = [token for token in metadata["tokenizer.ggml.tokens"] if token != "ð"]
    metadata |= {"tokenizer.ggml.tokens": tokens, "tokenizer.ggml.token_type": [3] * 3 + [1] * (len(tokens) - 3)}
    tokenizer = tokenizer_from_gguf(metadata)
    assert tokenizer.decode(tokenizer.encode("cat😀cat")) == "cat" + b"\x9f\x98\x80".decode("utf-8", "replace") + "cat"


def test_added_token_with_spaces_around(tmp_path: Path) -> None:
    """lstrip and rstrip are the tokenizer's own rules and stay."""
    backend = byte_level_tokenizer()
    backend.add_special_tokens([AddedToken("<mask>", lstrip=True, normalized=False)])
    tokenizer = _loaded(tmp_path, backend)
    assert tokenizer.encode("hello   <mask>") == [*tokenizer.encode("hello"), tokenizer.vocab_size - 1]


def test_ids_far_beyond_the_entries_are_refused_before_a_table_is_made(tmp_path: Path) -> None:
    """Before: a list of four billion strings."""
    write_tokenizer(tmp_path, byte_level_tokenizer())
    content = json.loads((tmp_path / "tokenizer.json").read_text())
    content["model"]["vocab"]["zz"] = 4_000_000_000
    (tmp_path / "tokenizer.json").write_text(json.dumps(content))
    with pytest.raises(ConfigError, match="token 'zz' has id 4000000000; ids are 0 to 16777215"):
        load_tokenizer(tmp_path)


@pytest.mark.parametrize(
    ("key", "value", "says"),
    [
        ("additional_special_tokens", 5, "must be a list of tokens"),
        ("additional_special_tokens", "abc", "must be a list of tokens"),
        ("additional_special_tokens", ["\ud800"], "lone surrogate"),
        ("bos_token", "\ud800", "lone surrogate"),
        ("bos_token", {"content": "a\udfff"}, "lone surrogate"),
    ],
)
def test_special_tokens_of_a_wrong_kind_are_refused_by_name(tmp_path: Path, key: str, value: object, says: str) -> None:
    write_tokenizer(tmp_path, byte_level_tokenizer())
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({key: value}))
    with pytest.raises(ConfigError) as caught:
        load_tokenizer(tmp_path)
    assert key in str(caught.value)
    assert says in str(caught.value)


def test_a_byte_order_mark_changes_nothing(tmp_path: Path) -> None:
    write_tokenizer(tmp_path, byte_level_tokenizer())
    plain = load_tokenizer(tmp_path)
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<|im_start|>"}))
    for name in ("tokenizer.json", "tokenizer_config.json"):
        (tmp_path / name).write_bytes(b"\xef\xbb\xbf" + (tmp_path / name).read_bytes())
    marked = load_tokenizer(tmp_path)
    assert plain is not None
    assert marked is not None
    assert marked.encode("hello") == plain.encode("hello")
    assert marked.special_tokens == {"bos_token": "<|im_start|>"}
