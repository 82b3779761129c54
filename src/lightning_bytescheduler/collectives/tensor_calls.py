"""Calls on groups that torch does not know by name, and a wait that a training thread can afford."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from datetime import timedelta

import torch
import torch.distributed as dist

__all__ = ["broadcast_from_first", "reduce_with", "wait_unless"]


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
