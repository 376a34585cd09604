"""Faults to plant in engine.cpu.mla."""

from tests.conformance.mutants import mutants

MLA_MUTANTS = mutants(
    "mla",
    (
        "mla_split_kv_b",
        "values before keys",
        "by_head[:, :qk_nope_head_dim], by_head",
        "by_head[:, ::-1][:, :qk_nope_head_dim], by_head",
    ),
    (
        "mla_split_kv_b",
        "heads in reverse",
        "by_head = stored.reshape(n_heads, -1, kv_b_proj.in_features)",
        "by_head = stored.reshape(n_heads, -1, kv_b_proj.in_features)[::-1]",
    ),
    ("mla_rope_latent_write", "latent not normed", "rmsnorm(kv_a[:, :rank], kv_a_layernorm, eps)", "kv_a[:, :rank]"),
    ("mla_rope_latent_write", "eps of 1e-6 for all", "kv_a_layernorm, eps)", "kv_a_layernorm, 1e-6)"),
    (
        "mla_rope_latent_write",
        "position not in the latent",
        "rotate(kv_a[:, None, rank:], cos_sin, interleaved)[:, 0]",
        "kv_a[:, rank:]",
    ),
    (
        "mla_rope_latent_write",
        "latent always interleaved",
        "rotate(kv_a[:, None, rank:], cos_sin, interleaved)",
        "rotate(kv_a[:, None, rank:], cos_sin, True)",
    ),
    (
        "mla_rope_latent_write",
        "queries always in halves",
        "rotate(q[:, :, nope:], cos_sin, interleaved)",
        "rotate(q[:, :, nope:], cos_sin, False)",
    ),
    (
        "mla_rope_latent_write",
        "first elements of a query rotated",
        "out[:, :, nope:] = rotate(q[:, :, nope:]",
        "out[:, :, : -nope or None] = rotate(q[:, :, nope:]",
    ),
    ("mla_rope_latent_write", "query rotated in place", "out = q.copy()", "out = q"),
    ("mla_rope_latent_write", "slots of other tokens", "[slot_mapping] = latent", "[slot_mapping[::-1]] = latent"),
    ("mla_decode", "position forgotten", "latent_q[:, :, rank:] = q[:, :, nope:]", "latent_q[:, :, rank:] = 0"),
    ("mla_decode", "groups put back in reverse", "summed[rows] =", "summed[rows[::-1]] ="),
    ("mla_decode", "position among the values", "latent[..., :rank], seq_lens", "latent[..., -rank:], seq_lens"),
    (
        "mla_decode",
        "scale of the latent's width",
        "seq_lens, sm_scale)\n\n\ndef mla_prefill",
        "seq_lens, latent_q.shape[2] ** -0.5)\n\n\ndef mla_prefill",
    ),
    (
        "mla_decode",
        "one table for all sequences",
        "rank, block_table[rows]",
        "rank, block_table[:1].repeat(len(block_table), 0)[rows]",
    ),
    ("mla_prefill", "past of a chunk forgotten", "first = seq_len - (ends[row + 1] - ends[row])", "first = 0"),
    ("mla_prefill", "second tile at the position of the first", "first + start - ends[row]", "first"),
    ("mla_prefill", "keys of the first head for all", "w_uk[head].T", "w_uk[0].T"),
    ("mla_prefill", "values of the next head", "w_uv[head])", "w_uv[head - 1])"),
    ("mla_prefill", "position left out of keys", "latent[:, rank:]], axis=1)", "0 * latent[:, rank:]], axis=1)"),
    (
        "mla_prefill",
        "last tile not computed",
        "range(ends[row], ends[row + 1], QUERY_TILE)",
        "range(ends[row], max(ends[row] + 1, ends[row + 1] - QUERY_TILE), QUERY_TILE)",
    ),
)
