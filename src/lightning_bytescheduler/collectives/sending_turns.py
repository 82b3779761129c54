"""Messages to several ranks, sent one after the other: to each in turn, so that no two senders meet at one receiver.

A worker that sends to all servers at once gives each a part of its link, and so does everybody else: all parts arrive
late together. Sent in turns that begin at another receiver on each rank, as in a Latin square, each message has its
sender's and its receiver's link to itself, and the first parts can be added up, and travel back, while others follow.

Messages are matched by number, so ranks need not agree on this order. Nobody waits forever, as receivers wait for
nothing to post a receive: a server does so for what was announced to it, a worker before it pushes its own part.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta

import torch
import torch.distributed as dist

from lightning_bytescheduler.scheduler.short_turns import prefer_short_turns

__all__ = ["PATIENCE", "OnSent", "SendingTurns", "turns_by_need"]

PATIENCE = timedelta(days=30)
"""Of who waits for a message in any case: that ends when a connection does. Connecting has a shorter one."""

OnSent = Callable[[float, float], object]
"""Told from when to when a message has left, in seconds of ``time.perf_counter``; on the thread that sends."""

_MOST_TURNS = 8  # of one receiver, for one of another
_AHEAD = 2  # messages handed to gloo at once: the next begins when one has left, without waking anybody


def turns_by_need(receivers: Sequence[int], needs: Sequence[float]) -> list[int]:
    """Receivers in an order of turns in which each occurs as often as it needs, evenly spread.

    With as many turns for all, those who get little keep up with those who get much: the links to the latter have to
    wait for their share then, and the others are done early and idle. With 4 workers, two spare servers and each
    worker a server besides, pushes and pulls took 6% less in turns of 3 and 1.

    Args:
        receivers: Ranks.
        needs: How much each of them gets, in any unit.
    """
    least = min((need for need in needs if need > 0), default=1.0)
    alike: dict[int, list[int]] = {}  # by how many turns each has
    for receiver, need in zip(receivers, needs, strict=True):
        alike.setdefault(min(max(round(need / least), 1), _MOST_TURNS), []).append(receiver)
    turns = []
    for count, ranks in alike.items():
        of_these = ranks * count
        turns += [((position + 0.5) / len(of_these), rank) for position, rank in enumerate(of_these)]
    return [rank for _, rank in sorted(turns, key=lambda turn: turn[0])]


class SendingTurns:
    """Sends messages on a thread of its own, ``bytescheduler-<name>``, until :meth:`close` or :meth:`stop`.

    Args:
        group: What they are sent on.
        receivers: Ranks, in the order of turns; the first is whose turn it is first. One may have several.
        name: Of the thread.
        on_error: Called on it, once, with what a message has failed with; nothing is sent after that.
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
        self._thread = threading.Thread(target=self._run, name=f"bytescheduler-{name}", daemon=True)
        self._thread.start()

    def put(
        self,
        message: torch.Tensor,
        receiver: int,
        number: int,
        header: dist.Work | None = None,
        on_sent: OnSent | None = None,
    ) -> None:
        """Send ``message`` as ``number`` when it is the receiver's turn; its header has been sent.

        Messages to one receiver leave in the order in which they came here. When one has left, ``on_sent`` is told.
        """
        with self._work:
            self._waiting[receiver].append((message, number, header, on_sent))
            self._work.notify()

    def close(self) -> None:
        """Send what waits, and end the thread: messages end with their group's timeout, at the latest."""
        with self._work:
            self._closed = True
            self._work.notify()
        self._thread.join()

    def stop(self, timeout: float = 0.0) -> bool:
        """Forget what waits, and end the thread with what is under way; returns whether it ended within ``timeout``.

        Args:
            timeout: In seconds; to be called off sooner, messages need their group's connections broken.
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
        prefer_short_turns()
        under_way: deque[tuple[dist.Work, dist.Work | None, OnSent | None, float]] = deque()
        left = 0.0  # when the message before had
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
        """The next message of who is next in turn and has one; ``None`` if there is none, or there will be none."""
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
