"""Quantizes a model, a layer at a time."""

from __future__ import annotations

import logging
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from threadpoolctl import threadpool_limits

from engine.cpu.team import Team
from engine.errors import ConfigError
from engine.progress import Progress
from engine.quantize.calibrate import Windows, build_layers, check_can_walk, walk
from engine.quantize.encode import STORAGE, is_finite, quantize_weight, to_stored
from engine.quantize.methods import BITS, METHODS, SHARES, Settings, choose_group_size
from engine.quantize.plan import Plan
from engine.quantize.smooth import smooth_piece
from engine.quantize.source_model import SourceModel
from engine.quantize.writer import Output
from engine.system import usable_cores
from engine.weights import LinearSpec
from ref.quant.coded import dequantize_weight
from ref.quant.gptq_quantize import gptq_quantize
from ref.quant.groups import GroupedInt
from ref.quant.scheme import SCALES, unpack_module
from ref.quant.scheme_config import parse_quantization_config

Array = NDArray[Any]
Float32 = NDArray[np.float32]

SHARD_BYTES = 5 * 10**9
TOKENS_AT_ONCE = 512  # whose second moments are summed in float32 before they go into float64
ROWS_AT_ONCE = 8192  # of a weight that GPTQ rounds in one go
GPTQ_BLOCK = 32  # of the sizes from 16 to 128 the quickest in NumPy (0.7 s against 2.0 for 3072 × 576)

logger = logging.getLogger(__name__)


def quantize(
    model: SourceModel,
    out: Path,
    settings: Settings,
    windows: Windows | None = None,
    ignore: tuple[str, ...] = (),
    shard_bytes: int = SHARD_BYTES,
    progress: bool = True,
) -> bool:
    """Writes the folder; False: it is there already, whole.

    Args:
        settings: with group_size 0 the largest usual one that divides all layers is taken.
        windows: token ids of the text that calibrates.
        ignore: linear modules that stay as they are, by name or "re:" and a pattern.

    Raises:
        ConfigError: the method does not fit the model, or out cannot be written.
        CheckpointError: a file of the model is damaged.
    """
    method = METHODS[settings.method]
    modules = {} if method.packing == "plain" else model.quantized(ignore)
    if method.calibration is None:
        windows = None
    else:
        check_can_walk(model.config, f"--method {settings.method}")
        if windows is None:
            raise ConfigError(f"--method {settings.method}: needs --calibration FILE, a text like those to be served")
    if method.has_groups and not settings.group_size:
        settings = replace(settings, group_size=choose_group_size({spec.in_features for spec in modules.values()}))
        logger.info("groups of %d", settings.group_size)
    plan = Plan(model, settings, modules, windows)
    output = Output(out, plan.units, plan.fingerprint(shard_bytes), shard_bytes)
    if output.is_finished:
        return False
    with output, _bar(plan, output, progress) as bar, threadpool_limits(1, user_api="blas"):  # Team has the threads
        try:
            job = _Job(model, plan, output, bar)
            if windows is None:
                job.round_to_nearest()
            elif method.calibration == "hessian":
                job.gptq(windows)
            else:
                job.by_absmax(windows)
            job.copy_rest()
            output.finish(model.text_files(), plan.config())
        except OSError as error:
            raise output.trouble(error) from error
    return True


def _bar(plan: Plan, output: Output, progress: bool) -> Progress:
    done = sum(output.is_done(unit.name) for unit in plan.units)
    if done:
        logger.info("%s: goes on after %d of %d units", output.folder, done, len(plan.units))
    return Progress(len(plan.units), plan.settings.method, "units", done, hidden=not progress)


