"""Writes conformance/golden, and nothing else does: logits of the golden models as transformers computes them.

python -m conformance.regenerate [NAME ...]      needs the extra "oracle" (torch, transformers)

Each <name>.npz holds for prompt i of golden_prompts: logits{i} [num_tokens, vocab_size] float32, and greedy{i}, the 16
ids that greedy decoding adds (each from a fresh run without a cache; not for dynamic rope, whose table would change
under way). manifest.json holds what made them: versions, seed, sha256 of the checkpoint and of the file.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers

from conformance.golden_models import GOLDEN_SEED, GOLDENS, golden_model, golden_prompts
from ref.numerics import relative_error

FOLDER = Path(__file__).parent / "golden"
NUM_GREEDY = 16


def oracle(checkpoint: Path, prompts: list[list[int]], greedy: bool) -> dict[str, np.ndarray[Any, Any]]:
    """Logits and greedy ids of transformers, float32, eager attention, no cache."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager"
    ).eval()

    def logits_of(ids: list[int]) -> np.ndarray[Any, Any]:
        return model(torch.tensor([ids]), use_cache=False).logits[0].numpy()

    arrays: dict[str, np.ndarray[Any, Any]] = {}
    with torch.no_grad():
        for i, prompt in enumerate(prompts):
            arrays[f"logits{i}"] = logits_of(prompt)
            ids = list(prompt)
            for _ in range(NUM_GREEDY if greedy else 0):
                ids.append(int(logits_of(ids)[-1].argmax()))
            if greedy:
                arrays[f"greedy{i}"] = np.array(ids[len(prompt) :], np.int32)
    return arrays


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def regenerate(name: str) -> dict[str, Any]:
    """Writes one golden, prints how far it moved, and returns its entry in the manifest."""
    file = FOLDER / f"{name}.npz"
    before = dict(np.load(file)) if file.exists() else {}
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = golden_model(folder, name)
        checkpoint_hash = sha256(checkpoint / "model.safetensors")
        arrays = oracle(checkpoint, golden_prompts(name), greedy=name != "dynamic")
    np.savez(file, **arrays)
    moved = {key: relative_error(array, before[key]) for key, array in arrays.items() if key in before}
    print(name, "new" if not before else f"largest relative change {max(moved.values()):.2e}")
    return {"seed": GOLDEN_SEED, "checkpoint_sha256": checkpoint_hash, "sha256": sha256(file)}


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m conformance.regenerate", description=__doc__)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(GOLDENS)}; default: all")
    names = parser.parse_args().names or list(GOLDENS)
    FOLDER.mkdir(exist_ok=True)
    manifest_file = FOLDER / "manifest.json"
    manifest = json.loads(manifest_file.read_text()) if manifest_file.exists() else {"models": {}}
    models = manifest["models"] | {name: regenerate(name) for name in names}
    versions = {"torch": torch.__version__, "transformers": transformers.__version__, "numpy": np.__version__}
    manifest = {"versions": versions, "models": {name: models[name] for name in sorted(models)}}
    manifest_file.write_text(json.dumps(manifest, indent=1) + "\n")


if __name__ == "__main__":
    main()
