"""From logits to the next token id: the specification of every step, in the order in which they apply.

penalties → logit bias → masks → temperature → top_k → top_p → min_p → one draw

Logits are ranked by value, highest first, and by token id, lowest first, among equals. The order is that of the
logits before the temperature, so no rounding can change it. All of this works in the type of the logits (float32 or
float64) with sums in float64. Logprobs that are reported are those of the model itself, before all of these steps.

Source: OpenAI API reference (presence and frequency penalty, logit bias); Keskar et al. 2019, "CTRL" (repetition
penalty); Fan, Lewis, Dauphin 2018, "Hierarchical Neural Story Generation" (top_k); Holtzman et al. 2019, "The Curious
Case of Neural Text Degeneration" (top_p); Nguyen et al. 2024, "Turning Up the Heat" (min_p); Devroye 1986,
"Non-Uniform Random Variate Generation" (the draw by inversion).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

Floats = NDArray[np.floating[Any]]

GREEDY_TEMPERATURE = 1e-5  # below this the most likely token is taken and nothing is drawn


def apply_penalties(
    logits: Floats,
    prompt_ids: ArrayLike,
    output_ids: ArrayLike,
    repetition_penalty: float = 1.0,
    presence_penalty: float = 0.0,
    frequency_penalty: float = 0.0,
) -> Floats:
    """Makes seen tokens less likely. Returns a new [vocab], dtype of logits.

    repetition_penalty r is for every id in prompt or output: l → l / r where l > 0,
    l · r elsewhere. Then l → l − frequency · count − presence · [count > 0], count in the output only. Ids outside
    the vocabulary (placeholders of other inputs) have no logit and are passed over.

    Args:
        logits: [vocab].
        prompt_ids, output_ids: [num_prompt] and [num_output], integers.
    """
    vocab_size = logits.shape[-1]
    prompt_counts = _count_ids(prompt_ids, vocab_size)
    output_counts = _count_ids(output_ids, vocab_size)
    seen = (prompt_counts + output_counts) > 0
    penalised = np.where(logits > 0, logits / repetition_penalty, logits * repetition_penalty)
    result: Floats = np.where(seen, penalised, logits)
    penalties = frequency_penalty * output_counts + presence_penalty * (output_counts > 0)
    result = result - penalties.astype(logits.dtype)
    return result


def _count_ids(token_ids: ArrayLike, vocab_size: int) -> NDArray[np.int64]:
    ids = np.asarray(token_ids, dtype=np.int64).reshape(-1)
    return np.bincount(ids[(ids >= 0) & (ids < vocab_size)], minlength=vocab_size)


def apply_logit_bias(logits: Floats, bias: Mapping[int, float]) -> Floats:
    """logits [vocab] plus bias, a new array, same dtype; −100 and lower is a ban, whatever the logit was."""
    result = logits.copy()
    for token_id, value in bias.items():
        result[token_id] = -np.inf if value <= -100 else result[token_id] + value
    return result


def apply_mask(logits: Floats, allowed: NDArray[np.bool_]) -> Floats:
    """logits [vocab], −inf wherever allowed [vocab] is False. Returns a new [vocab], dtype of logits."""
    return np.where(allowed, logits, -np.inf).astype(logits.dtype)


def banned_by_bad_words(bad_words_ids: Iterable[tuple[int, ...]], output_ids: ArrayLike) -> list[int]:
    """Last ids of those bad words whose other ids are the end of output_ids [num_output] (the prompt is no part)."""
    output = tuple(np.asarray(output_ids, dtype=np.int64).reshape(-1).tolist())
    return [word[-1] for word in bad_words_ids if output[len(output) - len(word) + 1 :] == word[:-1]]


def rank(logits: Floats) -> NDArray[np.int64]:
    """Token ids, best first, lower id first among equals. logits [..., vocab] → [..., vocab]."""
    return np.argsort(-logits, axis=-1, kind="stable")


def token_weights(logits: Floats, temperature: float) -> Floats:
    """exp((l − max l) / temperature): the probabilities but for a factor, the largest being 1. [vocab] → same.

    Taking the maximum off before dividing keeps any temperature from overflowing. dtype of logits.
    """
    shifted: Floats = (logits - logits.max()) / logits.dtype.type(temperature)
    return np.exp(shifted)


def keep_top_k(logits: Floats, top_k: int) -> NDArray[np.bool_]:
    """The top_k best of logits [vocab], exactly that many also among equals; 0, −1 and top_k ≥ vocab keep all."""
    if top_k <= 0:
        return np.ones(logits.shape, dtype=np.bool_)
    keep = np.zeros(logits.shape, dtype=np.bool_)
    keep[rank(logits)[:top_k]] = True
    return keep


def keep_top_p(logits: Floats, weights: Floats, top_p: float) -> NDArray[np.bool_]:
    """The shortest head of the ranking that holds at least top_p of all weight; never empty; 1 keeps all.

    logits, weights [vocab]; tokens that an earlier filter took out have weight 0.
    """
    keep = np.ones(logits.shape, dtype=np.bool_)
    if top_p < 1.0:
        order = rank(logits)
        mass = np.cumsum(weights[order], dtype=np.float64)
        num_kept = 1 + int(np.count_nonzero(mass < top_p * mass[-1]))
        keep[order[num_kept:]] = False
    return keep


def keep_min_p(weights: Floats, min_p: float) -> NDArray[np.bool_]:
    """Tokens at least min_p times as likely as the likeliest. weights [vocab], the largest being 1."""
    return weights.astype(np.float64) >= min_p


def keep_set(logits: Floats, temperature: float, top_k: int, top_p: float, min_p: float) -> NDArray[np.bool_]:
    """What one row of logits [vocab] may draw from: top_k, then top_p of what is left, then min_p; never empty."""
    weights = token_weights(logits, temperature)
    keep = keep_top_k(logits, top_k)
    keep &= keep_top_p(logits, np.where(keep, weights, 0), top_p)
    return keep & keep_min_p(weights, min_p)


def draw(weights: Floats, uniform: float) -> int:
    """The first token id at which the running sum of weights [vocab] passes uniform · total; uniform in [0, 1)."""
    mass = np.cumsum(weights, dtype=np.float64)
    return int(np.searchsorted(mass, np.float64(uniform) * mass[-1], side="right"))


def greedy(logits: Floats) -> NDArray[np.int32]:
    """The best token id of each row, the lowest among equals. [num_rows, vocab] → [num_rows]."""
    token_ids: NDArray[np.intp] = np.argmax(logits, axis=-1)
    return token_ids.astype(np.int32)


def sample(
    logits: Floats,
    temperature: ArrayLike,
    top_k: ArrayLike,
    top_p: ArrayLike,
    min_p: ArrayLike,
    uniforms: ArrayLike,
) -> NDArray[np.int32]:
    """One token id for each row of logits.

    Args:
        logits: [num_rows, vocab].
        temperature, top_k, top_p, min_p, uniforms: [num_rows], or a number for all rows.
    Returns:
        [num_rows] int32.

    A row with temperature below GREEDY_TEMPERATURE is greedy. So is a row whose largest logit is not finite (NaN,
    ±inf): it cannot be sampled, and a caller sees it by the logit of the id it gets. No row depends on another.
    """
    token_ids = greedy(logits)
    filters = np.broadcast_arrays(temperature, top_k, top_p, min_p, uniforms, token_ids)[:-1]
    for row, (heat, k, p, least, uniform) in enumerate(zip(*filters, strict=True)):
        if heat < GREEDY_TEMPERATURE or not np.isfinite(logits[row, token_ids[row]]):
            continue
        keep = keep_set(logits[row], float(heat), int(k), float(p), float(least))
        token_ids[row] = draw(np.where(keep, token_weights(logits[row], float(heat)), 0), float(uniform))
    return token_ids


def log_softmax(logits: Floats) -> Floats:
    """l − max l − log Σ exp(l − max l) along the last axis, natural log. [..., vocab] → [..., vocab], same dtype."""
    shifted = logits - logits.max(axis=-1, keepdims=True)
    total = np.exp(shifted).sum(axis=-1, keepdims=True, dtype=np.float64)
    logprobs: Floats = shifted - np.log(total)
    return logprobs.astype(logits.dtype)


def token_logprobs(logits: Floats, token_ids: ArrayLike, k: int) -> tuple[Floats, NDArray[np.int64], Floats]:
    """Logprobs to report for rows of logits [num_rows, vocab] as the model gave them, token_ids [num_rows].

    Returns the logprob of each row's token [num_rows], the k best ids of the row, best first, and their logprobs,
    both [num_rows, min(k, vocab)]; logprobs have the dtype of logits, ids are int64.
    """
    logprobs = log_softmax(logits)
    own_ids = np.asarray(token_ids, dtype=np.int64)[:, None]
    top_ids = rank(logits)[:, :k]
    own = np.take_along_axis(logprobs, own_ids, axis=-1)[:, 0]
    return own, top_ids, np.take_along_axis(logprobs, top_ids, axis=-1)
