"""Counters of one worker in one training."""

from __future__ import annotations

from dataclasses import dataclass

__all__ = ["SessionStatistics"]


@dataclass(slots=True)
class SessionStatistics:
    """Where a worker's time went.

    Attributes:
        rounds: That have ended.
        steps: Taken.
        samples: Processed.
        merged_samples: Of all workers, in rounds that have ended.
        exchange_s: That the training thread waited for updates, its own and the others'.
        start_s: That it waited for a round to start.
    """

    rounds: int = 0
    steps: int = 0
    samples: int = 0
    merged_samples: int = 0
    exchange_s: float = 0.0
    start_s: float = 0.0
