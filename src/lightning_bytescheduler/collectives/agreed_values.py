"""Numbers that rank 0 changes while a training runs, and that every rank uses from the same step on.

Every rank calls `before_step` for each step, in order, on one thread. At some of these calls, the exchanges, rank 0
posts what it wants next and the others post the matching receive; nobody waits. At the next exchange every rank takes
up what was posted at the last one. By then the message has long arrived, so the wait there is for nothing but a rank
that is a whole interval behind.

Why ranks agree:

* Exchanges are at the same steps on every rank. The first two are known beforehand: the first step of all, and the next
  one. Each message also says how many steps after the exchange at which it is read the next one is, so by induction all
  ranks know the step of the next exchange from a message that all of them have read.
* What was posted at one exchange comes into force at the next one, in the same call on every rank, rank 0 included: it
  reads the message that it has sent, not what it would like by now.
* The messages travel on a group of their own, on which nothing but this is launched, so they match by their number.
  It is gloo's: on a GPU, reading numbers that came through its memory would wait for all work that is queued there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_bytescheduler.collectives.groups import leave
from lightning_bytescheduler.collectives.operations import wait_unless

__all__ = ["AgreedValues"]

_WAIT_SLICE = timedelta(milliseconds=200)
_ARRIVAL_S = 1.0
_LOOK_AGAIN_S = 0.002


class AgreedValues:
    """One rank's end of the exchange; every rank must make it at the same point.

    Args:
        count: How many numbers are exchanged.
        timeout: Longest wait for another rank; the backend's default if ``None``.
        failure: Asked while another rank is waited for: why it will not come, if it will not.
    """

    def __init__(
        self,
        count: int,
        *,
        timeout: timedelta | None = None,
        failure: Callable[[], BaseException | None] = lambda: None,
    ) -> None:
        self._count = count
        self._failure = failure
        self._group: dist.ProcessGroup | None = dist.new_group(backend="gloo", timeout=timeout)
        self._posted: tuple[dist.Work | None, torch.Tensor] | None = None
        self._step = 0
        self._next_exchange = 0

    def before_step(self, step: int, wanted: Sequence[int] | None = None, *, interval: int = 1) -> list[int] | None:
        """Take part in an exchange, if there is one before this step.

        Args:
            step: Number of the step that begins. Calls for a step that was begun before do nothing.
            wanted: Rank 0's numbers; other ranks' are not looked at.
            interval: Rank 0's wish how many steps exchanges are apart, 1 or more, once this message was read.

        Returns:
            The numbers to put in force now, on all ranks; ``None`` if there is no exchange, or this is the first one.

        Raises:
            RuntimeError: If another rank is gone.
            BaseException: What ``failure`` says.
        """
        if step <= self._step or self._group is None:
            return None
        self._step = step
        if step < self._next_exchange:
            return None
        agreed, apart = None, 1
        if self._posted is not None:
            work, message = self._posted
            if work is not None:
                wait_unless(work, self._failure, look_every=_WAIT_SLICE)
            *agreed, apart = message.tolist()
        self._next_exchange = step + apart
        message = torch.tensor([*(wanted or [0] * self._count), interval], dtype=torch.int64, device="cpu")
        self._posted = dist.broadcast(message, src=0, group=self._group, async_op=True), message
        return agreed

    def close(self) -> None:
        """Leave the group, within a second; idempotent. What was posted last may never come, after a failure."""
        group, self._group = self._group, None
        if group is None:
            return
        work = None if self._posted is None else self._posted[0]
        # Not by waiting for it: a wait that times out would break connections that other ranks may still need.
        deadline = time.monotonic() + _ARRIVAL_S
        while work is not None and not work.is_completed() and time.monotonic() < deadline:
            time.sleep(_LOOK_AGAIN_S)
        leave(group, idle=work is None or work.is_completed())
