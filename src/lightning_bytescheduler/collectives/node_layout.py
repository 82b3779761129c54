"""Which ranks are on one machine, for what they do together before anything goes over the network.

Ranks of one machine, a *node*, are numbered on it, from 0. The ranks of one number, one on each node, are a *rail*:
among them and the servers travels what they have of the nodes' sums.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.groups import SchedulerGroups
from lightning_bytescheduler.exceptions import UnsupportedError

__all__ = ["NodeLayout", "RankOnNode", "agree_on_nodes", "lay_out"]

_WAY_OUT = "Leave group out: then each rank pushes for itself."


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
