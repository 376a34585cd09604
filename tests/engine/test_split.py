"""A model on several ranks gives what it gives on one: families, formats, uneven sizes, stages."""

from functools import partial
from pathlib import Path

import numpy as np
import pytest

from conformance.engine_run import make_runner, run_chunks
from conformance.golden_families import FAMILY_GOLDENS, family_model, family_prompts
from conformance.golden_formats import FORMAT_FAMILIES, FORMATS, GROUP, Format, format_folder, grouped
from conformance.golden_models import GOLDENS, Config, golden_model, rand_model, random_ids, write_stored
from conformance.split_ranks import all_ranks, decoding_ops, ranks_as_one
from engine.checkpoint import quantized_folder, quantized_words, store, stored_tensor, stored_words
from engine.checkpoint.loader import load_model_config, load_weights
from engine.checkpoint.quantized import keep_packed
from engine.checkpoint.safetensors_file import read_header
from engine.checkpoint.source import resolve
from engine.checkpoint.stored_tensor import StoredTensor
from engine.checkpoint.stored_words import StoredPart, StoredWords, integers_of, pick
from engine.config import ParallelConfig
from engine.models.registry import ARCHITECTURES
from engine.ops import cpu_ops
from engine.packed4 import PACKED, PACKED_GATED, Layout, word_shapes
from engine.split import rank_config, rank_weights
from engine.weights import Weights
from ref.quant.awq import awq_pack
from ref.quant.compressed_tensors import ct_pack
from ref.quant.gptq import gptq_pack
from ref.quant.groups import unpack_words

OPS = cpu_ops()
CHUNKS = (3, 17)  # of two prompts: a step of both, then decodes beside chunks
TOLERANCE = 1e-5


def assert_as_one_rank(
    folder: Path, prompts: list[list[int]], tp: int, pp: int, packed: bool = False, layers: tuple[int, ...] = ()
) -> None:
    expected = run_chunks(make_runner(folder, OPS, prompts), prompts, CHUNKS)
    ops = decoding_ops() if packed else OPS
    found = run_chunks(ranks_as_one(folder, ops, prompts, tp, pp, layers, packed=packed), prompts, CHUNKS)
    for one, other in zip(expected, found, strict=True):
        assert one.shape == other.shape
        np.testing.assert_allclose(other, one, rtol=0, atol=TOLERANCE * max(1, np.abs(one).max()))


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (3, 1), (4, 1), (1, 2), (2, 2)])
@pytest.mark.parametrize("name", [*GOLDENS, *FAMILY_GOLDENS])
def test_logits_are_those_of_one_rank(tmp_path: Path, name: str, tp: int, pp: int) -> None:
    """DST-05: heads cut, KV heads copied where ranks outnumber them; latents, experts, biases by row and by column."""
    folder = (family_model if name in FAMILY_GOLDENS else golden_model)(tmp_path, name)
    assert_as_one_rank(folder, family_prompts("qwen2"), tp, pp)


@pytest.mark.parametrize(("tp", "layers"), [(1, (4, 1)), (1, (1, 1, 3)), (2, (2, 3))])
def test_stages_of_other_sizes(tmp_path: Path, tp: int, layers: tuple[int, ...]) -> None:
    """--split memory: where GPUs are of different kinds."""
    folder = rand_model(tmp_path, num_hidden_layers=5)
    assert_as_one_rank(folder, family_prompts("qwen2"), tp, len(layers), layers=layers)
    parts = [rank_config(load_model_config(resolve(str(folder))), one) for one in all_ranks(tp, len(layers), layers)]
    assert {len(part.layers) for part in parts} == set(layers)


@pytest.mark.parametrize("layers", [(1, 2), (2, 1)])
@pytest.mark.parametrize("name", ["llama2", "qwen2_moe", "qwen2_window"])
def test_stages_of_other_sizes_of_families(tmp_path: Path, name: str, layers: tuple[int, ...]) -> None:
    folder = (family_model if name in FAMILY_GOLDENS else golden_model)(tmp_path, name)
    assert_as_one_rank(folder, family_prompts("qwen2"), 1, 2, layers=layers)


