"""One worker's WebSocket: takes frames, checks them, and sends frames.

The coordinator answers each frame of the worker with a frame whose ``heard`` is the worker's number. Other messages
wait in a bounded queue, and go out as one frame as soon as the last frame has been sent. Of several acknowledgements
only the last is sent. A worker that does not read is cut off; its lease goes on, and it may come back.

No member can block the event loop: its frames have a rate limit, and stalled transfers are cut off.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial

from aiohttp import WebSocketError, WSCloseCode, WSMsgType, web

from lightning_bytescheduler.coordinator.membership import Member
from lightning_bytescheduler.diloco.coordinator_protocol import Batch, decode_frame, encode_frame
from lightning_bytescheduler.diloco.messages import Acknowledge, Message, ToWorker
from lightning_bytescheduler.exceptions import OptionError


class Transfer:
    """A transfer that should make progress. :class:`Stalls` checks that regularly; single pieces have no timeout.

    Args:
        cut: Ends the transfer.
        now: The time, in seconds.
    """

    def __init__(self, cut: Callable[[], object], now: float) -> None:
        self.cut = cut
        self.moved = True
        self.since = now


class Stalls:
    """Watches the transfers of one event loop.

    Args:
        seconds: Seconds without progress after which a transfer is cut off.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._transfers: set[Transfer] = set()

    @contextmanager
    def watch(self, cut: Callable[[], object] | None = None) -> Iterator[Transfer]:
        """Watch a transfer within this context. The caller sets ``moved`` whenever it makes progress.

        Args:
            cut: Ends the transfer; if left out, this task is cancelled.
        """
        task = asyncio.current_task()
        transfer = Transfer(cut or (task.cancel if task is not None else bool), time.monotonic())
        self._transfers.add(transfer)
        try:
            yield transfer
        finally:
            self._transfers.discard(transfer)

    def look(self) -> None:
        """Cut off transfers that have made no progress for too long."""
        now = time.monotonic()
        for transfer in list(self._transfers):
            if transfer.moved:
                transfer.moved = False
                transfer.since = now
            elif now - transfer.since > self._seconds:
                self._transfers.discard(transfer)
                transfer.cut()


_PER_SECOND, _BURST = 100.0, 200.0


class RateLimit:
    """A token bucket: full at first, refilled at a steady rate. For one thread.

    Args:
        clock: Returns the time, in seconds.
    """

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._left = _BURST
        self._at = clock()

    def take(self, *, longest: float | None = None) -> float | None:
        """Count one more event.

        Args:
            longest: Most seconds that the event may be delayed; ``None`` for no limit.

        Returns:
            Seconds by which to delay the event; ``None`` if they exceed ``longest``, and then it was not counted.
        """
        now = self._clock()
        self._left = min(self._left + (now - self._at) * _PER_SECOND, _BURST)
        self._at = now
        pause = max(1 - self._left, 0.0) / _PER_SECOND
        if longest is not None and pause > longest:
            return None
        self._left -= 1
        return pause


_MOST_QUEUED = 500  # messages
_MOST_IN_FRAME = 1000  # messages
_MOST_BYTES = 1 << 20  # of a frame after the first
_REASON_BYTES = 120  # most that fit into a closing frame


