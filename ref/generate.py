"""The smallest complete engine: one sequence, a paged KV cache, one token at a time.

prefill: run the whole prompt through the model once, which fills the cache and gives the logits of its last token.
decode:  pick a token, run it alone (its keys and values join the cache), and so on. Attention reads the past from
         the cache, so a step costs one token's arithmetic; the answer is that of the model without a cache.

Source: Kwon et al. 2023, "Efficient Memory Management for Large Language Model Serving with PagedAttention".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from numpy.typing import NDArray

from ref.model.cache import Cache
from ref.model.fields import ModelConfig
from ref.model.registry import forward
from ref.model.run import Weights
from ref.sampling import greedy, sample

Array = NDArray[Any]


def generate(
    config: ModelConfig,
    weights: Weights,
    prompt_ids: Sequence[int],
    max_tokens: int,
    *,
    temperature: float = 0.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    uniforms: Sequence[float] = (),
    ignore_eos: bool = False,
    block_size: int = 16,
) -> list[int]:
    """Up to max_tokens new token ids, an end-of-sequence id included if one is met.

    temperature 0 is greedy. Otherwise uniforms [max_tokens], numbers from [0, 1), decide the draws, so the result is
    a function of the arguments alone. With dynamic rope and longrope the prompt's length chooses the table, for good:
    keys in the cache are rotated already and cannot follow a later change.
    weights: as ref.quant.scheme.read_weights gives them; those that stay in their files are decoded anew each token.
    Raises ValueError for an empty prompt, an id outside the vocabulary, or weights that do not fit config.
    """
    if not prompt_ids:
        raise ValueError("prompt_ids is empty: give at least one token, such as the begin-of-text id")
    cache = Cache(len(prompt_ids) + max_tokens, block_size, table_tokens=len(prompt_ids))
    new_ids: list[int] = []
    pending = list(prompt_ids)  # tokens that are not in the cache yet
    while len(new_ids) < max_tokens:
        logits = forward_chunk(config, weights, pending, cache)[-1:]  # [1, vocab_size]
        if temperature == 0:
            next_id = int(greedy(logits)[0])
        else:
            uniform = uniforms[len(new_ids)]
            next_id = int(sample(logits, [temperature], [top_k], [top_p], [min_p], [uniform])[0])
        new_ids.append(next_id)
        if next_id in config.eos_token_ids and not ignore_eos:
            break
        pending = [next_id]
    return new_ids


def forward_chunk(config: ModelConfig, weights: Weights, token_ids: Sequence[int], cache: Cache) -> Array:
    """Runs the next tokens of the sequence and adds them to the cache: [num_tokens] → [num_tokens, vocab_size], in the
    dtype of the weights.

    The same code does prefill (many tokens, nothing cached), a chunk of a prompt, and decode (one token).
    """
    logits = forward(config, weights, token_ids, cache=cache)
    cache.num_cached += len(token_ids)
    return logits
