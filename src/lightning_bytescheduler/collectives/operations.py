"""What a sub-task's start puts on the wire: all-reduce, reduce-scatter, all-gather, exchange.

The mean is formed as DDP's reducer forms it: scaled by 1/n before the sum, by multiplication, so that two ranks get
DDP's bits. Where ranks count unequally, each multiplies with a factor of its own instead, see ``sample_weights.py``.

On gloo, reduce-scatter and all-gather are made of point-to-point messages: its own reduce-scatter is a full all-reduce
and its all-to-all is half again as slow as the link (measured with torch 2.13, four ranks on shaped links). On NCCL the
native ones are used. Each part of a buffer is cut into one *shard* per rank, see :func:`shard_of`.

Every operation is started under the core's launching lock, in one order on all ranks, so a running number matches the
messages of one operation on all of them.

Besides: two calls on groups that torch does not know by name, and a wait that a training thread can afford.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

from lightning_bytescheduler.scheduler.task import Passage

_LOOK_AGAIN_S = 0.002


def broadcast_from_first(group: dist.ProcessGroup, tensor: torch.Tensor) -> dist.Work:
    """Begin to fill ``tensor`` with that of the group's first rank."""
    options = dist.BroadcastOptions()
    options.rootRank = 0
    options.rootTensor = 0
    return group.broadcast([tensor], options)


def reduce_with(group: dist.ProcessGroup, tensor: torch.Tensor, operation: dist.ReduceOp.RedOpType) -> dist.Work:
    """Begin to fill ``tensor`` with all ranks', reduced."""
    options = dist.AllreduceOptions()
    options.reduceOp = dist.ReduceOp(operation)
    return group.allreduce([tensor], options)


def wait_unless(work: dist.Work, failure: Callable[[], BaseException | None], *, look_every: timedelta) -> None:
    """Wait for a collective in slices, so that a training thread comes back when another rank has failed.

    Args:
        work: What is waited for.
        failure: Asked before each slice: why it will not come, if it will not.
        look_every: Length of a slice.

    Raises:
        RuntimeError: What the collective failed with.
        BaseException: What ``failure`` says.
    """
    while not work.is_completed():
        cause = failure()
        if cause is not None:
            raise cause
        with suppress(RuntimeError):  # the slice ran out; or the collective failed, and says so below
            work.wait(look_every)
    work.wait()  # it has ended: this raises what it failed with


def ends_within(work: dist.Work | None, seconds: float, failure: Callable[[], object] = lambda: None) -> bool:
    """Whether a collective that nobody waits for any more ends soon, so that its group can be left.

    Not by waiting for it: a wait that times out breaks connections that other ranks may still need.

    Args:
        work: The last of the group; ``None`` if there was none.
        seconds: Longest look.
        failure: Why it will not end, if it will not.
    """
    deadline = time.monotonic() + seconds
    while work is not None and not work.is_completed():
        if time.monotonic() >= deadline or failure():
            return False
        time.sleep(_LOOK_AGAIN_S)
    return True


@dataclass(frozen=True, slots=True)
class StartedOperation:
    """Something under way on the data group.

    Attributes:
        works: What has to end, in this order; of each only ``wait`` is called where these are messages.
        finish: Run once all of them have ended; may start what has to end after them.
        messages: Whether ``works`` are point-to-point messages. Gloo cannot wait for one in slices: it breaks all
            connections of a group on which a message did not come in time.
        closing: What is started by a ``finish`` and begins nothing itself. All that others wait for has been sent with
            it, so whoever waits may see first to what was launched meanwhile.
        lane: What is started on one lane ends in that order, but may end before what was started earlier on another.
        passage: By way of a parameter server.
    """

    works: Sequence[Any]
    finish: Callable[[], StartedOperation | None] | None = None
    messages: bool = False
    closing: bool = False
    lane: int | str | None = None
    passage: Passage | None = None


def ending_with(started: StartedOperation, last: Callable[[], None]) -> StartedOperation:
    """``started``, with ``last`` called when it and all that follows from it has ended, before anybody is told."""

    def finish() -> StartedOperation | None:
        following = None if started.finish is None else started.finish()
        if following is not None:
            return ending_with(following, last)
        last()
        return None

    return replace(started, finish=finish)


class Pull:
    """A message that is waited for no longer than ``timeout``: the group's own is shorter, for who connects."""

    def __init__(self, work: dist.Work, timeout: timedelta) -> None:
        self._work = work
        self._timeout = timeout

    def wait(self) -> bool:
        """As of ``torch.distributed.Work``."""
        return self._work.wait(self._timeout)


Operation = Callable[[dist.ProcessGroup, torch.Tensor, int], StartedOperation]
"""Starts on (group, part of a buffer, number of the operation)."""

Averaging = Callable[[dist.ProcessGroup, torch.Tensor, int, float | None], StartedOperation]
"""An operation that is also told what this rank counts in the mean; ``None`` for as much as any other."""