UNLIKE = ("bf16", "gptq_8bit", "ct_int8_smooth")  # decoded; or with outliers, which make roundings of sums larger
SIZES = {  # in which heads and shares are whole groups of 32 and tiles of 128
    **{"vocab_size": 67, "hidden_size": 256, "intermediate_size": 384, "num_key_value_heads": 2, "head_dim": 128},
    **{"moe_intermediate_size": 256, "shared_expert_intermediate_size": 384, "num_local_experts": 3, "num_experts": 3},
    **{"kv_lora_rank": 128, "qk_nope_head_dim": 64, "qk_rope_head_dim": 64, "v_head_dim": 64, "n_shared_experts": 1},
}


def format_config(family: str) -> Config:
    base = FORMAT_FAMILIES[family]
    sizes = {
        key: size for key, size in SIZES.items() if key in base or (key == "head_dim" and "q_lora_rank" not in base)
    }
    if "q_lora_rank" in base:
        sizes["num_key_value_heads"] = base["num_attention_heads"]
    if family in ("qwen2", "qwen2_moe"):  # whose heads are as wide as hidden_size says
        sizes |= {"num_attention_heads": 2}
    return base | sizes


FAMILIES_AND_FORMATS = (
    *(("llama", name) for name in FORMATS if name != "bf16"),
    *(
        (family, name)
        for family in FORMAT_FAMILIES
        if family != "llama"
        for name in ("fp8_block", "gptq_act_order", "awq")
    ),
)


@pytest.mark.parametrize(("family", "name"), FAMILIES_AND_FORMATS)
def test_decoded_formats_are_cut_like_floats(tmp_path: Path, family: str, name: str) -> None:
    """DST-05, packed: words, groups and tiles lie on one rank each, and a scale for all on every rank."""
    folder = format_folder(tmp_path, format_config(family), name)
    assert_as_one_rank(folder, random_ids(67, (5, 21)), 2, 1)


@pytest.mark.parametrize("name", ["gptq", "gptq_act_order", "awq", "ct_int4", "fp8_block", "ct_fp8_tensor"])
def test_formats_on_three_ranks_with_a_copied_head(tmp_path: Path, name: str) -> None:
    folder = format_folder(tmp_path, format_config("llama"), name)
    assert_as_one_rank(folder, random_ids(67, (5, 21)), 3, 1)


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in UNLIKE])
@pytest.mark.parametrize("tp", [2, 3])
def test_layers_that_stay_integers_or_codes(tmp_path: Path, name: str, tp: int) -> None:
    """As their kernels have them; with act-order a rank has the rows of gate and up that its columns of down read."""
    folder = format_folder(tmp_path, format_config("llama"), name)
    assert_as_one_rank(folder, random_ids(67, (5, 21)), tp, 1, packed=True)


INT4 = {"num_bits": 4, "type": "int", "symmetric": False, "strategy": "group", "group_size": GROUP, "actorder": "group"}
CT_ACT_ORDER = {
    "quant_method": "compressed-tensors",
    "format": "pack-quantized",
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4, "input_activations": None}},
    "ignore": ["lm_head"],
}
GPTQ_WHOLE = {"quant_method": "gptq", "bits": 4, "group_size": -1, "sym": False, "desc_act": True}
WIDE = {"group_size": 128}
GPTQ_128 = {"quant_method": "gptq", "bits": 4, "sym": False, "desc_act": False, **WIDE}
AWQ_128 = {"quant_method": "awq", "bits": 4, "zero_point": True, "version": "gemm", **WIDE}
CT_128 = CT_ACT_ORDER | {
    "config_groups": {"group_0": {"targets": ["Linear"], "weights": INT4 | WIDE | {"actorder": None}}}
}
WIDE_FORMATS = {
    "gptq_128": Format(GPTQ_128, partial(grouped, gptq_pack, **WIDE)),
    "gptq_act_order_128": Format(GPTQ_128 | {"desc_act": True}, partial(grouped, gptq_pack, act_order=True, **WIDE)),
    "gptq_8bit_128": Format(GPTQ_128 | {"bits": 8}, partial(grouped, gptq_pack, bits=8, **WIDE)),
    "awq_128": Format(AWQ_128, partial(grouped, awq_pack, **WIDE)),
    "ct_int4_128": Format(CT_128, partial(grouped, partial(ct_pack, symmetric=False), **WIDE)),
}
MORE_FORMATS = {
    "ct_act_order": Format(CT_ACT_ORDER, partial(grouped, partial(ct_pack, symmetric=False), act_order=True)),
    "gptq_one_group": Format(GPTQ_WHOLE, partial(grouped, gptq_pack, group_size=-1)),
}


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", MORE_FORMATS)
def test_words_by_rows_in_any_order_and_a_group_of_all(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, packed: bool
) -> None:
    monkeypatch.setitem(FORMATS, name, MORE_FORMATS[name])
    folder = format_folder(tmp_path, format_config("llama"), name)
    if packed:
        kept = {load(folder, rank).linears["layers.0.down_proj"].format for rank in all_ranks(3)}
        assert kept == {PACKED}
    assert_as_one_rank(folder, random_ids(67, (5, 21)), 3, 1, packed)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", WIDE_FORMATS)
