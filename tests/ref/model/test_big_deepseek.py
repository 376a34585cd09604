"""DeepSeek V3 as wide as it is, in 8 GB: one dense layer, one of 16 experts and a shared one, the full vocabulary.

The checkpoint is what DeepSeek stores: linear layers in e4m3 with a scale for every 128 × 128, embedding, norms and
head in bfloat16. Decoded to float32 its weights would take 13.5 GB.
"""

import json
import math
import shutil
import struct
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ref.checkpoint import read_checkpoint, widen
from ref.config import parse_config
from ref.model.registry import weight_shapes
from ref.numerics import relative_error
from ref.rmsnorm import rmsnorm

GIB = 1 << 30
MEMORY = 8 * 10**9
TOKEN_IDS = [0, 1, 4095, 4096, 77777, 129279]
# what the run may take is set from outside, so that a mistake ends in MemoryError and not in a machine without memory
COMMAND = """
import resource, sys
resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[1]),) * 2)
from ref.__main__ import main
status = main(sys.argv[2:])
print("peak", resource.getrusage(resource.RUSAGE_SELF).ru_maxrss)
sys.exit(status)
"""
CONFIG: dict[str, Any] = {
    "architectures": ["DeepseekV3ForCausalLM"],
    "hidden_size": 7168,
    "num_attention_heads": 128,
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "intermediate_size": 18432,
    "moe_intermediate_size": 2048,
    "n_routed_experts": 16,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "routed_scaling_factor": 2.5,
    "norm_topk_prob": True,
    "scoring_func": "sigmoid",
    "topk_method": "noaux_tc",
    "first_k_dense_replace": 1,
    "num_hidden_layers": 2,
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "rms_norm_eps": 1e-6,
    "rope_theta": 10000,
    "hidden_act": "silu",
    "torch_dtype": "bfloat16",
    "quantization_config": {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": [128, 128],
    },
}


def stored_tensors() -> dict[str, tuple[str, tuple[int, ...]]]:
    """Type and shape of every tensor, by name."""
    tensors: dict[str, tuple[str, tuple[int, ...]]] = {}
    for name, shape in weight_shapes(parse_config(CONFIG)).items():
        if "_proj" in name:
            tensors[name] = ("F8_E4M3", shape)
            tensors[f"{name}_scale_inv"] = ("F32", (math.ceil(shape[0] / 128), math.ceil(shape[1] / 128)))
        else:
            tensors[name] = ("F32" if "e_score" in name else "BF16", shape)
    return tensors


def values(kind: str, shape: tuple[int, ...], rng: np.random.Generator) -> Iterator[np.ndarray]:
    """Random numbers in pieces of at most 2²⁴: norms near 1, weights near 1/√in, where e4m3 and its scales multiply."""
    left = math.prod(shape)
    while left:
        size = min(left, 1 << 24)
        left -= size
        if kind == "F32":
            yield rng.uniform(0.01, 0.02, size).astype(np.float32)
        elif kind == "F8_E4M3":
            yield rng.integers(0, 256, size, np.uint8) & 0xBF  # exponents up to 7: below 2, no NaN
        elif len(shape) == 1:
            yield rng.integers(0, 1 << 7, size, np.uint16) | 0x3F00  # 1/2 to 1
        else:
            yield rng.integers(0, 1 << 16, size, np.uint16) & 0x807F | 0x3C00  # ± 2⁻⁷ to 2⁻⁶


def write_checkpoint(folder: Path) -> None:
    """Three files and their index; no more than a piece of a tensor is in memory."""
    rng, sizes = np.random.default_rng(0), {"F8_E4M3": 1, "F32": 4, "BF16": 2}
    names, weight_map = list(stored_tensors().items()), {}
    for part in range(3):
        file, at, header = f"model-{part + 1:05}-of-00003.safetensors", 0, {}
        for name, (kind, shape) in names[part::3]:
            end = at + math.prod(shape) * sizes[kind]
            header[name], weight_map[name] = {"dtype": kind, "shape": shape, "data_offsets": [at, end]}, file
            at = end
        text = json.dumps(header).encode()
        with open(folder / file, "wb") as out:
            out.write(struct.pack("<Q", len(text)) + text)
            for _, (kind, shape) in names[part::3]:
                for piece in values(kind, shape, rng):
                    out.write(piece.tobytes())
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    (folder / "config.json").write_text(json.dumps(CONFIG))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("deepseek")
    free = shutil.disk_usage(folder).free
    if free < 7 * GIB:
        pytest.skip(f"needs 7 GiB of disk for the checkpoint; {folder} has {free / GIB:.1f}")
    write_checkpoint(folder)
    yield folder
    shutil.rmtree(folder)


@pytest.mark.slow
@pytest.mark.parametrize("activations", ["float", "format"])
def test_it_runs_in_8_gb(folder: Path, tmp_path: Path, activations: str) -> None:
    out = tmp_path / "layers.npz"
    arguments = ["--model", str(folder), "--dtype", "float32", "--activations", activations, "--layers", str(out)]
    arguments += ["--ids", ",".join(map(str, TOKEN_IDS))]
    command = [sys.executable, "-c", COMMAND, str(MEMORY), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout.rsplit(maxsplit=1)[1]) * 1024 < MEMORY
    with np.load(out) as file:
        layers = dict(file)
    logits = layers["logits"]
    assert logits.shape == (len(TOKEN_IDS), 129280)
    assert np.isfinite(logits).all()
    assert {*layers["layers.1.mlp.expert_ids"].ravel()} <= {*range(16)}

    stored = read_checkpoint(folder, None)
    embedded = widen(stored["model.embed_tokens.weight"][TOKEN_IDS])
    assert np.abs(layers["layers.0.mlp_out"]).max() > 0.1
    residual = embedded + layers["layers.0.attn_out"] + layers["layers.0.mlp_out"]
    assert relative_error(layers["layers.0.residual"], residual) < 1e-6
    hidden = rmsnorm(layers["layers.1.residual"], widen(stored["model.norm.weight"]), 1e-6)
    for rows in (slice(0, 2), slice(4094, 4098), slice(129278, 129280)):  # both sides of a slice's edge
        assert relative_error(logits[:, rows], hidden @ widen(stored["lm_head.weight"][rows]).T) < 1e-5
