"""Checks of the numbers that describe links, models and schedules."""

from __future__ import annotations

import math

from lightning_bytescheduler.exceptions import OptionError

__all__ = ["require_seconds", "require_whole"]


def require_seconds(option: str, value: object) -> float:
    """Return ``value`` if it is a finite number of seconds, 0 or more.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise OptionError(option, value, "a finite number of seconds, 0 or more")
    return value


def require_whole(option: str, value: object, least: int) -> int:
    """Return ``value`` if it is a whole number, ``least`` or more.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(option, value, f"a whole number, {least} or more")
    return value