@pytest.mark.parametrize("tp", [2, 4])
def test_heads_that_share_a_group_may_part(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, name: str, packed: bool, tp: int
) -> None:
    """Three heads of 64 read one KV head, and a group of 128 of o_proj is of two: each rank has a copy of its scale, in
    groups of 32 that it has alone."""
    monkeypatch.setitem(FORMATS, name, WIDE_FORMATS[name])
    sizes = {"head_dim": 64, "num_attention_heads": 6, "num_key_value_heads": 2, "intermediate_size": 512}
    folder = format_folder(tmp_path, format_config("llama") | sizes, name)
    if packed and name != "gptq_8bit_128":
        assert {load(folder, rank).linears["layers.0.o_proj"].format for rank in all_ranks(tp)} == {PACKED}
    assert_as_one_rank(folder, random_ids(67, (5, 21)), tp, 1, packed)


def load(folder: Path, parallel: ParallelConfig) -> Weights:
    source = resolve(str(folder))
    config = load_model_config(source)
    whole = ARCHITECTURES[config.architecture].weight_map(config)
    return load_weights(source, keep_packed(rank_weights(whole, config, parallel)), progress=False)


def test_with_act_order_all_stays_packed(tmp_path: Path) -> None:
    """o_proj too, whose columns are cut by heads: each rank has some of every group, filled up to groups of 32."""
    folder = format_folder(tmp_path, format_config("llama"), "gptq_act_order")
    for rank in all_ranks(2):
        linears = load(folder, rank).linears
        formats = {name: linears[f"layers.0.{name}"].format for name in ("qkv_proj", "gate_up_proj", "down_proj")}
        assert formats == {"qkv_proj": PACKED, "gate_up_proj": PACKED_GATED, "down_proj": PACKED}
        o_proj = linears["layers.0.o_proj"]
        assert o_proj.format == PACKED
        assert 256 <= o_proj.in_features <= 512
        assert len(o_proj.tensors["order"]) == o_proj.in_features == 32 * len(o_proj.tensors["scales"])
        assert "order" not in linears["layers.0.down_proj"].tensors


@pytest.fixture
def reads(monkeypatch: pytest.MonkeyPatch) -> dict[StoredTensor, int]:
    """Bytes of every tensor, or part of one, that has been mapped since."""
    found: dict[StoredTensor, int] = {}
    map_bytes = stored_tensor.map_bytes

    def counted(tensor: StoredTensor) -> stored_tensor.Bytes:
        raw = map_bytes(tensor)
        assert raw.nbytes == tensor.num_bytes
        found[tensor] = raw.nbytes
        return raw

    for module in (quantized_folder, quantized_words, store, stored_tensor, stored_words):
        monkeypatch.setattr(module, "map_bytes", counted)
    return found


