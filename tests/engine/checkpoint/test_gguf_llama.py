"""engine.checkpoint.gguf_llama: a Llama in a GGUF file is the same Llama as in a folder."""

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest

from conformance.gguf_models import write_gguf as write_by_hand
from conformance.golden_models import llama_config, llama_tensors, write_checkpoint
from conformance.rope_table import frequency_arguments
from engine.checkpoint.gguf_file import read_gguf
from engine.checkpoint.gguf_llama import model_config_from_gguf
from engine.config import ModelConfig, RopeConfig
from engine.errors import CheckpointError, ConfigError
from ref.rope import rope_inv_freq
from tests.engine.checkpoint.files import GGUF_VOCAB, LLAMA_KEYS, llama_gguf_tensors, load, write_gguf

Kind = gguf.GGMLQuantizationType
Q = "blk.1.attn_q.weight"


@pytest.fixture
def tensors() -> dict[str, np.ndarray]:
    return llama_gguf_tensors(np.random.default_rng(0))


def write(path: Path, tensors: dict[str, np.ndarray], without: str = "", keys: Any = (), **rest: Any) -> Path:
    """A file with LLAMA_KEYS changed by `keys`."""
    merged = {key: value for key, value in {**LLAMA_KEYS, **dict(keys)}.items() if key != without}
    return write_gguf(path / "m.gguf", tensors, merged, **rest)


def config_of(*args: Any, **kwargs: Any) -> ModelConfig:
    return model_config_from_gguf(read_gguf(write(*args, **kwargs)))


def refusal(*args: Any, **kwargs: Any) -> str:
    path = write(*args, **kwargs)
    with pytest.raises((ConfigError, CheckpointError)) as caught:
        load(path)
    assert str(path) in str(caught.value)
    return str(caught.value)


def test_config(tmp_path: Path, tensors: dict[str, np.ndarray]):
    ids = {"ggml.bos_token_id": 1, "ggml.eos_token_id": 2, "ggml.eot_token_id": 7, "ggml.eom_token_id": 2}
    config = config_of(tmp_path, tensors, tokenizer=ids)
    assert config == ModelConfig(
        architecture="LlamaForCausalLM", n_layers=2, n_heads=4, n_kv_heads=2, head_dim=16, hidden_size=64,
        intermediate_size=96, vocab_size=GGUF_VOCAB, max_position_embeddings=128,
        norm_eps=float(np.float32(1e-5)), rope=RopeConfig(), tie_word_embeddings=True, bos_token_id=1,
        windows=(None, None), eos_token_ids=(2, 7),
    )  # fmt: skip


def test_head_sizes_and_an_untied_head(tmp_path: Path, tensors: dict[str, np.ndarray]):
    tensors["output.weight"] = tensors["token_embd.weight"] * 2
    path = write(tmp_path, tensors, keys={"attention.key_length": 16, "attention.value_length": 16})
    assert not model_config_from_gguf(read_gguf(path)).tie_word_embeddings
    weights = load(path)
    assert np.array_equal(weights.linears["lm_head"].tensors["weight"], tensors["output.weight"])
    assert np.array_equal(weights.arrays["embed_tokens"], tensors["token_embd.weight"])


def test_without_kv_heads_there_are_as_many_as_heads(tmp_path: Path, tensors: dict[str, np.ndarray]):
    assert config_of(tmp_path, tensors, without="attention.head_count_kv").n_kv_heads == 4


