"""Checks of options: each says what is wrong, with the option's name, and what is allowed."""

from __future__ import annotations

import math
from typing import TypeGuard

from lightning_bytescheduler.exceptions import OptionError

__all__ = [
    "is_finite",
    "is_whole",
    "require_bool",
    "require_not_negative",
    "require_positive",
    "require_seconds",
    "require_share",
    "require_whole",
]


def is_whole(value: object, least: int = 0) -> TypeGuard[int]:
    """Whether ``value`` is a whole number, ``least`` or more; ``True`` and ``False`` are none."""
    return isinstance(value, int) and not isinstance(value, bool) and value >= least


def is_finite(value: object) -> TypeGuard[float]:
    """Whether ``value`` is a number, neither infinite nor NaN; ``True`` and ``False`` are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)


def require_bool(option: str, value: object) -> bool:
    """Return ``value`` if it is ``True`` or ``False``.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if not isinstance(value, bool):
        raise OptionError(option, value, "True or False")
    return value


def require_whole(option: str, value: object, least: int) -> int:
    """Return ``value`` if it is a whole number, ``least`` or more.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if not is_whole(value, least):
        raise OptionError(option, value, f"a whole number, {least} or more")
    return value


def require_not_negative(option: str, value: object) -> float:
    """Return ``value`` if it is a finite number, 0 or more.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if not is_finite(value) or value < 0:
        raise OptionError(option, value, "a finite number, 0 or more")
    return value


def require_positive(option: str, value: object) -> float:
    """Return ``value`` if it is a finite number above 0.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if not is_finite(value) or value <= 0:
        raise OptionError(option, value, "a finite number, more than 0")
    return value


def require_seconds(option: str, value: object) -> float:
    """Return ``value`` if it is a finite number of seconds, 0 or more.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if not is_finite(value) or value < 0:
        raise OptionError(option, value, "a finite number of seconds, 0 or more")
    return value


def require_share(option: str, value: object) -> float:
    """Return ``value`` if it is a number from 0 to 1.

    Raises:
        OptionError: If it is not; names ``option``.
    """
    if not is_finite(value) or not 0 <= value <= 1:
        raise OptionError(option, value, "a number from 0 to 1")
    return value
