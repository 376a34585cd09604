"""engine.split: which sizes a model can be cut to, what each rank then has, and what is said of the others."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from conformance.engine_run import make_runner, run_chunks
from conformance.gguf_models import write_gguf
from conformance.golden_families import FAMILY_GOLDENS, family_model
from conformance.golden_formats import format_folder
from conformance.golden_models import GOLDENS, golden_model, llama_config, llama_tensors, rand_model, random_ids
from conformance.split_ranks import all_ranks
from engine.checkpoint.loader import load_model_config
from engine.checkpoint.quantized import keep_packed
from engine.checkpoint.source import resolve
from engine.config import ModelConfig, ParallelConfig
from engine.errors import ConfigError
from engine.models.registry import ARCHITECTURES
from engine.ops import cpu_ops
from engine.split import rank_config, rank_weights, with_row_splits
from engine.split_sizes import layers_by_room, split_units
from engine.weights import WeightMap
from tests.engine.test_split import assert_as_one_rank, format_config

OPS = cpu_ops()


def config_of(folder: Path) -> ModelConfig:
    return load_model_config(resolve(str(folder)))


def small(folder: Path, n_heads: int, n_kv_heads: int, **more: object) -> Path:
    sizes = {"num_attention_heads": n_heads, "num_key_value_heads": n_kv_heads, "head_dim": 8, "hidden_size": 32}
    return rand_model(folder, vocab_size=61, **{"intermediate_size": 48, **sizes, **more})


@pytest.mark.parametrize(
    ("heads", "tp", "expected"),
    [
        ((8, 8), 4, [(2, 2)] * 4),
        ((8, 2), 4, [(2, 1)] * 4),
        ((8, 1), 4, [(2, 1)] * 4),
        ((8, 1), 3, [(3, 1), (3, 1), (2, 1)]),
        ((14, 2), 2, [(7, 1)] * 2),
        ((14, 2), 4, [(4, 1), (3, 1), (4, 1), (3, 1)]),
        ((6, 3), 2, [(4, 2), (2, 1)]),
        ((6, 3), 4, [(1, 1), (1, 1), (2, 1), (2, 1)]),
        ((9, 3), 8, [(1, 1)] * 6 + [(2, 1), (1, 1)]),
    ],
)
def test_dst_05_heads_and_kv_heads(tmp_path: Path, heads: tuple[int, int], tp: int, expected: list[object]) -> None:
    """DST-05: whole heads; groups that read a KV head stay together; copies where ranks outnumber KV heads. Logits are
    those of one rank, and the cache has room for the heads of the rank."""
    folder = small(tmp_path, *heads, attention_bias=True)
    config = config_of(folder)
    ranks = [rank_config(config, rank) for rank in all_ranks(tp)]
    assert [(rank.n_heads, rank.n_kv_heads) for rank in ranks] == expected
    runners = [make_runner(folder, OPS, [[5, 6]], parallel=rank) for rank in all_ranks(tp)]
    assert [runner.model.cache_specs[0].n_kv_heads for runner in runners] == [kv for _, kv in expected]
    assert_as_one_rank(folder, random_ids(61, (5, 21)), tp, 1)


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("tp", [2, 4])
def test_dst_06_a_vocabulary_that_does_not_divide(tmp_path: Path, tp: int, tied: bool) -> None:
    """DST-06: 1003 rows; ids at the borders are found, and what is added at the end is cut off."""
    folder = rand_model(tmp_path, vocab_size=1003, tie_word_embeddings=tied)
    config = config_of(folder)
    rows = -(-1003 // tp)
    assert [rank_config(config, rank).vocab_first for rank in all_ranks(tp)] == [rows * rank for rank in range(tp)]
    borders = [edge + by for edge in range(rows, 1003, rows) for by in (-1, 0)]
    assert_as_one_rank(folder, [[*borders, 1002, 0], [3, 1002, *borders]], tp, 1)


def test_a_rank_whose_vocabulary_is_all_padding(tmp_path: Path) -> None:
    folder = rand_model(tmp_path, vocab_size=9, num_attention_heads=4, num_key_value_heads=4, eos_token_id=2)
    assert_as_one_rank(folder, [[5, 6, 8], [7, 4, 5, 6]], 4, 1)


@pytest.mark.parametrize(("tp", "pp"), [(2, 1), (3, 1), (2, 2)])
def test_a_gguf_file_with_turned_heads(tmp_path: Path, tp: int, pp: int) -> None:
    sizes = {"num_attention_heads": 6, "num_key_value_heads": 3, "hidden_size": 96, "vocab_size": 61}
    config = llama_config(**sizes)
    file = write_gguf(tmp_path / "m.gguf", config, llama_tensors(config, 3))
    assert_as_one_rank(file, random_ids(61, (5, 21)), tp, pp)


def test_all_problems_are_said_at_once_with_what_would_do(tmp_path: Path) -> None:
    """Before any weight is read: there is no weight file."""
    folder = small(tmp_path, 6, 3, intermediate_size=4)
    (folder / "model.safetensors").unlink()
    with pytest.raises(ConfigError) as raised:
        rank_config(config_of(folder), ParallelConfig(40, 7, 5))
    lines = str(raised.value).splitlines()
    assert lines[0] == "LlamaForCausalLM cannot be split so:"
    assert lines[1].startswith(
        "  --tensor-parallel-size 7: 6 query heads and 3 KV heads cannot be dealt out to 7 ranks"
    )
    assert lines[2:] == [
        "  --tensor-parallel-size 7: intermediate_size 4 is fewer than 7",
        "  this model can have --tensor-parallel-size 1, 2, 3, 4",
        "  --pipeline-parallel-size 5: 2 layers leave a stage without one; possible are 1 to 2",
        "  rank 40 is none of the 35 that 7 × 5 make",
    ]


@pytest.mark.parametrize(
    ("family", "name", "tp", "said"),
    [
        ("llama", "gptq", 13, "intermediate_size 384 has 12 runs of 32 that stay together, fewer than 13 ranks"),
        ("llama", "fp8_block", 4, "intermediate_size 384 has 3 runs of 128 that stay together, fewer than 4 ranks"),
        ("mixtral", "awq", 13, "moe_intermediate_size 384 has 12 runs of 32 that stay together, fewer than 13 ranks"),
        ("qwen2_moe", "gptq", 9, "moe_intermediate_size 256 has 8 runs of 32 that stay together, fewer than 9 ranks"),
        (
            "deepseek_v2",
            "fp8_block",
            3,
            "4 query heads and 4 KV heads in runs of 2 and 1 cannot be dealt out to 3 ranks",
        ),
    ],
)
def test_groups_are_never_cut(tmp_path: Path, family: str, name: str, tp: int, said: str) -> None:
    folder = format_folder(tmp_path, format_config(family), name)
    with pytest.raises(ConfigError) as raised:
        rank_config(config_of(folder), ParallelConfig(0, tp, 1))
    assert said in str(raised.value)
    assert "this model can have --tensor-parallel-size 1, 2" in str(raised.value).splitlines()[-1]


def test_heads_narrower_than_groups_stay_together(tmp_path: Path) -> None:
    """Two heads of 16 in a group of 32 of o_proj."""
    config = format_config("llama") | {"head_dim": 16, "num_attention_heads": 8, "num_key_value_heads": 4}
    folder = format_folder(tmp_path, config, "gptq")
    ranks = [rank_config(config_of(folder), rank) for rank in all_ranks(3)]
    assert [(rank.n_heads, rank.n_kv_heads) for rank in ranks] == [(4, 2), (2, 1), (2, 1)]
    assert_as_one_rank(folder, random_ids(67, (5, 21)), 3, 1)


@pytest.mark.parametrize(
    ("size", "tp", "unit", "expected"),
    [
        (1536, 8, 1, [192] * 8),
        (14336, 3, 1, [4800, 4800, 4736]),
        (29568, 2, 128, [14848, 14720]),
        (29568, 8, 128, [3712] * 7 + [3584]),
        (11008, 4, 1, [2752] * 4),
        (64, 3, 1, [32, 16, 16]),
        (4, 3, 1, [2, 1, 1]),
        (96, 3, 32, [32, 32, 32]),
    ],
)
def test_shares_are_even_and_of_sizes_that_kernels_like(size: int, tp: int, unit: int, expected: list[int]) -> None:
    assert [len(part) for part in split_units(size, tp, unit)] == expected


def parts_of(whole: WeightMap, ranks: list[WeightMap]) -> dict[str, list[tuple[range, range]]]:
    """Rows and columns of each module that ranks read."""
    found: dict[str, list[tuple[range, range]]] = {}
    for rank in ranks:
        for spec in rank.linears:
            for module in spec.stored():
                found.setdefault(module.name, []).append((module.rows, module.columns))
    return found


@pytest.mark.parametrize("name", [*GOLDENS, *FAMILY_GOLDENS])
def test_every_number_is_on_some_rank_and_all_sizes_fit(tmp_path: Path, name: str) -> None:
    """Each module is covered, by pieces that are whole copies or do not overlap, but for copies of KV heads."""
    folder = (family_model if name in FAMILY_GOLDENS else golden_model)(tmp_path, name)
    config = config_of(folder)
    whole = ARCHITECTURES[config.architecture].weight_map(config)
    for tp, pp in ((2, 1), (4, 1), (1, 2), (2, 2)):
        maps = [rank_weights(whole, config, rank) for rank in all_ranks(tp, pp)]
        found = parts_of(whole, maps)
        for spec in whole.linears:
            for module in spec.stored():
                cells = {
                    (row, column)
                    for rows, columns in set(found[module.name])
                    for row in (rows.start, rows.stop - 1)
                    for column in (columns.start, columns.stop - 1)
                }
                area = sum(len(rows) * len(columns) for rows, columns in set(found[module.name]))
                assert area == module.shape[0] * module.shape[1], (module.name, found[module.name])
                assert {(0, 0), (module.shape[0] - 1, module.shape[1] - 1)} <= cells
        biases = [spec.dest for rank in maps for spec in rank.linears if spec.bias and spec.column_cut is not None]
        assert len(biases) == len(set(biases)), "the bias of a row split is added once"


@pytest.mark.parametrize("name", [*GOLDENS, *FAMILY_GOLDENS])
def test_a_rank_is_a_smaller_model(tmp_path: Path, name: str) -> None:
    """What its config alone asks for has the sizes of what it is given, but for the vocabulary: kernels are found by
    the one, before the other is read."""
    config = config_of((family_model if name in FAMILY_GOLDENS else golden_model)(tmp_path, name))
    whole = ARCHITECTURES[config.architecture].weight_map(config)
    for rank in all_ranks(3):
        smaller = ARCHITECTURES[config.architecture].weight_map(rank_config(config, rank))
        given = rank_weights(whole, config, rank)
        sizes = [
            {
                spec.dest: (spec.out_features, spec.in_features, spec.latent)
                for spec in one.linears
                if spec.dest != "lm_head"
            }
            for one in (smaller, given)
        ]
        assert sizes[0] == sizes[1]
        shapes = [
            {spec.dest: spec.shape for spec in one.arrays if not spec.dest.startswith("embed_")}
            for one in (smaller, given)
        ]
        assert shapes[0] == shapes[1]


def test_one_rank_is_the_model_itself(tmp_path: Path) -> None:
    config = config_of(rand_model(tmp_path))
    whole = ARCHITECTURES[config.architecture].weight_map(config)
    assert rank_config(config, ParallelConfig()) is config
    assert rank_weights(whole, config, ParallelConfig()) is whole


def test_stages_have_layers_by_their_own_numbers(tmp_path: Path) -> None:
    """Rank 0 is in the last stage, which has the head; a tied head is the embedding, which both ends have."""
    folder = rand_model(tmp_path, num_hidden_layers=5, tie_word_embeddings=True)
    config = config_of(folder)
    whole = ARCHITECTURES[config.architecture].weight_map(config)
    ranks = [rank_config(config, rank) for rank in all_ranks(1, 3)]
    assert [rank.layers for rank in ranks] == [range(4, 5), range(2, 4), range(0, 2)]
    maps = [rank_weights(whole, config, rank) for rank in all_ranks(1, 3)]
    assert [rank.tied for rank in maps] == [True, False, False]
    held = [{spec.dest for spec in rank.arrays if not spec.dest.startswith("layers.")} for rank in maps]
    assert held == [{"embed_tokens", "norm"}, {"norm"}, {"embed_tokens", "norm"}]
    assert_as_one_rank(folder, random_ids(1000, (5, 21)), 1, 3)
    assert replace(config, stage_layers=None) == config


def test_a_missing_tensor_of_another_rank_is_said_by_all(tmp_path: Path) -> None:
    """DST-07: no rank goes on alone where another has found a fault."""
    folder = rand_model(tmp_path)
    config = (folder / "config.json").read_text().replace('"num_hidden_layers": 2', '"num_hidden_layers": 3')
    (folder / "config.json").write_text(config)
    said = set()
    for rank in all_ranks(1, 3):
        with pytest.raises(Exception, match="tensors are missing") as raised:
            make_runner(folder, OPS, [[5]], parallel=rank)
        said.add(str(raised.value))
    assert len(said) == 1


def test_chunks_are_what_one_rank_makes_of_them(tmp_path: Path) -> None:
    """What the helper of these tests compares is no constant."""
    folder = rand_model(tmp_path)
    prompts = random_ids(1000, (5, 21))
    logits = run_chunks(make_runner(folder, OPS, prompts), prompts, (3, 17))
    assert [part.shape for part in logits] == [(5, 1000), (21, 1000)]
    assert logits[0].std() > 0.1


@pytest.mark.parametrize("name", ["gptq_act_order", "gptq", "awq", "fp8_block"])
def test_formats_are_known_before_a_file_is_opened(tmp_path: Path, name: str) -> None:
    """As kernels are found from a rank's config alone; o_proj with act-order has groups of 32 on ranks."""
    config = config_of(format_folder(tmp_path, format_config("llama") | {"torch_dtype": "bfloat16"}, name))
    whole = ARCHITECTURES[config.architecture].weight_map(config)
    for rank in all_ranks(2):
        alone = keep_packed(with_row_splits(ARCHITECTURES[config.architecture].weight_map(rank_config(config, rank))))
        given = keep_packed(rank_weights(whole, config, rank))
        kept = [{spec.dest: (spec.packed, spec.coded) for spec in one.linears} for one in (alone, given)]
        assert kept[0] == kept[1]
        assert any(packed or coded for packed, coded in kept[0].values())


