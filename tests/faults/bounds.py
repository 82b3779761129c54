"""How long ranks have for short work, which takes seconds on a busy machine."""

from __future__ import annotations

import os
from typing import Any

from lightning_bytescheduler.failures import board
from lightning_bytescheduler.failures.standstill import Watchdog

__all__ = ["set_bounds"]


def set_bounds(*, patience: float = 60.0, linger: float = 30.0, goodbye: float = 60.0) -> None:
    """Have waits end because of what they wait for.

    Args:
        patience: Seconds for a training thread to come back after a failure.
        linger: Seconds that a failing rank stays until the others know.
        goodbye: Seconds that the store's host waits for the others in the end.
    """
    board_class: Any = board.FaultBoard
    watchdog: Any = Watchdog.__init__
    watchdog.__defaults__ = (patience, os._exit)
    board._LINGER_S = linger
    board_class.close.__defaults__ = (goodbye,)
    board_class.diagnose.__defaults__ = (60.0,)
    board_class.explain.__kwdefaults__["timeout"] = 60.0
