"""Waits for what another thread does; how long they may take only bounds how long a failure hangs."""

from __future__ import annotations

import time
from collections.abc import Callable

__all__ = ["WAIT", "until"]

WAIT = 60.0  # longest wait for anything, in seconds: only a test that fails waits this long


def until(condition: Callable[[], bool]) -> None:
    """Wait for ``condition``."""
    deadline = time.monotonic() + WAIT
    while not condition():
        if time.monotonic() > deadline:
            raise AssertionError("What was waited for did not happen.")
        time.sleep(0.0005)
