"""Process groups of workers that train on their own, launched as one job.

One rendezvous store joins all ranks. A worker is one of them, or several that follow one another and train together;
the first of those is its leader. A worker's default process group is made from a view of the store which only it sees,
so that whatever uses the default group stays inside the worker. Other groups, over gloo, are known to this package
alone: *updates* joins the leaders, for pseudo-gradients, used by the exchange's threads; *everyone* is for what all
ranks do at the same moment, such as a validation; *inside* joins the ranks of a worker, for what its leader tells them.
The last two are used by the training thread.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from lightning_bytescheduler.exceptions import UnsupportedError

__all__ = ["WorkerWorld", "worker_name"]

_TIMEOUT = timedelta(minutes=30)
_INSIDE = 4  # times the timeout: who waits for a leader has a shorter limit of its own, see WorkerGroup

# By rank and size, for as long as the process lives, as torch keeps that of a default group; and how often it was used.
_stores: dict[tuple[int, int], dist.Store] = {}
_joined: dict[tuple[int, int], int] = {}


def worker_name(number: int) -> str:
    """What a worker is called in messages and records."""
    return f"worker{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerWorld:
    """One rank's place among the workers.

    Attributes:
        rank: Among all ranks.
        size: Number of ranks.
        inner_size: Ranks of one worker.
        store: A view of the rendezvous store that all ranks share, and no earlier run has written to.
        everyone: All ranks.
        updates: The leaders; ``None`` on other ranks.
        inside: The ranks of this worker; ``None`` if it has but one.
    """

    rank: int
    size: int
    inner_size: int
    store: dist.Store
    everyone: dist.ProcessGroup
    updates: dist.ProcessGroup | None
    inside: dist.ProcessGroup | None

    @property
    def worker(self) -> int:
        """Number of this rank's worker."""
        return self.rank // self.inner_size

    @property
    def workers(self) -> int:
        """How many there are."""
        return self.size // self.inner_size

    @classmethod
    def join(
        cls,
        *,
        rank: int,
        size: int,
        backend: str,
        timeout: timedelta | None,
        inner_size: int = 1,
        meet: Callable[[dist.Store], object] = lambda _: None,
        **options: Any,
    ) -> WorkerWorld:
        """Meet the other ranks, and make this worker's default process group; every rank calls this.

        Args:
            rank: Among all ranks.
            size: Number of ranks.
            inner_size: Ranks of one worker; divides ``size``.
            backend: Of the default group.
            timeout: Of collectives; half an hour if ``None``.
            meet: Called with a part of the store, before anything is made that needs all ranks to agree.
            **options: For ``init_process_group``.

        Raises:
            UnsupportedError: If there is a default process group already.
        """
        if dist.is_initialized():
            raise UnsupportedError(
                "Strategy 'diloco' makes a default process group for each worker, but there is one already, as after "
                "a training with another strategy in the same process. Call torch.distributed.destroy_process_group() "
                "before, or use another process."
            )
        timeout = _TIMEOUT if timeout is None else timeout
        if (rank, size) not in _stores:
            _stores[rank, size] = next(rendezvous("env://", rank=rank, world_size=size, timeout=timeout))[0]
        _joined[rank, size] = _joined.get((rank, size), 0) + 1
        # Two stores of one process on one port are one store, so that sizes are kept apart as well.
        store = dist.PrefixStore(f"bytescheduler-diloco/{size}/{_joined[rank, size]}", _stores[rank, size])
        meet(dist.PrefixStore("meeting", store))
        worker, place = divmod(rank, inner_size)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(worker_name(worker), store),
            rank=place,
            world_size=inner_size,
            timeout=timeout,
            **options,
        )

        def group(name: str, rank: int, size: int, timeout: timedelta = timeout) -> dist.ProcessGroup:
            made = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, timeout)
            return cast(dist.ProcessGroup, made)  # its base class, which the stubs do not know

        # In one order on all ranks. Nobody waits for a rank that has to come by elsewhere before.
        return cls(
            rank=rank,
            size=size,
            inner_size=inner_size,
            store=store,
            everyone=group("everyone", rank, size),
            updates=group("updates", worker, size // inner_size) if place == 0 else None,
            inside=group(f"inside-{worker}", place, inner_size, _INSIDE * timeout) if inner_size > 1 else None,
        )

    def leave(self, *, idle: bool) -> None:
        """Give up all groups; local, does not wait for other ranks.

        Args:
            idle: Whether nothing is under way. Gloo cannot call anything off, and a group's end waits for it; groups
                that are not idle are kept for as long as the process lives.
        """
        if not idle:
            groups = [self.everyone, self.updates, self.inside]
            if dist.is_initialized() and self.inner_size > 1:
                groups.append(dist.group.WORLD)
            for group in groups:
                if group is not None:
                    ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        if dist.is_initialized():
            dist.destroy_process_group()
