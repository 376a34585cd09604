"""Faults to plant in copies of the CPU twins; test_the_tests.py plants them."""

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Mutant:
    """A copy of engine/cpu/<stem>.py in which one piece of text, found exactly once, is replaced by another."""

    stem: str
    fault: str  # what is wrong with it, in words
    old: str
    new: str
    ops: tuple[str, ...]  # functions of the op table that have it; for sampling, which is one entry, its functions


def mutants(stem: str, *faults: tuple[str, str, str, str]) -> list[Mutant]:
    return [Mutant(stem, fault, old, new, tuple(ops.split())) for ops, fault, old, new in faults]


ATTENTION = mutants(
    "attention",
    (
        "attention_decode",
        "mask off by one: reads the slot behind",
        "hidden = place >= seq_lens",
        "hidden = place > seq_lens",
    ),
    (
        "attention_decode",
        "mask off by one: misses the newest key",
        "place >= seq_lens[:, None]",
        "place >= seq_lens[:, None] - (seq_lens[:, None] > 1)",
    ),
    ("attention_decode", "window one too long", "(seq_lens - window)", "(seq_lens - window - 1)"),
    (
        "attention_decode",
        "window ignored",
        "if window is not None:\n        hidden |= place <",
        "if False:\n        hidden |= place <",
    ),
    ("attention_decode", "stale values behind the sequence are used", "v[hidden] = 0.0", "pass"),
    (
        "attention_decode",
        "heads swapped",
        ".reshape(num_seqs, n_kv_heads, n_heads // n_kv_heads, head_dim)",
        ".reshape(num_seqs, -1, n_kv_heads, head_dim).swapaxes(1, 2)",
    ),
    (
        "attention_decode",
        "scale a little off",
        "(q * np.float32(sm_scale)).reshape(num_seqs",
        "(q * np.float32(sm_scale * 1.0001)).reshape(num_seqs",
    ),
    (
        "attention_decode",
        "last block lost",
        "*shape[2:])[:, :longest]",
        "*shape[2:])[:, : (longest - 1) // shape[1] * shape[1] or longest]",
    ),
    (
        "attention_decode",
        "blocks in order of number",
        "np.maximum(block_table[:, : -(-longest // shape[1])], 0)",
        "np.sort(np.maximum(block_table[:, : -(-longest // shape[1])], 0))",
    ),
    ("attention_decode", "groups put back in reverse", "out[rows] =", "out[rows[::-1]] ="),
    (
        "attention_decode attention_prefill",
        "softmax without its maximum",
        "scores -= scores.max(axis=-1, keepdims=True)",
        "pass",
    ),
    (
        "attention_decode attention_prefill",
        "softmax sums to less than 1",
        "scores /= scores.sum(axis=-1, keepdims=True)",
        "scores /= scores.sum(axis=-1, keepdims=True) + np.float32(1e-4)",
    ),
    (
        "attention_decode",
        "query scaled in place",
        "(q * np.float32(sm_scale)).reshape(num_seqs",
        "np.multiply(q, np.float32(sm_scale), out=q).reshape(num_seqs",
    ),
    (
        "attention_prefill",
        "mask off by one: sees the future",
        "hidden = key_place > query_place",
        "hidden = key_place > query_place + 1",
    ),
    (
        "attention_prefill",
        "window one too long",
        "key_place <= query_place - window",
        "key_place < query_place - window",
    ),
    (
        "attention_prefill",
        "window one too short at the start of a tile",
        "max(0, position - window + 1)",
        "max(0, position - window + 2)",
    ),
    (
        "attention_prefill",
        "second tile at the position of the first",
        "position = first + start - ends[row]",
        "position = first",
    ),
    ("attention_prefill", "past of a chunk forgotten", "first = seq_len - (ends[row + 1] - ends[row])", "first = 0"),
    ("attention_prefill", "heads swapped", "k[kv_head, low:high]", "k[n_kv_heads - 1 - kv_head, low:high]"),
    (
        "attention_prefill",
        "scale squared",
        "(q * np.float32(sm_scale)).reshape(num_rows",
        "(q * np.float32(sm_scale * sm_scale)).reshape(num_rows",
    ),
    (
        "attention_prefill",
        "last tile not computed",
        "range(ends[row], ends[row + 1], QUERY_TILE)",
        "range(ends[row], max(ends[row] + 1, ends[row + 1] - QUERY_TILE), QUERY_TILE)",
    ),
)
ROPE = mutants(
    "rope",
    ("qk_norm_rope_kv_write", "mean over the heads", "np.float32(x.shape[2])", "np.float32(x.shape[1])"),
    ("qk_norm_rope_kv_write", "no eps", "np.sqrt(mean_square + np.float32(eps))", "np.sqrt(mean_square)"),
    ("qk_norm_rope_kv_write", "norm of k for q", "_head_norm(q, q_weight", "_head_norm(q, k_weight"),
    ("rope_kv_write", "turns the other way", "-= second * sin", "+= second * sin"),
    (
        "rope_kv_write",
        "keys stored without rotation",
        "kv_cache_write(rotate(k, cos_sin, interleaved)",
        "kv_cache_write(k",
    ),
    ("rope_kv_write", "values in the slots of other tokens", "v, slot_mapping, k", "v[::-1], slot_mapping, k"),
    (
        "rope_kv_write",
        "writes in front of the cache",
        "    return rotate(q, cos_sin, interleaved)",
        "    k_cache.base[0] = 0\n    return rotate(q, cos_sin, interleaved)",
    ),
    (
        "rope_kv_write",
        "clears slots of others",
        "    return rotate(q, cos_sin, interleaved)",
        "    np.nan_to_num(v_cache, copy=False)\n    return rotate(q, cos_sin, interleaved)",
    ),
    (
        "rope_kv_write",
        "last pair not turned",
        "out[:, :, seconds] += first * sin",
        "out[:, :, seconds] += np.pad((first * sin)[:, :, :-1], ((0, 0), (0, 0), (0, 1)))",
    ),
    ("rope_kv_write", "pairs always in halves", "if interleaved else", "if False else"),
    ("rope_kv_write", "pairs always neighbours", "if interleaved else", "if True else"),
    ("rope_kv_write", "pairs of k in halves", "rotate(k, cos_sin, interleaved)", "rotate(k, cos_sin, False)"),
    ("rope_kv_write", "cosine and sine swapped", "cos, sin = cos_sin", "sin, cos = cos_sin"),
)
KV_CACHE = mutants(
    "kv_cache",
    ("kv_cache_write", "keys for values", "[slot_mapping] = stored", "[slot_mapping] = k"),
    ("kv_cache_write", "in the slots of other tokens", "[slot_mapping] = stored", "[slot_mapping[::-1]] = stored"),
    ("kv_cache_write", "last token lost", "[slot_mapping] = stored", "[slot_mapping[:-1]] = stored[:-1]"),
)
LAYERNORM = mutants(
    "layernorm",
    ("layernorm", "mean stays in", "x - x.mean(axis=-1, keepdims=True)", "x.copy()"),
    ("layernorm", "eps missing", "variance + np.float32(eps)", "variance"),
    (
        "layernorm",
        "eps outside the root",
        "np.sqrt(variance + np.float32(eps))",
        "(np.sqrt(variance) + np.float32(eps))",
    ),
    ("layernorm", "variance over one element less", "np.float32(x.shape[-1])", "np.float32(max(x.shape[-1] - 1, 1))"),
    ("layernorm", "weight forgotten", "out *= weight", "pass"),
    ("layernorm", "bias forgotten", "out += bias", "pass"),
    ("layernorm", "heads share the first one's weight", "out *= weight", "out *= weight.reshape(-1, x.shape[-1])[0]"),
    ("add_layernorm", "residual not added", "residual += x", "residual[...] = x"),
    (
        "add_layernorm",
        "old residual returned",
        "    residual += x\n    return layernorm(residual, weight, bias, eps), residual",
        "    return layernorm(residual + x, weight, bias, eps), residual",
    ),
)
RMSNORM = mutants(
    "rmsnorm",
    ("rmsnorm", "eps missing", "mean_square + np.float32(eps)", "mean_square"),
    (
        "rmsnorm",
        "eps outside the root",
        "np.sqrt(mean_square + np.float32(eps))",
        "(np.sqrt(mean_square) + np.float32(eps))",
    ),
    ("rmsnorm", "mean over one element less", "np.float32(x.shape[1])", "np.float32(max(x.shape[1] - 1, 1))"),
    ("rmsnorm", "weight is 1 + weight", "out *= weight", "out *= 1 + weight"),
    ("add_rmsnorm", "residual not added", "residual += x", "residual[...] = x"),
    (
        "add_rmsnorm",
        "old residual returned",
        "    residual += x\n    return rmsnorm(residual, weight, eps), residual",
        "    return rmsnorm(residual + x, weight, eps), residual",
    ),
    (
        "rmsnorm",
        "mean over all rows",
        'np.einsum("th,th->t", x, x)',
        'np.einsum("th,th->", x, x) / np.float32(max(len(x), 1)) * np.ones(len(x), np.float32)',
    ),
    ("rmsnorm_ordered", "order turned round", "eps)[:, order]", "eps)[:, np.argsort(order)]"),
    ("add_rmsnorm_ordered", "order forgotten", "return normed[:, order], residual", "return normed, residual"),
)
ACTIVATION = mutants(
    "activation",
    ("gate_up_act", "gate and up swapped", "gate, up = gate_up", "up, gate = gate_up"),
    (
        "gate_up_act",
        "sigmoid without its gate",
        "np.divide(gate, out, out=out)",
        "np.divide(np.float32(1), out, out=out)",
    ),
    ("gate_up_act", "steep gates cut", "np.float32(80.0)", "np.float32(8.0)"),
    ("gate_up_act", "always silu", 'if activation != "silu":', "if False:"),
    (
        "gate_up_act",
        "gate not multiplied by up",
        "activation_named(activation)(gate) * up",
        "activation_named(activation)(gate)",
    ),
    ("gate_up_act", "NaN swallowed", "    return out", "    return np.nan_to_num(out)"),
    ("gate_up_act", "works on its input", "out: Float32 = np.negative(gate)", "out = np.negative(gate, out=gate)"),
)
LINEAR = mutants(
    "linear",
    ("linear", "bias forgotten", "y += weight.bias", "pass"),
    ("linear", "half precision on the way", "team.matmul(x,", "team.matmul(x.astype(np.float16).astype(np.float32),"),
    ("linear", "last row lost", "    return y", "    y[-1:] = 0\n    return y"),
    ("linear", "wider than its type", "    return y", "    return y.astype(np.float64)"),
    ("linear prepare", "outputs in reverse", "swapaxes(-2, -1))", "swapaxes(-2, -1)[..., ::-1])"),
    (
        "linear",
        "scaled by the largest row",
        "    return y",
        "    peak = np.abs(x).max(initial=0) or np.float32(1)\n    return (y / peak) * peak",
    ),
)
SAMPLING = mutants(
    "sampling",
    (
        "sample-greedy",
        "last among equals",
        "np.argmax(logits, axis=-1)",
        "logits.shape[-1] - 1 - np.argmax(logits[:, ::-1], axis=-1)",
    ),
    (
        "sample",
        "top_k one too many",
        "_best_positions(row, int(top_k))",
        "_best_positions(row, min(int(top_k) + 1, len(row)))",
    ),
    ("sample", "nucleus one too short", "num_kept = 1 + int(", "num_kept = 1 * int("),
    (
        "sample",
        "higher ids first among equals",
        "np.flatnonzero(row == lowest)[: k - len(above)]",
        "np.flatnonzero(row == lowest)[::-1][: k - len(above)]",
    ),
    ("sample", "nucleus looks at too little", "0.5 * (1.0 - top_p)", "5 * (1.0 - top_p)"),
    ("sample", "min_p ignored", "if min_p > 0.0:", "if min_p > 1.0:"),
    ("sample", "greedy rows drawn", "from engine.api import GREEDY_TEMPERATURE", "GREEDY_TEMPERATURE = 1e-9"),
    ("sample", "temperature ignored", "heat = np.float32(temperature)", "heat = np.float32(1)"),
    ("sample", "uniform mirrored", "target = uniform * block_ends[-1]", "target = (1 - uniform) * block_ends[-1]"),
    ("sample", "first block forgotten", "before = block_ends[block - 1] if block > 0 else 0.0", "before = 0.0"),
    (
        "sample",
        "other numbers",
        "uniform(seed[draws], position[draws], stream[draws])",
        "uniform(seed[draws], position[draws], 0)",
    ),
    ("sample", "bad rows pass", "np.where(usable, SAMPLED,", "np.where(usable | True, SAMPLED,"),
    ("penalties", "added", "seen * repetition_penalty) - penalties", "seen * repetition_penalty) + penalties"),
    ("edits", "bias of the next row", "edits.values[parts[BIAS]]", "np.roll(edits.values, 1)[parts[BIAS]]"),
    ("edits", "allowed ids lose their logits", "logits[ids[ALLOWED]] = allowed", "logits[ids[ALLOWED]] = 0"),
    ("edits", "bans forgotten", "logits[ids[BANNED]] = -np.inf", "logits[ids[BANNED][1:]] = -np.inf"),
    ("edits", "bad rows edited", "if not np.isfinite(logits[row].max()):", "if False:"),
    (
        "edits",
        "kept after the edits",
        "    return reasons, raw\n",
        "    return reasons, logits[edits.rows[edits.keeps_raw]]\n",
    ),
    (
        "penalties",
        "repetition turned around",
        "seen > 0, seen / repetition_penalty",
        "seen < 0, seen / repetition_penalty",
    ),
    (
        "logprobs",
        "logprobs without their sum",
        "own[i] = row[token_ids[i]] - best - log_total",
        "own[i] = row[token_ids[i]] - best",
    ),
    (
        "logprobs",
        "best ids in order of id",
        'top_ids[i] = ids[np.argsort(-row[ids], kind="stable")]',
        "top_ids[i] = ids",
    ),
    (
        "logprobs",
        "sums in half precision",
        ".sum(dtype=np.float64))\n        own",
        ".astype(np.float16).sum(dtype=np.float16))\n        own",
    ),
)
TEAM = mutants(
    "team",
    (
        "linear",
        "last share left out",
        "helpers = self._members[: num_shares - 1]",
        "helpers = self._members[: num_shares - 2]",
    ),
    ("linear", "second share in the place of the first", "out[:, low:high])", "out[:, : high - low])"),
    (
        "linear",
        "one column between shares lost",
        "member.finish()\n        return out",
        "member.finish()\n        out[:, bounds[1]] = 0\n        return out",
    ),
)
MUTANTS = [*ATTENTION, *KV_CACHE, *ROPE, *LAYERNORM, *RMSNORM, *ACTIVATION, *LINEAR, *TEAM, *SAMPLING]