@pytest.mark.parametrize("name", ["bf16", "gptq", "awq", "ct_int4", "fp8_block", "ct_int8"])
@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (1, 2)])
def test_a_rank_reads_its_bytes_alone(
    tmp_path: Path, reads: dict[StoredTensor, int], name: str, tp: int, pp: int
) -> None:
    """All ranks together read the file once, but for norms and, of GPTQ, the group of each column."""
    folder = format_folder(tmp_path, format_config("llama"), name)
    load(folder, ParallelConfig())
    whole = sum(reads.values())
    together = 0
    for rank in all_ranks(tp, pp):
        reads.clear()
        load(folder, rank)
        assert sum(reads.values()) < 0.6 * whole  # three tiles of 128 are two and one
        together += sum(reads.values())
    assert whole <= together < 1.03 * whole


@pytest.mark.parametrize("layout", ["gptq", "rows"])
def test_rows_and_columns_are_picked_from_words(tmp_path: Path, layout: Layout) -> None:
    """What is picked before a GPU puts it in order is what NumPy makes of the whole."""
    rng = np.random.default_rng(1)
    tensors = {}
    for name, shape in zip(("words", "scales", "zeros"), word_shapes(layout, 32, 128, 2), strict=True):
        tensors[name] = (
            rng.random(shape).astype(np.float16) if name == "scales" else rng.integers(0, 2**31, shape, np.int32)
        )
    write_stored(tmp_path / "t.safetensors", tensors)
    stored = read_header(tmp_path / "t.safetensors")
    part = StoredPart(32, stored["words"], stored["scales"], stored["zeros"])
    columns = rng.permutation(128)[:64].astype(np.int32)
    rows = rng.permutation(32)[:16].astype(np.int32)
    filled = np.where(np.arange(64) % 5 == 0, np.int32(-1), columns)
    finer = np.array([1, 0, 0, 1], np.int32)
    for order, row_order, groups in (
        (columns, None, None),
        (None, rows, None),
        (filled, None, finer[:2]),
        (None, None, finer),
    ):
        in_features = 128 if order is None else 64
        group_size = in_features // 2 if groups is None else 32
        layer = StoredWords(layout, (part, part), in_features, group_size, 1, True, order, row_order, groups)
        assert layer.is_picked
        q, scales, zeros = integers_of(layer)
        axes = (0, 1) if layout == "rows" else (1, 0)
        for found, first in zip(pick(layer), (0, len(q) // 2), strict=True):
            own = slice(first, first + found.rows)
            unpacked = unpack_words(found.words, 4, axis=axes[1])
            np.testing.assert_array_equal(unpacked if layout == "rows" else unpacked.T, q[own])
            unpacked = unpack_words(found.zeros, 4, axis=axes[0])
            unpacked = unpacked if layout == "rows" else unpacked.T + np.uint8(1) & np.uint8(15)
            np.testing.assert_array_equal(unpacked, zeros[own])
            np.testing.assert_array_equal(found.scales if layout == "rows" else found.scales.T, scales[own])


@pytest.mark.parametrize("name", ["gptq_act_order", "awq", "ct_int4_symmetric", "fp8_block", "ct_int8", "bf16"])
def test_dummy_weights_of_a_rank_have_the_shapes_of_its_own(tmp_path: Path, name: str) -> None:
    """A config alone is enough; where columns are filled up in a file, they are not here."""
    folder = format_folder(tmp_path, format_config("llama"), name)
    source = resolve(str(folder))
    config = load_model_config(source)
    for rank in all_ranks(2):
        whole = ARCHITECTURES[config.architecture].weight_map(config)
        weight_map = keep_packed(rank_weights(whole, config, rank))
        made = load_weights(source, weight_map, load_format="dummy")
        read = load_weights(source, weight_map, progress=False)
        for dest, weight in made.linears.items():
            shapes = {key: tensor.shape for key, tensor in weight.tensors.items()}
            if dest.endswith("o_proj") and name == "gptq_act_order":
                assert shapes["order"] == (weight.in_features,) == (256,)
                continue
            found = read.linears[dest]
            assert (weight.format, shapes) == (found.format, {key: t.shape for key, t in found.tensors.items()})
        assert made.arrays["embed_tokens"].shape == read.arrays["embed_tokens"].shape
