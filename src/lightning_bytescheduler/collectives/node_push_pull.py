"""Push and pull of sums that the ranks of a node have formed before: the group ``"node"``, as in BytePS.

Of each part one rank of a node is the *pusher*. The others send it what they have, it adds that up in the order of the
node's ranks, pushes the sum, and sends them what it pulls. So a part leaves a machine once, however many ranks are on
it. Pushers of a part have the same number on each node, and take turns by bytes: each rank pushes its share. Ranks of
one number, one on each node, are a *rail*: among them and the servers things are as in ``push_pull.py``, with nodes in
place of workers. On all ranks the same parts are launched in the same order, so they come to the same pusher.

The stages of a part, each with a queue and a thread of its own, so that one part is added up here while another is
pushed and a third one pulled; what does not apply is left out:

* *local reduce*: on ``bytescheduler-local-reduce``, in the order in which parts come there;
* *push*, *pull* and *sum*, see ``push_pull.py``;
* *local broadcast*: begun where the pull is waited for, and waited for on ``bytescheduler-local-broadcast``, with the
  next pull under way; on the other ranks by one thread for each pusher, ``bytescheduler-pulls-from-N``.

Values are scaled by 1/n before the first sum, as in ``operations.py``. So two ranks of one node, or two nodes of one
rank, get DDP's bits; more get the sum of nodes' sums, ``(a + b) + (c + d)``, the same in each run and with any number
of servers, where :class:`PushPull` has ``((a + b) + c) + d``.

Why nobody waits forever: take the oldest part that has not ended on all ranks. Each rank has credit to launch it, and
does: all older ones have ended. A launch posts all sends and receives that this rank has to post for a part at once. So
what ranks of a node send for it arrives, whatever younger parts are under way. Where it is added up, what comes before
it has been launched there, with credit that all ranks have or will have: what has ended on one rank waits for no stage
on any. So it is added up, too, and pushed. What ``push_pull.py`` says of pushes holds for it from there. What is pulled
is sent to ranks that have posted a receive for it, at their launch.

``placement``: which server has which part of a gradient, and a table of what each has had.

By default parts go by bytes: each to the server that is least full, measured by its share. BytePS's mixed mode goes by
the number of the bucket and of the part, so that a part is at one server for as long as sizes stay.
"""

from __future__ import annotations

import bisect
import itertools
import queue
import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from functools import cache
from typing import Protocol

import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.groups import SchedulerGroups
from lightning_bytescheduler.collectives.operations import Pull, StartedOperation
from lightning_bytescheduler.collectives.push_pull import ByteShares, PushPull
from lightning_bytescheduler.collectives.sending_turns import PATIENCE
from lightning_bytescheduler.collectives.summing_server import OwnSum, abandon
from lightning_bytescheduler.exceptions import UnsupportedError
from lightning_bytescheduler.scheduler.placement import Nodes, Placement, mixed_server, server_weights
from lightning_bytescheduler.scheduler.short_turns import prefer_short_turns
from lightning_bytescheduler.scheduler.task import NodePassage

__all__ = ["NodeLayout", "NodePushPull", "PlacedParts", "RankOnNode", "agree_on_nodes", "lay_out"]

