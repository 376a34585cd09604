"""engine.checkpoint.loader: exactly the tensors of the weight map, or an error that names them (LDR-04, 06, 09, 10)."""

import json
import logging
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import psutil
import pytest
from safetensors.numpy import load_file, save_file

from conformance.golden_models import config_v5, llama_config, rand_model
from engine.checkpoint.loader import load_model_config, load_weights
from engine.checkpoint.random_weights import DUMMY_STD
from engine.checkpoint.source import ModelSource
from engine.config import RopeConfig
from engine.errors import CheckpointError, ConfigError
from engine.models.registry import ARCHITECTURES
from engine.weights import ArraySpec, LinearSpec, WeightMap
from tests.engine.checkpoint.files import edit_config, load

Tensors = dict[str, np.ndarray]
DOWN = "model.layers.1.mlp.down_proj.weight"


def change(folder: Path, edit: Callable[[Tensors], Any]) -> Path:
    """Rewrites model.safetensors after `edit` had the tensors."""
    tensors = load_file(folder / "model.safetensors")
    edit(tensors)
    save_file(tensors, folder / "model.safetensors")
    return folder


def refusal(folder: Path) -> str:
    with pytest.raises(CheckpointError) as caught:
        load(folder)
    assert str(folder) in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_parts_are_stacked_along_out_and_converted_to_float32(tmp_path: Path, dtype: str):
    folder = rand_model(tmp_path / "model", dtype=dtype, attention_bias=True, mlp_bias=True)
    stored = {name: tensor.astype(np.float32) for name, tensor in load_file(folder / "model.safetensors").items()}
    weights = load(folder)
    attn = "model.layers.1.self_attn"
    qkv = weights.linears["layers.1.qkv_proj"]
    assert (qkv.format, qkv.out_features, qkv.in_features) == ("dense", 128 + 64 + 64, 128)
    assert qkv.tensors["weight"].dtype == np.float32
    wanted = [stored[f"{attn}.{part}_proj.weight"] for part in "qkv"]
    np.testing.assert_array_equal(qkv.tensors["weight"], np.concatenate(wanted))
    np.testing.assert_array_equal(qkv.bias, np.concatenate([stored[f"{attn}.{part}_proj.bias"] for part in "qkv"]))
    np.testing.assert_array_equal(weights.linears["layers.1.down_proj"].tensors["weight"], stored[DOWN])
    np.testing.assert_array_equal(weights.arrays["norm"], stored["model.norm.weight"])
    np.testing.assert_array_equal(weights.linears["lm_head"].tensors["weight"], stored["lm_head.weight"])
    assert weights.num_bytes == 4 * sum(tensor.size for tensor in stored.values())


def test_both_forms_of_config_json_and_generation_config(tmp_path: Path):
    folder = rand_model(tmp_path / "model", rope_scaling={"type": "linear", "factor": 2.0})
    source = ModelSource("folder", folder, "m")
    old = load_model_config(source)
    (folder / "config.json").write_text(json.dumps(config_v5(json.loads((folder / "config.json").read_text()))))
    assert load_model_config(source) == old
    assert old.rope == RopeConfig("linear", factor=2.0)
    (folder / "generation_config.json").write_text('{"eos_token_id": [7], "temperature": 0.6}')
    config = load_model_config(source)
    assert config.eos_token_ids == (2, 7)
    assert config.default_sampling == {"temperature": 0.6}


@pytest.mark.parametrize("content", ["[]", "{", "\xff"])
@pytest.mark.parametrize("file", ["config.json", "generation_config.json"])
def test_broken_config_files_are_named(tmp_path: Path, file: str, content: str):
    folder = rand_model(tmp_path / "model")
    (folder / file).write_bytes(content.encode("latin-1"))
    with pytest.raises(ConfigError, match=file):
        load(folder)


def test_ldr_04_missing_tensors_are_named_together(tmp_path: Path):
    """LDR-04: a weight and a bias are gone."""
    folder = rand_model(tmp_path / "model", attention_bias=True)
    bias = "model.layers.0.self_attn.k_proj.bias"
    text = refusal(change(folder, lambda tensors: [tensors.pop(name) for name in (DOWN, bias)]))
    assert "2 tensors are missing" in text
    assert DOWN in text
    assert bias in text


