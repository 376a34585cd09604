"""Text to token ids and back, for Hugging Face folders and GGUF files.

Rules:
- A prompt string gets exactly the ids of the model's own tokenizer, with what its post-processor adds (BOS). If the
  text itself begins with the BOS text, only one BOS is kept. A rendered chat is encoded with nothing added.
- The text of a control token in a prompt or a message ("<|im_end|>") becomes that control token, in every route,
  as the reference tokenizers do.
- Ids that the vocabulary lacks decode to nothing: a model may have more rows than its tokenizer has entries.
- Decoding cleans nothing up: no spaces are removed before punctuation.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import processors

from engine.errors import ConfigError, RequestError
from engine.gguf_tokenizer import build_gguf_tokenizer, gguf_special_token
from engine.token_bytes import ByteStream, TokenBytes, build_token_bytes

logger = logging.getLogger(__name__)

LARGEST_ID = 2**24 - 1  # far above every vocabulary; tables with a row for each id up to the largest are made
SPECIAL_NAMES = ("bos_token", "eos_token", "unk_token", "sep_token", "pad_token", "cls_token", "mask_token")

MAX_NORMALIZER_SHRINK = 4  # bytes of a text for one byte after NFKC: the mathematical letters U+1D400 and up


class Tokenizer:
    """A tokenizer of the tokenizers library and what the engine must know about it. Safe to share by threads.

    Attributes:
        vocab_size: largest id + 1.
        token_bytes: what each id adds to a text.
        special_ids: ids whose text is left out with skip_special_tokens.
        special_tokens: strings by name ("bos_token", "eos_token", …); a chat template may use them.
        bos_token_id, eos_token_id: ids of two of them, None if there is none.
        longest_token_bytes: no more bytes of a text become one token, save where whitespace is dropped.
    """

    def __init__(self, backend: tokenizers.Tokenizer, special_tokens: Mapping[str, str], source: str) -> None:
        """Takes backend over.

        Raises:
            ConfigError: the decoder is of a kind that is not supported, or an id is far too large.
        """
        backend.no_truncation()
        backend.no_padding()
        self._backend = backend
        self._warned_bos = False
        self.source = source
        self.special_tokens = dict(special_tokens)
        vocab = backend.get_vocab(with_added_tokens=True)
        self.vocab_size = max(vocab.values(), default=-1) + 1
        if self.vocab_size - 1 > LARGEST_ID:
            token = max(vocab, key=vocab.__getitem__)
            raise ConfigError(f"{source}: token {token!r} has id {vocab[token]}; ids are 0 to {LARGEST_ID}")
        strings = [backend.id_to_token(token_id) for token_id in range(self.vocab_size)]
        decoder = None if backend.decoder is None else json.loads(backend.decoder.__getstate__())
        self.token_bytes: TokenBytes = build_token_bytes(decoder, strings, source)
        added = backend.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        longest = max(map(len, (*self.token_bytes.table, *self.token_bytes.at_start.values())), default=1)
        self.longest_token_bytes = max(longest, 1) * (1 if backend.normalizer is None else MAX_NORMALIZER_SHRINK)
        self.bos_token_id = self._id_of("bos_token")
        self.eos_token_id = self._id_of("eos_token")

    def _id_of(self, name: str) -> int | None:
        token = self.special_tokens.get(name)
        return None if token is None else self._backend.token_to_id(token)

    def encode(self, text: str, add_special_tokens: bool = True, param: str = "prompt") -> list[int]:
        """Token ids of a text.

        Args:
            text: any text without lone surrogates.
            add_special_tokens: add what the post-processor adds: True for a prompt string, False for a rendered chat.
            param: the field that an error names.

        Raises:
            RequestError: the text has a lone surrogate, which is no character.
        """
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise RequestError(
                f"{param} has a lone surrogate U+{ord(text[error.start]):04X} at character {error.start}; "
                "send whole characters",
                param,
            ) from None
        # The batch call lets other Python threads run meanwhile; encode() would stop them all for a long text.
        ids: list[int] = self._backend.encode_batch_fast([text], add_special_tokens=add_special_tokens)[0].ids
        bos = self.bos_token_id
        if add_special_tokens and bos is not None and ids[:2] == [bos, bos]:
            if not self._warned_bos:
                self._warned_bos = True
                logger.warning(
                    "A prompt begins with the text %r, which the tokenizer adds by itself: one of the two is dropped. "
                    "This is said once.",
                    self.special_tokens["bos_token"],
                )
            return ids[1:]
        return ids

    def decode(self, token_ids: Iterable[int], skip_special_tokens: bool = False) -> str:
        """The text of a whole sequence; bytes that are not UTF-8 become U+FFFD, unknown ids nothing."""
        stream = ByteStream(self.token_bytes, self.skipped(skip_special_tokens))
        return b"".join(map(stream.next, token_ids)).decode("utf-8", "replace")

    def skipped(self, skip_special_tokens: bool) -> frozenset[int]:
        """The ids that have no text under skip_special_tokens."""
        return self.special_ids if skip_special_tokens else frozenset()

    def token_string(self, token_id: int) -> str:
        """The vocabulary's own spelling of an id ("Ġthe", "▁the", "<0x0A>"); "" for an unknown id."""
        if not 0 <= token_id < self.vocab_size:
            return ""
        return self._backend.id_to_token(token_id) or ""

    def check_vocab(self, vocab_size: int) -> None:
        """Raises ConfigError if an id of the tokenizer has no row in the model's embedding of vocab_size rows.

        Fewer entries than rows is normal: matrices are padded.
        """
        if self.vocab_size > vocab_size:
            raise ConfigError(
                f"{self.source} has token ids up to {self.vocab_size - 1}, but the model has only {vocab_size} rows "
                "(vocab_size in config.json): the tokenizer belongs to another model"
            )


