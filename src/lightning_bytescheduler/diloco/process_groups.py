"""Process groups of workers that train on their own, launched as one job, and what ranks do on them together.

One rendezvous store joins all ranks. A worker is one of them, or several that follow one another and train together;
the first of those is its leader. A worker's default process group is made from a view of the store which only it sees,
so that whatever uses the default group stays inside the worker. Other groups, over gloo, are known to this package
alone: *leaders*, for pseudo-gradients, is used by the exchange's threads; *everyone* is for what all ranks do at the
same moment, such as a validation (``JointCollectives``); *inside* joins the ranks of a worker, for what they sum up and
what its leader tells them (``WorkerGroup``). The last two are used by the training thread.

A leader's decision has to hold at the same step on all ranks of its worker, as each step's gradients join them: a rank
that ended a round a step before or after the others would wait in one collective while they wait in another. The calls
of ``WorkerGroup`` match by their order, as nothing else uses that group. All ranks of a worker make them in the same
order: after each batch, at the end of a round, and where all stand still. Whether a rank makes a call depends only on
the results of earlier calls; so by induction, all ranks make the same calls.

A wait ends with its timeout, or when a rank dies and its connections close.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, cast

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.rendezvous import rendezvous

from lightning_bytescheduler.collectives.groups import collect_left, give_up, set_patience, to_connect
from lightning_bytescheduler.collectives.operations import broadcast_from_first, reduce_with, wait_unless
from lightning_bytescheduler.exceptions import SchedulerTimeoutError, UnsupportedError

_TIMEOUT = timedelta(minutes=30)
_INSIDE = 4  # times the timeout: a wait for a leader has a shorter limit of its own, see WorkerGroup

_SLICE = timedelta(seconds=1)
_PATIENCE = 3.0  # times the timeout: the leader may have several waits in a row, and reports its own timeouts
_DIMENSIONS = 16  # most dimensions of a tensor

# Stores by rank and size, kept while the process lives, as torch keeps a default group's; and how often each was used.
_stores: dict[tuple[int, int], dist.Store] = {}
_joined: dict[tuple[int, int], int] = {}


def worker_name(number: int) -> str:
    """Return a worker's name in messages and records."""
    return f"worker{number}"


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerWorld:
    """One rank's place among the workers.

    Attributes:
        rank: This rank among all ranks.
        size: Number of ranks.
        inner_size: Ranks of one worker.
        store: A part of the rendezvous store that all ranks share, and no earlier run has written to.
        everyone: Group of all ranks.
        leaders: Group of the first rank of each worker; ``None`` on other ranks.
        inside: Group of this worker's ranks; ``None`` if it has only one.
    """

    rank: int
    size: int
    inner_size: int
    store: dist.Store
    everyone: dist.ProcessGroup
    leaders: dist.ProcessGroup | None
    inside: dist.ProcessGroup | None

    @property
    def worker(self) -> int:
        """Number of this rank's worker."""
        return self.rank // self.inner_size

    @property
    def workers(self) -> int:
        """Number of workers."""
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
        store: dist.Store | None = None,
        **options: Any,
    ) -> WorkerWorld:
        """Meet the other ranks, and make this worker's default process group; every rank calls this.

        Args:
            rank: Among all ranks.
            size: Number of ranks.
            inner_size: Ranks of one worker; divides ``size``.
            backend: Backend of the default group.
            timeout: Timeout of collectives; half an hour if ``None``.
            meet: Called with a part of the store, before anything is made that needs all ranks to agree.
            store: The store at which the ranks meet; if left out, the environment's, which must be new.
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
            if store is None:  # comes back when all have connected
                store = next(rendezvous("env://", rank=rank, world_size=size, timeout=timeout))[0]
            _stores[rank, size] = store
        _joined[rank, size] = _joined.get((rank, size), 0) + 1
        # Two stores of one process on one port are the same store, so keys differ by size, too.
        store = dist.PrefixStore(f"bytescheduler-diloco/{size}/{_joined[rank, size]}", _stores[rank, size])
        meet(dist.PrefixStore("meeting", store))
        collect_left()
        worker, place = divmod(rank, inner_size)
        dist.init_process_group(
            backend,
            store=dist.PrefixStore(worker_name(worker), store),
            rank=place,
            world_size=inner_size,
            timeout=timeout,
            **options,
        )

        def group(name: str, rank: int, size: int, patience: timedelta = timeout) -> dist.ProcessGroup:
            made = dist.ProcessGroupGloo(dist.PrefixStore(name, store), rank, size, to_connect(timeout, patience))
            set_patience(made, patience)
            return cast(dist.ProcessGroup, made)  # its base class, which the stubs do not know

        # In one order on all ranks, so that no rank waits for one that is held up in another group.
        return cls(
            rank=rank,
            size=size,
            inner_size=inner_size,
            store=store,
            everyone=group("everyone", rank, size),
            leaders=group("leaders", worker, size // inner_size) if place == 0 else None,
            inside=group(f"inside-{worker}", place, inner_size, _INSIDE * timeout) if inner_size > 1 else None,
        )

    def leave(self, *, idle: bool) -> None:
        """Give up all groups; local, does not wait for other ranks.

        Args:
            idle: Whether nothing is under way. Gloo cannot cancel an operation, and a group's end waits for it; groups
                that are not idle are kept while the process lives.
        """
        groups = [self.everyone, self.leaders, self.inside]
        if not idle and dist.is_initialized() and self.inner_size > 1:
            groups.append(dist.group.WORLD)
        for group in groups:
            if group is not None:
                give_up(group, idle=idle)
        if dist.is_initialized():
            dist.destroy_process_group()


class JointCollectives:
    """All-reduce, all-gather and broadcast over all ranks, with tensors in host memory, so that any device will do.

    For one thread.

    Args:
        group: Over all ranks; gloo.
    """

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group

    def reduce(self, tensor: Tensor, operation: Any = "mean") -> Tensor:
        """Return the reduced tensor, a new one.

        Args:
            tensor: Of the same shape on all ranks.
            operation: ``"mean"`` (also ``None``), ``"sum"``, ``"max"``, ``"min"``, ``"product"``, or one of torch's.
        """
        name = "MEAN" if operation is None else str(operation).rsplit(".", 1)[-1].upper()
        copy, is_mean = tensor.detach().to("cpu", copy=True), name in ("MEAN", "AVG")
        if is_mean and not copy.is_floating_point():
            copy = copy.float()
        reduce_with(self.group, copy, getattr(dist.ReduceOp, "SUM" if is_mean else name)).wait()
        if is_mean:
            copy /= self.group.size()
        return copy.to(tensor.device)

    def gather(self, tensor: Tensor) -> Tensor:
        """The tensors of all ranks, which must have the same shape, stacked by rank."""
        copy = tensor.detach().to("cpu").contiguous()
        parts = [torch.empty_like(copy) for _ in range(self.group.size())]
        self.group.allgather([parts], [copy]).wait()
        return torch.stack(parts).to(tensor.device)

    def gather_uneven(self, tensor: Tensor, group: object = None) -> list[Tensor]:
        """The tensors of all ranks, of any shape and the same type, by rank.

        Args:
            tensor: This rank's.
            group: Is ignored; torchmetrics passes one.
        """
        shape = torch.full((_DIMENSIONS,), -1)
        shape[: tensor.ndim] = torch.tensor(tensor.shape, dtype=torch.int64)
        shapes = [tuple(size for size in row if size >= 0) for row in self.gather(shape).tolist()]
        sizes = [math.prod(one) for one in shapes]
        padded = tensor.new_zeros(max(sizes))
        padded[: tensor.numel()] = tensor.detach().reshape(-1)
        rows = self.gather(padded)
        return [row[:size].reshape(one) for row, size, one in zip(rows, sizes, shapes, strict=True)]

    def broadcast(self, tensors: Iterable[Tensor]) -> None:
        """Fill tensors with those of rank 0."""
        fill(tensors, lambda flat: broadcast_from_first(self.group, flat).wait(), with_own=self.group.rank() == 0)


@torch.no_grad()
def fill(tensors: Iterable[Tensor], send: Callable[[Tensor], object], *, with_own: bool) -> None:
    """Fill tensors with those of one rank, bit for bit.

    Args:
        tensors: Of the same shapes and types on all ranks.
        send: Fills a tensor in host memory with that of the rank.
        with_own: Whether this is the rank.
    """
    by_type: dict[torch.dtype, list[Tensor]] = {}
    for tensor in tensors:
        by_type.setdefault(tensor.dtype, []).append(tensor)
    for same in by_type.values():
        flat = torch.cat([tensor.detach().reshape(-1).cpu() for tensor in same])
        send(flat)
        if not with_own:
            for tensor, part in zip(same, flat.split([tensor.numel() for tensor in same]), strict=True):
                tensor.copy_(part.view_as(tensor))


class WorkerGroup:
    """One rank's place among the ranks of its worker. For one thread, but for :meth:`abort`.

    Args:
        group: Over the worker's ranks; gloo. ``None`` for a worker of one rank, which has no other rank to ask or tell.
        timeout: Longest wait for other workers, in seconds.
        no_hope: Called about once a second while the leader waits for other workers. Returns why another rank, of this
            worker or another one of this launch, will not go on; else ``None``.

    Attributes:
        no_hope: As given.
        cause: Why the waits end, once :meth:`abort` was called.
    """

    cause: BaseException | None = None

    def __init__(
        self,
        group: dist.ProcessGroup | None = None,
        *,
        timeout: float = 0.0,
        no_hope: Callable[[], BaseException | None] = lambda: None,
    ) -> None:
        self.no_hope = no_hope
        self._group = group
        self._timeout = _PATIENCE * timeout

    @property
    def size(self) -> int:
        """How many ranks train together."""
        return 1 if self._group is None else self._group.size()

    @property
    def leads(self) -> bool:
        """Whether this rank speaks for its worker."""
        return self._group is None or self._group.rank() == 0

    def abort(self, cause: BaseException) -> None:
        """Raise ``cause`` from any wait, now or later. For any thread."""
        if self.cause is None:
            self.cause = cause

    def check(self) -> None:
        """Raise the cause with which waits end, if there is one."""
        if self.cause is not None:
            raise self.cause

    def total(self, numbers: Sequence[float]) -> list[float]:
        """The sums of all ranks' numbers, in fp64; the same on each rank."""
        if self._group is None:
            return list(numbers)
        sums = torch.tensor(numbers, dtype=torch.float64)
        self._wait(reduce_with(self._group, sums, dist.ReduceOp.SUM))
        values: list[float] = sums.tolist()
        return values

    def any(self, fact: bool) -> bool:
        """Whether ``fact`` holds on any rank."""
        return self.total([float(fact)])[0] > 0

    def tell(self, text: str = "") -> str:
        """Return the leader's text, on all ranks.

        Args:
            text: The leader's text; ignored on other ranks.
        """
        if self._group is None:
            return text
        letters = list(text.encode()) if self.leads else []
        length = torch.tensor([len(letters)], device="cpu")
        self._broadcast(length)
        content = torch.tensor(letters or [0] * int(length), dtype=torch.uint8, device="cpu")
        self._broadcast(content)
        return bytes(content.tolist()).decode()

    def share(self, tensors: Iterable[Tensor]) -> None:
        """Fill tensors with the leader's, see :func:`fill`."""
        if self._group is not None:
            fill(tensors, self._broadcast, with_own=self.leads)

    def _broadcast(self, tensor: Tensor) -> None:
        if self._group is not None and tensor.numel():
            self._wait(broadcast_from_first(self._group, tensor))

    def _wait(self, work: dist.Work) -> None:
        deadline = time.monotonic() + self._timeout

        def failure() -> BaseException | None:
            if self.cause is None and time.monotonic() >= deadline:
                return SchedulerTimeoutError(
                    f"A rank waited {self._timeout:.0f} s for the ranks that it trains with. Raise the strategy's "
                    "timeout if a step, or the wait for other workers, may take longer."
                )
            return self.cause

        wait_unless(work, failure, look_every=_SLICE)
