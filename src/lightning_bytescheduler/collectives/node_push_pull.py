"""Push and pull of sums that the ranks of a node have formed before: ``group="node"``, as in BytePS.

Of each part one rank of a node is the *pusher*. The others send it what they have, it adds that up in the order of the
node's ranks, pushes the sum, and sends them what it pulls. So a part leaves a machine once, however many ranks are on
it. Pushers of a part have the same number on each node, and take turns by bytes: each rank pushes its share. Ranks of
one number are a *rail* (``node_layout.py``): among them and the servers things are as in ``push_pull.py``, with nodes
in place of workers. On all ranks the same parts are launched in the same order, so they come to the same pusher.

The stages of a part, each with a queue and a thread of its own, so that one part is added up here while another is
pushed and a third one pulled; what does not apply is left out:

* *local reduce*: on ``bytescheduler-local-reduce``, in the order of launches;
* *push*, *pull* and *sum*, see ``push_pull.py``;
* *local broadcast*: begun where the pull is waited for, and waited for on ``bytescheduler-local-broadcast``, with the
  next pull under way; on the other ranks by one thread for each pusher, ``bytescheduler-pulls-from-N``.

Values are scaled by 1/n before the first sum, as in ``operations.py``. So two ranks of one node, or two nodes of one
rank, get DDP's bits; more get the sum of nodes' sums, ``(a + b) + (c + d)``, the same in each run and with any number
of servers, where :class:`PushPull` has ``((a + b) + c) + d``.

Why nobody waits forever: take the oldest part that has not ended on all ranks. Each rank has credit to launch it, and
does: all older ones have ended. A launch posts all sends and receives that this rank has to post for a part at once,
so what ranks of a node send for it arrives, whatever younger parts are under way. Where it is added up, it is the
first of those that have not been: it is pushed. What ``push_pull.py`` says of pushes holds for it from there. What is
pulled is sent to ranks that have posted a receive for it, at their launch.
"""

from __future__ import annotations

import queue
import threading
import time
from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial

import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.operations import StartedOperation
from lightning_bytescheduler.collectives.push_pull import ByteShares, Pull, PushPull
from lightning_bytescheduler.collectives.sending_turns import PATIENCE
from lightning_bytescheduler.collectives.summing_server import OwnSum, abandon
from lightning_bytescheduler.scheduler.passage import NodePassage
from lightning_bytescheduler.scheduler.short_turns import prefer_short_turns

__all__ = ["NodePushPull"]

_STOP_S = 2.0


class _Pushed:
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
    """The stage of that name, in the order of launches; on a thread of its own.

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


class NodePushPull(PushPull):
    """One rank's side; see the module.

    Args:
        group: Of this rank's rail: its rank on each node, then the spare servers; gloo.
        local: The ranks of this node, more than one; gloo. Both are used by nothing else.
        workers: Nodes.
        servers: k, no more than that.
        shares: Says which server has a part of this rail next; by bytes when left out.
        ranks: Those of the rail, as errors name them.
        timeout: Longest wait for a sum.
    """

    hands_on = True

    def __init__(
        self,
        group: dist.ProcessGroup,
        local: dist.ProcessGroup,
        *,
        workers: int,
        servers: int,
        shares: ByteShares | None = None,
        ranks: Sequence[int] = (),
        timeout: timedelta = timedelta(minutes=30),
    ) -> None:
        super().__init__(group, workers=workers, servers=servers, shares=shares, ranks=ranks, timeout=timeout)
        self._local = local
        self._local_rank, self._local_size = local.rank(), local.size()
        self._others = [rank for rank in range(self._local_size) if rank != self._local_rank]
        self._pushers = ByteShares((1.0 / self._local_size,) * self._local_size)
        self._ranks_in_all = workers * self._local_size
        self._local_reduce = _LocalReduce()

    @property
    def wire_share(self) -> float:
        """What a rank sends over the network per byte of a gradient, on average."""
        return super().wire_share / self._local_size

    @property
    def ranks_in_all(self) -> int:
        """See :class:`PushPull`."""
        return self._ranks_in_all

    def start(self, part: torch.Tensor, number: int) -> StartedOperation:
        """See :class:`PushPull`."""
        pusher = self._pushers.next(part.nbytes)
        if pusher == self._local_rank:
            return self._reduce_and_push(part, number)
        passage = NodePassage(pusher=pusher, moved=part.nbytes)
        # The receive goes first: the pusher answers when it has all of what this rank sends.
        mean = Pull(self._local.recv([part], pusher, number), self._timeout)
        sent = self._local.send([part], pusher, number)

        def left() -> None:
            sent.wait(PATIENCE)
            passage.reduced = time.perf_counter()

        self._local_reduce.put(left)
        return StartedOperation([mean], messages=True, lane=f"from-{pusher}", passage=passage)

    def _reduce_and_push(self, part: torch.Tensor, number: int) -> StartedOperation:
        server = self.next_server(part.nbytes)
        away = not self.adds_up(server)
        passage = NodePassage(
            server=server, pushed=part.nbytes * away, pulled=part.nbytes * away, moved=part.nbytes * len(self._others)
        )
        received = [(rank, torch.empty_like(part)) for rank in self._others]
        works = [self._local.recv([one], rank, number) for rank, one in received]
        pushed = _Pushed()

        def add_up_and_push() -> None:
            before: torch.Tensor | None = None
            for (rank, one), work in zip(received, works, strict=True):
                work.wait(PATIENCE)
                if rank > self._local_rank:
                    _add(part, before)
                    before = one
                else:
                    before = one if before is None else before.add_(one)
            _add(part, before)
            passage.reduced = time.perf_counter()
            pushed.begin(self.push(part, number, server, passage))

        self._local_reduce.put(add_up_and_push, pushed.fail)
        hand_on = partial(self._hand_on, part, number, passage)
        return StartedOperation([pushed], hand_on, messages=True, lane=server, passage=passage)

    def _hand_on(self, part: torch.Tensor, number: int, passage: NodePassage) -> StartedOperation:
        passage.came = time.perf_counter()
        sent = [Pull(self._local.send([part], rank, number), self._timeout) for rank in self._others]
        return StartedOperation(sent, messages=True, closing=True)

    def close(self, *, idle: bool) -> None:
        """See :class:`PushPull`. Where all is idle, nobody on this node waits for anything from here."""
        if not idle:
            abandon(self._local)
        super().close(idle=idle)
        self._local_reduce.stop(_STOP_S)


def _add(part: torch.Tensor, before: torch.Tensor | None) -> None:
    """Add what ranks before have to ``part``: the sum of two has the same bits in either order."""
    if before is not None:
        part.add_(before)
