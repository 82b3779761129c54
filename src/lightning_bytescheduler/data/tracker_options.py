"""How slices are handed out: the tracker's options."""

from __future__ import annotations

import math
from dataclasses import dataclass

from lightning_bytescheduler.exceptions import OptionError

__all__ = ["DELIVERIES", "TrackerOptions"]

DELIVERIES = ("at_least_once", "at_most_once")
"""What a worker's death may cost: samples trained twice, or samples left out."""


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackerOptions:
    """How slices are handed out; validated when made.

    Attributes:
        seed: Of the order of slices, from 0 to 2**64 - 1.
        shuffle: False hands slices out in the catalogue's order.
        delivery: ``"at_least_once"``: what a dead worker had begun comes back, from the last sample it is known to have
            trained on, so what it trained on after its last report is trained on twice. ``"at_most_once"``: that rest
            is dropped from the epoch and counted. Without deaths both train each sample exactly once.
        lease: Seconds without a message after which a worker is taken for dead.
        prefetch: Slices a worker may hold that it has not begun.

    Raises:
        OptionError: If a value is not allowed.
    """

    seed: int = 0
    shuffle: bool = True
    delivery: str = "at_least_once"
    lease: float = 300.0
    prefetch: int = 2

    def __post_init__(self) -> None:
        if isinstance(self.seed, bool) or not isinstance(self.seed, int) or not 0 <= self.seed < 2**64:
            raise OptionError("seed", self.seed, "a whole number from 0 to 2**64 - 1")
        if not isinstance(self.shuffle, bool):
            raise OptionError("shuffle", self.shuffle, "True or False")
        if self.delivery not in DELIVERIES:
            raise OptionError("delivery", self.delivery, f"one of {', '.join(map(repr, DELIVERIES))}")
        number = isinstance(self.lease, (int, float)) and not isinstance(self.lease, bool)
        if not number or not math.isfinite(self.lease) or self.lease <= 0:
            raise OptionError("lease", self.lease, "a finite number of seconds, more than 0")
        require_prefetch(self.prefetch)


def require_prefetch(value: object) -> int:
    """Return ``value`` if it is a number of slices to hold ahead.

    Raises:
        OptionError: If it is not a whole number, 1 or more.
    """
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OptionError("prefetch", value, "a whole number of slices, 1 or more")
    return value
