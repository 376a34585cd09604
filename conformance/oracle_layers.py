"""What each layer of a model of transformers puts out, by the names that ref gives it (python -m ref --layers).

attn_out and mlp_out (not where the fold of conformance.golden_folded scales them), residual, the numbers of the
chosen experts in rising order, and what goes into the cache.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from conformance.golden_models import Config

Arrays = dict[str, np.ndarray[Any, Any]]

ATTENTION, MLP = ("self_attn", "attn"), ("mlp",)
NOT_CACHED = ("CpmAntForCausalLM",)  # it looks both ways


def layer_outputs(model: Any, input_ids: Any, config: Config) -> Arrays:
    """By name, each [num_tokens, ...].

    input_ids: a tensor [1, num_tokens]. config: of the golden, which may be folded in model.
    """
    found: Arrays = {}
    handles = []
    is_scaled = "scale_depth" in config and config["model_type"] != model.config.model_type
    for number, layer in enumerate(_layers(model)):
        handles.append(layer.register_forward_hook(partial(_keep, found, f"layers.{number}.residual")))
        for names, output in ((ATTENTION, "attn_out"), (MLP, "mlp_out")):
            module = next((getattr(layer, name) for name in names if hasattr(layer, name)), None)
            if module is not None and not is_scaled:
                handles.append(module.register_forward_hook(partial(_keep, found, f"layers.{number}.{output}")))
        gate = getattr(getattr(layer, "mlp", None), "gate", None)
        if gate is not None:
            handles.append(gate.register_forward_hook(partial(_keep_ids, found, f"layers.{number}.expert_ids")))
    use_cache = config["architectures"][0] not in NOT_CACHED
    out = model(input_ids, use_cache=use_cache)
    for handle in handles:
        handle.remove()
    return found | (_cached(out, config) if use_cache else {})


def _layers(model: Any) -> Any:
    for path in ("model.layers", "transformer.h", "cpmant.encoder.layers"):
        try:
            return model.get_submodule(path)
        except AttributeError:
            continue
    raise ValueError(f"{type(model).__name__}: its layers are not where they are looked for")


def _keep(found: Arrays, name: str, module: Any, inputs: Any, output: Any) -> None:
    value = output[0] if isinstance(output, tuple) else output
    found[name] = value.detach().numpy().reshape(-1, value.shape[-1]).copy()


def _keep_ids(found: Arrays, name: str, module: Any, inputs: Any, output: Any) -> None:
    ids = next(part for part in output if not part.dtype.is_floating_point)
    found[name] = np.sort(ids.detach().numpy().astype(np.int64), axis=-1)


def _cached(out: Any, config: Config) -> Arrays:
    arrays: Arrays = {}
    for number, layer in enumerate(out.cache.layers):
        k, v = (part[0].transpose(0, 1).numpy() for part in (layer.keys, layer.values))  # [num_tokens, heads, width]
        if "kv_lora_rank" not in config:
            arrays |= {f"layers.{number}.k_cached": k, f"layers.{number}.v_cached": v}
            continue
        rotated = v[:, 0]
        if config["model_type"] == "deepseek_v3":  # it moves the pairs apart before it turns them; back again
            rotated = rotated.reshape(len(v), 2, -1).swapaxes(1, 2).reshape(len(v), -1)
        arrays[f"layers.{number}.latent_cached"] = np.concatenate([k[:, 0], rotated], axis=-1)
    return arrays
