"""Checks of the numbers that describe rounds."""

from __future__ import annotations

import math
from typing import TypeGuard

from lightning_bytescheduler.exceptions import OptionError

__all__ = ["require_positive", "require_seconds", "require_share", "require_whole"]


def require_whole(option: str, value: object, least: int) -> int:
    """Return ``value`` if it is a whole number, ``least`` or more.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise OptionError(option, value, f"a whole number, {least} or more")
    return value


def require_seconds(option: str, value: object) -> float:
    """Return ``value`` if it is a finite number of seconds, 0 or more.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if not (_is_finite(value) and value >= 0):
        raise OptionError(option, value, "a finite number of seconds, 0 or more")
    return value


def require_positive(option: str, value: object) -> float:
    """Return ``value`` if it is a finite number, more than 0.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if not (_is_finite(value) and value > 0):
        raise OptionError(option, value, "a finite number, more than 0")
    return value


def require_share(option: str, value: object) -> float:
    """Return ``value`` if it is a number from 0 to 1.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if not (_is_finite(value) and 0 <= value <= 1):
        raise OptionError(option, value, "a number from 0 to 1")
    return value


def _is_finite(value: object) -> TypeGuard[float]:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
