"""One launch order on every rank: rank 0 decides, the others follow.

Why the ranks agree, and why no rank waits forever:

* Collectives are matched by the order in which each rank launches them on a group. A thread that launches on the data
  group holds the core's launching lock from popping a batch until its last launch. So the launches are exactly the
  sequence that the order pops.
* Rank 0 pops by priority and credit. Before it starts a batch it broadcasts the batch's decisions on the control group.
  Broadcasts on one group arrive in order, so every follower has the same sequence and pops nothing else.
* A task is decided only when its data is complete on rank 0. A follower launches it when its own data is complete,
  which needs only its own backward pass: backward never waits for gradients of the same step.
* Take the oldest collective that has not completed. Rank 0 launches it right after its decision, before all younger
  ones. Each follower will launch it: everything older has completed there, so its credit is free for at least one
  sub-task, its data will be complete, and no younger one is popped before it. So it completes, and by induction all do.
* Other code's collectives (``routing_group.py``) are in the same sequence, where they are routed. A rank may wait for
  gradients before it submits one, so the induction needs more; see below.
* Rank 0 sends a part's lane (``LaneChoice``, for high latency) with the decision. Each lane is a separate group. Its
  launches are a subsequence of the one sequence, so they are one sequence on all ranks too. An overtaking part may take
  a second credit; followers do not compare its priority. The induction holds for a credit of any size.
* Several decisions travel in one message (all that credit allowed at once), without an answer: no round trip per
  partition. The next message travels while the data in flight uses up the credit. All ranks have to know the length of
  a broadcast. So the first one has room for four decisions, and if there are more, a second one brings the rest.
* With high latency and with parameter servers, rank 0 sends messages to each follower separately, and followers post
  several receives ahead. Gloo sends a message only when it knows of its receive, and a broadcast in flight delays the
  next receive by a round trip. With queues on links, as with servers, that would delay every follower's launches.
  Messages between two ranks on one group under one number arrive in order, so all of the above holds.

With other code's collectives. As DDP itself requires on one communicator, every rank submits the same gradients (in
DDP's hook) and foreign collectives in the same order; call this the *program*. A rank may wait anywhere for something
that it has submitted before. Rank 0 announces a foreign collective when all ranks have submitted it, and
no gradient before a foreign collective that it has submitted earlier. Let L be the sequence that rank 0 announces.

1. Everything in L completes. Take the oldest that has not. All older ones have completed on every rank, so credit is
  free and its turn has come. It is launched where it has been submitted. If it is foreign, all ranks have submitted it.
  If it is a gradient, suppose a rank never submits it, and let y be what that rank waits for instead. If y is foreign,
  rank 0 has also submitted it first, so it is older in L and has completed. If y is a gradient: a backward pass waits
  for none of its own step, and begins on rank 0 when all of the previous step has arrived there, so again y is older in
  L. Operations of a later phase (gathers, norms) follow from ended ones and need no training thread.
2. Everything awaited comes into L. Of all threads that wait forever take the one that is least far in the program. It
  waits for y, so every rank has submitted y and all before it. So rank 0 announces the foreign ones up to y, nothing
  holds up a gradient y or what follows from it, and by 1 there is credit for it. A contradiction.

On a GPU the host's order is the device's, as everything is on one communicator, whose kernels are on one stream. A
kernel waits there only for work enqueued before its launch. So no kernel that waits for other ranks holds what an older
one needs, however few kernels run at once. ``python -m tests.launch_order.explore`` simulates all this, and what fails
without each rule.
"""

from __future__ import annotations

import threading
import time
from array import array
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.completion import wait_in_slices
from lightning_bytescheduler.collectives.operations import PATIENCE, broadcast_from_first
from lightning_bytescheduler.failures.standstill import break_connections
from lightning_bytescheduler.scheduler.order import AnnouncedOrder, Decision, LaneChoice, MixedOrder
from lightning_bytescheduler.scheduler.task import SubCommTask, TaskKey
from lightning_bytescheduler.scheduler.threads import start_thread

__all__ = ["DecidingOrder", "FollowingOrder", "order_of"]

_CAPACITY = 24  # decisions per message, which fit one Ethernet frame
_FIELDS = 7  # int64 numbers of a decision: three of the key, partition size, index, task size, lane
_SHORTEST = 1 + 4 * _FIELDS  # numbers of a first broadcast: how many decisions follow, and the first of them
_CLOSE = -1
_EXPECTED = 16  # receives that are posted ahead for direct messages
_NUMBER = 1  # of all direct messages
_UNTOLD = 2048  # messages kept until they have certainly left
_NOTHING = array("q", bytes(8 * _SHORTEST))
_MOMENT_S = 0.5
_END_S = 5.0