_STOP_S = 2.0
_WAY_OUT = "Leave group out: then each rank pushes for itself."


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

    local: dist.ProcessGroup

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
        self.local = local
        self._own = local.rank()
        self._others = [rank for rank in range(local.size()) if rank != self._own]
        self._pushers = ByteShares((1.0 / local.size(),) * local.size())
        self._local_reduce = _LocalReduce()

    @property
    def wire_share(self) -> float:
        """What a rank sends over the network per byte of a gradient, on average."""
        return super().wire_share / self.local.size()

    @property
    def ranks_in_all(self) -> int:
        """See :class:`PushPull`."""
        return super().ranks_in_all * self.local.size()

    def start(self, part: torch.Tensor, number: int) -> StartedOperation:
        """See :class:`PushPull`."""
        pusher = self._pushers.next(part.nbytes)
        return self._push_for_all(part, number) if pusher == self._own else self._give(part, number, pusher)

    def _give(self, part: torch.Tensor, number: int, pusher: int) -> StartedOperation:
        """Send what this rank has of a part to who pushes it; ends when what has come of it is in its place."""
        passage = NodePassage(pusher=pusher, moved=part.nbytes)
        # The receive goes first: the pusher answers when it has all of what this rank sends.
        back = Pull(self.local.recv([part], pusher, number), self._timeout)
        sent = self.local.send([part], pusher, number)

        def left() -> None:
            sent.wait(PATIENCE)
            passage.reduced = time.perf_counter()

        self._local_reduce.put(left)
        return StartedOperation([back], messages=True, lane=f"from-{pusher}", passage=passage)

    def _push_for_all(self, part: torch.Tensor, number: int) -> StartedOperation:
        """Add up what the node's ranks have of a part, push that, and send them what is pulled."""
        server = self.next_server(part.nbytes)
        travels = 0 if self.adds_up(server) else part.nbytes
        moved = part.nbytes * len(self._others)
        passage = NodePassage(server=server, pushed=travels, pulled=travels, moved=moved)
        rooms = [torch.empty_like(part) for _ in self._others]
        works = [self.local.recv([room], rank, number) for rank, room in zip(self._others, rooms, strict=True)]
        pushed = _Pushed()

        def add_up_and_push() -> None:
            before: torch.Tensor | None = None
            for rank, room, work in zip(self._others, rooms, works, strict=True):
                work.wait(PATIENCE)
                if rank > self._own:
                    _add(part, before)
                    before = room
                else:
                    before = room if before is None else before.add_(room)
            _add(part, before)
            passage.reduced = time.perf_counter()
            pushed.begin(self.push(part, number, server, passage))

        def hand_on() -> StartedOperation:
            passage.came = time.perf_counter()
            sent = [Pull(self.local.send([part], rank, number), self._timeout) for rank in self._others]
            return StartedOperation(sent, messages=True, closing=True)

        self._local_reduce.put(add_up_and_push, pushed.fail)
        return StartedOperation([pushed], hand_on, messages=True, lane=server, passage=passage)

    def close(self, *, idle: bool) -> None:
        """See :class:`PushPull`. Where all is idle, nobody on this node waits for anything from here."""
        if not idle:
            abandon(self.local)
        super().close(idle=idle)
        self._local_reduce.stop(_STOP_S)


def _add(part: torch.Tensor, before: torch.Tensor | None) -> None:
    """Add what ranks before have to ``part``: the sum of two has the same bits in either order."""
    if before is not None:
        part.add_(before)


_BY_PART, _BY_TENSOR = 0.6180339887498949, 0.7548776662466927


class PlacedParts:
    """Places the parts of one fit.

    Args:
        how: One of ``scheduler.placement.PLACEMENTS``.
        workers: n.
        servers: k, no more than n.
        kept: Whether who adds up keeps something of a part, which counts for the bits: so that parts stay where they
            are, they are placed by their numbers alone, spread by the shares. In the order of launches one could be at
            another server in the next run.
        nodes: The ranks of each, where one of them pushes for all; these are the workers then.

    Attributes:
        shares: For :class:`PushPull`.
    """

    def __init__(self, how: str, *, workers: int, servers: int, kept: bool = False, nodes: Nodes = ()) -> None:
        self._how = how
        self._machines = workers, servers
        self._nodes = nodes
        weights = server_weights(workers, servers)
        place: Callable[[int, int], int] | None = _spread(weights) if kept else None
        if how == "mixed":
            place = cache(lambda tensor, part: mixed_server(tensor, part, workers, servers))
        self.shares = ByteShares(weights, place)

    @property
    def so_far(self) -> Placement:
        """Bytes that this worker has pushed to each server, all steps together."""
        return Placement(self._how, *self._machines, tuple(self.shares.bytes_per_server), self._nodes)


def _spread(weights: Sequence[float]) -> Callable[[int, int], int]:
    """Says which server has a part: multiples of an irrational number are spread more evenly than any hash."""
    edges = [*itertools.accumulate(weights)]
    last = max(server for server, weight in enumerate(weights) if weight)
    return lambda tensor, part: min(bisect.bisect(edges, (part * _BY_PART + tensor * _BY_TENSOR) % 1.0), last)


