"""Training data of workers that take slices as they need them, at unequal speeds.

What a strategy gives to a data module whose slices go to workers of unequal speed.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Callable, Mapping
from typing import Any, Protocol

import lightning.pytorch as pl

from lightning_bytescheduler.exceptions import OptionError, TrackerStateError
from lightning_bytescheduler.slices.batch_reader import ReadNote
from lightning_bytescheduler.slices.catalogue import SliceCatalogue
from lightning_bytescheduler.slices.store import SliceStore
from lightning_bytescheduler.slices.tracker import SliceTracker
from lightning_bytescheduler.slices.tracker_client import LocalTracker, TrackerClient
from lightning_bytescheduler.slices.tracker_plan import TrackerPlan
from lightning_bytescheduler.slices.tracker_state import TrackerOptions

__all__ = ["TrackedTraining", "TrackerHost"]


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


class TrackedTraining:
    """``TrainingSlices`` of one worker. The tracker is at worker 0, which saves it too.

    Args:
        host: The way to the tracker.
        store: Of the training data.
        options: Of the tracker.
        batch_size: Samples of a batch of this worker.
        ahead: Slices to hold ahead; None follows the speeds.
    """

    fills = False

    def __init__(
        self, host: TrackerHost, store: SliceStore, *, options: TrackerOptions, batch_size: int, ahead: int | None
    ) -> None:
        self._host = host
        self._store = store
        self._options = options
        self._batch_size = batch_size
        self._ahead = ahead
        self._tracker: LocalTracker | None = None
        self._pending: Mapping[str, Any] | None = None
        self._plan: TrackerPlan | None = None

    @property
    def plan(self) -> TrackerPlan:
        """The batches of this worker.

        Raises:
            OptionError: Before there was a loader.
        """
        if self._plan is None:
            raise OptionError("plan", None, "asked for after train_dataloader()")
        return self._plan

    @property
    def epoch(self) -> int:
        """See ``TrainingSlices``."""
        return 0 if self._plan is None else self._plan.epoch

    @property
    def batches(self) -> None:
        """Nobody knows."""
        return None

    @property
    def tracker(self) -> LocalTracker | None:
        """The tracker, where it is."""
        return self._tracker

    def open(self, trainer: pl.Trainer | None) -> None:
        """Reach the tracker, once."""
        if self._plan is None:
            self._plan = TrackerPlan(
                self._host.connect(self._make_tracker),
                worker=_name(self._host.worker),
                incarnation=uuid.uuid4().hex,
                batch_size=self._batch_size,
                ahead=self._ahead,
                slices=self._store.source.slices,
                cached=self._store.cached,
                waits=self._host.waits,
            )

    def note(self, note: ReadNote) -> None:
        """Tell the tracker what is corrupt."""
        self.plan.received(note)

    def trained(self) -> None:
        """Tell the tracker where this worker is."""
        self.plan.trained()

    def finish_epoch(self, trainer: pl.Trainer) -> None:
        """The tracker says when an epoch of the data is over."""

    def keep_alive(self) -> None:
        """Renew the lease in time."""
        if self._plan is not None:
            self._plan.keep_alive()

    def awaits_others(self) -> bool:
        """Whether other workers hold all that is left of the epoch."""
        return self.plan.awaits_others()

    def end_epoch(self) -> None:
        """Go on to the next epoch of the data, if nothing is left of this one: for all workers at the same moment."""
        self.plan.end_epoch()

    def close(self) -> None:
        """Give back what this worker holds."""
        if self._plan is not None:
            self._plan.leave()
            self._plan = None

    def state_dict(self) -> dict[str, Any]:
        """The tracker's at worker 0; elsewhere nothing."""
        if self._tracker is not None:
            return {"tracker": self._tracker.state_dict()}
        return {} if self._pending is None else dict(self._pending)

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where a state was saved; heeded where the tracker is.

        Raises:
            TrackerStateError: If it was saved by ranks that step together, or does not fit.
        """
        if state and "tracker" not in state:
            raise TrackerStateError(
                "The state of the slices was saved by ranks that step together. Resume with the strategy that it was "
                "saved with, or load only the weights."
            )
        self._pending = dict(state) or None
        if self._tracker is not None:
            self._load(self._tracker)

    def _make_tracker(self) -> LocalTracker:
        if self._tracker is None:
            catalogue = SliceCatalogue(self._store.source.slices)
            tracker = LocalTracker(SliceTracker(catalogue, self._options, clock=time.monotonic))
            self._load(tracker)
            self._tracker = tracker
        return self._tracker

    def _load(self, tracker: LocalTracker) -> None:
        if self._pending is not None:
            workers = [_name(number) for number in range(self._host.workers)]
            tracker.load_state_dict(self._pending["tracker"], workers=workers)
            self._pending = None
            report = tracker.report()
            if report.over and not self._host.waits:  # nobody goes on to the next one by itself
                tracker.start_epoch(report.epoch + 1)


def _name(worker: int) -> str:
    return f"worker-{worker}"
