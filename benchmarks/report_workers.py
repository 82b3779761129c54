"""A thousand workers that report their steps, in one thread without a library: the side that measures is never slow.

Each worker has a WebSocket of its own. It reports at fixed times, and as the protocol says: a frame waits for the
answer to the one before, and carries all steps until then. The time of an answer counts from when the step was due, so
that neither a slow server nor a slow client is hidden.
"""

from __future__ import annotations

import base64
import http.client
import os
import select
import socket
import struct
import time
from typing import TypeVar
from urllib.parse import urlsplit

from lightning_bytescheduler import __version__
from lightning_bytescheduler.diloco import coordinator_protocol as protocol
from lightning_bytescheduler.diloco import messages

__all__ = ["ReportWorker", "report"]

_TEXT, _PING, _PONG, _CLOSE = 1, 9, 10, 8
_WAIT_SECONDS = 60.0

Message = TypeVar("Message", bound=messages.AnyMessage)


class ReportWorker:
    """One worker, of a coordinator's run."""

    def __init__(self, url: str, name: str, model: tuple[protocol.ModelParameter, ...]) -> None:
        place = urlsplit(url)
        self._place = f"{place.hostname}:{place.port}"
        self.socket = socket.create_connection((place.hostname or "127.0.0.1", place.port or 80), _WAIT_SECONDS)
        self.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._buffer = b""
        self._inbox: list[messages.AnyMessage] = []
        self._number = self._heard = 0
        self.steps = 0  # due so far
        self.sent = 0  # of the steps
        self.heard = 0  # of the steps that were sent, by the coordinator
        key = base64.b64encode(os.urandom(16)).decode()
        self.socket.sendall(
            f"GET {protocol.WORKER_PATH} HTTP/1.1\r\nHost: {self._place}\r\nUpgrade: websocket\r\n"
            f"Connection: Upgrade\r\nSec-WebSocket-Key: {key}\r\nSec-WebSocket-Version: 13\r\n\r\n".encode()
        )
        while b"\r\n\r\n" not in self._buffer:
            self._buffer += self.socket.recv(4096)
        self._buffer = self._buffer.partition(b"\r\n\r\n")[2]
        hello = protocol.Hello(protocol=protocol.PROTOCOL, package=__version__, worker=name, model=model)
        self._send(protocol.encode_frame(hello).encode())
        welcome = protocol.decode_frame(self._one_frame(), sender="the coordinator")
        assert isinstance(welcome, protocol.Welcome), welcome
        self.name = welcome.worker
        self.headers = {protocol.SESSION_HEADER: welcome.session}

    def provide(self, body: bytes) -> None:
        """Send the first weights."""
        connection = http.client.HTTPConnection(self._place)
        connection.request("PUT", protocol.STATE_PATH, body, self.headers)
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        connection.close()

    def say(self, message: messages.Message) -> None:
        """Send a frame."""
        self._number += 1
        self._send(
            protocol.encode_frame(protocol.Batch(number=self._number, heard=self._heard, messages=(message,))).encode()
        )

    def wait_for(self, kind: type[Message]) -> Message:
        """The next message of a kind; those before it are dropped."""
        while True:
            while self._inbox:
                message = self._inbox.pop(0)
                if isinstance(message, kind):
                    return message
            frame = protocol.decode_frame(self._one_frame(), sender="the coordinator")
            assert isinstance(frame, protocol.Batch)
            self._heard = frame.number
            self._inbox += frame.messages

    def report(self, round: int, seconds: float) -> None:
        """Report all steps that are due."""
        self._number += 1
        self.sent = self.steps
        # Written by hand, as msgspec would take as long as everything else here.
        text = (
            f'{{"kind":"Batch","number":{self._number},"heard":{self._heard},"messages":[{{"kind":"StepReport",'
            f'"worker":"{self.name}","round":{round},"steps":{self.steps},"samples":{8 * self.steps},"batch_size":8,'
            f'"seconds":{seconds}}}]}}'
        )
        self._send(text.encode())

    def answered(self) -> bool:
        """Read what is there; returns whether the last frame was answered."""
        try:
            self._buffer += self.socket.recv(65536)
        except BlockingIOError:
            return False
        done = False
        while (text := self._take()) is not None:
            self._heard += 1
            at = text.index(b'"heard":') + 8
            done = done or int(text[at:].partition(b",")[0].rstrip(b"}")) >= self._number
        return done

    def _send(self, text: bytes) -> None:
        # The mask is of zeros, and leaves the text as it is.
        length = len(text)
        if length < 126:
            header = struct.pack("!BB4x", 0x80 | _TEXT, 0x80 | length)
        else:  # none of these messages has 64 KiB
            header = struct.pack("!BBH4x", 0x80 | _TEXT, 0x80 | 126, length)
        self.socket.send(header + text)

    def _one_frame(self) -> bytes:
        while (text := self._take()) is None:
            got = self.socket.recv(65536)
            assert got, "The coordinator has closed the connection."
            self._buffer += got
        return text

    def _take(self) -> bytes | None:
        """The next text of what was received."""
        while len(self._buffer) >= 2:
            kind, length = self._buffer[0] & 15, self._buffer[1]
            start = 2
            if length == 126:
                start, length = 4, int.from_bytes(self._buffer[2:4], "big")
            elif length == 127:
                start, length = 10, int.from_bytes(self._buffer[2:10], "big")
            if len(self._buffer) < start + length:
                return None
            text, self._buffer = self._buffer[start : start + length], self._buffer[start + length :]
            assert kind != _CLOSE, text
            if kind == _PING:
                self.socket.send(struct.pack("!BB4x", 0x80 | _PONG, 0x80 | length) + text)
            elif kind == _TEXT:
                return text
        return None


def report(workers: list[ReportWorker], round: int, *, rate: float, seconds: float) -> tuple[list[float], int]:
    """Let all workers of a round report at a rate of steps a second each, for some seconds.

    Returns:
        How long each report waited for its answer, and the number of frames that were sent.
    """
    poll = select.epoll()
    numbers = {worker.socket.fileno(): number for number, worker in enumerate(workers)}
    for worker in workers:
        worker.socket.setblocking(False)
        poll.register(worker.socket, select.EPOLLIN)
    count, pause = len(workers), 1 / rate
    apart = pause / count
    begin = time.perf_counter() + 0.5
    latencies: list[float] = []
    frames = turn = waiting = 0
    last = int(seconds / apart)
    while turn < last or waiting:
        now = time.perf_counter()
        while turn < last and begin + turn * apart <= now:
            worker = workers[turn % count]
            worker.steps += 1
            turn += 1
            if worker.sent == worker.heard:
                worker.report(round, pause)
                frames += 1
                waiting += 1
        left = begin + turn * apart - time.perf_counter() if turn < last else 0.1
        for file, _ in poll.poll(max(left, 0)):
            number = numbers[file]
            worker = workers[number]
            if not worker.answered() or worker.heard == worker.sent:
                continue
            done = time.perf_counter()
            due = range(worker.heard, worker.sent)
            latencies.extend(done - begin - (number + step * count) * apart for step in due)
            worker.heard = worker.sent
            waiting -= 1
            if worker.steps > worker.sent:
                worker.report(round, pause)
                frames += 1
                waiting += 1
    poll.close()
    return latencies, frames
