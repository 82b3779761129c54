"""Collectives of others (DDP's, Lightning's, a model's) take their place in the one launch order, among gradients.

Each is a task of no credit that is named by its number alone: how many its process group has launched in this order.
Rank 0 puts it into the sequence that it decides on, and tells the others like any decision; they launch the k-th when
their own thread has submitted it. When rank 0 may, is said in :class:`~lightning_bytescheduler.scheduler.MixedOrder`,
and why nobody waits forever in ``launch_order.py``. Nothing here knows of devices, groups or threads.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

from lightning_bytescheduler.scheduler.core import ByteCore
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask, TaskKey

__all__ = ["KINDS", "ForeignCollectives"]

_FOREIGN = -1  # in place of a step
KINDS = (
    "allreduce",
    "allreduce_coalesced",
    "broadcast",
    "reduce",
    "allgather",
    "allgather_coalesced",
    "_allgather_base",
    "allgather_into_tensor_coalesced",
    "all_gather_single",
    "all_gather_single_coalesced",
    "gather",
    "scatter",
    "reduce_scatter",
    "_reduce_scatter_base",
    "reduce_scatter_tensor_coalesced",
    "reduce_scatter_single",
    "reduce_scatter_single_coalesced",
    "alltoall",
    "alltoall_base",
    "all_to_all_single",
    "barrier",
    "coalesced",
)
"""Names of what is ordered; a decision carries the place of its own in here, so that ranks that differ are found."""


class ForeignCollectives:
    """One rank's, in the order in which they are submitted.

    Args:
        core: Whose order they are part of: one of ``launch_order.py``.
        report: Called with how many have been submitted here, after each; rank 0 has to learn how many all ranks have.
    """

    def __init__(self, core: ByteCore, report: Callable[[int], None]) -> None:
        self._core = core
        self._report = report
        self._lock = threading.Lock()
        self._submitted = 0

    @property
    def submitted(self) -> int:
        """How many there were."""
        return self._submitted

    def submit(self, kind: str, launch: Callable[[], None]) -> CommTask:
        """Have ``launch`` called when its turn comes, on whichever thread launches.

        Args:
            kind: One of :data:`KINDS`.
            launch: Starts it; must not raise, and must not wait for the network.

        Returns:
            Ends when it has been launched.

        Raises:
            BaseException: Why the core was stopped.
        """

        def start(sub_task: SubCommTask) -> None:
            launch()
            sub_task.notify_finish()

        with self._lock:  # numbers are in the order of admission
            number = self._submitted + 1
            # Its size is the place of its kind: orders compare sizes.
            task = CommTask(
                f"{kind} {number}",
                1 + KINDS.index(kind),
                launch=start,
                key=TaskKey(_FOREIGN, bucket=number),
                takes_credit=False,
            )
            self._core.enqueue(task)
            self._submitted = number
            self._report(number)
        task.notify_ready()
        self._core.launch_allowed()
        return task
