"""What the ranks of one machine send each other of a part: to the one that pushes it, and what comes of it back.

Of each part one rank of a node is the *pusher*, see ``node_push_pull.py``. The others give it what they have; it takes
that in the order of ranks, on a thread of its own, ``bytescheduler-local-reduce``, in the order in which parts come
here. Nobody else waits for a message of the node there.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.operations import Pull, StartedOperation
from lightning_bytescheduler.collectives.sending_turns import PATIENCE
from lightning_bytescheduler.collectives.summing_server import OwnSum, abandon
from lightning_bytescheduler.scheduler.short_turns import prefer_short_turns
from lightning_bytescheduler.scheduler.task import NodePassage

__all__ = ["NodeLinks", "Pushed"]

_STOP_S = 2.0


class Pushed:
    """What is pushed later, as something to wait for: until it has been pulled."""

    def __init__(self) -> None:
        self._begun = threading.Event()
        self._work: OwnSum | Pull | None = None
        self._failure: BaseException | None = None

    def begin(self, work: OwnSum | Pull) -> None:
        """It is under way."""
        self._work = work
        self._begun.set()

    def fail(self, error: BaseException) -> None:
        """It never will be."""
        self._failure = error
        self._begun.set()

    def wait(self) -> bool:
        """As of ``torch.distributed.Work``; ends when the thread that begins it does, at the latest."""
        self._begun.wait()
        if self._work is None:
            raise self._failure or RuntimeError("A part was not pushed.")
        return self._work.wait()


class _LocalReduce:
    """The stage of that name, on a thread of its own, one part after the other.

    When something fails, nothing is begun after that. Whoever waits for a part finds out and stops the scheduler, which
    breaks the connections: broken here, they would fail on other threads first, with less of a cause.
    """

    def __init__(self) -> None:
        self._parts: queue.SimpleQueue[tuple[Callable[[], None], Callable[[BaseException], None]] | None] = (
            queue.SimpleQueue()
        )
        self._thread = threading.Thread(target=self._run, name="bytescheduler-local-reduce", daemon=True)
        self._thread.start()

    def put(self, work: Callable[[], None], fail: Callable[[BaseException], None] = lambda _: None) -> None:
        """Have ``work`` done in its turn, or ``fail`` told why it is not."""
        self._parts.put((work, fail))

    def stop(self, timeout: float) -> None:
        """Do what waits, and end the thread; what it waits for ends when the group's connections do."""
        self._parts.put(None)
        self._thread.join(timeout)

    def _run(self) -> None:
        prefer_short_turns()
        failure: BaseException | None = None
        while (part := self._parts.get()) is not None:
            work, fail = part
            if failure is None:
                try:
                    work()
                except BaseException as error:
                    failure = error
            if failure is not None:
                fail(failure)


class NodeLinks:
    """One rank's connections to the others of its node.

    Args:
        group: The ranks of the node, more than one; gloo, and used by nothing else.
        timeout: Longest wait for what comes back.

    Attributes:
        rank: This one's number on the node.
        others: The others'.
    """

    def __init__(self, group: dist.ProcessGroup, timeout: timedelta) -> None:
        self._group = group
        self._timeout = timeout
        self.rank = group.rank()
        self.others = tuple(rank for rank in range(group.size()) if rank != self.rank)
        self._local_reduce = _LocalReduce()

    @property
    def size(self) -> int:
        """Ranks of the node."""
        return len(self.others) + 1

    def give(
        self, pusher: int, number: int, own: torch.Tensor, room: torch.Tensor, passage: NodePassage
    ) -> StartedOperation:
        """Send what this rank has of a part to who pushes it; ends when what has come of it is there.

        Args:
            pusher: Number on the node.
            number: Of the operation.
            own: What is sent.
            room: Where what comes back is put; may be ``own``, and larger than that is.
            passage: Told when ``own`` has left.
        """
        # The receive goes first: the pusher answers when it has all of what this rank sends.
        back = Pull(self._group.recv([room], pusher, number), self._timeout)
        sent = self._group.send([own], pusher, number)

        def left() -> None:
            sent.wait(PATIENCE)
            passage.reduced = time.perf_counter()

        self._local_reduce.put(left)
        return StartedOperation([back], messages=True, lane=f"from-{pusher}", passage=passage)

    def take(
        self, number: int, rooms: Sequence[torch.Tensor], push: Callable[[Iterator[torch.Tensor]], OwnSum | Pull]
    ) -> Pushed:
        """Receive what the others have of a part that this rank pushes.

        Args:
            number: Of the operation.
            rooms: Where what each of :attr:`others` sends is put.
            push: Called on the thread, with that as it comes, in the order of ranks; begins the push.

        Returns:
            What ends when the part has been pulled.
        """
        works = [self._group.recv([room], rank, number) for rank, room in zip(self.others, rooms, strict=True)]
        pushed = Pushed()

        def arriving() -> Iterator[torch.Tensor]:
            for room, work in zip(rooms, works, strict=True):
                work.wait(PATIENCE)
                yield room

        self._local_reduce.put(lambda: pushed.begin(push(arriving())), pushed.fail)
        return pushed

    def hand_on(self, number: int, part: torch.Tensor) -> StartedOperation:
        """Send what was pulled to the others."""
        sent = [Pull(self._group.send([part], rank, number), self._timeout) for rank in self.others]
        return StartedOperation(sent, messages=True, closing=True)

    def abandon(self) -> None:
        """Break the connections."""
        abandon(self._group)

    def stop(self) -> None:
        """End the thread, once all is idle or the connections are broken; bounded."""
        self._local_reduce.stop(_STOP_S)
