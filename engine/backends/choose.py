"""Which kind of machine an engine is built for."""

from __future__ import annotations

import importlib
import importlib.util
import logging

from engine.backends.backend import ALONE, Backend, Place
from engine.config import EngineConfig, ModelConfig
from engine.errors import ConfigError, KernelError
from engine.system import has_nvidia_driver

logger = logging.getLogger(__name__)


def make_backend(config: EngineConfig, model_config: ModelConfig, place: Place = ALONE) -> Backend:
    """The machine that is asked for; a GPU, if there is one that can run the model, where nothing is said.

    Raises:
        ConfigError: that machine is not here, or cannot run the model.
    """
    name, why = config.device, ""
    if name == "auto":
        name = "cuda" if has_nvidia_driver() and config.dtype != "float32" else "cpu"
        why = _no_gpu(model_config) if name == "cuda" else ""
        if why:
            logger.warning("there is an NVIDIA GPU here, but this model runs on the CPU: %s", why)
            name = "cpu"
    elif name == "cuda":
        why = _no_gpu(model_config) if has_nvidia_driver() else "no NVIDIA driver is loaded on this machine"
        if why:
            raise ConfigError(f"--device cuda: {why}; use --device cpu, or auto")
    try:
        return _named_backend(name, config, model_config, place)
    except (ImportError, KernelError) as error:  # a library that is not there, a GPU that is too old
        if config.device != "auto" or name == "cpu":
            raise ConfigError(f"--device {name}: {error}; use --device cpu") from error
        logger.warning("there is an NVIDIA GPU here, but this model runs on the CPU: %s", error)
        return _named_backend("cpu", config, model_config, place)


def _named_backend(name: str, config: EngineConfig, model_config: ModelConfig, place: Place) -> Backend:
    """By name, so that a machine without a GPU never imports what needs one."""
    backend: Backend = importlib.import_module(f"engine.backends.{name}").make_backend(config, model_config, place)
    return backend


def _no_gpu(model_config: ModelConfig) -> str:
    """Why a GPU cannot run the model, or "" if it can."""
    if importlib.util.find_spec("cupy") is None or importlib.util.find_spec("cuda") is None:
        return "the packages for it are not installed (pip install 'glint-llm[cuda13]', or cuda12)"
    lacks = {
        "latent attention": model_config.mla is not None,
        "mixture of experts": model_config.moe is not None,
        "prompts read both ways": model_config.prefix_lm is not None,
    }
    return ", ".join(f"there are no kernels for {name} yet" for name, has in lacks.items() if has)
