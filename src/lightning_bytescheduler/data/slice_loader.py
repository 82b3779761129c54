"""A loader of batches of slices: passes over a plan.

The plan is asked in the process that trains, and its batches go to the processes that read over the DataLoader's own
local queues; so nobody else needs to know of ranks, and the order is the plan's with any number of workers.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from typing import Any

from lightning_bytescheduler.data.batch_plan import BatchPlan
from lightning_bytescheduler.data.batch_reader import ReadNote
from lightning_bytescheduler.data.batch_workers import BatchWorkers

__all__ = ["SliceLoader"]


class SliceLoader:
    """Batches of a plan, any number of times.

    It is not a ``DataLoader``, so that Lightning does not look for a sampler to replace.

    Args:
        plan: Which batches.
        workers: Read them; may be those of a loader before this one.
        length: Of the loader; None if nobody knows how many batches there will be.
        on_note: Called with what the reader has to tell, when a batch is handed out.

    Attributes:
        plan: As given.
        waited: Seconds that whoever iterates has waited for batches, with all that it took to make them.
    """

    def __init__(
        self,
        plan: BatchPlan,
        workers: BatchWorkers,
        *,
        length: int | None,
        on_note: Callable[[ReadNote], None] | None = None,
    ) -> None:
        self.plan = plan
        self.worker_init_fn: Callable[[int], None] | None = None  # Lightning sets it, for seeds
        self._workers = workers
        self._on_note = on_note
        self.waited = 0.0
        self._length = length

    def __len__(self) -> int:
        if self._length is None:
            raise TypeError("How many batches there will be is not known: they are handed out as they are needed.")
        return self._length

    def state_dict(self) -> dict[str, Any]:
        """Nothing: the position is the plan's. That there is a state tells Lightning that a loader can be resumed."""
        return {}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Nothing to do, see ``state_dict``."""

    def __iter__(self) -> Iterator[Any]:
        # A generator, so that nothing starts before the first batch is wanted: Lightning makes more iterators than
        # it uses.
        batches = self._workers.batches(self.plan, self.worker_init_fn)
        while True:
            started = time.perf_counter()
            read = next(batches, None)
            self.waited += time.perf_counter() - started
            if read is None:
                return
            batch, note = read
            if self._on_note is not None:
                self._on_note(note)
            if batch is not None:
                yield batch
