"""What all tests share: threads of the matrix products, and the starter model."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

# Before anything imports NumPy, whose BLAS reads it once. Models of tests are tiny: a second thread only waits, and in
# processes that run side by side it takes the cores of the others. A test that wants more says so (--num-threads).
os.environ.setdefault("OPENBLAS_NUM_THREADS", "1")

import pytest

from engine.checkpoint.source import ModelSource, resolve
from engine.checkpoint.starter import StarterModel, ensure_starter
from engine.errors import ConfigError

OFFLINE = "GLINT_OFFLINE"


@pytest.fixture(autouse=True, scope="session")
def _no_gpu() -> Iterator[None]:
    """Engines of tests compute on the CPU, also on a machine with a GPU: what they must give is known to 1e-4."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("engine.backends.choose.has_nvidia_driver", lambda: False)
        yield


@pytest.fixture(scope="session")
def starter_model() -> ModelSource:
    """The starter model, fetched if it is not in the user's cache. Every test marked `starter` has this fixture.

    It fails where the model cannot be had. With GLINT_OFFLINE=1 nothing is fetched, and it skips instead.
    """
    try:
        if os.environ.get(OFFLINE) == "1":
            ensure_starter(fetch=_refuse)
        return resolve("starter")
    except ConfigError as error:
        why = str(error)
    if os.environ.get(OFFLINE) == "1":
        pytest.skip(why)
    pytest.fail(f"{why}\nSet {OFFLINE}=1 to skip the tests that need it.", pytrace=False)


def _refuse(starter: StarterModel, folder: Path) -> None:
    raise ConfigError(f"{OFFLINE}=1, and {starter.name} has not been fetched before")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Lets the marker alone be enough: a test that starts a server names no fixture."""
    for item in items:
        if isinstance(item, pytest.Function) and item.get_closest_marker("starter"):
            item.fixturenames.insert(0, "starter_model")
