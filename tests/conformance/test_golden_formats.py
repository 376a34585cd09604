"""The goldens of families in number formats: whole, small, and such that a fault in a format shows."""

import hashlib
import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest

from conformance import golden
from conformance.case import Case
from conformance.check import check
from conformance.compare import compare
from conformance.golden_families import family_tensors
from conformance.golden_formats import FORMAT_FAMILIES, FORMATS, format_model
from conformance.golden_models import write_stored
from conformance.golden_smooth import OUTLIER, smooth, with_outliers
from conformance.suite import target_ops
from conformance.tolerance import FORMAT_FLOAT, FORMAT_FP8
from ref.checkpoint import read_checkpoint
from ref.config import parse_config
from ref.model.registry import forward

OPS = target_ops("golden")
MANIFEST = json.loads((golden.FOLDER / "manifest.json").read_text())
PAIRS = [f"{family}-{form}" for family in FORMAT_FAMILIES for form in FORMATS]
CASES = {case.name: case for case in golden.cases() if "format" in case.axes}
MAX_FOLDER_BYTES = 2_500_000
Stored = dict[str, np.ndarray[Any, Any]]


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def test_families_and_formats_cross() -> None:
    assert list(FORMAT_FAMILIES) == ["llama", "qwen2", "mixtral", "qwen2_moe", "deepseek_v2", "deepseek_v3"]
    assert {form.config["quant_method"] for form in FORMATS.values() if form.config} == {
        *("gptq", "awq", "fp8", "compressed-tensors")
    }
    eight_bit = [name for name, form in FORMATS.items() if form.activations]
    assert len(eight_bit) == 6
    expected = [f"{family}-{form}-float" for family in FORMAT_FAMILIES for form in FORMATS]
    expected += [f"{family}-{form}-format" for family in FORMAT_FAMILIES for form in eight_bit]
    assert sorted(CASES) == sorted(expected)
    assert all(case.tolerance.norm in (1e-4, 1e-3, 5e-3) and not case.skip for case in CASES.values())


def test_every_golden_is_in_the_manifest() -> None:
    assert sorted(MANIFEST["formats"]) == sorted(PAIRS)
    assert sorted(file.stem for file in (golden.FOLDER / "formats").iterdir()) == sorted(PAIRS)
    assert {"torch", "transformers", "numpy", "compressed-tensors"} == set(MANIFEST["versions"])
    assert sum(file.stat().st_size for file in golden.FOLDER.rglob("*") if file.is_file()) <= MAX_FOLDER_BYTES


@pytest.mark.parametrize("pair", PAIRS)
def test_checkpoint_and_file_are_those_of_the_manifest(pair: str, tmp_path: Path) -> None:
    entry, (family, form) = MANIFEST["formats"][pair], pair.split("-")
    assert sha256(golden.FOLDER / "formats" / f"{pair}.npz") == entry["sha256"]
    assert sha256(format_model(tmp_path, family, form) / "model.safetensors") == entry["checkpoint_sha256"]
    assert entry["seed"] == FORMATS[form].seed


@pytest.mark.parametrize("pair", PAIRS)
def test_what_is_stored(pair: str) -> None:
    """Logits, greedy ids, and each layer's outputs; the last two once more with quantized activations."""
    family, form = pair.split("-")
    config = parse_config(FORMAT_FAMILIES[family])
    cached = {"latent_cached"} if family.startswith("deepseek") else {"k_cached", "v_cached"}
    stored = golden.format_stored(family, form, "float")
    layers = {f"layers.{n}.{output}" for n in range(config.n_layers) for output in {"attn_out", "mlp_out", *cached}}
    routed = {name for name in stored if name.endswith("expert_ids")}
    assert set(stored) - routed == {"logits", "greedy", *layers}
    assert bool(routed) == (family not in ("llama", "qwen2"))
    assert set(golden.format_stored(family, form, "format")) == (
        {"logits", "greedy"} if FORMATS[form].activations else set()
    )


