"""The tokenizer and the chat template of a model, wherever its files keep them."""

from __future__ import annotations

from engine.chat_template import ChatTemplate, load_chat_template
from engine.checkpoint.gguf_file import gguf_metadata
from engine.checkpoint.source import ModelSource
from engine.tokenizer import Tokenizer, load_tokenizer, tokenizer_from_gguf


def load_text(
    source: ModelSource, vocab_size: int, chat_template: str | None = None
) -> tuple[Tokenizer | None, ChatTemplate | None]:
    """What turns text into ids of the model and back.

    Args:
        vocab_size: rows of the model's embedding.
        chat_template: --chat-template, in place of the model's own.

    Returns:
        The tokenizer, None if the folder has none; and the template, None if there is none or no tokenizer.

    Raises:
        ConfigError: the files are broken, or the tokenizer belongs to another model.
    """
    metadata = gguf_metadata(source.path) if source.kind == "gguf" else None
    tokenizer = load_tokenizer(source.path) if metadata is None else tokenizer_from_gguf(metadata, str(source.path))
    if tokenizer is None:
        return None, None
    tokenizer.check_vocab(vocab_size)
    return tokenizer, load_chat_template(source.path, tokenizer.special_tokens, chat_template, metadata)
