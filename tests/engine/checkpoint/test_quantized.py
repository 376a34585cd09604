"""Quantized folders in the engine: decoded exactly, packed where they can be, refused by name where they are wrong."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from safetensors import safe_open
from safetensors.numpy import load_file, save_file

from conformance.engine_run import make_runner, run_chunks
from conformance.golden_formats import FORMATS, format_model, format_prompt
from engine.checkpoint.loader import load_model_config, load_weights
from engine.checkpoint.quantized import keep_packed
from engine.checkpoint.random_weights import DUMMY_STD, SMALL_STD
from engine.checkpoint.source import ModelSource, resolve
from engine.coded8 import blank8, decode8
from engine.cpu.linear import prepare_dense
from engine.errors import CheckpointError, ConfigError
from engine.models.registry import ARCHITECTURES
from engine.ops import cpu_ops
from engine.packed4 import PACKED, PACKED_GATED
from engine.weights import Coded, Packed, WeightMap, Weights
from ref.config import parse_config
from ref.model.registry import forward
from ref.quant.scheme import read_weights

PACKABLE = {  # with zeros?
    **{"awq": True, "gptq": True, "gptq_v2": True, "gptq_act_order": True},
    **{"ct_int4": True, "ct_int4_symmetric": False},
}
CODED = {  # what a layer of one module and one of several become
    "ct_int8": (Coded("int8", "channel", False),) * 2,
    "ct_int8_smooth": (Coded("int8", "channel", False),) * 2,
    "ct_fp8_tensor": (Coded("fp8", "tensor", False), Coded("fp8", "channel", False)),
    "ct_fp8_channel": (Coded("fp8", "channel", False),) * 2,
    "ct_fp8_static": (Coded("fp8", "tensor", True), Coded("fp8", "channel", True)),
    "fp8_block": (Coded("fp8", "block", False), None),  # 160 rows: the next module begins within a tile
}
FLOAT32 = 2.0**-24


def weight_map_of(folder: Path) -> WeightMap:
    config = load_model_config(resolve(str(folder)))
    return ARCHITECTURES[config.architecture].weight_map(config)


def load(folder: Path, packed: bool = True) -> Weights:
    weight_map = weight_map_of(folder)
    return load_weights(resolve(str(folder)), keep_packed(weight_map) if packed else weight_map, progress=False)


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", FORMATS)
def test_every_format_gives_the_logits_of_ref(name: str, packed: bool, tmp_path: Path) -> None:
    """Both decode to the same numbers; what is left is the order of float32 sums."""
    folder, prompt = format_model(tmp_path, "llama", name), format_prompt()
    config = parse_config(json.loads((folder / "config.json").read_text()))
    wanted = forward(config, read_weights(folder, np.float64), prompt)
    rounded = forward(config, read_weights(folder, np.float32), prompt)
    found = run_chunks(make_runner(folder, cpu_ops(), [prompt], packed=packed), [prompt], [5])[0]
    spread = np.abs(wanted).max()
    assert np.abs(found - wanted).max() < 4 * np.abs(rounded - wanted).max() + 64 * FLOAT32 * spread


@pytest.mark.parametrize("name", PACKABLE)
def test_what_stays_packed(name: str, tmp_path: Path) -> None:
    linears = load(format_model(tmp_path, "llama", name)).linears
    formats = {dest.rpartition(".")[2]: weight.format for dest, weight in linears.items()}
    assert formats == {
        "qkv_proj": PACKED,
        "o_proj": PACKED,
        "gate_up_proj": PACKED_GATED,
        "down_proj": PACKED,
        "lm_head": "dense",
    }
    assert all(("zeros" in weight.tensors) == PACKABLE[name] for weight in linears.values() if weight.format == PACKED)


def test_what_cannot_stay_packed(tmp_path: Path) -> None:
    """Groups of 8 bits are decoded."""
    for name in sorted(FORMATS.keys() - PACKABLE.keys() - CODED.keys()):
        linears = load(format_model(tmp_path / name, "llama", name)).linears
        assert {weight.format for weight in linears.values()} == {"dense"}, name


@pytest.mark.parametrize("name", CODED)
def test_what_stays_codes(name: str, tmp_path: Path) -> None:
    """The codes of the files, in rows one module after the other; scales of float32 that decode to the same numbers."""
    folder = format_model(tmp_path, "llama", name)
    weight_map = keep_packed(weight_map_of(folder))
    specs, linears = {spec.dest: spec for spec in weight_map.linears}, load(folder).linears
    decoded, one, several = load(folder, packed=False).linears, *CODED[name]
    assert specs["lm_head"].coded is None
    for layer, wanted in (("o_proj", one), ("down_proj", one), ("qkv_proj", several), ("gate_up_proj", several)):
        dest = f"layers.1.{layer}"
        weight, shape = linears[dest], (specs[dest].out_features, specs[dest].in_features)
        assert specs[dest].coded == wanted
        if wanted is None:
            assert weight.format == "dense"
            continue
        assert weight.format == wanted.kind
        blank = blank8(wanted.kind, wanted.scale, wanted.static, *shape)
        assert {key: (value.shape, value.dtype) for key, value in weight.tensors.items()} == {
            key: (value.shape, value.dtype) for key, value in blank.items()
        }
        np.testing.assert_array_equal(decode8(weight.tensors), decoded[dest].tensors["weight"])


def test_experts_and_latents_are_decoded(tmp_path: Path) -> None:
    linears = load(format_model(tmp_path, "mixtral", "gptq")).linears
    assert {weight.format for dest, weight in linears.items() if "experts" in dest} == {"dense"}


def changed_config(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    path = folder / "config.json"
    config = json.loads(path.read_text())
    change(config["quantization_config"])
    path.write_text(json.dumps(config))


def test_symmetric_by_the_config_alone_is_refused(tmp_path: Path) -> None:
    folder = format_model(tmp_path, "llama", "gptq")
    changed_config(folder, lambda quantization: quantization.update(sym=True))
    with pytest.raises(CheckpointError, match=r"q_proj: the config says symmetric, but qzeros holds other"):
        load(folder)


def test_a_method_that_is_not_known_is_refused_at_start(tmp_path: Path) -> None:
    folder = format_model(tmp_path, "llama", "gptq")
    changed_config(folder, lambda quantization: quantization.update(quant_method="squeeze"))
    with pytest.raises(ConfigError, match=r"quant_method 'squeeze' is not supported; known are gptq, awq"):
        load_model_config(resolve(str(folder)))


def test_three_bits_are_refused_at_start(tmp_path: Path) -> None:
    folder = format_model(tmp_path, "llama", "gptq")
    changed_config(folder, lambda quantization: quantization.update(bits=3))
    with pytest.raises(ConfigError, match="bits is 3; integer weights of 4 or 8 bits are supported"):
        load_model_config(resolve(str(folder)))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda tensors: tensors.pop("model.layers.1.mlp.up_proj.scales"), "model.layers.1.mlp.up_proj.*scales is mis"),
        (lambda tensors: tensors.update({"model.layers.0.mlp.odd": np.zeros(3, np.float32)}), "unexpected"),
        (
            lambda tensors: tensors["model.layers.0.mlp.up_proj.scales"].fill(np.nan),
            "model.layers.0.mlp.up_proj.*scales must be finite",
        ),
        (
            lambda tensors: tensors["model.layers.0.mlp.up_proj.g_idx"].fill(99),
            "model.layers.0.mlp.up_proj.*g_idx must hold",
        ),
    ],
)
def test_damage_is_named(change: Callable[[dict[str, Any]], Any], message: str, tmp_path: Path) -> None:
    folder = format_model(tmp_path, "llama", "gptq")
    path = folder / "model.safetensors"
    tensors = {name: np.array(tensor) for name, tensor in load_file(path).items()}
    change(tensors)
    save_file(tensors, path)
    with pytest.raises(CheckpointError, match=message):
        load(folder)


def test_qnt_01_act_order_stays_packed(tmp_path: Path) -> None:
    """Columns lie by groups. Norms put out what they give in that order; before down_proj the rows of gates and of what
    they are multiplied by are in it; and x of o_proj is gathered."""
    folder = format_model(tmp_path, "llama", "gptq_act_order")
    spec = {spec.dest.rpartition(".")[2]: spec.packed for spec in keep_packed(weight_map_of(folder)).linears}
    assert spec["qkv_proj"] == spec["gate_up_proj"] == Packed(32, True, "normed")
    assert spec["o_proj"] == Packed(32, True, "gathered")
    assert spec["down_proj"] == Packed(32, True, "folded")
    weights, stored = load(folder), load_file_of_integers(folder)
    linears = weights.linears
    orders = {
        "self_attn.q_proj": weights.arrays["layers.0.input_layernorm.order"],
        "self_attn.o_proj": linears["layers.0.o_proj"].tensors["order"],
        "mlp.up_proj": weights.arrays["layers.0.post_attention_layernorm.order"],
    }
    for module, order in orders.items():
        assert sorted(order) == list(range(160))
        np.testing.assert_array_equal(stored[f"model.layers.0.{module}.g_idx"][order], np.arange(160) // 32)
    assert [dest for dest, linear in linears.items() if "order" in linear.tensors] == [
        f"layers.{layer}.o_proj" for layer in range(2)
    ]
    down = np.argsort(stored["model.layers.0.mlp.down_proj.g_idx"], kind="stable")
    assert not np.array_equal(down, np.arange(160))
    decoded = load(folder, packed=False).linears
    gate_up = prepare_dense(linears["layers.0.gate_up_proj"]).tensors["weight_t"].T
    wanted = decoded["layers.0.gate_up_proj"].tensors["weight"][np.concatenate([down, 160 + down])]
    wanted = wanted[:, orders["mlp.up_proj"]]
    np.testing.assert_array_equal(gate_up, wanted)


def load_file_of_integers(folder: Path) -> dict[str, Any]:
    """Without what is of bfloat16."""
    with safe_open(folder / "model.safetensors", "numpy") as file:
        return {name: file.get_tensor(name) for name in file.keys() if name.endswith("g_idx")}  # noqa: SIM118


def test_qnt_01_a_bias_keeps_rows_where_they_are(tmp_path: Path) -> None:
    """What stands before down_proj has a bias: x of down_proj is gathered."""
    weight_map = weight_map_of(format_model(tmp_path, "llama", "gptq_act_order"))
    linears = tuple(replace(spec, bias=spec.gated) for spec in weight_map.linears)
    kept = {spec.dest: spec.packed for spec in keep_packed(replace(weight_map, linears=linears)).linears}
    assert kept["layers.0.down_proj"] == Packed(32, True, "gathered")


def test_groups_of_uneven_sizes_are_decoded(tmp_path: Path) -> None:
    folder = format_model(tmp_path, "llama", "gptq_act_order")
    key = "model.layers.0.mlp.down_proj.g_idx"
    changed_tensors(folder, lambda tensors: tensors[key].__setitem__(slice(0, 3), 0))
    linears = load(folder).linears
    assert linears["layers.0.down_proj"].format == "dense"
    assert linears["layers.1.down_proj"].format == PACKED
    np.testing.assert_allclose(logits_of(folder, packed=True), logits_of(folder, packed=False), atol=1e-4)


def test_random_weights_are_packed_too(tmp_path: Path) -> None:
    folder = format_model(tmp_path, "llama", "ct_int4")
    weight_map = keep_packed(weight_map_of(folder))
    source = resolve(str(folder))
    first, again, other = (
        load_weights(source, weight_map, seed=seed, load_format="dummy").linears["layers.0.gate_up_proj"]
        for seed in (0, 0, 1)
    )
    assert (first.format, first.out_features, first.in_features) == (PACKED_GATED, 320, 160)
    np.testing.assert_array_equal(first.tensors["weight"], again.tensors["weight"])
    assert (first.tensors["weight"] != other.tensors["weight"]).mean() > 0.9
    assert first.tensors["zeros"].max() == 8


@pytest.mark.parametrize("name", ["ct_int8", "ct_fp8_static", "fp8_block", "gptq_act_order", "gptq"])
def test_random_weights_are_multiplied(name: str, tmp_path: Path) -> None:
    """They have the sizes of what is read, are of the format that it stays in, and near DUMMY_STD."""
    folder = format_model(tmp_path, "llama", name)
    weight_map = keep_packed(weight_map_of(folder))
    made = load_weights(resolve(str(folder)), weight_map, load_format="dummy").linears
    read = load_weights(resolve(str(folder)), weight_map, progress=False).linears
    for spec in weight_map.linears:
        weight = made[spec.dest]
        assert (weight.out_features, weight.in_features) == (spec.out_features, spec.in_features)
        assert weight.format == (spec.coded.kind if spec.coded else read[spec.dest].format)
        assert weight.tensors.keys() == read[spec.dest].tensors.keys() or spec.coded
        numbers = prepare_dense(weight).tensors["weight_t"]
        assert numbers.shape == (spec.in_features, spec.out_features)
        assert numbers.std() == pytest.approx(DUMMY_STD, rel=0.1)


@pytest.mark.parametrize("name", ["gptq", "ct_int8"])
def test_small_random_weights(name: str, tmp_path: Path) -> None:
    """Norms, biases and scales of groups too, of both signs; the words are those of dummy."""
    weight_map = keep_packed(weight_map_of(format_model(tmp_path, "llama", name)))
    source = ModelSource("folder", tmp_path, "none")
    made, plain = (load_weights(source, weight_map, load_format=kind) for kind in ("dummy-small", "dummy"))
    norm, linear = made.arrays["norm"], made.linears["layers.0.down_proj"]
    assert np.abs(norm).max() < 5 * SMALL_STD
    assert norm.min() < 0 < norm.max()
    assert (plain.arrays["norm"] == 1).all()
    assert made.arrays["embed_tokens"].std() == pytest.approx(SMALL_STD, rel=0.1)
    np.testing.assert_array_equal(linear.tensors["weight"], plain.linears["layers.0.down_proj"].tensors["weight"])
    if linear.format == PACKED:
        assert linear.tensors["scales"].astype(np.float64).std() == pytest.approx(SMALL_STD, rel=0.1)


def test_groups_of_other_sizes_are_decoded(tmp_path: Path) -> None:
    folder = format_model(tmp_path, "llama", "awq")
    weight_map = weight_map_of(folder)
    assert weight_map.quantization is not None
    for group_size, packed in ((32, Packed(32, True)), (48, None), (160, Packed(160, True)), (-1, Packed(160, True))):
        method = replace(weight_map.quantization.method, group_size=group_size)
        changed = replace(weight_map, quantization=replace(weight_map.quantization, method=method))
        assert keep_packed(changed).linears[0].packed == packed, group_size


def test_a_config_in_a_file_of_its_own_is_read(tmp_path: Path) -> None:
    folder = format_model(tmp_path, "llama", "gptq")
    config = json.loads((folder / "config.json").read_text())
    quantization = config.pop("quantization_config")
    (folder / "config.json").write_text(json.dumps(config))
    del quantization["quant_method"]
    (folder / "quantize_config.json").write_text(json.dumps(quantization))
    assert load(folder).linears["layers.0.o_proj"].format == PACKED
    (folder / "quantize_config.json").write_text(json.dumps(quantization | {"bits": 3}))
    with pytest.raises(ConfigError, match=r"quantize_config\.json: .*bits is 3"):
        load(folder)


def changed_tensors(folder: Path, change: Callable[[dict[str, Any]], Any], name: str = "model.safetensors") -> None:
    """BF16 goes through as it is: what is changed is of other types, or of its bits."""
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    (folder / "model.safetensors").unlink()
    save_file({key: np.ascontiguousarray(value) for key, value in tensors.items()}, folder / name)


def logits_of(folder: Path, packed: bool) -> np.ndarray[Any, Any]:
    prompt = format_prompt()
    return run_chunks(make_runner(folder, cpu_ops(), [prompt], packed=packed), [prompt], [5])[0]


@pytest.mark.parametrize("name", ["gptq_act_order", "gptq"])
def test_groups_in_another_order_than_the_config_says(name: str, tmp_path: Path) -> None:
    """g_idx is what counts, with desc_act or without. QNT-01: modules of a layer with an order each are decoded."""
    folder = format_model(tmp_path, "llama", name)
    changed_config(folder, lambda quantization: quantization.update(desc_act=False))
    if name == "gptq":
        key = "model.layers.0.self_attn.q_proj.g_idx"
        changed_tensors(folder, lambda tensors: tensors.update({key: tensors[key][::-1]}))
        assert load(folder).linears["layers.0.qkv_proj"].format == "dense"
        assert load(folder).linears["layers.0.o_proj"].format == PACKED
    np.testing.assert_allclose(logits_of(folder, packed=True), logits_of(folder, packed=False), atol=1e-4)


def test_scales_that_float16_does_not_hold(tmp_path: Path) -> None:
    """The layer is decoded: packed scales are float16."""
    folder = format_model(tmp_path, "llama", "gptq")
    key = "model.layers.0.mlp.down_proj.scales"
    changed_tensors(folder, lambda tensors: tensors.update({key: tensors[key].astype(np.float32) * 1.0003}))
    assert load(folder).linears["layers.0.down_proj"].format == "dense"
    np.testing.assert_allclose(logits_of(folder, packed=True), logits_of(folder, packed=False), atol=1e-4)


def test_symmetric_with_zero_points_in_the_file(tmp_path: Path) -> None:
    folder = format_model(tmp_path, "llama", "ct_int4")

    def lie(quantization: dict[str, Any]) -> None:
        quantization["config_groups"]["group_0"]["weights"]["symmetric"] = True

    changed_config(folder, lie)
    with pytest.raises(CheckpointError, match=r"q_proj: the config says symmetric, but weight_zero_point holds"):
        load(folder)


def test_an_order_of_groups_that_the_config_does_not_know(tmp_path: Path) -> None:
    folder = format_model(tmp_path, "llama", "ct_int4")
    order = np.arange(160, dtype=np.int32)[::-1] // 32
    changed_tensors(folder, lambda tensors: tensors.update({"model.layers.0.mlp.up_proj.weight_g_idx": order}))
    with pytest.raises(CheckpointError, match=r"up_proj: weight_g_idx is stored in another order"):
        load(folder)


def test_a_code_that_is_no_number(tmp_path: Path) -> None:
    """0x7F is NaN in e4m3."""
    folder = format_model(tmp_path, "llama", "fp8_block")
    data = bytearray((folder / "model.safetensors").read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    start = 8 + int.from_bytes(data[:8], "little") + header["model.layers.0.mlp.up_proj.weight"]["data_offsets"][0]
    data[start] = 0x7F
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"up_proj decodes to numbers that are not finite"):
        load(folder)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_a_code_that_is_no_number_where_codes_stay(code: int, tmp_path: Path) -> None:
    folder = format_model(tmp_path, "llama", "ct_fp8_channel")
    data = bytearray((folder / "model.safetensors").read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    _, end = header["model.layers.1.mlp.down_proj.weight"]["data_offsets"]
    data[8 + int.from_bytes(data[:8], "little") + end - 1] = code
    (folder / "model.safetensors").write_bytes(data)
    with pytest.raises(CheckpointError, match=r"model\.layers\.1\.mlp\.down_proj: codes that are no numbers"):
        load(folder)


def test_modules_whose_activations_have_other_scales_are_decoded(tmp_path: Path) -> None:
    folder = format_model(tmp_path, "llama", "ct_fp8_static")
    path = folder / "model.safetensors"
    data = bytearray(path.read_bytes())
    header = json.loads(data[8 : 8 + int.from_bytes(data[:8], "little")])
    start, end = header["model.layers.0.self_attn.k_proj.input_scale"]["data_offsets"]
    first = 8 + int.from_bytes(data[:8], "little")
    data[first + start : first + end] = np.float32(0.5).tobytes()
    path.write_bytes(data)
    linears = load(folder).linears
    assert linears["layers.0.qkv_proj"].format == "dense"
    assert linears["layers.1.qkv_proj"].format == "fp8"


def test_no_rows(tmp_path: Path) -> None:
    folder = format_model(tmp_path, "llama", "awq")
    key = "model.layers.0.mlp.up_proj.qweight"
    changed_tensors(folder, lambda tensors: tensors.update({key: tensors[key][:0]}))
    with pytest.raises(
        CheckpointError, match=r"module model\.layers\.0\.mlp\.up_proj: qweight is I32 \[0, 20\]; a weight"
    ):
        load(folder)


def test_biases_of_zeros_are_passed_over(tmp_path: Path) -> None:
    """Some writers of GPTQ files give every module one."""
    folder = format_model(tmp_path, "llama", "gptq")
    key = "model.layers.0.mlp.up_proj.bias"
    changed_tensors(folder, lambda tensors: tensors.update({key: np.zeros(160, np.float16)}))
    assert load(folder).linears["layers.0.gate_up_proj"].bias is None
    changed_tensors(folder, lambda tensors: tensors.update({key: np.ones(160, np.float16)}))
    with pytest.raises(CheckpointError, match=r"unexpected.*up_proj\.bias"):
        load(folder)


def test_any_name_of_the_file(tmp_path: Path) -> None:
    folder = format_model(tmp_path, "llama", "gptq")
    changed_tensors(folder, lambda tensors: None, name="gptq_model-4bit-32g.safetensors")
    assert load(folder).linears["layers.0.o_proj"].format == PACKED


def test_activations_of_a_wrong_kind_are_refused(tmp_path: Path) -> None:
    folder = format_model(tmp_path, "llama", "ct_int8")

    def change(quantization: dict[str, Any]) -> None:
        quantization["config_groups"]["group_0"]["input_activations"] = "int8"

    changed_config(folder, change)
    with pytest.raises(ConfigError, match="input_activations must be an object or null, found 'int8'"):
        load_model_config(resolve(str(folder)))
