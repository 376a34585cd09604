"""ref against transformers: stored logits of tiny models of every kind (written by conformance.regenerate)."""

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import conformance.golden_models as models
from conformance.golden_families import FAMILY_GOLDENS
from ref.checkpoint import read_checkpoint
from ref.config import parse_config, read_config
from ref.generate import generate
from ref.model.llama import llama
from ref.numerics import relative_error

FOLDER = Path(models.__file__).parent / "golden"
MANIFEST = json.loads((FOLDER / "manifest.json").read_text())

# The oracle is float32: 2^-24 a rounding, of which a path through 3 layers has some 50 that count, growing about as
# their root, times the amplification of the layers (below 10): 4e-6. A wrong formula shows at 1e-2 (last test).
TOLERANCE = 1e-5


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def golden(name: str) -> dict[str, np.ndarray]:
    with np.load(FOLDER / f"{name}.npz") as file:
        return dict(file)


def test_every_golden_is_in_the_manifest() -> None:
    names = {*models.GOLDENS, *FAMILY_GOLDENS}
    assert set(MANIFEST["models"]) == {*names, "starter"}
    assert names == {file.stem for file in FOLDER.glob("*.npz")}
    assert sha256(FOLDER / "starter.json") == MANIFEST["models"]["starter"]["sha256"]


@pytest.mark.parametrize("name", models.GOLDENS)
def test_checkpoint_and_file_are_those_of_the_manifest(name: str, tmp_path: Path) -> None:
    entry = MANIFEST["models"][name]
    assert sha256(FOLDER / f"{name}.npz") == entry["sha256"]
    assert sha256(models.golden_model(tmp_path, name) / "model.safetensors") == entry["checkpoint_sha256"]


@pytest.mark.parametrize("dtype", [np.float64, np.float32])
@pytest.mark.parametrize("name", models.GOLDENS)
def test_logits(name: str, dtype: type, tmp_path: Path) -> None:
    folder = models.golden_model(tmp_path, name)
    config, weights, expected = read_config(folder), read_checkpoint(folder, dtype), golden(name)
    for i, prompt in enumerate(models.golden_prompts(name)):
        logits = llama(config, weights, prompt)
        assert logits.shape == expected[f"logits{i}"].shape
        assert relative_error(logits, expected[f"logits{i}"]) <= TOLERANCE


@pytest.mark.parametrize("name", models.GOLDENS)
def test_outputs_of_every_layer(name: str, tmp_path: Path) -> None:
    """After attention, after the MLP, the residual stream, and what is cached; of the first prompt."""
    folder = models.golden_model(tmp_path, name)
    config, weights = read_config(folder), read_checkpoint(folder, np.float64)
    seen: dict[str, np.ndarray] = {}
    llama(config, weights, models.golden_prompts(name)[0], trace=seen.__setitem__)
    stored = {key: array for key, array in golden(name).items() if key.startswith("layers.")}
    assert len(stored) == 5 * config.n_layers
    for key, expected in stored.items():
        assert relative_error(seen[key], expected) <= TOLERANCE, key


@pytest.mark.parametrize("name", [name for name in models.GOLDENS if name != "dynamic"])
def test_greedy_ids(name: str, tmp_path: Path) -> None:
    folder = models.golden_model(tmp_path, name)
    config, weights, expected = read_config(folder), read_checkpoint(folder, np.float64), golden(name)
    for i, prompt in enumerate(models.golden_prompts(name)):
        new_ids = generate(config, weights, prompt, 16, ignore_eos=True)
        best_two = np.sort(llama(config, weights, prompt + new_ids)[len(prompt) - 1 : -1], axis=-1)[:, -2:]
        assert (best_two[:, 1] - best_two[:, 0]).min() > 1e-3, "a near tie: choose another seed for the golden"
        assert new_ids == expected[f"greedy{i}"].tolist()


@pytest.mark.parametrize(
    ("name", "change"),
    [
        ("llama3", {"rope_scaling": None}),
        ("linear", {"rope_scaling": None}),
        ("dynamic", {"rope_scaling": None}),
        ("mistral", {"sliding_window": 17}),
        ("bias", {"attention_bias": False}),
        ("bias", {"mlp_bias": False}),
        ("llama2", {"rms_norm_eps": 1e-2}),
    ],
)
def test_the_goldens_see_a_wrong_formula(name: str, change: dict[str, Any], tmp_path: Path) -> None:
    folder = models.golden_model(tmp_path, name)
    config = parse_config(models.llama_config(**{**models.GOLDENS[name], **change}))
    assert config != read_config(folder)
    logits = llama(config, read_checkpoint(folder), models.golden_prompts(name)[2])
    assert relative_error(logits, golden(name)["logits2"]) > 1000 * TOLERANCE