def test_ldr_04_unexpected_and_renamed(tmp_path: Path):
    """LDR-04: an unknown tensor stops the start (documented); a renamed one is both missing and unexpected."""
    folder = rand_model(tmp_path / "model")
    text = refusal(change(folder, lambda tensors: tensors.update(made_up=np.ones(3, np.float32))))
    assert "1 tensors are unexpected: made_up" in text
    assert "missing" not in text
    folder = rand_model(tmp_path / "model")
    text = refusal(change(folder, lambda tensors: tensors.update({f"x.{DOWN}": tensors.pop(DOWN)})))
    assert f"1 tensors are missing: {DOWN}" in text
    assert f"1 tensors are unexpected: x.{DOWN}" in text


def test_ldr_04_biases_that_the_config_does_not_have(tmp_path: Path):
    """LDR-04: weights that would be left out of the arithmetic are no warning but an error."""
    folder = rand_model(tmp_path / "model", attention_bias=True)
    edit_config(folder, attention_bias=False)
    assert "8 tensors are unexpected: model.layers.0.self_attn." in refusal(folder)


def test_ldr_04_rotary_buffers_are_ignored_and_counted(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    """LDR-04: buffers of old checkpoints are known, and one line says how many there were."""
    names = [f"model.layers.{layer}.self_attn.rotary_emb.inv_freq" for layer in range(2)]
    folder = rand_model(tmp_path / "model")
    change(folder, lambda tensors: tensors.update({name: np.ones(16, np.float32) for name in names}))
    with caplog.at_level(logging.INFO):
        load(folder)
    assert "loaded 21 tensors" in caplog.text
    assert "2 tensors ignored" in caplog.text


def test_long_lists_are_cut(tmp_path: Path):
    folder = rand_model(tmp_path / "model")
    text = refusal(change(folder, lambda tensors: tensors.update({f"x{i}": np.ones(1) for i in range(60)})))
    assert "60 tensors are unexpected: x0" in text
    assert "and 10 more" in text


def test_ldr_06_tied_without_a_head(tmp_path: Path):
    """LDR-06, 1 of 4: the head is the embedding, in one buffer."""
    folder = rand_model(tmp_path / "model", tie_word_embeddings=True)
    weights = load(folder)
    assert weights.linears["lm_head"].tensors["weight"] is weights.arrays["embed_tokens"]
    assert (weights.linears["lm_head"].out_features, weights.linears["lm_head"].in_features) == (1000, 128)
    assert weights.num_bytes == (folder / "model.safetensors").stat().st_size - _data_start(folder)


def _data_start(folder: Path) -> int:
    return 8 + int.from_bytes((folder / "model.safetensors").read_bytes()[:8], "little")


@pytest.mark.parametrize("scale", [1.0, 2.0])
def test_ldr_06_tied_with_a_head(tmp_path: Path, scale: float):
    """LDR-06, 2 and 3 of 4: a spare head, equal or not, is ignored: tied wins, as in transformers."""
    folder = rand_model(tmp_path / "model", tie_word_embeddings=True)
    head = scale * load_file(folder / "model.safetensors")["model.embed_tokens.weight"]
    weights = load(change(folder, lambda tensors: tensors.update({"lm_head.weight": head})))
    assert weights.linears["lm_head"].tensors["weight"] is weights.arrays["embed_tokens"]
    assert np.array_equal(weights.arrays["embed_tokens"], head / scale)


def test_ldr_06_untied_without_a_head(tmp_path: Path):
    """LDR-06, 4 of 4: an error, not a random head."""
    folder = rand_model(tmp_path / "model")
    text = refusal(change(folder, lambda tensors: tensors.pop("lm_head.weight")))
    assert "1 tensors are missing: lm_head.weight" in text
    assert "the config does not tie the head to the embedding" in text


@pytest.mark.parametrize("shape", [(0,), (0, 5), ()])
def test_ldr_09_empty_tensors_and_scalars(tmp_path: Path, shape: tuple[int, ...]):
    """LDR-09: as unknown tensors they are named; as ignored ones they do no harm; in a map they are read."""
    folder = rand_model(tmp_path / "model")
    change(folder, lambda tensors: tensors.update(odd=np.zeros(shape, np.float32)))
    assert "1 tensors are unexpected: odd" in refusal(folder)
    source = ModelSource("folder", folder, "m")
    config = load_model_config(source)
    known = ARCHITECTURES[config.architecture].weight_map(config)
    load_weights(source, WeightMap(known.linears, known.arrays, ignored=("odd",)))
    wanted = WeightMap(known.linears, (*known.arrays, ArraySpec("odd", "odd", shape)))
    assert load_weights(source, wanted).arrays["odd"].shape == shape


@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("named", ["float32", "float16", "bfloat16"])
def test_ldr_09_the_file_says_its_dtype_not_the_config(tmp_path: Path, dtype: Any, named: str):
    """LDR-09: BF16 is never read as F16, whatever config.json names."""
    folder = rand_model(tmp_path / "model")
    wanted = load_file(folder / "model.safetensors")[DOWN].astype(dtype)
    change(folder, lambda tensors: tensors.update({DOWN: wanted}))
    edit_config(folder, torch_dtype=named)
    found = load(folder).linears["layers.1.down_proj"].tensors["weight"]
    np.testing.assert_array_equal(found, wanted.astype(np.float32))


@pytest.mark.parametrize(
    ("dtype", "name"),
    [(np.int64, "I64"), (np.int8, "I8"), (np.float64, "F64"), (np.bool_, "BOOL"), (ml_dtypes.float8_e4m3fn, "F8_E4M3")],
)
def test_ldr_09_other_types_are_refused_by_name(tmp_path: Path, dtype: Any, name: str):
    """LDR-09: an integer or 8-bit float tensor without its scales is not a weight."""
    folder = rand_model(tmp_path / "model")
    text = refusal(change(folder, lambda tensors: tensors.update({DOWN: np.zeros((128, 256), dtype)})))
    assert f"1 tensors have a type that cannot be read (F32, F16, BF16, Q8_0, Q4_0, Q4_1 can): {DOWN} is {name}" in text


@pytest.mark.parametrize(
    ("changes", "says"),
    [
        ({"vocab_size": 1001}, "model.embed_tokens.weight is [1000, 128], wanted [1001, 128]"),
        ({"hidden_size": 64}, "model.norm.weight is [128], wanted [64]"),
        ({"num_hidden_layers": 1}, "9 tensors are unexpected: model.layers.1."),
        ({"num_hidden_layers": 3}, "9 tensors are missing: model.layers.2."),
        ({"num_key_value_heads": 4}, "model.layers.0.self_attn.k_proj.weight is [64, 128], wanted [128, 128]"),
        ({"head_dim": 16}, "model.layers.0.self_attn.q_proj.weight is [128, 128], wanted [64, 128]"),
        ({"intermediate_size": 255}, "model.layers.1.mlp.down_proj.weight is [128, 256], wanted [128, 255]"),
    ],
)
def test_ldr_10_one_number_of_the_config_is_wrong(tmp_path: Path, changes: dict[str, int], says: str):
    """LDR-10: the start stops with tensor, found and wanted shape; no request is needed to find it."""
    folder = rand_model(tmp_path / "model")
    edit_config(folder, **changes)
    assert says in refusal(folder)


@pytest.mark.parametrize("changes", [{"eos_token_id": 1000}, {"max_position_embeddings": 0}])
def test_ldr_10_config_that_no_weight_contradicts(tmp_path: Path, changes: dict[str, int]):
    """LDR-10: an eos id beyond the vocabulary, no positions."""
    folder = rand_model(tmp_path / "model")
    edit_config(folder, **changes)
    with pytest.raises(ConfigError, match=next(iter(changes))):
        load(folder)


def test_a_transposed_tensor_is_refused(tmp_path: Path):
    """Same number of elements, another shape: it would load without a word and answer nonsense."""
    folder = rand_model(tmp_path / "model")
    change(folder, lambda tensors: tensors.update({DOWN: np.ascontiguousarray(tensors[DOWN].T)}))
    assert f"{DOWN} is [256, 128], wanted [128, 256]" in refusal(folder)


def test_dummy_weights_need_no_file_and_come_from_the_seed(tmp_path: Path):
    (tmp_path / "config.json").write_text(json.dumps(llama_config(attention_bias=True, tie_word_embeddings=True)))
    source = ModelSource("folder", tmp_path, "m")
    config = load_model_config(source)
    weight_map = ARCHITECTURES[config.architecture].weight_map(config)
    first, again, other = (load_weights(source, weight_map, seed=seed, load_format="dummy") for seed in (0, 0, 1))
    assert set(first.linears) == {spec.dest for spec in weight_map.linears} | {"lm_head"}
    assert first.linears["lm_head"].tensors["weight"] is first.arrays["embed_tokens"]
    for dest, linear in first.linears.items():
        weight = linear.tensors["weight"]
        assert np.array_equal(weight, again.linears[dest].tensors["weight"])
        assert not np.array_equal(weight, other.linears[dest].tensors["weight"])
        # the standard deviation of n samples strays by std/√(2n): five of these
        assert abs(weight.std() / DUMMY_STD - 1) < 5 / np.sqrt(2 * weight.size)
        assert linear.bias is None or not linear.bias.any()
    assert not np.array_equal(
        first.linears["layers.0.qkv_proj"].tensors["weight"], first.linears["layers.1.qkv_proj"].tensors["weight"]
    )
    assert (first.arrays["norm"] == 1).all()


def test_no_bar_and_no_other_output_where_there_is_no_terminal(tmp_path: Path, capfd: pytest.CaptureFixture[str]):
    load(rand_model(tmp_path / "model"))
    assert capfd.readouterr() == ("", "")


def test_nothing_of_the_files_stays_mapped(tmp_path: Path):
    weights = load(rand_model(tmp_path / "model"))
    maps = [entry.path for entry in psutil.Process().memory_maps() if entry.path.endswith(".safetensors")]
    assert weights.num_bytes
    assert maps == []


PEAK = """
import sys
from pathlib import Path
from engine.checkpoint.loader import load_weights
from engine.checkpoint.source import ModelSource
from engine.weights import LinearSpec, WeightMap
specs = tuple(LinearSpec(str(i), ((f"t{i}", 2048),), 2048) for i in range(16))
def peak():  # ru_maxrss would count the parent's memory at the fork
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith("VmHWM"))
before = peak()
weights = load_weights(ModelSource("folder", Path(sys.argv[1]), "m"), WeightMap(specs, ()))
print((peak() - before) * 1024, weights.num_bytes)
"""


@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_the_peak_is_the_weights_and_one_tensor(tmp_path: Path):
    """16 tensors of 16 MiB; a second copy or a mapping of the whole file would add 256 MiB."""
    save_file({f"t{i}.weight": np.full((2048, 2048), i, np.float32) for i in range(16)}, tmp_path / "model.safetensors")
    done = subprocess.run(
        [sys.executable, "-c", PEAK, str(tmp_path)], capture_output=True, text=True, check=True, env=dict(os.environ)
    )
    grown, num_bytes = map(int, done.stdout.split())
    one = num_bytes // 16
    assert num_bytes == 2**28
    assert num_bytes * 0.9 < grown < num_bytes + one + 16 * 2**20  # 16 MiB for the reader itself


def test_the_order_of_parts_is_that_of_the_map(tmp_path: Path):
    """Not that of the file."""
    folder = tmp_path
    save_file({"b.weight": np.full((1, 2), 2, np.float32), "a.weight": np.ones((2, 2), np.float32)},
              folder / "model.safetensors")  # fmt: skip
    source = ModelSource("folder", folder, "m")
    for parts, rows in (((("a", 2), ("b", 1)), [1, 1, 2]), ((("b", 1), ("a", 2)), [2, 1, 1])):
        weights = load_weights(source, WeightMap((LinearSpec("x", parts, 2),), ()))
        assert weights.linears["x"].tensors["weight"][:, 0].tolist() == rows


def test_weights_that_no_memory_can_hold_say_how_large_they_are(tmp_path: Path):
    """A petabyte, more than an address space has."""
    weight_map = WeightMap((LinearSpec("wide", (("wide", 1 << 24),), 1 << 24),), ())
    with pytest.raises(ConfigError, match="no memory for the weights: the config asks for 1,125,899,907 MB"):
        load_weights(ModelSource("folder", tmp_path, "x"), weight_map, load_format="dummy")