def in_hf_order(rows: np.ndarray, n_heads: int) -> np.ndarray:
    """Written out: row h·d + j·d/2 + i of Hugging Face is row h·d + 2i + j of llama.cpp."""
    head_dim = len(rows) // n_heads
    out = np.empty_like(rows)
    for head in range(n_heads):
        for half in range(2):
            for pair in range(head_dim // 2):
                out[head * head_dim + half * head_dim // 2 + pair] = rows[head * head_dim + 2 * pair + half]
    return out


def test_every_tensor_gets_to_its_place(tmp_path: Path, tensors: dict[str, np.ndarray]):
    weights = load(write(tmp_path, tensors))
    assert weights.linears["lm_head"].tensors["weight"] is weights.arrays["embed_tokens"]
    assert np.array_equal(weights.arrays["embed_tokens"], tensors["token_embd.weight"])
    assert np.array_equal(weights.arrays["norm"], tensors["output_norm.weight"])
    for layer in range(2):
        held = {
            name: tensors[f"blk.{layer}.{name}.weight"]
            for name in (
                "attn_norm",
                "attn_q",
                "attn_k",
                "attn_v",
                "attn_output",
                "ffn_norm",
                "ffn_gate",
                "ffn_up",
                "ffn_down",
            )
        }
        qkv = [in_hf_order(held["attn_q"], 4), in_hf_order(held["attn_k"], 2), held["attn_v"]]
        wanted = {
            "qkv_proj": np.concatenate(qkv),
            "o_proj": held["attn_output"],
            "down_proj": held["ffn_down"],
            "gate_up_proj": np.concatenate([held["ffn_gate"], held["ffn_up"]]),
        }
        for dest, weight in wanted.items():
            assert np.array_equal(weights.linears[f"layers.{layer}.{dest}"].tensors["weight"], weight)
        assert np.array_equal(weights.arrays[f"layers.{layer}.input_layernorm"], held["attn_norm"])
        assert np.array_equal(weights.arrays[f"layers.{layer}.post_attention_layernorm"], held["ffn_norm"])  # fmt: skip


def test_biases_of_q_and_k_are_put_in_order_too(tmp_path: Path, tensors: dict[str, np.ndarray]):
    rng = np.random.default_rng(1)
    rows = {"attn_q": 64, "attn_k": 32, "attn_v": 32, "attn_output": 64}
    for layer in range(2):
        tensors |= {f"blk.{layer}.{name}.bias": rng.standard_normal(n, np.float32) for name, n in rows.items()}
    weights = load(write(tmp_path, tensors))
    held = [tensors[f"blk.1.attn_{part}.bias"] for part in "qkv"]
    wanted = [in_hf_order(held[0], 4), in_hf_order(held[1], 2), held[2]]
    assert np.array_equal(weights.linears["layers.1.qkv_proj"].bias, np.concatenate(wanted))
    assert np.array_equal(weights.linears["layers.1.o_proj"].bias, tensors["blk.1.attn_output.bias"])


def turn(x: np.ndarray, position: int, first: np.ndarray, second: np.ndarray) -> np.ndarray:
    """Rotates the pairs (first[i], second[i]) of x [n_heads, head_dim] by position · θ_i."""
    angle = position * rope_inv_freq("default", 10000.0, x.shape[1])
    out = np.empty_like(x)
    out[:, first] = x[:, first] * np.cos(angle) - x[:, second] * np.sin(angle)
    out[:, second] = x[:, first] * np.sin(angle) + x[:, second] * np.cos(angle)
    return out


def test_attention_scores_are_those_of_interleaved_rope_on_the_rows_of_the_file(
    tmp_path: Path, tensors: dict[str, np.ndarray]
):
    """Why rows are moved at all: llama.cpp turns rows (2i, 2i + 1), Hugging Face rows (i, i + d/2)."""
    qkv = load(write(tmp_path, tensors)).linears["layers.1.qkv_proj"].tensors["weight"].astype(np.float64)
    x, y = np.random.default_rng(2).standard_normal((2, 64))
    even, odd, low, high = np.arange(0, 16, 2), np.arange(1, 16, 2), np.arange(8), np.arange(8, 16)
    file_q, file_k = (tensors[f"blk.1.attn_{part}.weight"].astype(np.float64) for part in "qk")
    wanted = np.repeat(turn((file_k @ y).reshape(2, 16), 3, even, odd), 2, axis=0)
    wanted = (turn((file_q @ x).reshape(4, 16), 11, even, odd) * wanted).sum(1)
    found = np.repeat(turn((qkv[64:96] @ y).reshape(2, 16), 3, low, high), 2, axis=0)
    found = (turn((qkv[:64] @ x).reshape(4, 16), 11, low, high) * found).sum(1)
    np.testing.assert_allclose(found, wanted, rtol=1e-9)
    unturned = ((qkv[:64] @ x).reshape(4, 16) * np.repeat((qkv[64:96] @ y).reshape(2, 16), 2, axis=0)).sum(1)
    assert not np.allclose(unturned, wanted)


@pytest.mark.parametrize("kind", [Kind.F32, Kind.F16, Kind.BF16, Kind.Q8_0, Kind.Q4_0, Kind.Q4_1])
def test_types(tmp_path: Path, tensors: dict[str, np.ndarray], kind: gguf.GGMLQuantizationType):
    """Matrices of each type, norms in F32, as converters write them."""
    kinds = {name: kind for name, tensor in tensors.items() if tensor.ndim == 2}
    path = write(tmp_path, tensors, quantize=kinds)
    weights = load(path)
    stored = {tensor.name: gguf.dequantize(tensor.data, tensor.tensor_type) for tensor in gguf.GGUFReader(path).tensors}
    assert np.array_equal(weights.arrays["embed_tokens"], stored["token_embd.weight"])
    assert np.array_equal(weights.linears["layers.1.down_proj"].tensors["weight"], stored["blk.1.ffn_down.weight"])
    assert np.array_equal(weights.linears["layers.1.qkv_proj"].tensors["weight"][:64], in_hf_order(stored[Q], 4))
    named = {Kind.F16: "float16", Kind.BF16: "bfloat16"}.get(kind, "float32")
    assert model_config_from_gguf(read_gguf(path)).dtype == named


def test_other_types_are_refused_by_name_and_tensor(tmp_path: Path, tensors: dict[str, np.ndarray]):
    text = refusal(tmp_path, tensors, quantize={"blk.0.ffn_down.weight": Kind.Q5_0, "token_embd.weight": Kind.Q5_1})
    assert "2 tensors have a type that cannot be read" in text
    assert "model.embed_tokens.weight is Q5_1" in text
    assert "model.layers.0.mlp.down_proj.weight is Q5_0" in text


def test_missing_and_unexpected(tmp_path: Path, tensors: dict[str, np.ndarray]):
    """LDR-04 for GGUF."""
    del tensors[Q]
    tensors["blk.0.ffn_gate_inp.weight"] = np.ones((8, 64), np.float32)
    text = refusal(tmp_path, tensors)
    assert "1 tensors are missing: model.layers.1.self_attn.q_proj.weight" in text
    assert "1 tensors are unexpected: blk.0.ffn_gate_inp.weight" in text


def test_more_layers_than_tensors(tmp_path: Path, tensors: dict[str, np.ndarray]):
    """LDR-10 for GGUF."""
    assert "9 tensors are missing: model.layers.2." in refusal(tmp_path, tensors, keys={"block_count": 3})


def test_metadata_that_cannot_be_served(tmp_path: Path, tensors: dict[str, np.ndarray]):
    assert "general.architecture is 'qwen2'" in refusal(tmp_path, tensors, architecture="qwen2")
    assert "the metadata lacks llama.block_count" in refusal(tmp_path, tensors, without="block_count")
    assert "llama.expert_count is 8" in refusal(tmp_path, tensors, keys={"expert_count": 8})
    assert "key_length and llama.attention.value_length" in refusal(
        tmp_path, tensors, keys={"attention.key_length": 16}
    )
    assert "llama.rope.dimension_count is 8" in refusal(tmp_path, tensors, keys={"rope.dimension_count": 8})
    assert "rope.scaling.type 'yarn' is not supported" in refusal(
        tmp_path, tensors, keys={"rope.scaling.type": "yarn", "rope.scaling.factor": 2.0}
    )
    assert "intermediate_size must be an integer" in refusal(tmp_path, tensors, keys={"feed_forward_length": [96, 96]})
    assert "num_attention_heads must be an integer" in refusal(tmp_path, tensors, keys={"attention.head_count": "4"})
    assert "num_hidden_layers must be at most 4096" in refusal(tmp_path, tensors, keys={"block_count": 10**9})
    tensors.pop("token_embd.weight")
    assert "has no tensor token_embd.weight" in refusal(tmp_path, tensors)


def test_q_rows_that_the_heads_do_not_divide(tmp_path: Path, tensors: dict[str, np.ndarray]):
    tensors[Q] = np.ones((63, 64), np.float32)
    assert f"{Q} has 63 rows" in refusal(tmp_path, tensors)


def test_linear_rope_new_and_old(tmp_path: Path, tensors: dict[str, np.ndarray]):
    wanted = RopeConfig("linear", 5e5, 4.0)
    theta = {"rope.freq_base": 5e5}
    new = {"rope.scaling.type": "linear", "rope.scaling.factor": 4.0, **theta}
    assert config_of(tmp_path, tensors, keys=new).rope == wanted
    assert config_of(tmp_path, tensors, keys={"rope.scale_linear": 4.0, **theta}).rope == wanted
    assert config_of(tmp_path, tensors, keys={"rope.scaling.type": "none", **theta}).rope == RopeConfig(theta=5e5)
    assert config_of(tmp_path, tensors, without="rope.freq_base").rope == RopeConfig(theta=10000.0)


def llama3_factors(head_dim: int, rope: RopeConfig) -> np.ndarray:
    """By ref: the plain frequencies over the scaled ones."""
    plain = rope_inv_freq("default", rope.theta, head_dim)
    return (plain / rope_inv_freq(head_dim=head_dim, **frequency_arguments(rope))).astype(np.float32)


@pytest.mark.parametrize(
    ("theta", "factor", "length", "head_dim"),
    [(500000.0, 8.0, 8192, 128), (500000.0, 32.0, 8192, 64), (10000.0, 8.0, 32, 16), (10000.0, 4.0, 100, 16)],
)
def test_rope_factors_become_llama3(
    tmp_path: Path, tensors: dict[str, np.ndarray], theta: float, factor: float, length: int, head_dim: int
):
    """rope_freqs.weight of Llama 3.1 (first line) and 3.2 (second), and of small models."""
    wanted = RopeConfig("llama3", theta, factor, 1.0, 4.0, length)
    tensors["rope_freqs.weight"] = llama3_factors(head_dim, wanted)
    keys = {"rope.freq_base": theta, "attention.key_length": head_dim, "attention.value_length": head_dim}
    assert config_of(tmp_path, tensors, keys=keys).rope == wanted


def test_rope_factors_do_not_disturb_loading(tmp_path: Path, tensors: dict[str, np.ndarray]):
    tensors["rope_freqs.weight"] = llama3_factors(16, RopeConfig("llama3", 10000.0, 8.0, 1.0, 4.0, 32))
    assert load(write(tmp_path, tensors)).arrays["norm"].shape == (64,)


@pytest.mark.parametrize(
    ("factors", "says"),
    [
        ([1, 1, 1, 2, 3, 3, 8, 8], "is no table of llama3 scaling"),
        ([8, 8, 1, 1, 1, 1, 1, 1], "is no table of llama3 scaling"),
        ([1, 1, 1, 1, 1, 1, 1, 0.5], "finite factors of at least 1"),
        ([1, 1, 1, 1, 1, 1, 1, np.nan], "finite factors of at least 1"),
        ([[1, 1], [1, 8]], "must be a row of F32"),
        ([1, 1, 1, 1], "rope_freqs.weight is [4], wanted [8]"),
    ],
)
def test_rope_factors_of_another_kind_are_refused(
    tmp_path: Path, tensors: dict[str, np.ndarray], factors: Any, says: str
):
    tensors["rope_freqs.weight"] = np.array(factors, np.float32)
    assert says in refusal(tmp_path, tensors)


def test_a_file_written_by_hand_is_the_same_llama(tmp_path: Path):
    """conformance.gguf_models writes what the gguf package reads, and what the folder of the same weights holds."""
    config = llama_config(hidden_size=64, intermediate_size=96, vocab_size=GGUF_VOCAB)
    weights = llama_tensors(config, seed=0)
    path = write_by_hand(tmp_path / "m.gguf", config, weights)
    names = {str(tensor.name) for tensor in gguf.GGUFReader(path).tensors}
    assert names == {*llama_gguf_tensors(np.random.default_rng(0)), "output.weight"}
    by_file, by_folder = load(path), load(write_checkpoint(tmp_path / "folder", config, weights))
    assert by_file.arrays.keys() == by_folder.arrays.keys()
    assert all(np.array_equal(by_file.arrays[name], by_folder.arrays[name]) for name in by_file.arrays)
    assert by_file.linears.keys() == by_folder.linears.keys()
    for name, linear in by_file.linears.items():
        assert np.array_equal(linear.tensors["weight"], by_folder.linears[name].tensors["weight"]), name
