"""Checks of the numbers that describe a search."""

from __future__ import annotations

import math

from lightning_bytescheduler.exceptions import OptionError

__all__ = ["require_not_negative", "require_positive", "require_whole"]


def require_not_negative(option: str, value: object) -> float:
    """Return ``value`` if it is a finite number, 0 or more.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise OptionError(option, value, "a finite number, 0 or more")
    return float(value)


def require_positive(option: str, value: object) -> float:
    """Return ``value`` if it is a finite number above 0.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value <= 0:
        raise OptionError(option, value, "a finite number, more than 0")
    return float(value)


def require_whole(option: str, value: object, least: int) -> int:
    """Return ``value`` if it is a whole number, ``least`` or more.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(option, value, f"a whole number, {least} or more")
    return value
