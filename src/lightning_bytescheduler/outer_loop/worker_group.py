"""The ranks that train together as one worker: what they sum up, and what the first of them tells the others.

One rank of each worker, its leader, speaks with the other workers. What it decides has to hold at the same step on all
ranks of its worker, which each step's gradients join: a rank that took part in an update a step before or after the
others would wait in one collective while they wait in another.

All of this runs on the training thread, on a gloo group that nothing else uses, so that the calls of the ranks match by
their order. Calls are made where all ranks of a worker come by in the same order: after each batch, at the end of a
round, and where all stand still. Whether a rank gets to a call depends on nothing but what such a call has told it
before; so by induction over the calls, all ranks make the same ones.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist
from torch import Tensor

from lightning_bytescheduler.collectives.tensor_calls import broadcast_from_first, reduce_with, wait_unless
from lightning_bytescheduler.exceptions import SchedulerTimeoutError

__all__ = ["WorkerGroup"]

_SLICE = timedelta(seconds=1)
_PATIENCE = 3.0  # times the timeout: the leader may wait that long for several things, and says so when time is up


class WorkerGroup:
    """One rank's place among the ranks of its worker. For one thread, but for :meth:`abort`.

    Args:
        group: Over the worker's ranks; gloo. ``None`` for a worker of one rank, which asks and tells nobody.
        timeout: Longest wait for other workers, in seconds.
        clock: Seconds; injected by tests.
    """

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._group = group
        self._timeout = _PATIENCE * timeout
        self._clock = clock
        self._cause: BaseException | None = None

    @property
    def size(self) -> int:
        """How many ranks train together."""
        return 1 if self._group is None else self._group.size()

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its worker."""
        return self._group is None or self._group.rank() == 0

    def abort(self, cause: BaseException) -> None:
        """Raise ``cause`` from whatever is waited for, now or later. For any thread."""
        if self._cause is None:
            self._cause = cause

    def total(self, numbers: Sequence[float]) -> list[float]:
        """The sums of all ranks' numbers, in fp64; the same on each rank."""
        if self._group is None:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64)
        self._wait(reduce_with(self._group, sums, dist.ReduceOp.SUM))
        values: list[float] = sums.tolist()
        return values

    def any(self, fact: bool) -> bool:
        """Whether it is so on any rank."""
        return self.total([float(fact)])[0] > 0

    def tell(self, text: str = "") -> str:
        """The leader's text, on all ranks.

        Args:
            text: Other ranks' are not looked at.
        """
        if self._group is None:
            return text
        letters = list(text.encode()) if self.leads else []
        length = torch.tensor([len(letters)])
        self._broadcast(length)
        content = torch.zeros(int(length), dtype=torch.uint8)
        if self.leads:
            content = torch.tensor(letters, dtype=torch.uint8)
        self._broadcast(content)
        return bytes(content.tolist()).decode()

    @torch.no_grad()
    def share(self, tensors: Iterable[Tensor]) -> None:
        """Fill tensors with the leader's, bit for bit.

        Args:
            tensors: Of the same shapes and types on all ranks.
        """
        if self._group is None:
            return
        by_type: dict[torch.dtype, list[Tensor]] = {}
        for tensor in tensors:
            by_type.setdefault(tensor.dtype, []).append(tensor)
        for same in by_type.values():
            flat = torch.cat([tensor.detach().reshape(-1).cpu() for tensor in same])
            self._broadcast(flat)
            if not self.leads:
                parts = flat.split([tensor.numel() for tensor in same])
                for tensor, part in zip(same, parts, strict=True):
                    tensor.copy_(part.view_as(tensor))

    def _broadcast(self, tensor: Tensor) -> None:
        if self._group is not None and tensor.numel():
            self._wait(broadcast_from_first(self._group, tensor))

    def _wait(self, work: dist.Work) -> None:
        deadline = self._clock() + self._timeout

        def failure() -> BaseException | None:
            if self._cause is None and self._clock() >= deadline:
                return SchedulerTimeoutError(
                    f"A rank waited {self._timeout:.0f} s for the ranks that it trains with. Raise the strategy's "
                    "timeout if a step, or the wait for other workers, may take longer."
                )
            return self._cause

        wait_unless(work, failure, look_every=_SLICE)
