"""Logging of every process of the engine: standard error, one line an event, with the process's role."""

from __future__ import annotations

import logging
import sys


def set_up_logging(role: str, level: str = "INFO") -> None:
    """role is "rank 0", "http", …"""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(logging.Formatter(f"%(asctime)s {role} %(levelname)s %(message)s", "%H:%M:%S"))
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level)