class Connection:
    """A worker's WebSocket, after the answer to its ``Hello``.

    Args:
        socket: Its WebSocket. This class sends the pings and answers the worker's.
        transport: The transport under the WebSocket.
        member: The worker.
        stalls: Cuts the worker off if it does not read.
        hear: Called with a frame's messages and the time of their arrival; raises ``OptionError`` if one is wrong.
    """

    def __init__(
        self,
        socket: web.WebSocketResponse,
        transport: asyncio.Transport | None,
        member: Member,
        *,
        stalls: Stalls,
        hear: Callable[[Member, tuple[Message, ...], float], None],
    ) -> None:
        self.member = member
        self._socket = socket
        self._transport = transport
        self._stalls = stalls
        self._hear = hear
        self._queue: deque[ToWorker] = deque()
        self._heard = 0
        self._answered = 0
        self._sent = 0
        self._sending = False
        self._hearing = False
        self._ends = False
        self._task: asyncio.Task[None] | None = None
        self._limit = RateLimit(time.monotonic)
        self._cut = ""
        self._heard_at = self._pinged_at = time.monotonic()
        self._ping: asyncio.Task[None] | None = None  # sent since the worker was last heard of

    def post(self, message: ToWorker) -> None:
        """Send a message as soon as possible, in order."""
        queue = self._queue
        if queue and isinstance(message, Acknowledge) and isinstance(queue[-1], Acknowledge):
            queue.pop()
        queue.append(message)
        if len(queue) > _MOST_QUEUED:
            self.cut(f"{len(queue)} messages wait for a worker that does not read")
        elif not self._sending and not self._hearing and self._task is None:
            self._task = asyncio.get_running_loop().create_task(self._flush_later(), name="bytescheduler-send")

    def last_heard(self, now: float, *, every: float, patience: float) -> float | None:
        """When the worker last sent anything, if only the answer to a ping; ``None`` once the connection is closed.

        Args:
            now: The time, in seconds.
            every: Seconds of silence after which the worker is pinged.
            patience: Seconds after a ping at which the worker is cut off.
        """
        if now - self._heard_at >= every and self._ping is None:
            self._pinged_at = now
            self._ping = asyncio.get_running_loop().create_task(self._ask_whether_alive(), name="bytescheduler-ping")
        elif self._ping is not None and now - self._pinged_at > patience:
            self.cut("The worker answers no ping.")
        return None if self._cut or self._socket.closed else self._heard_at

    async def _ask_whether_alive(self) -> None:
        with contextlib.suppress(ConnectionError, RuntimeError):  # the task that reads sees the error, too
            await self._socket.ping()

    def cut(self, reason: str) -> None:
        """End the connection without waiting."""
        if self._cut:
            return
        self._cut = reason
        self._queue.clear()
        if self._sending:  # the worker does not read, so it would not get the reason
            if self._transport is not None:
                self._transport.abort()
        else:
            self._task = asyncio.get_running_loop().create_task(self.close(reason), name="bytescheduler-close")

    def end(self, reason: str) -> None:
        """End the connection. If a frame of the worker is being handled, end it after the answer."""
        if self._hearing:
            self._ends = True
        else:
            self.cut(reason)

    async def close(self, reason: str, *, code: int = WSCloseCode.POLICY_VIOLATION) -> None:
        """End the connection with a reason."""
        self._cut = self._cut or reason
        await self._socket.close(code=code, message=reason.encode()[:_REASON_BYTES])

    async def serve(self) -> None:
        """Handle frames until the connection ends.

        Raises:
            OptionError: If a frame is wrong.
        """
        name = self.member.name
        async for received in self._socket:
            if self._cut:
                return
            self._heard_at, self._ping = time.monotonic(), None
            if received.type is WSMsgType.PONG:
                continue
            if received.type is WSMsgType.PING:
                await self._socket.pong(received.data)
                continue
            if received.type is WSMsgType.ERROR and not isinstance(received.data, WebSocketError):
                return  # the connection has broken
            if received.type is not WSMsgType.TEXT:
                raise OptionError("frame", received.type.name, "a text")
            text: str = received.data
            if len(text) > _MOST_BYTES:
                raise OptionError("frame", f"{len(text)} letters", f"{_MOST_BYTES} at most")
            frame = decode_frame(text, sender=name)
            if not isinstance(frame, Batch):
                raise OptionError("frame", type(frame).__name__, "a Batch after the first one")
            if frame.number != self._heard + 1:
                raise OptionError("number", frame.number, f"{self._heard + 1}, the next of this connection")
            if len(frame.messages) > _MOST_IN_FRAME:
                raise OptionError("messages", len(frame.messages), f"{_MOST_IN_FRAME} at most in a frame")
            self._hearing = True  # messages posted from here on go out with the answer
            try:
                self._hear(self.member, frame.messages, self._heard_at)
            finally:
                self._hearing = False
            self._heard = frame.number
            if pause := self._limit.take():  # a worker sends its next frame after the answer
                await asyncio.sleep(pause)
            await self._flush()
            if self._ends:
                await self.close("It has left.", code=WSCloseCode.OK)
                return

    async def _flush_later(self) -> None:
        self._task = None
        with contextlib.suppress(ConnectionError, RuntimeError, asyncio.TimeoutError):
            await self._flush()  # the task that reads from it sees the error, too

    async def _flush(self) -> None:
        if self._sending:
            return  # the task that is sending also sends these
        self._sending = True
        try:
            if self._transport is not None and self._transport.get_write_buffer_size():
                with self._stalls.watch(partial(self.cut, "The worker does not read.")):
                    await self._send_all()
            else:
                await self._send_all()
        finally:
            self._sending = False

    async def _send_all(self) -> None:
        while (self._queue or self._answered < self._heard) and not self._cut:
            messages = tuple(self._queue)
            self._queue.clear()
            self._sent += 1
            self._answered = self._heard
            await self._socket.send_str(encode_frame(Batch(number=self._sent, heard=self._heard, messages=messages)))