@pytest.mark.parametrize(
    ("num_layers", "room", "expected"),
    [
        (80, [80, 40], (53, 27)),  # 53.3 and 26.7
        (10, [1, 1, 1], (4, 3, 3)),
        (7, [5, 5], (4, 3)),
        (10, [25, 25, 50], (3, 2, 5)),  # 2.5, 2.5, 5: the first of equal remainders
        (4, [0, 100], (1, 3)),
        (4, [-7, 100, -9], (1, 2, 1)),
        (5, [0, 0], (3, 2)),
        (3, [1, 1000, 1], (1, 1, 1)),
    ],
)
def test_layers_by_room(num_layers: int, room: list[int], expected: tuple[int, ...]) -> None:
    assert layers_by_room(num_layers, room) == expected


@given(st.lists(st.integers(-(10**12), 10**12), min_size=1, max_size=8), st.integers(0, 100))
def test_layers_by_room_leave_none_out(room: list[int], more: int) -> None:
    """All layers, at least one each; a stage with more room has no fewer; where all have one by right, each has its
    share but for a part of a layer."""
    num_layers = len(room) + more
    counts = layers_by_room(num_layers, room)
    assert (sum(counts), len(counts)) == (num_layers, len(room))
    assert min(counts) >= 1
    pairs = [(count, max(num_bytes, 0)) for count, num_bytes in zip(counts, room, strict=True)]
    assert all(a >= b for a, x in pairs for b, y in pairs if x > y)
    shares = [num_layers * num_bytes / max(sum(x for _, x in pairs), 1) for _, num_bytes in pairs]
    if min(shares) >= 1:
        assert all(abs(count - share) < 1.001 for count, share in zip(counts, shares, strict=True))