class RankOnNode(Protocol):
    """What Lightning's strategies know of where a rank is."""

    @property
    def node_rank(self) -> int:
        """Number of the node."""

    @property
    def local_rank(self) -> int:
        """Number of the rank on it."""

    @property
    def root_device(self) -> torch.device:
        """Where its gradients live."""

    @property
    def num_processes(self) -> int:
        """Ranks that were started there."""


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """Who is where, the same on all ranks but for ``rank``.

    Attributes:
        nodes: The ranks of each node, as many on each, by their number there.
        rank: This process's.
    """

    nodes: tuple[tuple[int, ...], ...]
    rank: int

    @property
    def node(self) -> int:
        """This rank's node."""
        return next(number for number, ranks in enumerate(self.nodes) if self.rank in ranks)

    @property
    def local_rank(self) -> int:
        """This rank's number on its node, which is that of its rail."""
        return self.nodes[self.node].index(self.rank)

    @property
    def local_size(self) -> int:
        """Ranks of each node."""
        return len(self.nodes[0])

    @property
    def rails(self) -> tuple[tuple[int, ...], ...]:
        """The ranks of each rail, by node."""
        return tuple(zip(*self.nodes, strict=True))


def lay_out(rank: int, places: Sequence[tuple[int, int, int]]) -> NodeLayout:
    """What follows from where each rank says that it is.

    Args:
        rank: This process's.
        places: By rank: number of its node, its number there, and how many were started there.

    Raises:
        UnsupportedError: On all ranks alike, if that is not true, or nodes have unequally many ranks.
    """
    found: dict[int, list[tuple[int, int]]] = {}
    for one, (node, local, _) in enumerate(places):
        found.setdefault(node, []).append((local, one))
    nodes = [sorted(found[node]) for node in sorted(found)]
    numbers = dict(zip(sorted(found), nodes, strict=True))
    for one, (node, local, size) in enumerate(places):
        locals_there = [number for number, _ in numbers[node]]
        if locals_there != list(range(len(locals_there))):
            raise UnsupportedError(
                f"The group 'node' needs to know which ranks are on which node, but rank {one} says that it is number "
                f"{local} on node {node}, where the ranks say that they are numbers {_listed(locals_there)}. The "
                "launcher tells them by LOCAL_RANK, and NODE_RANK or GROUP_RANK: see that these are right on each "
                f"machine. {_WAY_OUT}"
            )
        if size != len(locals_there) and len({len(ranks) for ranks in nodes}) == 1:
            raise UnsupportedError(
                f"The group 'node' needs to know which ranks are on which node, but rank {one} says that node {node} "
                f"has {size} ranks, and {len(locals_there)} say that they are there. See that devices=... and "
                f"num_nodes=... of the Trainer are what the launcher has started. {_WAY_OUT}"
            )
    if len({len(ranks) for ranks in nodes}) > 1:
        counts = ", ".join(f"node {node} has {len(ranks)}" for node, ranks in numbers.items())
        raise UnsupportedError(f"The group 'node' needs as many ranks on each node, but {counts}. {_WAY_OUT}")
    return NodeLayout(tuple(tuple(one for _, one in ranks) for ranks in nodes), rank)


def agree_on_nodes(groups: SchedulerGroups, place: RankOnNode) -> NodeLayout:
    """Learn where all ranks are; every rank calls this at the same point.

    Args:
        groups: The scheduler's, before anything is scheduled.
        place: Where this rank is.

    Raises:
        UnsupportedError: See :func:`lay_out`.
        RuntimeError: If a rank has died.
    """
    own = torch.tensor([place.node_rank, place.local_rank, place.num_processes], device="cpu")
    places = [torch.zeros_like(own) for _ in range(groups.world_size)]
    dist.all_gather(places, own, group=groups.control)
    return lay_out(groups.rank, [(node, local, size) for node, local, size in (one.tolist() for one in places)])


def _listed(numbers: Sequence[int]) -> str:
    return ", ".join(map(str, numbers))