def swap_halves(words: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    return np.ascontiguousarray(words).view(np.int16).reshape(*words.shape, 2)[..., ::-1].copy().view(np.int32)[..., 0]


# what is done to one tensor of one layer, and which; the head of nothing else is touched
DAMAGE: dict[str, tuple[str, Callable[[Any], Any]]] = {
    "deepseek_v3-awq": ("kv_b_proj.qweight", swap_halves),
    "deepseek_v2-gptq": ("kv_b_proj.qzeros", lambda words: words + 0x11111111),
    "llama-gptq_v2": ("o_proj.qzeros", lambda words: words - 0x11111111),
    "mixtral-gptq_act_order": ("w2.g_idx", np.sort),
    "qwen2-gptq_8bit": ("down_proj.qweight", swap_halves),
    "qwen2_moe-fp8_block": ("k_proj.weight_scale_inv", lambda scale: scale[:, ::-1]),
    "deepseek_v3-fp8_block": ("kv_b_proj.weight_scale_inv", lambda scale: scale[::-1]),
    "mixtral-ct_int4": ("v_proj.weight_zero_point", swap_halves),
    "llama-ct_int8": ("up_proj.weight_scale", lambda scale: scale[::-1]),
    "qwen2_moe-ct_fp8_channel": ("v_proj.weight", lambda codes: codes ^ 0x80),
}


@pytest.mark.parametrize("pair", DAMAGE)
def test_a_damaged_tensor_is_seen(pair: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """In every format, one tensor of the first layer that has it, read in another way than it was written."""
    suffix, damage = DAMAGE[pair]

    def damaged(folder: Path, family: str, form: str) -> Path:
        path = format_model(folder, family, form)
        tensors = {name: np.array(tensor) for name, tensor in read_checkpoint(path, None).items()}
        stored = {name: t.view(ml_dtypes.bfloat16) if t.dtype.names else t for name, t in tensors.items()}
        name = next(name for name in stored if name.endswith(suffix))
        stored[name] = np.ascontiguousarray(damage(stored[name]))
        write_stored(path / "model.safetensors", stored)
        return path

    monkeypatch.setattr(golden, "format_model", damaged)
    assert any("output logits is off by" in problem for problem in check(CASES[f"{pair}-float"], OPS).problems)


@pytest.mark.parametrize("form", [name for name, form in FORMATS.items() if form.activations])
def test_activations_in_float_are_not_those_of_the_format(form: str) -> None:
    """If ref did not quantize them, the case would fail."""
    case = CASES[f"llama-{form}-format"]

    def in_float(**inputs: Any) -> Any:
        outputs = case.reference(**inputs | {"activations": "float"})
        return {name: outputs[name] for name in ("logits", "greedy")}

    assert any(
        "output logits is off by" in problem for problem in check(replace(case, reference=in_float), OPS).problems
    )


def off(case: Case, output: str, change: Callable[[Any], None]) -> Case:
    def candidate(ops: Any, **inputs: Any) -> Any:
        outputs = case.candidate(ops, **inputs)
        change(outputs[output])
        return outputs

    return replace(case, candidate=candidate)


@pytest.mark.parametrize("output", ["greedy", "layers.1.expert_ids", "layers.0.attn_out", "layers.1.latent_cached"])
def test_each_stored_array_counts(output: str) -> None:
    def change(stored: Any) -> None:
        stored.flat[1] += 1

    case = CASES["deepseek_v2-awq-float"]
    assert not check(case, OPS).problems
    assert [p for p in check(off(case, output, change), OPS).problems if p.startswith(f"output {output} ")]


def test_greedy_ids_are_equal_up_to_ties(monkeypatch: pytest.MonkeyPatch) -> None:
    """An id that is nearly the best stays; one that is not becomes the best, and the rest goes on from the stored."""
    logits = np.array([0.0, 3.0, 3.0 - 1e-4, 1.0])
    seen: list[list[int]] = []

    def forward_chunk(config: Any, weights: Any, token_ids: list[int], cache: Any) -> Any:
        seen.append(token_ids)
        return logits[None]

    monkeypatch.setattr(golden, "forward_chunk", forward_chunk)
    found = golden._greedy_up_to_ties(None, {}, np.array([1, 2, 3, 0], np.int32), FORMAT_FLOAT)  # type: ignore[arg-type]
    assert found.tolist() == [1, 2, 1, 1]
    assert seen[1:] == [[1], [2], [3]]


@pytest.mark.parametrize("family", FORMAT_FAMILIES)
def test_smoothing_leaves_the_function_as_it_was(family: str) -> None:
    """With factors that are powers of two it is exact up to the order of nothing: only float64 rounding remains."""
    config = FORMAT_FAMILIES[family]
    with_them = with_outliers(family_tensors(config, 3))
    smoothed = smooth(with_them)
    norm = "model.layers.0.input_layernorm.weight"
    assert np.ptp(with_them[norm]) > OUTLIER / 2 > 2 * np.ptp(smoothed[norm])
    wanted, found = (
        forward(parse_config(config), {name: t.astype(np.float64) for name, t in tensors.items()}, [5, 6, 7])
        for tensors in (with_them, smoothed)
    )
    np.testing.assert_allclose(found, wanted, rtol=0, atol=1e-9)


def test_a_norm_of_errors() -> None:
    """‖(3, 4) − (3, 4.025)‖ / ‖(3, 4)‖ = 0.005; integers and what is not finite as ever."""
    truth = np.array([3.0, 4.0])

    def compared(actual: Any) -> Any:
        return compare(np.asarray(actual, np.float32), truth, truth.astype(np.float32), FORMAT_FP8, "float32")

    assert compared([3.0, 4.0249]).problem == ""
    assert compared([3.0, 4.0249]).error == pytest.approx(0.00498, rel=1e-3)
    assert "is off by 0.00502 of its norm over all elements, limit 0.005" in compared([3.0, 4.0251]).problem
    assert compared([3.0, np.nan]).problem
    ids = np.array([1, 2])
    assert compare(ids + 1, ids, ids, FORMAT_FP8, "float32").problem
