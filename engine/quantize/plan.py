"""What is written, all of it: the tensors in their units, and config.json."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from engine.quantize.calibrate import Windows
from engine.quantize.encode import Layout, layout
from engine.quantize.files import Unit
from engine.quantize.methods import METHODS, Settings, check_sizes, quantization_config, scale_dtype
from engine.quantize.source_model import SourceModel
from engine.weights import HEAD, LinearSpec

VERSION = 1  # of what is written: another one goes on from no unfinished folder of this


class Plan:
    """One model by one method.

    modules: the linear modules that are quantized, each with its layer. scales: their type. rest: names of the tensors
    that stay. layers: dest names of layers that are made anew. A unit is a tensor that stays, a module, or, where a
    text calibrates, a layer of several modules.
    """

    def __init__(
        self, model: SourceModel, settings: Settings, modules: Mapping[str, LinearSpec], windows: Windows | None
    ) -> None:
        """
        Raises:
            ConfigError: the method cannot cut a weight.
        """
        self.settings, self.modules, self.method = settings, modules, METHODS[settings.method]
        self.scales = scale_dtype(self.method, model.dtype)
        self._model, self._windows = model, windows
        planned_layers = {spec.dest: self._planned(spec) for spec in model.weight_map.linears if spec.dest != HEAD}
        self.layers = {dest: planned for dest, planned in planned_layers.items() if planned}
        made = {f"{module}.weight" for planned in self.layers.values() for module in planned}
        self.rest = [name for name in model.tensors if name not in made]
        self.units = [Unit(name, {name: self.as_is(name)}) for name in self.rest]
        for dest, planned in self.layers.items():
            if self.method.calibration is None:
                self.units += [Unit(module, tensors) for module, tensors in planned.items()]
            else:
                all_tensors = {name: one for tensors in planned.values() for name, one in tensors.items()}
                self.units.append(Unit(dest, all_tensors))

    def tensors_of(self, module: str) -> list[str]:
        """Names of the tensors that a quantized module becomes."""
        return list(self.layers[self.modules[module].dest][module])

    def as_is(self, name: str) -> Layout:
        """Of a tensor that is not quantized."""
        dtype = "BF16" if self.method.packing == "plain" else self._model.stored_dtype(name)
        return Layout(dtype, self._model.tensors[name].shape)

    def _planned(self, spec: LinearSpec) -> dict[str, dict[str, Layout]]:
        """The tensors of those modules of a layer that are made anew. Smoothing may change what stays, too."""
        planned: dict[str, dict[str, Layout]] = {}
        for module, _, rows in spec.modules():
            if module in self.modules:
                check_sizes(self.settings, module, rows.stop - rows.start, spec.in_features)
                found = layout(self.settings, self.scales, rows.stop - rows.start, spec.in_features)
                planned[module] = {f"{module}.{suffix}": one for suffix, one in found.items()}
            elif self.method.smooth:
                planned[module] = {f"{module}.weight": self.as_is(f"{module}.weight")}
        return planned

    def fingerprint(self, shard_bytes: int) -> str:
        """Of all that decides what is written."""
        windows = self._windows
        about = {
            "version": VERSION,
            "settings": asdict(self.settings),
            "units": [[unit.name, {name: asdict(one) for name, one in unit.tensors.items()}] for unit in self.units],
            "model": self._model.fingerprint(),
            "text": None if windows is None else [hashlib.sha256(windows.tobytes()).hexdigest(), windows.shape],
            "shard_bytes": shard_bytes,
        }
        return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()

    def quantization_config(self) -> dict[str, Any] | None:
        """What config.json says of the weights; None: they are in floating point."""
        linears = self._model.weight_map.linears
        names = [module for spec in linears for module, _, _ in spec.modules() if module not in self.modules]
        return quantization_config(self.settings, list(dict.fromkeys([HEAD, *names])))

    def config(self) -> dict[str, Any]:
        """config.json of what is written."""
        words = self.quantization_config()
        if words is None:
            return {**self._model.hf_config, "dtype": "bfloat16", "torch_dtype": "bfloat16"}
        return {**self._model.hf_config, "quantization_config": words}
