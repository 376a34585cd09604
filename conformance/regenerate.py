"""Writes conformance/golden, and nothing else does: logits of the golden models as transformers computes them.

python -m conformance.regenerate [NAME ...]      needs the extra "oracle" (torch, transformers, compressed-tensors)

NAME is a golden model, or a family and a format such as mixtral-awq.

<name>.npz holds for prompt i of golden_prompts (family_prompts): logits{i} [num_tokens, vocab_size] float32, and
greedy{i}, the 16 ids that greedy decoding adds (each from a fresh run without a cache; not for dynamic rope and
longrope, whose table would change under way); and mtp{i} if the model has an MTP layer. Of the first prompt
it holds what each layer puts out too, by the names of python -m ref --layers.

formats/<family>-<format>.npz holds the same of format_prompt, with the weights that conformance.oracle_formats decodes:
logits, greedy, and of each layer's output the last tokens; and logits_format and greedy_format with 8-bit activations,
where the format has them.

starter.json holds, for each text of starter.prompts, the prompt's ids and greedy ids with the five best logprobs of
each, from the starter model's GGUF file dequantized to float32; and the logprobs of the same ids at the same places in
bfloat16 and in float16 (weights and arithmetic), which say how far each type alone leads from float32.

manifest.json holds what made them: versions, seed, sha256 of the checkpoint and of the file.
"""

from __future__ import annotations

import argparse
import copy
import hashlib
import json
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import numpy as np

try:
    import safetensors.torch
    import torch
    import transformers
    from transformers.modeling_layers import MtpModel

    from conformance.oracle_formats import decoded, quantize_activations
except ImportError as error:
    raise SystemExit(f"{error}; this command needs the extra `oracle`: pip install -e .[oracle]") from None

from conformance.golden_families import CHANGES_UNDER_WAY, FAMILY_GOLDENS, family_model, family_prompts
from conformance.golden_folded import oracle_model
from conformance.golden_formats import (
    FORMAT_FAMILIES,
    FORMATS,
    KEPT_LAYER_OUTPUTS,
    KEPT_TOKENS,
    NUM_FORMAT_GREEDY,
    format_model,
    format_prompt,
)
from conformance.golden_models import GOLDEN_SEED, GOLDENS, Config, golden_model, golden_prompts
from conformance.oracle_layers import layer_outputs
from conformance.starter.prompts import STARTER_PROMPTS
from engine.checkpoint.starter import ensure_starter
from ref.checkpoint import read_checkpoint
from ref.numerics import relative_error

FOLDER = Path(__file__).parent / "golden"
NUM_GREEDY = 16
NUM_STARTER_GREEDY = 32
STARTER_NAME = "starter"


def oracle(checkpoint: Path, prompts: list[list[int]], config: Config, greedy: bool) -> dict[str, np.ndarray[Any, Any]]:
    """Logits and greedy ids of transformers, float32, eager attention, no cache."""
    model = load_model(checkpoint)
    arrays: dict[str, np.ndarray[Any, Any]] = {}
    with torch.no_grad():
        if getattr(model.config, "num_mtp_layers", 0):
            arrays |= mtp_oracle(model, checkpoint.parent, prompts)
        arrays |= layer_outputs(model, torch.tensor([prompts[0]]), config)
        for i, prompt in enumerate(prompts):
            arrays[f"logits{i}"] = logits_of(model, prompt)
            if greedy:
                arrays[f"greedy{i}"] = greedy_of(model, prompt, NUM_GREEDY)
    return arrays


