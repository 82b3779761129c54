"""Where a slice stands in an epoch."""

from __future__ import annotations

from enum import IntEnum

__all__ = ["SliceState"]


class SliceState(IntEnum):
    """State of a slice in the running epoch (seed 004), as the tracker keeps it in one byte.

    ``AVAILABLE -> ASSIGNED -> USED``; back to ``AVAILABLE`` when its holder dies or leaves, and with a new epoch.
    ``QUARANTINED`` slices cannot be read; they are left out of this epoch and of those that follow.
    """

    AVAILABLE = 0
    ASSIGNED = 1
    USED = 2
    QUARANTINED = 3
