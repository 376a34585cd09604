"""Fixtures of the engine's tests."""

import logging
from collections.abc import Iterator

import pytest


@pytest.fixture(scope="module")
def quiet_loop() -> Iterator[None]:
    """For tests in which many steps fail on purpose: the loop's log lines, each with a traceback, are not kept."""
    logger = logging.getLogger("engine.loop")
    level = logger.level
    logger.setLevel(logging.CRITICAL)
    yield
    logger.setLevel(level)
