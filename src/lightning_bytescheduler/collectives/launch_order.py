"""One launch order on every rank: rank 0 decides, the others follow.

Why the ranks agree, and why nobody waits forever:

* Collectives match by the order in which each rank launches them on a group. Whichever thread launches
  on the data group holds the core's launching lock from popping a batch until the last of it is launched, so what is
  launched is exactly the sequence that the order pops.
* Rank 0 pops by priority and credit. Before it starts a batch it broadcasts the batch's decisions on the control group;
  broadcasts on one group arrive in order, so every follower holds the same sequence and pops nothing else.
* A decision is made only for a task whose data exists on rank 0. A follower launches it when its own data exists,
  which needs nothing but its own backward pass: backward never waits for gradients of the same step.
* Take the oldest collective that has not completed. Rank 0 has launched it (decisions precede everything younger). Each
  follower will: everything older has completed there, so its credit is free for at least one sub-task, its data will
  exist, and no younger one can be popped before it. So it completes, and by induction all do.
* Collectives of others (``routing_group.py``) are in the same sequence, where they are routed. A rank may wait
  for what is above before it comes to submit one: so the induction takes more, see below.
* The lane that a part travels on (``LaneChoice``, over long ways) rank 0 says with the decision. Each lane is a
  group of its own. What is launched on it is a part of the one sequence, so it is one sequence on all ranks too. What
  overtakes may take a second credit, on followers whatever rank 0 says; for the induction a credit of any size is
  enough.
* Several decisions travel in one message (whatever credit allowed at once), and nobody answers: no round trip per
  partition. The message for what comes next travels while the credit's worth of data is in flight.
* Over long ways, and with parameter servers, messages go from rank 0 to each follower, which expects several ahead:
  gloo sends what it knows to be expected, and a broadcast on its way keeps the next one from being expected, a round
  trip for each. Where links have queues, as to and from servers, that is 0.1 s also over a short way, by which all
  others launch a part later than rank 0, and its sum waits. What one sends to one other on a group under one number
  arrives in order, so all of the above holds.

With collectives of others. What is assumed is what DDP asks for, whose own are on one communicator: every rank submits
the same in the same order, gradients (in DDP's hook) and foreign collectives alike; the *program*. Each may wait where
it likes, for what it has submitted before. Rank 0 announces a foreign one when all ranks have submitted it, and no
gradient before a foreign one that it has submitted earlier. Let L be the sequence that rank 0 announces.

1. What is in L completes. Take the oldest that has not. All older ones have, on every rank, so credit is free, and its
   turn has come. It is launched where it has been submitted: if it is foreign, that is so on all ranks. If it is a
   gradient, suppose a rank never submits it, and let y be what that rank waits for instead. If y is foreign, rank 0
   has submitted it first too, so it is older in L, and has completed. If y is a gradient: a backward pass waits for
   none of its own step, and begins on rank 0 when all of the step before has arrived there, so again y is older in L.
   What is of a later phase (gathers, norms) follows from what has ended, and needs no training thread.
2. What is waited for comes into L. Of all threads that wait for good take the one that is least far in the program. It
   waits for y, which every rank has thus submitted, and all that is before y. So rank 0 announces the foreign ones up
   to y, nothing holds up a gradient y, or what follows from it, and by 1 there is credit for it. A contradiction.

On a GPU the host's order is the device's, as all are on one communicator, whose kernels are on one stream; and a kernel
waits there for what was enqueued before its launch. So no kernel that waits for other ranks holds what an older one
needs, however few kernels run at once. ``python -m tests.launch_order.explore`` plays all this, and what goes wrong
without each rule.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta
from functools import partial
from itertools import chain

import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.completion import wait_in_slices
from lightning_bytescheduler.collectives.operations import broadcast_from_first
from lightning_bytescheduler.failures.standstill import break_connections
from lightning_bytescheduler.scheduler.order import AnnouncedOrder, Decision, LaneChoice, MixedOrder
from lightning_bytescheduler.scheduler.short_turns import prefer_short_turns
from lightning_bytescheduler.scheduler.task import SubCommTask, TaskKey

__all__ = ["DecidingOrder", "FollowingOrder"]

_CAPACITY = 24  # decisions per message: 25 records of 7 int64 fit one Ethernet frame
_FIELDS = 7  # of the key, then partition size, index, task size and lane
_CLOSE = -1
_EXPECTED = 16  # messages, where they are direct
_NUMBER = 1  # of all these messages
_UNTOLD = 2048  # messages that are kept until it is certain that they have left
_MOMENT_S = 0.5
_REST = (0,) * (_FIELDS - 1)
_EMPTY = array("q", bytes(8 * _FIELDS * (_CAPACITY + 1)))


class DecidingOrder(MixedOrder):
    """Rank 0's order: by priority, with foreign collectives; each batch told to the other ranks before it is started.

    Args:
        control: The scheduler's control group.
        on_error: Called with what the control group failed with; returns the error to raise instead.
        direct: Whether messages go to each follower, instead of being broadcast; the same on all ranks.
        lanes: Whether what is urgent may overtake on a lane of its own; needs lanes on all ranks.
    """

    def __init__(
        self,
        control: dist.ProcessGroup,
        on_error: Callable[[BaseException], BaseException] | None = None,
        *,
        direct: bool = False,
        lanes: bool = False,
    ) -> None:
        super().__init__()
        self._control = control
        self._on_error = on_error
        self._direct = direct
        self._lanes = LaneChoice() if lanes else None
        self._sent: deque[tuple[dist.Work, torch.Tensor]] = deque()  # kept alive until gloo has sent them

    def decided(self, batch: Sequence[SubCommTask]) -> None:
        """Broadcast the batch's decisions; returns without waiting for anyone."""
        if self._lanes is not None:
            for sub in batch:
                sub.lane = self._lanes.choose(sub)
        for first in range(0, len(batch), _CAPACITY):
            part = batch[first : first + _CAPACITY]
            records = [[len(part), *_REST]]
            records += [
                [*sub.parent.key, sub.parent.sub_tasks[0].size, sub.index, sub.parent.size, sub.lane] for sub in part
            ]
            self._send(chain.from_iterable(records))

    def close(self) -> None:
        """Tell the followers that no more decisions come."""
        for _ in range(_EXPECTED if self._direct else 1):  # whatever is expected comes
            self._send([_CLOSE])

    def wait_sent(self, timeout: float) -> bool:
        """Wait until every message has left; returns whether all did within ``timeout`` seconds."""
        deadline = time.monotonic() + timeout
        try:
            for work, _ in self._sent:
                work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except RuntimeError:
            return False
        self._sent.clear()
        return True

    def _send(self, numbers: Iterable[int]) -> None:
        fields = array("q", numbers)  # sent with every part: a tensor of lists takes ten times as long
        fields.extend(_EMPTY[len(fields) :])
        message = torch.frombuffer(fields, dtype=torch.int64)
        try:
            if self._direct:
                self._send_to_each(message)
            else:
                self._sent = deque((work, kept) for work, kept in self._sent if not work.is_completed())
                self._sent.append((broadcast_from_first(self._control, message), message))
        except RuntimeError as error:
            if self._on_error is None:
                raise
            raise self._on_error(error) from error

    def _send_to_each(self, message: torch.Tensor) -> None:
        self._sent.extend(
            (self._control.send([message], rank, _NUMBER), message) for rank in range(1, self._control.size())
        )
        while len(self._sent) > _UNTOLD * self._control.size():
            self._sent.popleft()[0].wait()  # gloo does not say otherwise that a message has left; this one has