def load_tokenizer(path: Path) -> Tokenizer | None:
    """Reads tokenizer.json and the names of the special tokens from a Hugging Face folder.

    Returns:
        None if the folder has no tokenizer.json; such a model serves token ids only.

    Raises:
        ConfigError: a file is broken or describes something that is not supported; names the file.
    """
    file = path / "tokenizer.json"
    if not file.is_file():
        return None
    try:
        backend = tokenizers.Tokenizer.from_str(file.read_text(encoding="utf-8-sig"))
    except Exception as error:  # the library raises plain Exception for whatever is wrong with the file
        raise ConfigError(f"{file} cannot be read: {error}") from error
    config = {**read_json(path / "special_tokens_map.json"), **read_json(path / "tokenizer_config.json")}
    found = {name: _token_text(config.get(name), name, path) for name in SPECIAL_NAMES}
    special_tokens = {name: text for name, text in found.items() if text is not None}
    _add_missing(backend, config, special_tokens, path)
    if backend.post_processor is None and config.get("add_bos_token") and "bos_token" in special_tokens:
        bos = special_tokens["bos_token"]
        special = [(bos, backend.token_to_id(bos))]
        backend.post_processor = processors.TemplateProcessing(single=[bos, "$A"], special_tokens=special)
    return Tokenizer(backend, special_tokens, str(file))


def tokenizer_from_gguf(metadata: Mapping[str, Any], source: str = "the GGUF file") -> Tokenizer:
    """The tokenizer of a GGUF file, from its key-value pairs.

    Raises:
        ConfigError: the vocabulary is missing, broken, or of a kind that is not supported.
    """
    backend = build_gguf_tokenizer(metadata)
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    found = {name: gguf_special_token(metadata, key) for name, key in names.items()}
    return Tokenizer(backend, {name: token for name, token in found.items() if token is not None}, source)


def read_json(file: Path) -> dict[str, Any]:
    """The object in a JSON file, {} if there is no such file.

    Raises:
        ConfigError: the file is not UTF-8, not JSON or not an object; names it.
    """
    if not file.is_file():
        return {}
    try:
        content = json.loads(file.read_text(encoding="utf-8-sig"))
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"{file} cannot be read as JSON: {error}") from error
    if not isinstance(content, dict):
        raise ConfigError(f"{file} must hold a JSON object, found {type(content).__name__}")
    return content


def _token_text(value: object, name: str, path: Path) -> str | None:
    """A special token is written as a string or as an object with its content."""
    text = value.get("content") if isinstance(value, dict) else value
    if not isinstance(text, str) or not text:
        return None
    if any("\ud800" <= character <= "\udfff" for character in text):
        raise ConfigError(f"{path}: {name} is {text!r} in its tokenizer files, which has a lone surrogate")
    return text


def _add_missing(
    backend: tokenizers.Tokenizer, config: Mapping[str, Any], special_tokens: Mapping[str, str], path: Path
) -> None:
    """Registers tokens that only tokenizer_config.json names, in the order of their ids, as the reference does."""
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    named = config.get("added_tokens_decoder") or {}
    flags = ("lstrip", "rstrip", "single_word", "normalized", "special")
    try:
        for _, entry in sorted(named.items(), key=lambda item: int(item[0])):
            if entry["content"] not in known:
                given = {flag: bool(entry[flag]) for flag in flags if flag in entry}
                backend.add_tokens([tokenizers.AddedToken(entry["content"], **given)])
    except (AttributeError, KeyError, TypeError, ValueError) as error:
        raise ConfigError(f"{path / 'tokenizer_config.json'}: added_tokens_decoder is broken: {error!r}") from error
    known = {token.content for token in backend.get_added_tokens_decoder().values()}
    name = "additional_special_tokens"
    extra = config.get(name) or []
    if not isinstance(extra, list):
        raise ConfigError(f"{path}: {name} must be a list of tokens in its tokenizer files, found {extra!r}")
    extra_texts = [_token_text(token, name, path) for token in extra]
    texts = [*special_tokens.values(), *(text for text in extra_texts if text is not None)]
    missing = [text for text in dict.fromkeys(texts) if text not in known]
    backend.add_special_tokens([tokenizers.AddedToken(text, special=True, normalized=False) for text in missing])
