"""The process of one shard, and what the coordinator asks of it: frames over a pair of sockets, memory as descriptors.

``python -m lightning_bytescheduler.coordinator.shard_process FILE_DESCRIPTOR`` answers one request after the other
until its coordinator is gone, whose end of the pair the system then closes. Signals that are meant for the coordinator,
such as Ctrl+C, it leaves to it. It decides nothing and keeps nothing over a round: it knows neither workers nor rounds,
only which pieces of which buffers it is to read and to write.

A frame is its length in 4 bytes, with the descriptors of buffers that it names for the first time, and MessagePack.
"""

from __future__ import annotations

import mmap
import os
import signal
import socket
import sys
from collections.abc import Sequence
from typing import TypeAlias

import msgspec
import numpy as np
import torch
from torch import Tensor

from lightning_bytescheduler.compression.wire_format import WireFormat
from lightning_bytescheduler.coordinator.extents import Extent
from lightning_bytescheduler.coordinator.piece_sums import Addend, MeanPlace, PieceSums
from lightning_bytescheduler.coordinator.pieces import PiecedFormat

__all__ = ["Add", "Answer", "Clear", "Encode", "Form", "Look", "Request", "Share", "receive", "send"]

_LENGTH_BYTES = 4
_MOST_FILES = 250  # descriptors that Linux passes with one message


class _Struct(msgspec.Struct, frozen=True, kw_only=True, tag_field="kind", tag=True):
    pass


class Form(msgspec.Struct, frozen=True, kw_only=True):
    """Of payloads; see ``PiecedFormat``."""

    dtype: str
    density: float | None
    elements: int
    piece: int


class Share(msgspec.Struct, frozen=True, kw_only=True):
    """An update in a sum.

    Attributes:
        payload: Number of its buffer.
        weight: With which it counts.
        extents: Of the pieces that are asked for, in their order.
    """

    payload: int
    weight: int
    extents: tuple[Extent, ...] = ()


class Look(_Struct, frozen=True, kw_only=True):
    """Find the extents of pieces of an update."""

    form: Form
    payload: int
    pieces: tuple[int, ...]


class Add(_Struct, frozen=True, kw_only=True):
    """Add updates to the sum of that number."""

    form: Form
    sum: int
    updates: tuple[Share, ...]
    pieces: tuple[int, ...]


class Encode(_Struct, frozen=True, kw_only=True):
    """Write the mean of ``updates``, or without any that of the sum; see ``PieceSums.encode`` and ``MeanPlace``."""

    form: Form
    sum: int
    updates: tuple[Share, ...]
    pieces: tuple[int, ...]
    payload: int
    round: int
    known: int | None = None
    lost: int | None = None


class Clear(_Struct, frozen=True, kw_only=True):
    """Begin a sum anew, in the same memory."""

    sum: int
    pieces: tuple[int, ...]


Work: TypeAlias = Look | Add | Encode | Clear


class Request(msgspec.Struct, frozen=True, kw_only=True):
    """What is to be done.

    Attributes:
        work: That.
        opened: Number and length of the buffers whose descriptors come with it, in their order.
        closed: Numbers of buffers that are not needed any more.
        dropped: Numbers of sums that are not needed any more.
    """

    work: Work
    opened: tuple[tuple[int, int], ...] = ()
    closed: tuple[int, ...] = ()
    dropped: tuple[int, ...] = ()


class Answer(msgspec.Struct, frozen=True, kw_only=True):
    """It is done.

    Attributes:
        extents: That were asked for.
        error: In words, if it failed.
    """

    extents: tuple[Extent, ...] = ()
    error: str | None = None


# ── Frames ───────────────────────────────────────────────────────────


def send(channel: socket.socket, frame: Request | Answer, files: Sequence[int] = ()) -> None:
    """Send a frame, with descriptors.

    Raises:
        OSError: If nobody listens.
        ValueError: If there are more descriptors than one message takes.
    """
    if len(files) > _MOST_FILES:
        raise ValueError(f"{len(files)} buffers at once are more than the {_MOST_FILES} that can be handed over.")
    body = msgspec.msgpack.encode(frame)
    length = len(body).to_bytes(_LENGTH_BYTES, "little")
    if files:
        # These few bytes, to a socket whose last frame was answered, go at once or not at all.
        socket.send_fds(channel, [length], list(files))
        channel.sendall(body)
    else:
        channel.sendall(length + body)


