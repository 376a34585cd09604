"""Builds a tokenizer from the metadata of a GGUF file, which holds no tokenizer.json.

Two kinds of vocabulary are read: "gpt2" (byte-level BPE with a list of merges, and the name of the pattern that
splits text into words) and "llama" (sentencepiece BPE: scores in place of merges, U+2581 for spaces, byte fallback).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors

from engine.errors import ConfigError

SPACE = "\u2581"
CONTROL, USER_DEFINED, BYTE = 3, 4, 6  # values of tokenizer.ggml.token_type
UNKNOWN = 2

# Split patterns, tried one after the other on what the one before left together. "gpt-2" is the pattern of GPT-2.
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_PATTERNS: Mapping[str, tuple[str, ...]] = {
    "default": (r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", r"[0-9][0-9][0-9]"),
    "gpt-2": (_GPT2,),
    "smollm": (r"\p{N}", _GPT2),
    "llama-bpe": (_LLAMA3,),
    "llama3": (_LLAMA3,),
    "llama-v3": (_LLAMA3,),
    "qwen2": (_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}"),),
}
_LLAMA3_NAMES = ("llama-bpe", "llama3", "llama-v3")  # whole words of the vocabulary beat merges; BOS by default


def build_gguf_tokenizer(metadata: Mapping[str, Any]) -> Tokenizer:
    """The tokenizer that a GGUF file describes, with BOS and EOS added to prompts as the file says.

    Args:
        metadata: the file's key-value pairs; arrays as lists.

    Raises:
        ConfigError: a key is missing, lists disagree, or the kind of vocabulary or split pattern is unknown.
    """
    kind = _need(metadata, "tokenizer.ggml.model", str)
    tokens = _need(metadata, "tokenizer.ggml.tokens", list)
    if odd := [token for token in tokens if not isinstance(token, str)]:
        raise ConfigError(f"tokenizer.ggml.tokens must be strings, found {odd[0]!r}")
    types = metadata.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    if not isinstance(types, list):
        raise ConfigError(f"tokenizer.ggml.token_type must be a list, found {types!r}")
    if len(types) != len(tokens):
        raise ConfigError(f"tokenizer.ggml.token_type has {len(types)} entries for {len(tokens)} tokens")
    build = _BUILDERS.get(kind)
    if build is None:
        raise ConfigError(f"tokenizer.ggml.model is {kind!r}; supported are {', '.join(sorted(_BUILDERS))}")
    try:
        tokenizer, adds_bos = build(metadata, tokens, types)
        _set_post_processor(tokenizer, metadata, adds_bos)
    except ConfigError:
        raise
    except Exception as error:  # the library raises plain Exception for a vocabulary that it cannot use
        raise ConfigError(f"the vocabulary of the GGUF file cannot be used: {error}") from error
    tokenizer.add_special_tokens([_added(token) for token, kind in zip(tokens, types, strict=True) if kind == CONTROL])
    tokenizer.add_tokens([_added(token) for token, kind in zip(tokens, types, strict=True) if kind == USER_DEFINED])
    return tokenizer


def gguf_special_token(metadata: Mapping[str, Any], name: str) -> str | None:
    """The string of the token that tokenizer.ggml.{name}_token_id names, None if there is none.

    Raises:
        ConfigError: the id lies outside of the vocabulary.
    """
    key = f"tokenizer.ggml.{name}_token_id"
    token_id = metadata.get(key)
    tokens = metadata["tokenizer.ggml.tokens"]
    if token_id is None:
        return None
    if type(token_id) is not int or not 0 <= token_id < len(tokens):
        raise ConfigError(f"{key} is {token_id!r}; the file has tokens 0 to {len(tokens) - 1}")
    return str(tokens[token_id])


def _need(metadata: Mapping[str, Any], key: str, kind: type) -> Any:
    value = metadata.get(key)
    if not isinstance(value, kind):
        found = "nothing" if value is None else type(value).__name__
        raise ConfigError(f"GGUF metadata {key} must be a {kind.__name__}, found {found}")
    return value


def _merge(text: object) -> tuple[str, str]:
    parts = text.split(" ") if isinstance(text, str) else []
    if len(parts) != 2:
        raise ConfigError(f"tokenizer.ggml.merges must be pairs of pieces with a space between, found {text!r}")
    return parts[0], parts[1]


def _added(token: str) -> AddedToken:
    return AddedToken(token, normalized=False)


def _byte_level_bpe(metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int]) -> tuple[Tokenizer, bool]:
    name = metadata.get("tokenizer.ggml.pre", "default")
    if name not in _PATTERNS:
        raise ConfigError(f"tokenizer.ggml.pre is {name!r}; supported are {', '.join(sorted(_PATTERNS))}")
    merges = [_merge(text) for text in _need(metadata, "tokenizer.ggml.merges", list)]
    vocab = {token: index for index, token in enumerate(tokens)}
    is_llama3 = name in _LLAMA3_NAMES
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=is_llama3))
    splits = [pre_tokenizers.Split(Regex(pattern), "isolated") for pattern in _PATTERNS[name]]
    bytes_of_text = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([*splits, bytes_of_text])
    if name == "qwen2":  # as the model's own tokenizer does
        tokenizer.normalizer = normalizers.NFC()
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, is_llama3


def _sentencepiece_bpe(metadata: Mapping[str, Any], tokens: list[str], types: Sequence[int]) -> tuple[Tokenizer, bool]:
    scores = _need(metadata, "tokenizer.ggml.scores", list)
    if len(scores) != len(tokens):
        raise ConfigError(f"tokenizer.ggml.scores has {len(scores)} entries for {len(tokens)} tokens")
    vocab = {token: index for index, token in enumerate(tokens)}
    unknown = gguf_special_token(metadata, "unknown")
    model = models.BPE(
        vocab=vocab,
        merges=merges_from_scores(tokens, scores, types),
        unk_token=unknown,
        fuse_unk=unknown is not None,
        byte_fallback=True,
    )
    tokenizer = Tokenizer(model)
    adds_space = bool(metadata.get("tokenizer.ggml.add_space_prefix", True))
    spaces = normalizers.Replace(" ", SPACE)
    tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend(SPACE), spaces]) if adds_space else spaces
    steps: list[Any] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if adds_space else steps)
    return tokenizer, True


_BUILDERS: Mapping[str, Callable[[Mapping[str, Any], list[str], Sequence[int]], tuple[Tokenizer, bool]]] = {
    "gpt2": _byte_level_bpe,
    "llama": _sentencepiece_bpe,
}


def merges_from_scores(
    tokens: Sequence[str], scores: Sequence[float], types: Sequence[int] | None = None
) -> list[tuple[str, str]]:
    """Merges that pick, like sentencepiece, the pair of neighbours whose joined piece has the best score.

    Every cut of a piece into two other pieces of the vocabulary is a merge; they are ordered by falling score of
    the piece, then by the ids of the parts. Control and byte tokens take no part.

    Args:
        tokens: pieces by id, [num_tokens].
        scores: score of each piece, [num_tokens].
        types: tokenizer.ggml.token_type, [num_tokens].
    """
    types = types or [1] * len(tokens)
    apart = (UNKNOWN, CONTROL, BYTE)
    ids = {token: index for index, (token, kind) in enumerate(zip(tokens, types, strict=True)) if kind not in apart}
    ranked = []
    for token, index in ids.items():
        for cut in range(1, len(token)):
            left, right = ids.get(token[:cut]), ids.get(token[cut:])
            if left is not None and right is not None:
                ranked.append((-scores[index], left, right))
    ranked.sort()
    return [(tokens[left], tokens[right]) for _, left, right in ranked]


def _set_post_processor(tokenizer: Tokenizer, metadata: Mapping[str, Any], adds_bos: bool) -> None:
    """Puts BOS in front and EOS behind where the file asks for it; adds_bos is the rule if it does not say."""
    single, special = ["$A"], []
    for name, default in (("bos", adds_bos), ("eos", False)):
        token = gguf_special_token(metadata, name)
        if token is not None and metadata.get(f"tokenizer.ggml.add_{name}_token", default):
            single = [token, *single] if name == "bos" else [*single, token]
            special.append((token, int(metadata[f"tokenizer.ggml.{name}_token_id"])))
    if special:
        tokenizer.post_processor = processors.TemplateProcessing(single=single, special_tokens=special)
