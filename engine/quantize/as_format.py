"""A quantized folder as its format's kernels compute it, on a CPU: 8-bit activations where the format has them.

The engine on a CPU decodes weights and leaves activations alone. Here each linear layer is what ref.quant defines, so
what a GPU with 8-bit matrix units will answer can be judged without one. Slow: all windows go through layer by layer.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
from numpy.typing import NDArray

from engine.checkpoint.folder import folder_tensors
from engine.checkpoint.loader import load_model_config
from engine.checkpoint.source import resolve
from engine.cpu.team import Team
from engine.errors import ConfigError
from engine.models.registry import ARCHITECTURES
from engine.quantize.calibrate import Windows, build_layers, check_can_walk, walk
from engine.quantize.source_model import SourceModel
from engine.system import usable_cores
from engine.weights import LinearSpec
from ref.checkpoint import read_checkpoint
from ref.quant.coded import quantized_linear
from ref.quant.groups import GroupedInt
from ref.quant.scheme import unpack_module
from ref.quant.scheme_config import module_scheme
from ref.quant.w4a8 import w4a8_linear

Array = NDArray[Any]
Float32 = NDArray[np.float32]

ACTIVATIONS = ("format", "int8", "fp8")  # the last two: of 4-bit weights too (W4A8)


class FormatModel:
    """A folder, quantized or not."""

    def __init__(self, model: str, activations: str) -> None:
        """
        Raises:
            ConfigError: there is no such folder, or its family has layers that are not walked here.
        """
        source = resolve(model)
        config = load_model_config(source)
        if source.kind != "folder":
            raise ConfigError(f"{model}: 8-bit activations are those of a quantized folder; this is a GGUF file")
        check_can_walk(config, model)
        weight_map = ARCHITECTURES[config.architecture].weight_map(config)
        self._model = SourceModel(source, config, {}, folder_tensors(source.path), weight_map)
        self._stored: Mapping[str, Array] = read_checkpoint(source.path, None)
        self._activations, self._team = activations, Team(usable_cores())

    def logits(self, windows: Windows, num_rows: int) -> Iterator[Float32]:
        """Of all tokens of each window, [≤ num_rows, vocab_size] at a time, in order; a new part for each window."""
        layers, _ = build_layers(self._model, self._multiply)
        length = windows.shape[1]
        for piece, hidden in walk(self._model, layers, windows):
            if piece is not None:
                continue
            for first in range(0, len(hidden), length):
                for low in range(first, first + length, num_rows):
                    yield layers.logits(hidden[low : min(low + num_rows, first + length)])

    def _multiply(self, spec: LinearSpec, x: Float32) -> Float32:
        return np.concatenate([self._module(spec, module, x) for module, _, _ in spec.modules()], axis=1)

    def _module(self, spec: LinearSpec, module: str, x: Float32) -> Float32:
        config = self._model.config.quantization
        if module_scheme(config, module) is None:
            return self._team.matmul(x, self._model.weight(spec, module).T)
        weight = unpack_module(self._stored, config, module)
        if isinstance(weight, GroupedInt) and self._activations in ("int8", "fp8"):
            return np.asarray(w4a8_linear(x, weight, kind=self._activations), np.float32)
        return np.asarray(quantized_linear(x, weight), np.float32)
