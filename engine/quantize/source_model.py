"""The model that is to be quantized: its config, where its tensors lie, and which of them become what."""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.folder import folder_tensors, read_json
from engine.checkpoint.gguf_file import gguf_metadata, read_gguf
from engine.checkpoint.gguf_llama import hf_config, hf_tensors
from engine.checkpoint.loader import load_model_config
from engine.checkpoint.source import ModelSource, resolve
from engine.checkpoint.stored_tensor import DECODERS, StoredTensor, map_bytes, read_into
from engine.config import ModelConfig
from engine.errors import CheckpointError, ConfigError
from engine.gguf_tokenizer import build_gguf_tokenizer, gguf_special_token
from engine.models.registry import ARCHITECTURES
from engine.weights import HEAD, LinearSpec, WeightMap
from ref.quant.compressed_tensors_config import matches

Float32 = NDArray[np.float32]

TEXT_FILES = ("*.json", "*.jinja", "*.model", "*.tiktoken", "*.txt", "*.py", "LICENSE*")  # that go along
NOT_COPIED = ("config.json", "*.index.json", "quantize_config.json", "quant_config.json")
KEPT = (r"router", r"shared_expert_gate")  # ends of dest names: choices that a few numbers make
SAMPLE_BYTES = 4096  # of each tensor, to tell one model from another
BYTES_AT_ONCE = 16 << 20  # of a tensor that is copied


@dataclass(frozen=True, slots=True)
class SourceModel:
    """A model in floating point (or a GGUF file, which is decoded)."""

    source: ModelSource
    config: ModelConfig
    hf_config: Mapping[str, Any]
    tensors: Mapping[str, StoredTensor]
    weight_map: WeightMap

    @property
    def dtype(self) -> str:
        """That of its linear layers: F32, F16 or BF16."""
        module, _, _ = next(self.weight_map.linears[0].modules())
        return self.stored_dtype(f"{module}.weight")

    def stored_dtype(self, name: str) -> str:
        """In what a tensor is written where it is not quantized."""
        return "BF16" if self.source.kind == "gguf" else self.tensors[name].dtype

    def weight(self, spec: LinearSpec, module: str) -> Float32:
        """[out_features, in_features] of a module. Raises CheckpointError for numbers that are not finite."""
        weight = self.array(f"{module}.weight")
        if not np.isfinite(weight).all():
            raise CheckpointError(
                f"{self.source.path}: {module}.weight holds {weight[~np.isfinite(weight)][0]}, which no format of 8 or "
                "4 bits can hold; fetch its files again"
            )
        return np.ascontiguousarray(weight.T) if spec.transposed else weight

    def bias(self, spec: LinearSpec) -> Float32 | None:
        """[out_features] of all modules of a layer without experts."""
        if not spec.bias:
            return None
        return np.concatenate([self.array(f"{module}.bias") for module, _, _ in spec.modules()])

    def array(self, name: str) -> Float32:
        """A tensor in float32."""
        tensor = self.tensors[name]
        values = np.empty(tensor.shape, np.float32)
        read_into(tensor, values)
        return values

    def rows(self, name: str, indices: NDArray[Any]) -> Float32:
        """Some rows of a matrix in float32, [num_rows, …]; nothing else is read."""
        tensor = self.tensors[name]
        values = np.empty((len(indices), *tensor.shape[1:]), np.float32)
        for place, row in enumerate(indices.tolist()):
            read_into(row_slice(tensor, row, row + 1), values[place : place + 1])
        return values

    def pieces(self, name: str, dtype: str) -> Iterator[NDArray[Any]]:
        """A tensor piece by piece: as it is in its file where that is of this type, else in float32."""
        tensor = self.tensors[name]
        if tensor.dtype == dtype:
            raw = map_bytes(tensor)
            for first in range(0, len(raw), BYTES_AT_ONCE):
                yield raw[first : first + BYTES_AT_ONCE]
        elif tensor.n_interleaved_heads or not tensor.shape:
            yield self.array(name)
        else:
            step = max(1, BYTES_AT_ONCE // 4 * tensor.shape[0] // max(1, int(np.prod(tensor.shape))))
            for first in range(0, tensor.shape[0], step):
                part = row_slice(tensor, first, min(first + step, tensor.shape[0]))
                values = np.empty(part.shape, np.float32)
                read_into(part, values)
                yield values

    def quantized(self, ignore: tuple[str, ...]) -> dict[str, LinearSpec]:
        """Linear modules that are to be quantized, each with its layer, in the order of the model.

        ignore: names of modules, or "re:" and a pattern.

        Raises:
            ConfigError: an entry of ignore names no module, or is no regular expression.
        """
        kept = re.compile(rf".*\.({'|'.join(KEPT)})")
        chosen: dict[str, LinearSpec] = {}
        unused = set(ignore)
        for entry in ignore:
            _check_pattern(entry)
        for spec in self.weight_map.linears:
            for module, _, _ in spec.modules():
                named = [entry for entry in ignore if matches(entry, module)]
                unused -= set(named)
                if not named and spec.dest != HEAD and not kept.fullmatch(spec.dest):
                    chosen[module] = spec
        if unused - {HEAD}:
            raise ConfigError(f"--ignore {sorted(unused - {HEAD})[0]}: no linear module of the model has this name")
        if not chosen:
            raise ConfigError("--ignore leaves no module to quantize")
        return chosen

    def fingerprint(self) -> str:
        """Of names, shapes, types and the first bytes of all tensors, and of the config."""
        digest = hashlib.sha256(json.dumps(self.hf_config, sort_keys=True).encode())
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name} {tensor.dtype} {tensor.shape}".encode())
            digest.update(bytes(map_bytes(tensor)[:SAMPLE_BYTES]))
        return digest.hexdigest()

    def text_files(self) -> Iterator[tuple[str, bytes]]:
        """Name and content of the files that go along: tokenizer, templates, settings of generation."""
        if self.source.kind == "gguf":
            yield from _gguf_files(gguf_metadata(self.source.path))
            return
        left_out = {path for pattern in NOT_COPIED for path in self.source.path.glob(pattern)}
        found = {path for pattern in TEXT_FILES for path in self.source.path.glob(pattern)}
        for path in sorted(found - left_out):
            if path.is_file():
                yield path.name, path.read_bytes()