class DecidingOrder(MixedOrder):
    """Rank 0's order: by priority, with foreign collectives; it sends each batch's decisions before the batch starts.

    Args:
        on_error: Called with errors of the control group; returns the error to raise instead.
        direct: Whether messages go to each follower instead of being broadcast; the same on all ranks.
        lanes: Whether urgent parts may overtake on a second lane; needs lanes on all ranks.
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
        """Send the batch's decisions without waiting."""
        if self._lanes is not None:
            for sub in batch:
                sub.lane = self._lanes.choose(sub)
        for first in range(0, len(batch), _CAPACITY):
            part = batch[first : first + _CAPACITY]
            numbers = array(
                "q", [len(part)]
            )  # this runs for every part, and torch.tensor() of lists is ten times slower
            for sub in part:
                task = sub.parent
                numbers.extend((*task.key, task.sub_tasks[0].size, sub.index, task.size, sub.lane))
            self._send(numbers)

    def start(self, update_order: Callable[[Callable[[], None]], None]) -> None:
        """See :class:`FollowingOrder`; here the priorities decide."""

    def end(self, timeout: float, hopeless: Callable[[], bool] = lambda: False) -> bool:
        """Tell the followers that no more decisions come; returns whether the control group is idle.

        Args:
            timeout: Longest wait, in seconds, until every message has left; 5 seconds at most.
            hopeless: For :class:`FollowingOrder`; ignored here.
        """
        deadline = time.monotonic() + min(timeout, _END_S)
        for _ in range(_EXPECTED if self._direct else 1):  # one for each receive that a follower has posted
            self._send(array("q", [_CLOSE]))
        try:
            for work, _ in self._sent:
                work.wait(timedelta(seconds=max(0.001, deadline - time.monotonic())))
        except RuntimeError:
            return False
        self._sent.clear()
        return True

    def _send(self, numbers: array[int]) -> None:
        try:
            if self._direct:
                self._send_to_each(torch.frombuffer(numbers, dtype=torch.int64))
                return
            numbers.extend(_NOTHING[len(numbers) :])
            message = torch.frombuffer(numbers, dtype=torch.int64)
            self._sent = deque((work, kept) for work, kept in self._sent if not work.is_completed())
            self._sent.append((broadcast_from_first(self._control, message[:_SHORTEST]), message))
            if len(numbers) > _SHORTEST:
                self._sent.append((broadcast_from_first(self._control, message[_SHORTEST:]), message))
        except RuntimeError as error:
            if self._on_error is None:
                raise
            raise self._on_error(error) from error

    def _send_to_each(self, message: torch.Tensor) -> None:
        self._sent.extend(
            (self._control.send([message], rank, _NUMBER), message) for rank in range(1, self._control.size())
        )
        while len(self._sent) > _UNTOLD * self._control.size():
            # Gloo does not report that a message has left, but this one certainly has.
            self._sent.popleft()[0].wait(PATIENCE)


class FollowingOrder(AnnouncedOrder):
    """The order of all other ranks: what rank 0 announces, received on a separate thread.

    The thread, ``bytescheduler-launch-order``, ends on rank 0's closing message, on an error of the control group, or
    soon after :meth:`end` has waited in vain.

    Args:
        direct: Whether rank 0 sends messages to each rank instead of broadcasting; the same on all ranks.
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
        self._closed = False  # rank 0's closing message has come
        self._thread: threading.Thread | None = None

    def start(self, update_order: Callable[[Callable[[], None]], None]) -> None:
        """Begin to receive; ``update_order`` is :meth:`ByteCore.update_order` of this order's core."""
        self._thread = start_thread("launch-order", partial(self._receive, update_order))

    def end(self, timeout: float, hopeless: Callable[[], bool] = lambda: False) -> bool:
        """Await rank 0's closing message, and end the thread; returns whether the control group is idle.

        Args:
            timeout: Longest wait, in seconds. Rank 0 may come to its end much later than this rank.
            hopeless: Called regularly; returns whether the message will never come. A receive cannot be cancelled.
        """
        deadline, thread = time.monotonic() + timeout, self._thread
        if thread is None:
            return False
        while thread.is_alive() and time.monotonic() < deadline and not hopeless():
            thread.join(_MOMENT_S / 2)
        closed = self._closed
        self._stopping.set()
        thread.join(_MOMENT_S)
        if self._direct and thread.is_alive():
            break_connections(self._control)  # a single message cannot be awaited in slices
        thread.join(_END_S)
        return closed

    def take(self, numbers: list[int], update_order: Callable[[Callable[[], None]], None]) -> bool:
        """Handle one message of rank 0; returns whether more will come."""
        count = numbers[0]
        if count == _CLOSE:
            return False
        decisions = []
        for first in range(1, 1 + count * _FIELDS, _FIELDS):
            step, phase, bucket, size, index, task_size, lane = numbers[first : first + _FIELDS]
            decisions.append(Decision(TaskKey(step, phase, bucket), size, index, task_size, lane))
        update_order(partial(self.announce, decisions))
        return True

    def _receive(self, update_order: Callable[[Callable[[], None]], None]) -> None:
        try:
            while True:
                numbers = self._next_message()
                if not numbers:
                    return
                if not self.take(numbers, update_order):
                    for work, _ in self._expected:
                        work.wait(PATIENCE)
                    self._closed = True
                    return
        except BaseException as error:
            if not self._stopping.is_set():
                self._on_error(error)

    def _next_message(self) -> list[int]:
        """Return the numbers of rank 0's next message; none if the thread is to end."""
        if not self._direct:
            numbers = self._broadcast(_SHORTEST)
            more = 1 + numbers[0] * _FIELDS - _SHORTEST if numbers else 0
            rest = self._broadcast(more) if more > 0 else []
            return numbers + rest if len(rest) == max(more, 0) else []
        while len(self._expected) < _EXPECTED:
            room = torch.zeros(1 + _CAPACITY * _FIELDS, dtype=torch.int64)  # gloo accepts shorter messages, too
            self._expected.append((self._control.recv([room], 0, _NUMBER), room))
        work, room = self._expected.popleft()
        work.wait(PATIENCE)
        return room.tolist()

    def _broadcast(self, length: int) -> list[int]:
        message = torch.zeros(length, dtype=torch.int64)
        ended = wait_in_slices(broadcast_from_first(self._control, message), self._stopping)
        return message.tolist() if ended else []


def order_of(
    control: dist.ProcessGroup,
    on_error: Callable[[BaseException], BaseException],
    *,
    direct: bool,
    lanes: bool = False,
) -> DecidingOrder | FollowingOrder:
    """Return this rank's order; see the classes."""
    if control.rank() == 0:
        return DecidingOrder(control, on_error, direct=direct, lanes=lanes)
    return FollowingOrder(control, on_error, direct=direct)
