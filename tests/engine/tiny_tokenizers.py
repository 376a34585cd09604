"""Two tiny tokenizers made in code, one of each kind that models use, and a function that writes one to a folder.

Ids are the same in both: 0 to 2 are special, 3 + b is the single byte b, words follow.
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

FIRST_BYTE_ID = 3
WORDS = ("the", "hello", "world", "cat", "Rome", "don", "==")

CHAT_TEMPLATE = (
    "{% for message in messages %}<|im_start|>{{ message['role'] }}\n{{ message['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def byte_id(byte: int) -> int:
    """The id that stands for one byte (0 … 255) in both tokenizers."""
    return FIRST_BYTE_ID + byte


def byte_ids(text: str) -> list[int]:
    """Ids of the UTF-8 bytes of text, one a byte, in both tokenizers."""
    return [byte_id(byte) for byte in text.encode()]


def byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary: itself if printable, else U+0100 and up."""
    kept = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(256) if byte not in kept]
    return [chr(byte) if byte in kept else chr(0x100 + moved.index(byte)) for byte in range(256)]


def byte_level_tokenizer(add_bos: bool = False) -> Tokenizer:
    """Byte-level BPE as in GPT-2, Llama 3 and Qwen.

    Special tokens: <|endoftext|> 0, <|im_start|> 1 (also the BOS), <|im_end|> 2. No added leading space.
    """
    characters = byte_characters()
    spelled = ["".join(characters[byte] for byte in f"{space}{word}".encode()) for word in WORDS for space in (" ", "")]
    specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    vocab, merges = _vocab_and_merges([*specials, *characters], spelled)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    if add_bos:
        tokenizer.post_processor = _bos_processor("<|im_start|>", 1)
    return tokenizer


def byte_fallback_tokenizer() -> Tokenizer:
    """BPE with spaces as U+2581 and byte fallback, as in Llama 2 and Mistral.

    Special tokens: <unk> 0, <s> 1 (added in front of every prompt), </s> 2. One space is put in front of the text,
    and decoding takes it away again.
    """
    space = "\u2581"
    specials = ["<unk>", "<s>", "</s>"]
    letters = [space, *(chr(code) for code in range(0x21, 0x7F)), "é", "\n"]
    spelled = [f"{prefix}{word}" for word in (*WORDS, space) for prefix in (space, "")]
    byte_tokens = [f"<0x{byte:02X}>" for byte in range(256)]
    vocab, merges = _vocab_and_merges([*specials, *byte_tokens, *letters], spelled)
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, unk_token="<unk>", fuse_unk=True, byte_fallback=True))
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(space), normalizers.Replace(" ", space)])
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace(space, " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in specials])
    tokenizer.post_processor = _bos_processor("<s>", 1)
    return tokenizer


def _vocab_and_merges(base: list[str], spelled: list[str]) -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Adds each word, and every beginning of it, as merges of a beginning with its next character."""
    vocab = {token: index for index, token in enumerate(base)}
    merges = []
    for word in spelled:
        for end in range(2, len(word) + 1):
            if word[:end] not in vocab:
                vocab[word[:end]] = len(vocab)
                merges.append((word[: end - 1], word[end - 1]))
    return vocab, merges


def _bos_processor(token: str, token_id: int) -> processors.TemplateProcessing:
    return processors.TemplateProcessing(
        single=f"{token} $A", pair=f"{token} $A {token} $B", special_tokens=[(token, token_id)]
    )


def write_tokenizer(
    folder: Path,
    tokenizer: Tokenizer,
    chat_template: str | list[dict[str, str]] | None = CHAT_TEMPLATE,
    bos_token: str | None = None,
    eos_token: str | None = None,
) -> None:
    """Writes tokenizer.json and tokenizer_config.json; bos and eos default to the tokens 1 and 2."""
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {
        "bos_token": bos_token or tokenizer.id_to_token(1),
        "eos_token": eos_token or tokenizer.id_to_token(2),
        "tokenizer_class": "PreTrainedTokenizerFast",
    }
    if chat_template is not None:
        config["chat_template"] = chat_template
    (folder / "tokenizer_config.json").write_text(json.dumps(config), encoding="utf-8")
