"""The messages of a sub-task: all-reduce, reduce-scatter, all-gather, exchange.

The mean is formed as in DDP's reducer: each rank multiplies by 1/n before the sum, so that two ranks get DDP's bits.
With unequal weights each rank multiplies by its own factor, see ``sample_weights.py``.

On gloo, reduce-scatter and all-gather are made of point-to-point messages: its own reduce-scatter is a full all-reduce,
and its all-to-all is slower than the link. On NCCL the native ones are used. Each part of a buffer is cut into one
*shard* per rank, see :func:`shard_of`.

Every operation is started under the core's launching lock, in one order on all ranks. So a running number matches an
operation's messages on all of them.

The module also has two calls on groups that torch does not know by name, and waits for a training thread.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_bytescheduler.exceptions import RankFailedError

PATIENCE = timedelta(days=30)
"""Timeout of waits for messages that may come only after a long validation. A closed connection ends them anyway;
connecting has a shorter timeout."""

_LOOK_AGAIN_S = 0.002


def broadcast_from_first(group: dist.ProcessGroup, tensor: torch.Tensor) -> dist.Work:
    """Begin to fill ``tensor`` with that of the group's first rank."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return group.broadcast([tensor], options)


def reduce_with(group: dist.ProcessGroup, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> dist.Work:
    """Begin to replace ``tensor`` by the reduction over all ranks."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(operation)
    return group.allreduce([tensor], options)


def wait_unless(work: dist.Work, failure: Callable[[], BaseException | None], *, look_every: timedelta) -> None:
    """Wait for a collective in slices, so that a training thread returns when another rank has failed.

    Args:
        work: The collective.
        failure: Called before each slice; returns the reason if the collective will not end.
        look_every: Length of a slice.

    Raises:
        RuntimeError: The collective's error.
        BaseException: The result of ``failure``.
    """
    while not work.is_completed():
        cause = failure()
        if cause is not None:
            raise cause
        with suppress(RuntimeError):  # the slice ran out, or the collective failed and raises below
            work.wait(look_every)
    work.wait()  # raises the error of an ended collective


def ends_within(work: dist.Work | None, seconds: float, failure: Callable[[], object] = lambda: None) -> bool:
    """Whether a collective that no caller waits for ends soon, so that its group can be left.

    It polls, as a wait that times out breaks connections that other ranks may still need.

    Args:
        work: The last collective of the group; ``None`` if there was none.
        seconds: Longest time to poll.
        failure: Returns the reason if it will not end.
    """
    deadline = time.monotonic() + seconds
    while work is not None and not work.is_completed():
        if time.monotonic() >= deadline or failure():
            return False
        time.sleep(_LOOK_AGAIN_S)
    return True


@dataclass(frozen=True, slots=True)
class StartedOperation:
    """An operation in flight.

    Attributes:
        works: What has to end, in this order; for messages, only ``wait`` of each is called.
        finish: Called once all of them have ended; may return an operation that has to end after them.
        messages: Whether ``works`` are point-to-point messages. Gloo cannot wait for one in slices: a timeout breaks
            all connections of the group.
        closing: Whether it was returned by a ``finish`` and starts nothing itself. All messages that others wait for
            have been sent, so the waiting thread may handle later launches first.
        lane: Operations of one lane end in launch order, but may end before earlier ones of another lane.
        group: The group of ``works``, if it is not the data group.
    """

    works: Sequence[Any]
    finish: Callable[[], StartedOperation | None] | None = None
    messages: bool = False
    closing: bool = False
    lane: int | str | None = None
    group: dist.ProcessGroup | None = None


def ending_with(started: StartedOperation, last: Callable[[], None]) -> StartedOperation:
    """Return ``started`` with ``last`` called after it and all that follows, before the sub-task is notified."""

    def finish() -> StartedOperation | None:
        following = None if started.finish is None else started.finish()
        if following is not None:
            return ending_with(following, last)
        last()
        return None

    return replace(started, finish=finish)


class Pull:
    """A message with its own timeout for waits, as the group's shorter one is for connecting."""

    def __init__(self, work: dist.Work, timeout: timedelta) -> None:
        self._work = work
        self._timeout = timeout

    def wait(self) -> bool:
        """See ``torch.distributed.Work``."""
        return self._work.wait(self._timeout)


class Coming:
    """A handle to wait for a result that another thread of this process makes, or begins.

    Attributes:
        known: Set once it is made or begun.
    """

    def __init__(self) -> None:
        self.known = threading.Event()
        self._failure: BaseException | None = None
        self._then: Any = None

    def end(self, failure: BaseException | None = None, then: Any = None) -> None:
        """Complete it: with an error, or once ``then`` has ended."""
        self._failure, self._then = failure, then
        self.known.set()

    def wait(self) -> bool:
        """See ``torch.distributed.Work``; ends with the completing thread at the latest."""
        self.known.wait()
        if self._failure is not None:
            # Gloo's own error about a rank is more specific, and is examined further.
            cause = self._failure.__cause__ if isinstance(self._failure, RankFailedError) else None
            raise cause or self._failure
        return self._then is None or self._then.wait()


Operation = Callable[[dist.ProcessGroup, torch.Tensor, int], StartedOperation]
"""Starts on (group, part of a buffer, number of the operation)."""

Averaging = Callable[[dist.ProcessGroup, torch.Tensor, int, float], StartedOperation]
"""An operation that also gets this rank's weight in the mean; 1 / ranks if all weigh the same."""


def shard_of(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """Return the shard of ``rank`` in ``size`` elements as (first, end); empty for the last ranks of a small part."""
    length = -(-size // world_size)
    return min(rank * length, size), min((rank + 1) * length, size)


def shards_over(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether ``group`` has reduce-scatter and all-gather of tensors on ``device``."""
    return dist.get_backend(group) in (("nccl",) if device.type == "cuda" else ("gloo",))


def scale(part: torch.Tensor, factor: float) -> None:
    """Multiply ``part`` in place. A factor of 0 also clears non-finite values."""
    if factor:
        part.mul_(factor)
    else:
        part.zero_()


def all_reduce(group: dist.ProcessGroup, part: torch.Tensor, number: int, factor: float) -> StartedOperation:
    """Average ``part`` over all ranks, in place, with this rank's weight ``factor``."""
    scale(part, factor)
    return StartedOperation([group.allreduce([part])])


def reduce_scatter(group: dist.ProcessGroup, part: torch.Tensor, number: int, factor: float) -> StartedOperation:
    """Average this rank's shard of ``part`` over all ranks, in place; the rest keeps local values.

    Args:
        group: The data group.
        part: Part of a buffer.
        number: Number of the operation.
        factor: This rank's weight in the mean.
    """
    scale(part, factor)
    if part.device.type == "cuda":
        return _native_reduce_scatter(group, part)
    own = _shard(group, part, group.rank())
    received = [(rank, torch.empty_like(own)) for rank in others_of(group)] if own.numel() else []
    works = [group.recv([shard], rank, number) for rank, shard in received]
    works += [
        group.send([_shard(group, part, rank)], rank, number)
        for rank in others_of(group)
        if _shard(group, part, rank).numel()
    ]

    def add_up() -> None:
        for _, shard in received:
            own.add_(shard)

    return StartedOperation(works, add_up, messages=True)


def all_gather(group: dist.ProcessGroup, part: torch.Tensor, number: int) -> StartedOperation:
    """Fill ``part`` with every rank's shard of it, in place."""
    if part.device.type == "cuda":
        return _native_all_gather(group, part)
    return _gather(group, part, number, _expect_shards(group, part, number))


def all_reduce_in_shards(group: dist.ProcessGroup, part: torch.Tensor, number: int, factor: float) -> StartedOperation:
    """Average ``part`` over all ranks, in place, in two halves that go straight to their targets.

    For links with high latency: gloo's own all-reduce sends ``2(n-1)`` messages one after the other around a ring, and
    a group carries only two of them at once. Gloo sends a message when it knows of its receive, so receives of means
    are posted at the start, which saves half a round trip. They overwrite values that this rank has already sent:
    another rank sends the mean of its shard once it has received all of them.

    Args:
        group: The data group; gloo.
        part: Part of a buffer.
        number: Number of the operation.
        factor: This rank's weight in the mean.
    """
    scattered = reduce_scatter(group, part, number, factor)
    means = _expect_shards(group, part, number)  # after the shards, as messages of one number are in order

    def gather() -> StartedOperation:
        if scattered.finish is not None:
            scattered.finish()
        return replace(_gather(group, part, number, means), closing=True)

    return replace(scattered, finish=gather)


def all_reduce_direct(group: dist.ProcessGroup, part: torch.Tensor, number: int, factor: float) -> StartedOperation:
    """Average a small ``part`` over all ranks, in place: each rank sends all of it to all others and sums by itself.

    One round of messages instead of two, for ``n/2`` times the bytes. All sum in the order of ranks, so that they get
    the same bits.

    Args:
        group: The data group; gloo.
        part: Part of a buffer.
        number: Number of the operation.
        factor: This rank's weight in the mean.
    """
    scale(part, factor)
    received = {rank: torch.empty_like(part) for rank in others_of(group)}
    works = [group.recv([values], rank, number) for rank, values in received.items()]
    works += [group.send([part], rank, number) for rank in received]

    def add_up() -> None:
        first, *rest = (received.get(rank, part) for rank in range(group.size()))
        total = first.clone() if first is part else first  # ``part`` is still being read, so it is not summed into
        for values in rest:
            total.add_(values)
        part.copy_(total)

    return StartedOperation(works, add_up, messages=True)


def exchange(group: dist.ProcessGroup, part: torch.Tensor, number: int) -> StartedOperation:
    """Fill row r of ``part``, a matrix with one row per rank, with rank r's row r, in place."""
    # Gloo's own all-gather passes rows around a ring, and each message would wait behind all that is in flight.
    return all_gather(group, part.view(-1), number)


def _expect_shards(group: dist.ProcessGroup, part: torch.Tensor, number: int) -> list[dist.Work]:
    return [
        group.recv([_shard(group, part, rank)], rank, number)
        for rank in others_of(group)
        if _shard(group, part, rank).numel()
    ]


def _gather(
    group: dist.ProcessGroup, part: torch.Tensor, number: int, expected: Sequence[dist.Work]
) -> StartedOperation:
    """Send this rank's shard, for which the others have posted receives."""
    own = _shard(group, part, group.rank())
    sent = [group.send([own], rank, number) for rank in others_of(group)] if own.numel() else []
    return StartedOperation([*expected, *sent], messages=True)


def others_of(group: dist.ProcessGroup) -> list[int]:
    """Return the other ranks, beginning with the next: no two ranks send to the same one first."""
    size, rank = group.size(), group.rank()
    return [(rank + distance) % size for distance in range(1, size)]


def _shard(group: dist.ProcessGroup, part: torch.Tensor, rank: int) -> torch.Tensor:
    first, end = shard_of(part.numel(), rank, group.size())
    return part[first:end]


def _native_reduce_scatter(group: dist.ProcessGroup, part: torch.Tensor) -> StartedOperation:
    padded = _padded(group, part)
    own = _shard(group, part, group.rank())
    reduced = padded.new_empty(padded.numel() // group.size())
    work = group._reduce_scatter_base(reduced, padded, dist.ReduceScatterOptions())

    def keep_own() -> None:
        own.copy_(reduced[: own.numel()])

    return StartedOperation([work], keep_own)


def _native_all_gather(group: dist.ProcessGroup, part: torch.Tensor) -> StartedOperation:
    padded = _padded(group, part)
    length = padded.numel() // group.size()
    own = padded[group.rank() * length : (group.rank() + 1) * length].clone()
    work = group._allgather_base(padded, own)

    def unpad() -> None:
        if padded is not part:
            part.copy_(padded[: part.numel()])

    return StartedOperation([work], unpad)


def _padded(group: dist.ProcessGroup, part: torch.Tensor) -> torch.Tensor:
    """Return ``part`` if it cuts into equal shards, otherwise a padded copy."""
    missing = -part.numel() % group.size()
    return torch.nn.functional.pad(part, (0, missing)) if missing else part
