"""engine.bench weights: its files are whole models of every format, and what it says."""

from pathlib import Path

import pytest

from engine.bench import weights
from engine.bench.model_shapes import QUANTS, SHAPES
from engine.checkpoint.loader import load_model_config, load_weights
from engine.checkpoint.quantized import keep_packed
from engine.checkpoint.source import resolve
from engine.models.registry import ARCHITECTURES

SMALL = {"hidden_size": 256, "intermediate_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2}
FORMATS = {"": "dense", "gptq-int4": "packed4", "gptq-int4-actorder": "packed4", "awq-int4": "packed4"}
FORMATS |= {"int8": "int8", "fp8": "fp8", "fp8-block": "fp8"}


@pytest.mark.parametrize("quant", ["", *QUANTS])
def test_files_are_models(quant: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(SHAPES, "small", SHAPES["llama-3.1-8b"] | SMALL)
    num_bytes = weights.write_folder(tmp_path, "small", quant, 2)
    file_bytes = (tmp_path / "model.safetensors").stat().st_size
    assert num_bytes < file_bytes < num_bytes + 10_000
    source = resolve(str(tmp_path))
    config = load_model_config(source)
    loaded = load_weights(source, keep_packed(ARCHITECTURES[config.architecture].weight_map(config)), progress=False)
    assert {loaded.linears[f"layers.{layer}.o_proj"].format for layer in range(2)} == {FORMATS[quant]}


def test_the_table() -> None:
    """7 of 10 GB/s are the goal."""
    report = weights.Report("shape", 8, 4.0, 0.5, 7.0, 10.0, 4.0, 4.5, 0.5)
    assert "7.0 GB/s; a copy from pinned memory 10.0 GB/s: 0.70 of it, goal 0.7: met" in weights.table(report)
    assert '"share": 0.7' in weights.as_json(report)
