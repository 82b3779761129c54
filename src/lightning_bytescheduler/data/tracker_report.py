"""How far an epoch of slices is."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["TrackerReport"]


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackerReport:
    """Counts of the running epoch.

    Attributes:
        epoch: The epoch.
        over: Whether nothing is left of it.
        samples: Samples of all slices.
        trained: Of these, samples known to be trained on, each counted once.
        dropped: Of these, samples that the epoch will not train on: quarantined, abandoned, or at most once.
        unfinished: Slices that are neither used nor quarantined.
        quarantined: Reason by key, of all slices that are left out.
        workers: Workers known.
        returned: Slices that came back from workers that died or left.
        stolen: Slices taken from a slower worker that had not begun them.
    """

    epoch: int
    over: bool
    samples: int
    trained: int
    dropped: int
    unfinished: int
    quarantined: dict[str, str]
    workers: int
    returned: int
    stolen: int