class _Job:
    """Fills an output; what is there already is passed over."""

    def __init__(self, model: SourceModel, plan: Plan, output: Output, bar: Progress) -> None:
        self._model, self._plan, self._output, self._bar = model, plan, output, bar
        self._team = Team(usable_cores())

    def copy_rest(self) -> None:
        """What stays as it is."""
        for name in self._plan.rest:
            if not self._output.is_done(name):
                dtype = self._plan.as_is(name).dtype
                pieces = self._model.pieces(name, dtype)
                self._output.write(name, (_stored(piece, dtype) for piece in pieces))
                self._commit(name)

    def round_to_nearest(self) -> None:
        """Module by module, from the weights alone."""
        for module, spec in self._plan.modules.items():
            if not self._output.is_done(module):
                self._write_module(module, self._model.weight(spec, module))
                self._commit(module)

    def gptq(self, windows: Windows) -> None:
        """Layer by layer; each sees what comes out of those before it once they are quantized."""
        layers, _ = build_layers(self._model, self._gptq_layer)
        for _ in walk(self._model, layers, windows):
            if self._layers_are_done():
                break

    def _gptq_layer(self, spec: LinearSpec, x: Float32) -> Float32:
        """Quantizes a layer by its input x [num_tokens, in], and multiplies x by what it has become."""
        chosen = [module for module, _, _ in spec.modules() if module in self._plan.modules]
        _require_finite(spec, x)
        if chosen and not self._output.is_done(spec.dest):
            weights = [self._model.weight(spec, module) for module in chosen]
            found = self._round_by_gptq(np.concatenate(weights), self._second_moments(x))
            ends = np.cumsum([len(weight) for weight in weights])
            for module, end, weight in zip(chosen, ends.tolist(), weights, strict=True):
                rows = slice(end - len(weight), end)
                mine = replace(found, q=found.q[rows], scales=found.scales[rows], zeros=found.zeros[rows])
                self._write_module(module, weight, grouped=mine)
            self._commit(spec.dest)
        parts = [
            self._team.matmul(x, (self._decoded(module) if module in chosen else self._model.weight(spec, module)).T)
            for module, _, _ in spec.modules()
        ]
        return np.concatenate(parts, axis=1)

    def _round_by_gptq(self, weight: Float32, hessian: Array) -> GroupedInt:
        settings = self._plan.settings
        with np.errstate(over="ignore", invalid="ignore"):  # scales that are too large are refused with their module
            parts = [
                gptq_quantize(
                    weight[first : first + ROWS_AT_ONCE],
                    hessian,
                    BITS,
                    settings.group_size,
                    symmetric=settings.symmetric,
                    act_order=settings.act_order,
                    damp=settings.damp,
                    block=GPTQ_BLOCK,
                    storage=STORAGE[self._plan.scales],
                    shares=SHARES,
                )
                for first in range(0, len(weight), ROWS_AT_ONCE)
            ]
        scales = np.concatenate([part.scales for part in parts])
        return GroupedInt(
            BITS,
            np.concatenate([part.q for part in parts]),
            np.where(scales > 0, scales, 1),  # a group of zeros
            np.concatenate([part.zeros for part in parts]),
            parts[0].g_idx,
        )

    def _second_moments(self, x: Float32) -> NDArray[np.float64]:
        """gptq_hessian of [num_tokens, in], the float32 sums of some tokens at a time added up in float64."""
        moments = np.zeros((x.shape[1], x.shape[1]))
        for first in range(0, len(x), TOKENS_AT_ONCE):
            part = x[first : first + TOKENS_AT_ONCE]
            moments += 2 * self._team.matmul(part.T, part)
        return moments

    def _decoded(self, module: str) -> Float32:
        """A weight as whoever loads the output has it."""
        tensors = {name: self._output.read(name) for name in self._plan.tensors_of(module)}
        config = parse_quantization_config(self._plan.quantization_config() or {})
        return np.asarray(dequantize_weight(unpack_module(tensors, config, module), np.float32))

    def by_absmax(self, windows: Windows) -> None:
        """Piece by piece, the largest activations of a run in floating point in hand."""
        inputs: list[tuple[LinearSpec, Float32]] = []

        def multiply(spec: LinearSpec, x: Float32) -> Float32:
            _require_finite(spec, x)
            inputs.append((spec, x))
            weights = [self._model.weight(spec, module) for module, _, _ in spec.modules()]
            return np.concatenate([self._team.matmul(x, weight.T) for weight in weights], axis=1)

        layers, names = build_layers(self._model, multiply)
        for piece, hidden in walk(self._model, layers, windows):
            if piece is None:
                break
            factors: dict[str, Float32] = {}
            if self._plan.method.smooth:
                smoothed = smooth_piece(self._model, piece, hidden, inputs, names, self._plan.settings.alpha)
                factors = dict.fromkeys(smoothed.readers, smoothed.factors)
                for name, norm in smoothed.norms.items():
                    if not self._output.is_done(name):
                        self._output.write(name, [to_stored(norm, self._plan.as_is(name).dtype)])
                        self._commit(name)
            for spec, x in inputs:
                self._write_layer(spec, factors.get(spec.dest), float(np.abs(x).max(initial=0)))
            inputs.clear()
            if self._layers_are_done():
                break

    def _write_layer(self, spec: LinearSpec, factors: Float32 | None, input_absmax: float) -> None:
        if spec.dest not in self._plan.layers or self._output.is_done(spec.dest):
            return
        for module, _, _ in spec.modules():
            weight = self._model.weight(spec, module)
            if factors is not None:
                weight *= factors
            if module in self._plan.modules:
                self._write_module(module, weight, input_absmax=input_absmax)
            elif self._plan.method.smooth:
                name = f"{module}.weight"
                dtype = self._plan.as_is(name).dtype
                with np.errstate(over="ignore"):
                    stored = to_stored(weight.T if spec.transposed else weight, dtype)
                if not is_finite(stored):
                    raise ConfigError(
                        f"--ignore {module}: smoothing makes its weight larger than {STORAGE[dtype]} holds; quantize "
                        "it too, or give a smaller --alpha"
                    )
                self._output.write(name, [stored])
        self._commit(spec.dest)

    def _write_module(
        self, module: str, weight: Float32, grouped: GroupedInt | None = None, input_absmax: float = 0.0
    ) -> None:
        tensors = quantize_weight(self._plan.settings, self._plan.scales, weight, grouped, input_absmax)
        scales = next((array for suffix, array in tensors.items() if suffix in SCALES), np.zeros(0, np.float16))
        if not is_finite(scales):
            raise ConfigError(
                f"--method {self._plan.settings.method}: module {module} has numbers up to {np.abs(weight).max():.3g}, "
                f"whose scales {STORAGE[self._plan.scales]} does not hold; --ignore it, or use int8, fp8 or fp8-block"
            )
        for suffix, array in tensors.items():
            self._output.write(f"{module}.{suffix}", [array])

    def _layers_are_done(self) -> bool:
        return all(self._output.is_done(dest) for dest in self._plan.layers)

    def _commit(self, unit: str) -> None:
        self._output.commit(unit)
        self._bar.update()


def _require_finite(spec: LinearSpec, x: Float32) -> None:
    """Raises ConfigError where the input of a layer is not finite, of which nothing can be learnt."""
    if not np.isfinite(x).all():
        raise ConfigError(
            f"--calibration: with this text {spec.dest} gets {x[~np.isfinite(x)][0]} as an input, so the model is "
            "damaged or overflows; methods without a text look at the weights alone"
        )


def _stored(piece: Array, dtype: str) -> Array:
    return piece if piece.dtype == np.uint8 else to_stored(piece, dtype)
