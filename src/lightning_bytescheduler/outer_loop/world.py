"""Process groups of workers that train on their own, launched as one job.

One rendezvous store joins all ranks, each of which is a worker. Its default process group is made from a view of that
store which only it sees, so that whatever uses the default group stays inside the worker. Two more groups, over gloo
and known to this package alone, join the workers: *updates*, for pseudo-gradients, used by the exchange's threads;
*everyone*, for what all ranks do at the same moment, such as a validation, used by the training thread.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch.distributed as dist
from torch.distributed.rendezvous import rendezvous

from lightning_bytescheduler.exceptions import UnsupportedError

__all__ = ["WorkerWorld", "worker_name"]

_TIMEOUT = timedelta(minutes=30)

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
        store: A view of the rendezvous store that all ranks share, and no earlier run has written to.
        everyone: All ranks.
        updates: All ranks as well.
    """

    rank: int
    size: int
    store: dist.Store
    everyone: dist.ProcessGroup
    updates: dist.ProcessGroup

    @classmethod
    def join(cls, *, rank: int, size: int, backend: str, timeout: timedelta | None, **options: Any) -> WorkerWorld:
        """Meet the other ranks, and make this worker's default process group; every rank calls this.

        Args:
            rank: Among all ranks.
            size: Number of ranks.
            backend: Of the default group.
            timeout: Of collectives; half an hour if ``None``.
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
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(worker_name(rank), store),
            rank=0,
            world_size=1,
            timeout=timeout,
            **options,
        )
        everyone = dist.ProcessGroupGloo(dist.PrefixStore("everyone", store), rank, size, timeout)
        updates = dist.ProcessGroupGloo(dist.PrefixStore("updates", store), rank, size, timeout)
        return cls(
            rank=rank,
            size=size,
            store=store,
            everyone=cast(dist.ProcessGroup, everyone),  # its base class, which the stubs do not know
            updates=cast(dist.ProcessGroup, updates),
        )

    def leave(self, *, idle: bool) -> None:
        """Give up all groups; local, does not wait for other ranks.

        Args:
            idle: Whether nothing is under way. Gloo cannot call anything off, and a group's end waits for it; groups
                that are not idle are kept for as long as the process lives.
        """
        if not idle:
            for group in (self.everyone, self.updates):
                ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
        if dist.is_initialized():
            dist.destroy_process_group()
