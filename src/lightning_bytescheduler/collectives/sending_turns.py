"""Sends messages to several ranks in turns, so that two senders rarely meet at one receiver.

If a worker sends to all servers at once, it shares its link among them, as all workers do, and all parts arrive late
together. In turns that begin at another receiver on each rank, as in a Latin square, each message has its sender's and
its receiver's link to itself. The first parts can be summed, and travel back, while others follow.

Messages are matched by number, so ranks need not agree on this order. No rank waits forever, as receivers post a
receive without waiting: a server does so for every announced part, a worker before it pushes its own part.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_bytescheduler.scheduler.threads import start_thread

__all__ = ["PATIENCE", "OnSent", "SendingTurns", "turns_by_need"]

PATIENCE = timedelta(days=30)
"""Timeout of waits that a closed connection ends anyway, for what may come as late as a validation ends; connecting has
a shorter one."""

OnSent = Callable[[float, float], object]
"""Called with begin and end of a message's way out, in seconds of ``time.perf_counter``, on the sending thread."""

_MOST_TURNS = 8  # of one receiver, per turn of another
_AHEAD = 2  # messages handed to gloo at once: the next begins without a wake-up when one has left


def turns_by_need(receivers: Sequence[int], needs: Sequence[float]) -> list[int]:
    """Return an order of turns in which each receiver occurs in proportion to its need, evenly spread.

    With equal turns, receivers with small needs would be done early, and the links to the others would then carry the
    rest alone.
    """
    least = min((need for need in needs if need > 0), default=1.0)
    alike: dict[int, list[int]] = {}  # receivers by number of turns
    for receiver, need in zip(receivers, needs, strict=True):
        alike.setdefault(min(max(round(need / least), 1), _MOST_TURNS), []).append(receiver)
    turns = []
    for count, ranks in alike.items():
        of_these = ranks * count
        turns += [((position + 0.5) / len(of_these), rank) for position, rank in enumerate(of_these)]
    return [rank for _, rank in sorted(turns, key=lambda turn: turn[0])]


class SendingTurns:
    """Sends messages on a separate thread, ``bytescheduler-<name>``, until :meth:`close` or :meth:`stop`.

    Args:
        on_error: Called on the thread once with a message's error; nothing is sent after that.
    """

    def __init__(
        self,
        group: dist.ProcessGroup,
        receivers: Sequence[int],
        *,
        name: str,
        on_error: Callable[[BaseException], object],
    ) -> None:
        self._group = group
        self._waiting: dict[int, deque[tuple[torch.Tensor, int, dist.Work | None, OnSent | None]]] = {
            rank: deque() for rank in receivers
        }
        self._turns = list(receivers)
        self._next = 0
        self._on_error = on_error
        self._work = threading.Condition()
        self._closed = False
        self._thread = start_thread(name, self._run)

    def put(
        self,
        message: torch.Tensor,
        receiver: int,
        number: int,
        header: dist.Work | None = None,
        on_sent: OnSent | None = None,
    ) -> None:
        """Send ``message`` as ``number`` in the receiver's turn; its header has been sent.

        Messages to one receiver leave in the order of these calls. ``on_sent`` is called when it has left.
        """
        with self._work:
            self._waiting[receiver].append((message, number, header, on_sent))
            self._work.notify()

    def close(self) -> None:
        """Send what waits and end the thread; messages end with their group's timeout at the latest."""
        with self._work:
            self._closed = True
            self._work.notify()
        self._thread.join()

    def stop(self, timeout: float = 0.0) -> bool:
        """Drop what waits and end the thread after messages in flight; returns whether it ended within ``timeout``.

        Args:
            timeout: In seconds; to end messages in flight sooner, break the group's connections.
        """
        with self._work:
            self._closed = True
            for waiting in self._waiting.values():
                waiting.clear()
            self._work.notify()
        if timeout:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    def _run(self) -> None:
        under_way: deque[tuple[dist.Work, dist.Work | None, OnSent | None, float]] = deque()
        left = 0.0  # when the previous message had left
        try:
            while True:
                taken = self._take(wait=not under_way)
                if taken is None and not under_way:
                    return
                if taken is not None:
                    receiver, message, number, header, on_sent = taken
                    start = time.perf_counter()
                    under_way.append((self._group.send([message], receiver, number), header, on_sent, start))
                if taken is None or len(under_way) >= _AHEAD:
                    sent, header, on_sent, start = under_way.popleft()
                    sent.wait(PATIENCE)
                    start, left = max(start, left), time.perf_counter()
                    if on_sent is not None:
                        on_sent(start, left)
                    if header is not None:
                        header.wait(PATIENCE)
        except BaseException as error:
            self.stop()
            self._on_error(error)

    def _take(self, *, wait: bool) -> tuple[int, torch.Tensor, int, dist.Work | None, OnSent | None] | None:
        """Return the next message of the next receiver that has one; ``None`` if there is none, or the thread ends."""
        with self._work:
            while True:
                for distance in range(len(self._turns)):
                    position = (self._next + distance) % len(self._turns)
                    receiver = self._turns[position]
                    if self._waiting[receiver]:
                        self._next = position + 1
                        return (receiver, *self._waiting[receiver].popleft())
                if self._closed or not wait:
                    return None
                self._work.wait()