def shard_of(size: int, rank: int, world_size: int) -> tuple[int, int]:
    """What ``rank`` reduces of ``size`` elements, as (first, end); nothing for the last ranks of a small part."""
    length = -(-size // world_size)
    return min(rank * length, size), min((rank + 1) * length, size)


def shards_over(group: dist.ProcessGroup, device: torch.device) -> bool:
    """Whether reduce-scatter and all-gather of tensors on ``device`` can be had on ``group``."""
    return dist.get_backend(group) in (("nccl",) if device.type == "cuda" else ("gloo",))


def scale(part: torch.Tensor, factor: float) -> None:
    """Multiply ``part`` in place. What counts nothing becomes nothing, also where it is not finite."""
    if factor:
        part.mul_(factor)
    else:
        part.zero_()


def all_reduce(
    group: dist.ProcessGroup, part: torch.Tensor, number: int, factor: float | None = None
) -> StartedOperation:
    """Average ``part`` over all ranks, in place, this one's counting ``factor``."""
    scale(part, 1.0 / group.size() if factor is None else factor)
    return StartedOperation([group.allreduce([part])])


def reduce_scatter(
    group: dist.ProcessGroup, part: torch.Tensor, number: int, factor: float | None = None
) -> StartedOperation:
    """Average this rank's shard of ``part`` over all ranks, in place; the rest is left with local values.

    Args:
        group: The data group.
        part: Of a buffer.
        number: Of the operation.
        factor: What this rank's counts; as much as any other's when left out.
    """
    scale(part, 1.0 / group.size() if factor is None else factor)
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


def all_reduce_in_shards(
    group: dist.ProcessGroup, part: torch.Tensor, number: int, factor: float | None = None
) -> StartedOperation:
    """Average ``part`` over all ranks, in place, in two halves that each go straight to where they are wanted.

    For links of long round trips: gloo's own goes around a ring, ``2(n-1)`` messages one after the other, and a group
    carries two of them at once. Gloo sends a message when it knows that it is expected. So means are expected from the
    start, which saves half a round trip. Where they come to, this rank's own values are read no more by then: another
    rank sends the mean of its shard when it has received all of them.

    Args:
        group: The data group; gloo.
        part: Of a buffer.
        number: Of the operation.
        factor: What this rank's counts; as much as any other's when left out.
    """
    scattered = reduce_scatter(group, part, number, factor)
    means = _expect_shards(group, part, number)  # after the shards that they are made of, in the order of one number

    def gather() -> StartedOperation:
        if scattered.finish is not None:
            scattered.finish()
        return replace(_gather(group, part, number, means), closing=True)

    return replace(scattered, finish=gather)


def all_reduce_direct(
    group: dist.ProcessGroup, part: torch.Tensor, number: int, factor: float | None = None
) -> StartedOperation:
    """Average a small ``part`` over all ranks, in place: each sends all of it to all others, and adds up by itself.

    One round of messages in place of two, for ``n/2`` times the bytes. All add up in the order of ranks, so that they
    get the same bits.

    Args:
        group: The data group; gloo.
        part: Of a buffer.
        number: Of the operation.
        factor: What this rank's counts; as much as any other's when left out.
    """
    scale(part, 1.0 / group.size() if factor is None else factor)
    received = {rank: torch.empty_like(part) for rank in others_of(group)}
    works = [group.recv([values], rank, number) for rank, values in received.items()]
    works += [group.send([part], rank, number) for rank in received]

    def add_up() -> None:
        first, *rest = (received.get(rank, part) for rank in range(group.size()))
        total = first.clone() if first is part else first  # what is sent is added once, and then written
        for values in rest:
            total.add_(values)
        part.copy_(total)

    return StartedOperation(works, add_up, messages=True)


def exchange(group: dist.ProcessGroup, part: torch.Tensor, number: int) -> StartedOperation:
    """Fill row r of ``part``, a matrix of as many rows as ranks, with rank r's row r, in place."""
    # Not gloo's own, which passes rows on from rank to rank: each time they would wait behind all that is under way.
    return all_gather(group, part.view(-1), number)


def _expect_shards(group: dist.ProcessGroup, part: torch.Tensor, number: int) -> list[dist.Work]:
    """Receive the other ranks' shards of ``part``."""
    return [
        group.recv([_shard(group, part, rank)], rank, number)
        for rank in others_of(group)
        if _shard(group, part, rank).numel()
    ]


def _gather(
    group: dist.ProcessGroup, part: torch.Tensor, number: int, expected: Sequence[dist.Work]
) -> StartedOperation:
    """Send this rank's shard, which the others expect as it does theirs."""
    own = _shard(group, part, group.rank())
    sent = [group.send([own], rank, number) for rank in others_of(group)] if own.numel() else []
    return StartedOperation([*expected, *sent], messages=True)


def others_of(group: dist.ProcessGroup) -> list[int]:
    """The other ranks, beginning with the next: no two ranks send to the same one first."""
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
    """``part`` itself if it cuts into equal shards, else a longer copy that does."""
    missing = -part.numel() % group.size()
    return torch.nn.functional.pad(part, (0, missing)) if missing else part