class FollowingOrder(AnnouncedOrder):
    """Every other rank's order: what rank 0 announces, received by a thread of its own.

    The thread, ``bytescheduler-launch-order``, ends on rank 0's closing message, on an error of the control group,
    or within half a second of :meth:`stop`.

    Args:
        control: The scheduler's control group.
        on_error: Called on the thread when the control group fails.
        direct: Whether messages come from rank 0 to each, instead of being broadcast; the same on all ranks.
    """

    def __init__(
        self, control: dist.ProcessGroup, on_error: Callable[[BaseException], object], *, direct: bool = False
    ) -> None:
        super().__init__()
        self._control = control
        self._on_error = on_error
        self._direct = direct
        self._expected: deque[tuple[dist.Work, torch.Tensor]] = deque()
        self._stopping = threading.Event()
        self._closed = False
        self._update_order: Callable[[Callable[[], None]], None] | None = None
        self._thread = threading.Thread(target=self._receive, name="bytescheduler-launch-order", daemon=True)

    def start(self, update_order: Callable[[Callable[[], None]], None]) -> None:
        """Begin to receive; ``update_order`` is :meth:`ByteCore.update_order` of the core this order serves."""
        self._update_order = update_order
        self._thread.start()

    def stop(self, timeout: float) -> bool:
        """End the thread; returns whether it ended within ``timeout`` seconds."""
        self._stopping.set()
        if self._thread.ident is not None:
            self._thread.join(min(timeout, _MOMENT_S))
            if self._direct and self._thread.is_alive():
                break_connections(self._control)  # a single message is not waited for in slices
            self._thread.join(timeout)
        return not self._thread.is_alive()

    @property
    def closed(self) -> bool:
        """Whether rank 0's closing message has come."""
        return self._closed

    def wait_closed(self, timeout: float) -> bool:
        """Wait for rank 0's closing message; returns whether the thread ended within ``timeout`` seconds."""
        self._thread.join(timeout)
        return not self._thread.is_alive()

    def take(self, records: list[list[int]], update_order: Callable[[Callable[[], None]], None]) -> bool:
        """Do what one message of rank 0 says; returns whether more are to come.

        Args:
            records: The message, as it was sent.
            update_order: See :meth:`start`.
        """
        count = records[0][0]
        if count == _CLOSE:
            return False
        decisions = [
            Decision(TaskKey(step, phase, bucket), size, index, task_size, lane)
            for step, phase, bucket, size, index, task_size, lane in records[1 : 1 + count]
        ]
        update_order(partial(self.announce, decisions))
        return True

    def _receive(self) -> None:
        update_order = self._update_order
        if update_order is None:
            return
        prefer_short_turns()
        try:
            while True:
                message = self._next_message()
                if message is None:
                    return
                if not self.take(message.tolist(), update_order):
                    for work, _ in self._expected:
                        work.wait()
                    self._closed = True
                    return
        except BaseException as error:
            if not self._stopping.is_set():
                self._on_error(error)

    def _next_message(self) -> torch.Tensor | None:
        """Wait for it; ``None`` if the thread was stopped meanwhile."""
        if not self._direct:
            message = _room()
            return message if wait_in_slices(broadcast_from_first(self._control, message), self._stopping) else None
        while len(self._expected) < _EXPECTED:
            message = _room()
            self._expected.append((self._control.recv([message], 0, _NUMBER), message))
        work, message = self._expected.popleft()
        work.wait()
        return message


def _room() -> torch.Tensor:
    return torch.zeros((_CAPACITY + 1, _FIELDS), dtype=torch.int64)