def _check_pattern(entry: str) -> None:
    """Raises ConfigError for "re:" and no regular expression."""
    try:
        re.compile(entry.removeprefix("re:") if entry.startswith("re:") else "")
    except re.error as error:
        raise ConfigError(f"--ignore {entry}: is no regular expression: {error}") from error


def row_slice(tensor: StoredTensor, first: int, end: int) -> StoredTensor:
    """Rows of a tensor, as a tensor of its own."""
    row_bytes = tensor.num_bytes // tensor.shape[0]
    return replace(
        tensor,
        shape=(end - first, *tensor.shape[1:]),
        offset=tensor.offset + first * row_bytes,
        num_bytes=(end - first) * row_bytes,
    )


def open_model(model: str) -> SourceModel:
    """A folder, a GGUF file or "starter".

    Raises:
        ConfigError: there is no such model, or it is quantized already.
        CheckpointError: its tensors are not those of its config.
    """
    source = resolve(model)
    config = load_model_config(source)
    if config.quantization is not None:
        raise ConfigError(
            f"--model {model}: is quantized already (quantization_config); give the folder that it was made from"
        )
    if source.kind == "gguf":
        file = read_gguf(source.path)
        tensors, words = hf_tensors(file), _for_others(hf_config(file))
    else:
        tensors, words = folder_tensors(source.path), read_json(source.path / "config.json")
    opened = SourceModel(source, config, words, tensors, ARCHITECTURES[config.architecture].weight_map(config))
    _check(opened)
    return opened


def _check(model: SourceModel) -> None:
    problems = []
    for spec in model.weight_map.linears:
        for module, _, rows in spec.modules():
            wanted = (rows.stop - rows.start, spec.in_features)
            wanted = wanted[::-1] if spec.transposed else wanted
            tensor = model.tensors.get(f"{module}.weight")
            if tensor is None:
                problems.append(f"{module}.weight is missing")
            elif tensor.shape != wanted:
                problems.append(f"{module}.weight is {list(tensor.shape)}, wanted {list(wanted)}")
            elif tensor.dtype not in DECODERS:
                problems.append(f"{module}.weight is {tensor.dtype}, wanted floating point")
    problems += [f"{array.name} is missing" for array in model.weight_map.arrays if array.name not in model.tensors]
    if problems:
        more = f" and {len(problems) - 1} more" if len(problems) > 1 else ""
        raise CheckpointError(f"{model.source.path}: the weights do not fit the config: {problems[0]}{more}")


def _for_others(config: dict[str, Any]) -> dict[str, Any]:
    """The config of a GGUF file with what transformers wants to read: its own words of both forms."""
    rope = dict(config["rope_parameters"])
    theta = rope.pop("rope_theta")
    return config | {
        "model_type": "llama",
        "dtype": "bfloat16",
        "torch_dtype": "bfloat16",
        "hidden_act": "silu",
        "rope_theta": theta,
        "rope_scaling": rope or None,
    }


def _gguf_files(metadata: Mapping[str, Any]) -> Iterator[tuple[str, bytes]]:
    yield "tokenizer.json", build_gguf_tokenizer(metadata).to_str().encode()
    names = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    words: dict[str, Any] = {name: gguf_special_token(metadata, key) for name, key in names.items()}
    words["tokenizer_class"] = "PreTrainedTokenizerFast"
    words["chat_template"] = metadata.get("tokenizer.chat_template")
    kept = {name: value for name, value in words.items() if value is not None}
    yield "tokenizer_config.json", json.dumps(kept, indent=2, ensure_ascii=False).encode()
