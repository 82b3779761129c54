"""What a strategy gives to a data module whose slices go to workers of unequal speed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

from lightning_bytescheduler.data.local_tracker import LocalTracker
from lightning_bytescheduler.data.tracker_client import TrackerClient

__all__ = ["TrackerHost"]


class TrackerHost(Protocol):
    """One worker's way to the run's slice tracker; see :meth:`SliceDataModule.bind_tracker`.

    Attributes:
        worker: Number of this worker, from 0; the same after a restart.
        workers: How many there are at the start. Others may join later.
        waits: Whether a worker that finds nothing for now when its epoch begins waits in its loader, and goes on to the
            next epoch of the data by itself. If not, its epoch of Lightning may be empty, and the strategy ends epochs
            of the data for all workers, with ``training.awaits_others()`` and ``training.end_epoch()``.
    """

    worker: int
    workers: int
    waits: bool

    def connect(self, make: Callable[[], LocalTracker]) -> TrackerClient:
        """Reach the tracker.

        Called once in a fit, when the first batch is wanted, which is after a checkpoint was loaded. At worker 0 it
        calls ``make``, offers the result to the others and returns it, or something that leads there. Elsewhere it does
        not call ``make``, and waits, for a bounded time, until worker 0 offers its tracker.

        Raises:
            Exception: If the tracker cannot be reached.
        """
