"""Rates, times and sizes as people write them: ``10Gbit/s``, ``10GbE``, ``1.25GB/s``, ``20ms``, ``350M``.

A small ``b`` is a bit and a capital ``B`` a byte. What could be either, such as ``1GB`` or ``1gb/s``, is refused with a
question: the answers differ by a factor of eight. Prefixes are decimal, as those of networks are; ``Ki``, ``Mi`` and
``Gi`` are binary.
"""

from __future__ import annotations

import math
import re

from lightning_bytescheduler.checks import require_positive, require_seconds
from lightning_bytescheduler.exceptions import OptionError

RATES = "10Gbit/s, 500Mbps, 25GbE or 1.25GB/s"
"""Examples of rates, for help and errors."""

TIMES = "20ms, 0.5ms or 200us"
"""Examples of times."""

_NUMBER = r"(?P<number>(?:\d+(?:\.\d*)?|\.\d+)(?:e[+-]?\d+)?)"
_RATE = re.compile(
    rf"{_NUMBER}\s*(?P<prefix>kilo|mega|giga|tera|[kmgt])?(?P<binary>i)?[ -]?(?P<unit>bits?|bytes?|b)?"
    r"(?P<per>\s*/\s*s(?:ec(?:ond)?)?|\s*per\s*s(?:ec(?:ond)?)?|\s*a second|ps)?",
    re.IGNORECASE,
)
_ETHERNET = re.compile(r"([mg])(?:be|e|ige)$", re.IGNORECASE)
_TIME = re.compile(rf"{_NUMBER}\s*(?P<prefix>micro|milli|n|u|µ|μ|m)?(?:seconds?|secs?|s)", re.IGNORECASE)
_SIZE = re.compile(rf"{_NUMBER}\s*(?P<prefix>[kmgbt])?(?P<binary>i)?\s*(?P<unit>b|bytes?|parameters|params)?", re.I)
_PREFIXES = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "b": 1e9, "t": 1e12}
_FRACTIONS = {"": 1.0, "n": 1e-9, "u": 1e-6, "µ": 1e-6, "μ": 1e-6, "m": 1e-3, "micro": 1e-6, "milli": 1e-3}
_LEAST_BARE_BITS = 1e6  # who writes a smaller number without a unit means megabits or gigabits
_WIDTH = 4  # bytes of a parameter


def require_rate(option: str, value: object) -> float:
    """Bytes per second: a number of them, or a text such as ``10Gbit/s``.

    Args:
        option: Its name.
        value: What was given. A text without a unit, such as ``1e9``, is in bits per second, as networks are.

    Raises:
        OptionError: If it is no rate above 0, or could be in bits or in bytes; names ``option``.
    """
    if not isinstance(value, str):
        return require_positive(option, value, of="bytes per second")
    found = _RATE.fullmatch(_ETHERNET.sub(r"\1bps", value.strip()))
    bits = float(found["number"]) * _factor(found) * _bits_of_unit(option, value, found) if found else 0.0
    if not bits or not math.isfinite(bits):
        above = "above 0 " if found else ""
        raise OptionError(option, value, f"a rate {above}such as {RATES}")
    return bits / 8


def _factor(found: re.Match[str]) -> float:
    prefix = (found["prefix"] or "")[:1].lower()
    return 1024.0 ** " kmgt".index(prefix or " ") if found["binary"] else _PREFIXES[prefix]


def _bits_of_unit(option: str, value: str, found: re.Match[str]) -> int:
    """How many bits the unit has.

    Raises:
        OptionError: If that cannot be told.
    """
    number, unit, prefix, per = found["number"], found["unit"] or "", found["prefix"] or "", found["per"] or ""
    if not unit and not prefix and float(number) < _LEAST_BARE_BITS:
        raise OptionError(option, value, f"a rate with its unit, such as {number}Gbit/s or {number}Mbit/s")
    # Who minds capitals minds them everywhere: "GBPS" and "gb/s" show that nobody did.
    if (unit == "B" and per in ("", "PS")) or (unit == "b" and prefix in ("m", "g", "t") and per.lower() != "ps"):
        letters = prefix.upper().replace("K", "k") + (found["binary"] or "")
        choices = f"{number}{letters}bit/s or {number}{letters}B/s"
        raise OptionError(option, value, f"{choices} (is it in bits or in bytes a second?)")
    return 8 if unit == "B" or unit.lower().startswith("byte") else 1


def require_duration(option: str, value: object) -> float:
    """Seconds: a number of them, or a text such as ``20ms``.

    Raises:
        OptionError: If it is no time, 0 or more; names ``option``.
    """
    if not isinstance(value, str):
        return require_seconds(option, value)
    found = _TIME.fullmatch(value.strip())
    seconds = 0.0
    if found is not None:
        seconds = float(found["number"]) * _FRACTIONS[(found["prefix"] or "").lower()]
    elif value.strip() != "0":
        raise OptionError(option, value, f"a time with its unit, such as {TIMES}")
    return require_seconds(option, seconds)


def parameters_in(text: str) -> int | None:
    """How many parameters ``350M``, ``7B`` or ``100MB`` (of fp32 gradients) are; ``None`` if it is no size at all."""
    found = _SIZE.fullmatch(text.strip())
    if found is None or not (found["prefix"] or found["unit"]):
        return None
    in_bytes = (found["unit"] or "").lower().startswith("b")
    number = float(found["number"]) * _factor(found) / (_WIDTH if in_bytes else 1)
    return round(number) if 1 <= number < math.inf else None


def rate_in_words(bandwidth: float) -> str:
    """For example ``500 Mbit/s``, of bytes per second."""
    rate = bandwidth * 8
    unit, size = next((u, s) for u, s in (("Gbit/s", 1e9), ("Mbit/s", 1e6), ("kbit/s", 0.0)) if rate >= s)
    return f"{rate / (size or 1e3):,.4g} {unit}"


def duration_in_words(seconds: float) -> str:
    """For example ``0.2 ms``, or ``5 µs`` where that is little."""
    return f"{seconds * 1e3:.3g} ms" if seconds >= 1e-4 or not seconds else f"{seconds * 1e6:.3g} µs"