def receive(channel: socket.socket) -> tuple[bytes, list[int]]:
    """Wait for a frame; returns it and the descriptors that came with it.

    Raises:
        ConnectionError: If the other side has gone.
    """
    head, files, _, _ = socket.recv_fds(channel, _LENGTH_BYTES, _MOST_FILES)
    if len(head) < _LENGTH_BYTES:
        head += _exactly(channel, _LENGTH_BYTES - len(head)) if head else b""
    if not head:
        raise ConnectionError("The other process has gone.")
    return _exactly(channel, int.from_bytes(head, "little")), files


def _exactly(channel: socket.socket, length: int) -> bytes:
    parts = bytearray()
    while len(parts) < length:
        part = channel.recv(length - len(parts))
        if not part:
            raise ConnectionError("The other process has gone.")
        parts += part
    return bytes(parts)


# ── The process ───────────────────────────────────────────────────────────


class _Shard:
    """Does what is asked."""

    def __init__(self) -> None:
        self._buffers: dict[int, Tensor] = {}
        self._formats: dict[Form, PiecedFormat] = {}
        self._sums: dict[int, PieceSums] = {}

    def answer(self, request: Request, files: Sequence[int]) -> Answer:
        for (number, length), file in zip(request.opened, files, strict=True):
            mapped = mmap.mmap(file, length)  # which has a descriptor of its own
            self._buffers[number] = torch.from_numpy(np.frombuffer(mapped, dtype=np.uint8))
        for number in request.closed:
            self._buffers.pop(number, None)
        for number in request.dropped:
            self._sums.pop(number, None)
        work = request.work
        if isinstance(work, Look):
            return self._look(work)
        if isinstance(work, Clear):
            for index in work.pieces if work.sum in self._sums else ():
                self._sums[work.sum].clear(index)
        elif isinstance(work, Add):
            updates = self._addends(work)
            for index in work.pieces:
                self._sum(work).add(updates, index)
        else:
            place = MeanPlace(
                payload=self._buffers[work.payload],
                round=work.round,
                known=None if work.known is None else self._buffers[work.known].view(torch.float32),
                lost=None if work.lost is None else self._buffers[work.lost].view(torch.float32),
            )
            updates = self._addends(work)
            for index in work.pieces:
                self._sum(work).encode(updates, place, index)
        return Answer()

    def _look(self, work: Look) -> Answer:
        pieced, payload = self._format(work.form), self._buffers[work.payload]
        return Answer(extents=tuple(pieced.extent(payload, index) for index in work.pieces))

    def _addends(self, work: Add | Encode) -> list[Addend]:
        return [Addend(self._buffers[one.payload], one.weight, _at(work.pieces, one.extents)) for one in work.updates]

    def _sum(self, work: Add | Encode) -> PieceSums:
        found = self._sums.get(work.sum)
        if found is None:
            found = self._sums[work.sum] = PieceSums(self._format(work.form))
        return found

    def _format(self, form: Form) -> PiecedFormat:
        pieced = self._formats.get(form)
        if pieced is None:
            wire = WireFormat(dtype=form.dtype, density=form.density)  # type: ignore[arg-type]  # checked there
            pieced = self._formats[form] = PiecedFormat(wire, form.elements, form.piece)
        return pieced


def _at(pieces: Sequence[int], extents: Sequence[Extent]) -> Sequence[Extent]:
    """Extents by the index of their piece."""
    if not extents:
        return ()
    found = [extents[0]] * (max(pieces) + 1)
    for index, extent in zip(pieces, extents, strict=True):
        found[index] = extent
    return found


def main() -> int:
    """Answer until the coordinator is gone."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)
    torch.set_num_threads(1)
    shard = _Shard()
    decoder = msgspec.msgpack.Decoder(Request)
    with socket.socket(fileno=int(sys.argv[1])) as channel:
        while True:
            # No timeout: a run may have nothing to add for any time, and its end closes the other side.
            try:
                body, files = receive(channel)
            except OSError:
                return 0
            try:
                answer = shard.answer(decoder.decode(body), files)
            except Exception as error:  # said where it was asked
                answer = Answer(error=f"{type(error).__name__}: {error}")
            finally:
                for file in files:
                    os.close(file)
            try:
                send(channel, answer)
            except OSError:
                return 0


if __name__ == "__main__":
    sys.exit(main())
