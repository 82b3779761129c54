"""Push and pull of sums that the ranks of a node form first: the group ``"node"``, as in BytePS.

For each part one rank of a node is the *pusher*. The others send it their values. It sums them in the order of the
node's ranks, pushes the sum, and sends them the pulled result. So a part leaves a machine once, however many ranks are
on it. Pushers of a part have the same number on each node and alternate by bytes, so that each rank pushes its share.
The ranks with one number, one on each node, are a *rail*: among them and the servers everything is as in
``push_pull.py``, with nodes in place of workers. All ranks launch the same parts in the same order, so they choose the
same pusher.

Each stage of a part has its own queue and thread, so that one part is summed while another is pushed and a third one
pulled:

* *local reduce*: on ``bytescheduler-local-reduce``, in order of launch;
* *push*, *pull* and *sum*, see ``push_pull.py``;
* *local broadcast*: begun by the thread that waits for the pull, and awaited as a second half (``completion.py``),
  during the next pull; on the other ranks by one thread for each pusher, ``bytescheduler-pulls-from-N``.

Values are scaled by 1/n before the first sum, as in ``operations.py``. So two ranks of one node, or two nodes of one
rank, get DDP's bits. More ranks get the sum of nodes' sums, ``(a + b) + (c + d)``, the same in each run and with any
number of servers, where :class:`PushPull` has ``((a + b) + c) + d``.

Why no rank waits forever: take the oldest part that has not ended on all ranks. Each rank has credit to launch it and
does, as all older ones have ended. A launch posts all of this rank's sends and receives for a part at once, so what
ranks of a node send for it arrives, whatever younger parts are in flight. Everything before it on the summing thread
has been launched, with credit that all ranks have or will have: a part that has ended on one rank needs no further
stage elsewhere. So it is summed, too, and pushed, and ``push_pull.py`` holds from there. The result is sent to ranks
that have posted a receive at launch.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.groups import SchedulerGroups, abandon
from lightning_bytescheduler.collectives.operations import Passage, Pull, StartedOperation
from lightning_bytescheduler.collectives.push_pull import PlacedParts, PushPull
from lightning_bytescheduler.collectives.sending_turns import PATIENCE
from lightning_bytescheduler.collectives.summing_server import Coming
from lightning_bytescheduler.exceptions import UnsupportedError
from lightning_bytescheduler.scheduler.threads import WorkThread

__all__ = ["NodeLayout", "NodePushPull", "agree_on_nodes", "each_alone", "lay_out"]

_STOP_S = 2.0
_WAY_OUT = "Leave group out: then each rank pushes for itself."


class NodePushPull(PushPull):
    """One rank's side; see the module.

    Args:
        group: Group of this rank's rail: its rank on each node, then the spare servers; gloo.
        local: The ranks of this node, more than one; gloo. Both groups have no other use.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        local: dist.ProcessGroup,
        ranks: Sequence[int],
        shares: PlacedParts,
        timeout: timedelta,
    ) -> None:
        super().__init__(group, ranks, shares, timeout)
        self.local = local
        self._own = local.rank()
        self._others = [rank for rank in range(local.size()) if rank != self._own]
        self._pushers = PlacedParts(workers=local.size(), servers=0)
        self._averaged *= local.size()
        # After an error it begins nothing more. A waiter for a part finds the cause and stops the scheduler, which
        # breaks the connections. Broken here, they would first fail on other threads, with a less specific error.
        self._local_reduce = WorkThread("local-reduce")

    def start(self, part: torch.Tensor, number: int) -> StartedOperation:
        """See :class:`PushPull`."""
        pusher = self._pushers.next(part.nbytes)
        return self._push_for_all(part, number) if pusher == self._own else self._give(part, number, pusher)

    def _give(self, part: torch.Tensor, number: int, pusher: int) -> StartedOperation:
        """Send this rank's part to its pusher; ends when the result is in place."""
        passage = Passage(where={"pusher": pusher}, moved=part.nbytes)
        # The receive is posted first, as the pusher answers once it has this rank's values.
        back = Pull(self.local.recv([part], pusher, number), self._timeout)
        sent = self.local.send([part], pusher, number)

        def left() -> None:
            sent.wait(PATIENCE)
            passage.reduced = time.perf_counter()

        self._local_reduce.put(left, lambda error: None)
        return StartedOperation([back], messages=True, lane=f"from-{pusher}", passage=passage)

    def _push_for_all(self, part: torch.Tensor, number: int) -> StartedOperation:
        """Sum the node's values of a part, push the sum, and send the result to the node's ranks."""
        server = self.next_server(part.nbytes)
        passage = self.passage(server, part, moved=part.nbytes * len(self._others))
        rooms = {rank: torch.empty_like(part) for rank in self._others}
        works = {rank: self.local.recv([room], rank, number) for rank, room in rooms.items()}
        pushed = Coming()

        def add_up_and_push() -> None:
            total: torch.Tensor | None = None
            for rank in range(self.local.size()):
                if rank in works:
                    works[rank].wait(PATIENCE)
                value = rooms.get(rank, part)
                if total is None:
                    total = value
                else:  # the sum of two has the same bits in either order
                    total = part.add_(total) if rank == self._own else total.add_(value)
            passage.reduced = time.perf_counter()
            pushed.end(then=self.push(part, number, server, passage))

        def hand_on() -> StartedOperation:
            passage.came = time.perf_counter()
            sent = [Pull(self.local.send([part], rank, number), self._timeout) for rank in self._others]
            return StartedOperation(sent, messages=True, closing=True)

        self._local_reduce.put(add_up_and_push, pushed.end)
        return StartedOperation([pushed], hand_on, messages=True, lane=server, passage=passage)

    def close(self, *, idle: bool) -> None:
        """See :class:`PushPull`. If all is idle, no rank of this node waits for this one."""
        if not idle:
            abandon(self.local)
        super().close(idle=idle)
        self._local_reduce.stop(_STOP_S)