def load_model(checkpoint: Path) -> Any:
    """The model of transformers; ValueError if a tensor is missing or to spare."""
    model, loaded = transformers.AutoModelForCausalLM.from_pretrained(
        checkpoint, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    wrong = {fault: names for fault, names in loaded.items() if names}
    if wrong:
        raise ValueError(f"{checkpoint}: the weight map of ref is not that of transformers: {wrong}")
    return model.eval()


def logits_of(model: Any, ids: list[int]) -> np.ndarray[Any, Any]:
    logits: np.ndarray[Any, Any] = model(torch.tensor([ids]), use_cache=False).logits[0].numpy()
    return logits


def greedy_of(model: Any, prompt: list[int], count: int) -> np.ndarray[Any, Any]:
    """The ids that greedy decoding adds, int32."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(logits_of(model, ids)[-1].argmax()))
    return np.array(ids[len(prompt) :], np.int32)


def format_oracle(checkpoint: Path, scratch: Path) -> dict[str, np.ndarray[Any, Any]]:
    """The same of a quantized checkpoint, its weights decoded into another one; then with quantized activations."""
    config = json.loads((checkpoint / "config.json").read_text())
    quantization = config.pop("quantization_config", {})
    scratch.mkdir()
    (scratch / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(decoded(checkpoint, quantization), scratch / "model.safetensors", {"format": "pt"})
    model, prompt = load_model(scratch), format_prompt()
    with torch.no_grad():
        layers = layer_outputs(model, torch.tensor([prompt]), config)
        kept = {name: array for name, array in layers.items() if name.rpartition(".")[2] in KEPT_LAYER_OUTPUTS}
        arrays = {name: array[-KEPT_TOKENS:] for name, array in kept.items()}
        arrays["logits"] = logits_of(model, prompt)
        arrays["greedy"] = greedy_of(model, prompt, NUM_FORMAT_GREEDY)
        if FORMATS[checkpoint.name].activations is not None:
            quantize_activations(model, checkpoint)
            arrays["logits_format"] = logits_of(model, prompt)
            arrays["greedy_format"] = greedy_of(model, prompt, NUM_FORMAT_GREEDY)
    return arrays


def mtp_oracle(model: Any, checkpoint: Path, prompts: list[list[int]]) -> dict[str, np.ndarray[Any, Any]]:
    """mtp{i} [num_tokens - 1, vocab_size]: what the MTP layer of transformers says of the token after the next."""
    tensors = {name: torch.from_numpy(tensor) for name, tensor in read_checkpoint(checkpoint).items()}
    prefix = f"model.layers.{model.config.num_hidden_layers}."
    model.config.first_k_dense_replace = 0  # MTP layers are numbered from 0, and theirs has experts
    mtp = MtpModel(model, 1).eval()
    state: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.startswith(prefix) and ".experts." not in name:
            name = name.removeprefix(prefix).replace("shared_head.norm", "post_norm")
            outer = name.split(".")[0] in ("enorm", "hnorm", "eh_proj", "post_norm")
            state[f"layers.0.{'' if outer else 'mtp_block.'}{name}"] = tensor
    experts = [f"{prefix}mlp.experts.{e}." for e in range(model.config.n_routed_experts)]
    gate_up = [torch.cat([tensors[f"{e}gate_proj.weight"], tensors[f"{e}up_proj.weight"]]) for e in experts]
    state["layers.0.mtp_block.mlp.experts.gate_up_proj"] = torch.stack(gate_up)
    state["layers.0.mtp_block.mlp.experts.down_proj"] = torch.stack([tensors[f"{e}down_proj.weight"] for e in experts])
    missing, unexpected = mtp.load_state_dict(state, strict=False)
    if unexpected or any(name.startswith("layers.") for name in missing):
        raise ValueError(f"the MTP layer's weights do not fit: missing {missing}, unexpected {unexpected}")
    arrays = {}
    for i, prompt in enumerate(prompts):
        ids, positions = torch.tensor([prompt]), torch.arange(1, len(prompt))[None]
        hidden = model(ids[:, :-1], use_cache=False, output_hidden_states=True).hidden_states[-1]
        out = mtp.forward_layer(0, hidden, positions, None, input_ids=ids[:, 1:])
        arrays[f"mtp{i}"] = model.lm_head(out)[0].numpy()
    return arrays


def sha256(file: Path) -> str:
    return hashlib.sha256(file.read_bytes()).hexdigest()


def regenerate(name: str) -> dict[str, Any]:
    """Writes one golden, prints how far it moved, and returns its entry in the manifest."""
    file = FOLDER / f"{name}.npz"
    with tempfile.TemporaryDirectory() as folder:
        is_family = name in FAMILY_GOLDENS
        checkpoint = family_model(folder, name) if is_family else golden_model(folder, name)
        prompts = family_prompts(name) if is_family else golden_prompts(name)
        checkpoint_hash = sha256(checkpoint / "model.safetensors")
        folded = oracle_model(Path(folder) / "folded", name) if is_family else None
        config = json.loads((checkpoint / "config.json").read_text())
        arrays = oracle(folded or checkpoint, prompts, config, greedy=name not in ("dynamic", *CHANGES_UNDER_WAY))
    moved = changes(file, arrays)
    np.savez(file, **arrays)
    print(name, moved)
    return {"seed": GOLDEN_SEED, "checkpoint_sha256": checkpoint_hash, "sha256": sha256(file)}


def regenerate_format(name: str) -> dict[str, Any]:
    """The same for a family in a format."""
    family, _, form = name.partition("-")
    file = FOLDER / "formats" / f"{name}.npz"
    file.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = format_model(Path(folder) / form, family, form)
        checkpoint_hash = sha256(checkpoint / "model.safetensors")
        arrays = format_oracle(checkpoint, Path(folder) / "decoded")
    moved = changes(file, arrays)
    np.savez_compressed(file, **arrays)
    print(name, moved)
    return {"seed": FORMATS[form].seed, "checkpoint_sha256": checkpoint_hash, "sha256": sha256(file)}


def changes(file: Path, arrays: dict[str, np.ndarray[Any, Any]]) -> str:
    """How far the arrays are from those that file holds, in words."""
    if not file.exists():
        return "new"
    with np.load(file) as before:
        moved = [relative_error(array, before[key]) for key, array in arrays.items() if key in before]
        gone = sorted(set(before) - set(arrays))
    return f"largest relative change {max(moved):.2e}" + (f", without {', '.join(gone)}" if gone else "")


def starter_oracle() -> list[dict[str, Any]]:
    """What transformers makes of the starter model's prompts, greedily, float32."""
    path = ensure_starter()
    tokenizer = transformers.AutoTokenizer.from_pretrained(path.parent, gguf_file=path.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        path.parent, gguf_file=path.name, dtype=torch.float32, attn_implementation="eager"
    ).eval()
    entries = []
    for name, text in STARTER_PROMPTS.items():
        prompt_ids = tokenizer(text)["input_ids"]
        ids, top = list(prompt_ids), []
        with torch.no_grad():
            while len(top) < NUM_STARTER_GREEDY:
                logits = model(torch.tensor([ids]), use_cache=False).logits[0, -1]
                best = torch.log_softmax(logits, -1).topk(5)
                top.append([[i, round(p, 6)] for i, p in zip(best.indices.tolist(), best.values.tolist(), strict=True)])
                ids.append(int(best.indices[0]))
                if ids[-1] == model.config.eos_token_id:
                    break
        entries.append({"name": name, "prompt_ids": prompt_ids, "greedy_ids": ids[len(prompt_ids) :], "top5": top})
        print(name, len(prompt_ids), tokenizer.decode(ids[len(prompt_ids) :])[:60])
    for dtype in (torch.bfloat16, torch.float16):
        rounded = copy.deepcopy(model).to(dtype)
        for entry in entries:
            entry[f"top5_{str(dtype).removeprefix('torch.')}"] = logprobs_along(rounded, entry)
    return entries


def logprobs_along(model: Any, entry: dict[str, Any]) -> list[list[float]]:
    """Of the ids of top5, where the text goes on as greedy_ids say."""
    ids, start = entry["prompt_ids"] + entry["greedy_ids"], len(entry["prompt_ids"]) - 1
    with torch.no_grad():
        logits = model(torch.tensor([ids]), use_cache=False).logits[0, start:-1].float()
    found = torch.log_softmax(logits, -1)
    return [[round(float(row[i]), 6) for i, _ in best] for row, best in zip(found, entry["top5"], strict=True)]


def regenerate_starter() -> dict[str, Any]:
    """Writes starter.json and returns its entry in the manifest."""
    file = FOLDER / f"{STARTER_NAME}.json"
    lines = ",\n".join(json.dumps(entry) for entry in starter_oracle())
    file.write_text(f"[\n{lines}\n]\n")
    return {"checkpoint_sha256": sha256(ensure_starter()), "sha256": sha256(file)}


def main() -> None:
    models = [*GOLDENS, *FAMILY_GOLDENS, STARTER_NAME]
    formats = [f"{family}-{form}" for family in FORMAT_FAMILIES for form in FORMATS]
    parser = argparse.ArgumentParser(prog="python -m conformance.regenerate", description=__doc__)
    known = f"of {', '.join(models)}; or one of {', '.join(FORMAT_FAMILIES)}, - and one of {', '.join(FORMATS)}"
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"{known}; default: all")
    names = parser.parse_args().names or models + formats
    wrong = [name for name in names if name not in models + formats]
    if wrong:
        parser.error(f"unknown are {', '.join(wrong)}; NAME is {known}")
    FOLDER.mkdir(exist_ok=True)
    manifest_file = FOLDER / "manifest.json"
    manifest = json.loads(manifest_file.read_text()) if manifest_file.exists() else {}
    made = {
        name: regenerate_starter() if name == STARTER_NAME else regenerate(name) for name in names if name in models
    }
    made_formats = {name: regenerate_format(name) for name in names if name in formats}
    packages = ("torch", "transformers", "numpy", "compressed-tensors")
    manifest = {
        "versions": {package: version(package) for package in packages},
        "models": dict(sorted((manifest.get("models", {}) | made).items())),
        "formats": dict(sorted((manifest.get("formats", {}) | made_formats).items())),
    }
    manifest_file.write_text(json.dumps(manifest, indent=1) + "\n")


if __name__ == "__main__":
    main()
