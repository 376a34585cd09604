"""Sleeping until a word of shared memory changes, and waking those who sleep: futex(2), through ctypes."""

from __future__ import annotations

import ctypes
import os
import platform
import sys

SYS_FUTEX = 202  # on x86-64
FUTEX_WAIT, FUTEX_WAKE = 0, 1  # both between processes
EVERYBODY = 0x7FFFFFFF

# Stores of one core are seen by others in order on x86-64, which a sequence word behind its message relies on.
AVAILABLE = sys.platform == "linux" and platform.machine() == "x86_64"


class _Timespec(ctypes.Structure):
    _fields_ = (("seconds", ctypes.c_long), ("nanoseconds", ctypes.c_long))


_syscall = ctypes.CDLL(None, use_errno=True).syscall if AVAILABLE else None


def wait(word: ctypes.c_uint32, seen: int, seconds: float) -> None:
    """Sleeps while word is still what was seen, at most so long; it may return sooner, so the caller looks again."""
    assert _syscall is not None, "see AVAILABLE"
    limit = _Timespec(int(seconds), int(seconds % 1 * 1e9))
    _syscall(SYS_FUTEX, ctypes.byref(word), FUTEX_WAIT, ctypes.c_uint32(seen), ctypes.byref(limit), None, 0)


def wake(word: ctypes.c_uint32) -> None:
    """Wakes all who sleep on this word."""
    assert _syscall is not None, "see AVAILABLE"
    if _syscall(SYS_FUTEX, ctypes.byref(word), FUTEX_WAKE, EVERYBODY, None, None, 0) < 0:
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