@dataclass(frozen=True, slots=True)
class NodeLayout:
    """The ranks of each node, the same on all ranks but for ``rank``.

    Attributes:
        nodes: The ranks of each node, equally many on each, by their number there; ordered by their first ranks.
    """

    nodes: tuple[tuple[int, ...], ...]
    rank: int

    @property
    def node(self) -> int:
        """This rank's node."""
        return next(number for number, ranks in enumerate(self.nodes) if self.rank in ranks)

    @property
    def local_rank(self) -> int:
        """This rank's number on its node, which is also its rail."""
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
    """Return the layout of ranks from each rank's own statement.

    Args:
        rank: This process's rank.
        places: By rank: its node, its number there, and the number of ranks started there.

    Raises:
        UnsupportedError: On all ranks alike, if the statements contradict each other, or nodes have different numbers
            of ranks.
    """
    there = [(node, local, one) for one, (node, local, _) in enumerate(places)]
    nodes = {node: sorted(one[1:] for one in there if one[0] == node) for node, _, _ in sorted(there)}
    if len({len(ranks) for ranks in nodes.values()}) > 1:
        counts = ", ".join(f"node {node} has {len(ranks)}" for node, ranks in nodes.items())
        raise UnsupportedError(f"The group 'node' needs as many ranks on each node, but {counts}. {_WAY_OUT}")
    for one, (node, local, size) in enumerate(places):
        numbers = [number for number, _ in nodes[node]]
        if numbers != [*range(size)]:
            raise UnsupportedError(
                f"The group 'node' needs to know which ranks are on which node, but rank {one} says that it is number "
                f"{local} of {size} on node {node}, where the ranks say that they are numbers "
                f"{', '.join(map(str, numbers))}. The launcher tells them by LOCAL_RANK, and NODE_RANK or GROUP_RANK, "
                "and devices=... and num_nodes=... of the Trainer are to be what it has started: see that these are "
                f"right on each machine. {_WAY_OUT}"
            )
    return NodeLayout(tuple(sorted(tuple(one for _, one in ranks) for ranks in nodes.values())), rank)


def each_alone(groups: SchedulerGroups) -> NodeLayout:
    """Return the layout in which each rank pushes for itself."""
    return lay_out(groups.rank, [(one, 0, 1) for one in range(groups.world_size)])


def agree_on_nodes(groups: SchedulerGroups, place: Sequence[int]) -> NodeLayout:
    """Exchange the places of all ranks; every rank calls this at the same point.

    Raises:
        UnsupportedError: See :func:`lay_out`.
        RuntimeError: If a rank has died.
    """
    own = torch.tensor(place, device="cpu")
    places = [torch.zeros_like(own) for _ in range(groups.world_size)]
    dist.all_gather(places, own, group=groups.control)
    return lay_out(groups.rank, [(node, local, size) for node, local, size in (one.tolist() for one in places)])
