"""Uploads, and the exact sum of a round's updates: piece by piece in several threads, with the same bits in any order.

Uploads share a bounded room in memory until they are added. While an update comes in, its digest and the magnitude of
its numbers are computed. Unless means have a format of their own, the first update of a sum is held as it came, and is
the mean if no other comes. All others are added when they are complete, so a sum takes 16 bytes for each element with
any number of workers. Pieces are independent, so the bits do not depend on which thread works on which piece.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable
from concurrent.futures import Executor
from functools import cached_property, partial
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_bytescheduler.compression.wire_format import WireFormat
from lightning_bytescheduler.diloco.weighted_mean import LARGEST, MOST_WEIGHT, WeightedMean
from lightning_bytescheduler.exceptions import OptionError, SchedulerTimeoutError


def view_of(payload: Tensor) -> memoryview:
    """The bytes of a tensor, without a copy."""
    array: Any = payload.numpy()  # numpy's types do not say that an array is a buffer
    return memoryview(array)


def buffer_of(length: int) -> Tensor:
    """A buffer of so many bytes, uninitialised. NumPy makes it, as it asks the system for large pages."""
    return torch.from_numpy(np.empty(length, dtype=np.uint8))


PIECE = 1 << 20
"""Elements of a piece: a whole number of blocks, and of bytes, in every format."""

_ELEMENT_BITS: dict[str, int] = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}
"""Formats that can be cut; a payload in another format is one piece."""


class PiecedFormat:
    """Cuts payloads with a given number of elements into pieces, and puts them together.

    Args:
        wire: The format.
        elements: Elements of the whole payload.
        piece: Elements of a piece; 0 for ``PIECE``.
    """

    def __init__(self, wire: WireFormat, elements: int, piece: int = 0) -> None:
        self.wire = wire
        self.elements = elements
        self.piece = piece or PIECE
        self.payload_bytes: int = wire.payload_bytes(elements)
        self._bits = _ELEMENT_BITS.get(wire.dtype, 0)
        length = self.piece if self._bits else elements
        self.pieces = [(start, min(start + length, elements)) for start in range(0, elements, length)]
        self._scales = self.payload_bytes - self._element_bytes(elements)
        self._scales_of_piece = wire.payload_bytes(self.piece) - self._element_bytes(self.piece)

    @cached_property
    def of_means(self) -> PiecedFormat:
        """The format of the means of such payloads, cut the same way."""
        wire = self.wire.of_means
        return self if wire == self.wire else PiecedFormat(wire, self.elements, self.piece)

    def _element_bytes(self, elements: int) -> int:
        return -(-elements * self._bits // 8)

    def _sections(self, index: int) -> list[slice]:
        if not self._bits:
            return [slice(0, self.payload_bytes)]
        start, stop = self.pieces[index]
        elements = slice(self._scales + self._element_bytes(start), self._scales + self._element_bytes(stop))
        if not self._scales:
            return [elements]
        first = index * self._scales_of_piece
        last = self._scales if stop == self.elements else first + self._scales_of_piece
        return [slice(first, last), elements]

    def end_of(self, index: int) -> int:
        """Return how many bytes of the payload must have come before a piece can be read."""
        return int(self._sections(index)[-1].stop)

    def length_of(self, index: int) -> int:
        """Elements of a piece."""
        start, stop = self.pieces[index]
        return stop - start

    def largest(self, payload: Tensor, index: int) -> float:
        """An upper bound of the magnitudes in one piece; infinity if a number is not finite."""
        largest = self.wire.largest(self.part(payload, index), self.length_of(index))
        return math.inf if math.isnan(largest) else largest

    def part(self, payload: Tensor, index: int) -> Tensor:
        """One piece of a payload; without a copy where the format has no scales."""
        sections: list[Tensor] = [payload[section] for section in self._sections(index)]
        return sections[0] if len(sections) == 1 else torch.cat(sections)

    def place_of(self, payload: Tensor, index: int) -> Tensor | None:
        """The view of one piece in a payload, or ``None`` if it is not contiguous there."""
        sections = self._sections(index)
        return payload[sections[0]] if len(sections) == 1 else None

    def place(self, part: Tensor, payload: Tensor, index: int) -> None:
        """Write one piece into a payload."""
        offset = 0
        for section in self._sections(index):
            length = section.stop - section.start
            payload[section] = part[offset : offset + length]
            offset += length

    def seed(self, round: int, index: int) -> int:
        """The seed for one piece of a round's mean. Each has its own, as one seed rounds every tensor the same way."""
        return round * len(self.pieces) + index


class Update:
    """An update whose numbers are known.

    Args:
        payload: The update as it came.
        largest: An upper bound of the magnitudes of its numbers; infinity if one is not finite.
        digest: Digest of the payload, in hexadecimal digits.
    """

    def __init__(self, payload: Tensor, largest: float, digest: str) -> None:
        self.payload = payload
        self.largest = largest
        self.digest = digest
        self.weight = 0  # set when it becomes part of a sum


_AT_ONCE = 1 << 23  # bytes that are checked together


class UploadRoom:
    """Bounded room in memory for all uploads. For one event loop.

    Args:
        limit: Bytes of all uploads together; a larger upload is accepted while there is no other.
        executor: Threads that check uploads.
    """

    def __init__(self, limit: int, executor: Executor) -> None:
        self.limit = limit
        self.executor = executor
        self.taken = 0
        self._waiting: list[asyncio.Future[None]] = []

    async def take(self, what: PiecedFormat | int, *, timeout: float) -> Upload:
        """Take room, or wait for it.

        Args:
            what: Format of an update; or the length of another body, whose numbers are not checked.
            timeout: Longest wait in seconds.

        Raises:
            SchedulerTimeoutError: If there is not enough room in time.
        """
        pieced, length = (None, what) if isinstance(what, int) else (what, what.payload_bytes)
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while self.taken and self.taken + length > self.limit:
            changed = loop.create_future()
            self._waiting.append(changed)
            try:
                await asyncio.wait_for(changed, deadline - loop.time())
            except (TimeoutError, asyncio.TimeoutError):
                raise SchedulerTimeoutError(
                    f"There is no room for {length} bytes more: {self.taken} of {self.limit} are taken by uploads."
                ) from None
        upload = Upload(self, length, pieced)
        self.taken += length
        return upload

    def give_back(self, length: int) -> None:
        """Free room, and wake those that wait for it."""
        self.taken -= length
        waiting, self._waiting = self._waiting, []
        for changed in waiting:
            if not changed.done():
                changed.set_result(None)


class Upload:
    """A body of known length, filled from the front and checked in a thread. As a context it gives back its room.

    Args:
        room: The room that it has taken a part of.
        length: Length in bytes.
        pieced: Its format; ``None`` if its numbers are not checked.
    """

    def __init__(self, room: UploadRoom, length: int, pieced: PiecedFormat | None) -> None:
        import xxhash

        self.length = self._takes = length
        self._room = room
        self._pieced = pieced
        self._payload = buffer_of(length)
        self._view = view_of(self._payload)
        self._filled = 0
        self._hash = xxhash.xxh3_128()
        self._hashed = 0
        self._looked = 0  # pieces that have been checked
        self._largest = 0.0
        self._job: asyncio.Future[None] | None = None

    def write(self, chunk: bytes) -> None:
        """Append a chunk; returns at once.

        Raises:
            OptionError: If it is longer than was announced.
        """
        end = self._filled + len(chunk)
        if end > self.length:
            raise OptionError("body", f"{end} bytes", f"{self.length} bytes, as announced")
        self._view[self._filled : end] = chunk
        self._filled = end
        if end - self._hashed >= _AT_ONCE and (self._job is None or self._job.done()):
            if self._job is not None:
                self._job.result()
            self._job = asyncio.get_running_loop().run_in_executor(self._room.executor, self._look, end)

    async def finish(self) -> Update:
        """The update, once the whole body has come in."""
        if self._job is not None:
            await self._job
        await asyncio.get_running_loop().run_in_executor(self._room.executor, self._look, self.length)
        return Update(self._payload, self._largest, self._hash.hexdigest())

    def close(self) -> None:
        """Give the room back; may be repeated."""
        self._room.give_back(self._takes)
        self._takes = 0

    def __enter__(self) -> Upload:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _look(self, filled: int) -> None:
        self._hash.update(self._view[self._hashed : filled])
        self._hashed = filled
        pieced = self._pieced
        while pieced is not None and self._looked < len(pieced.pieces) and pieced.end_of(self._looked) <= filled:
            self._largest = max(self._largest, pieced.largest(self._payload, self._looked))
            self._looked += 1


class UpdateSum:
    """Sum of one fragment's updates in one round. Its methods are called on the event loop; threads do the work.

    Additions are announced on the loop with :meth:`begin`, so that :meth:`settled` waits for all of them.

    Args:
        pieced: The format of the updates.
        executor: Threads that add.
    """

    def __init__(self, pieced: PiecedFormat, executor: Executor) -> None:
        self.pieced = pieced
        self._executor = executor
        self._held: Update | None = None  # the first one, until there is another
        self._sums: list[WeightedMean | None] = [None] * len(pieced.pieces)
        self._locks = [threading.Lock() for _ in pieced.pieces]  # one for each piece; a thread holds only one
        self._summed = False  # whether the sums hold anything
        self._under_way = 0
        self._settled = asyncio.Event()
        self._settled.set()
        self._bound = 0.0
        self.weight = 0
        self.failed: BaseException | None = None

    def begin(self, update: Update, *, weight: int) -> None:
        """Announce an update, so that :meth:`settled` waits for it.

        Args:
            update: The update.
            weight: Its weight, 1 or more.

        Raises:
            OptionError: If it is not finite, the sum could become too large with it, or the weight is too large.
        """
        largest = update.largest
        bound = self._bound + largest * weight
        if not bound < LARGEST:  # false for NaN, too
            state = f"{largest:.3g} in it" if math.isfinite(largest) else "infinities or NaN in it"
            raise OptionError("update", state, f"finite, and below {LARGEST:.3g} when it is weighted and summed")
        if weight > MOST_WEIGHT:
            raise OptionError("weight", weight, f"{MOST_WEIGHT} at most")
        self._bound = bound
        self.weight += weight
        update.weight = weight
        self._under_way += 1
        self._settled.clear()

    async def add(self, update: Update) -> None:
        """Add an announced update; its payload belongs to the sum from now on."""
        held, self._held = self._held, None
        try:
            if held is None and not self._summed and self.pieced.of_means is self.pieced:
                self._held = update
            else:
                self._summed = True
                for one in (update,) if held is None else (held, update):
                    await self._of_pieces(partial(self._add, one))
        except BaseException as error:
            self.failed = error  # part of it may be in the sum, which must not be used
            raise
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._settled.set()

    async def settled(self) -> None:
        """Wait until nothing is being added."""
        # No timeout: additions run in memory, in threads, and each sets the event whether it succeeds or fails. They do
        # not depend on the connection of the worker that sent the update.
        await self._settled.wait()

    @property
    def only(self) -> Update | None:
        """The only update in a settled sum, whose payload is the mean; ``None`` if there are others.

        It is sent as it is: in 8 or 4 bits, encoding it again would round it once more.
        """
        return self._held

    async def encode_mean(
        self, payload: Tensor, *, round: int, known: Tensor | None = None, lost: Tensor | None = None
    ) -> None:
        """Write the mean of a settled sum that has no :attr:`only` update.

        Args:
            payload: The whole fragment's payload, which is written to.
            round: The mean's round, which seeds the rounding.
            known: Residual of the fragment's earlier means; ``None`` for zeros. It is only read, so that a mean can be
                formed again.
            lost: Filled with the residual after this mean; ``None`` where the wire format keeps no residuals.

        Raises:
            ValueError: If nothing was added.
        """
        await self._of_pieces(partial(self._encode, payload, round, known, lost))

    async def reopen(self) -> None:
        """Make the sum empty again, in the same memory."""
        self._held = None
        if self._summed:
            await self._of_pieces(self._clear)
        self._summed = False
        self._bound = 0.0
        self.weight = 0

    # ── One piece, in a thread ───────────────────────────────────────────────────────────

    async def _of_pieces(self, work: Callable[[int], None]) -> None:
        loop = asyncio.get_running_loop()
        indices = range(len(self.pieced.pieces))
        await asyncio.gather(*(loop.run_in_executor(self._executor, work, index) for index in indices))

    def _add(self, update: Update, index: int) -> None:
        part = self.pieced.part(update.payload, index)
        with self._locks[index]:
            sums = self._sums[index]
            if sums is None:
                sums = self._sums[index] = WeightedMean(self.pieced.length_of(index))
            sums.add(part, self.pieced.wire, weight=update.weight, largest=update.largest)

    def _encode(self, payload: Tensor, round: int, known: Tensor | None, lost: Tensor | None, index: int) -> None:
        means, sums = self.pieced.of_means, self._sums[index]
        if sums is None:
            raise ValueError("There is no mean: nothing was added.")
        start, stop = self.pieced.pieces[index]
        unsent = None if lost is None else lost[start:stop]
        if unsent is not None:
            unsent.copy_(torch.zeros((), dtype=unsent.dtype) if known is None else known[start:stop])
        out = means.place_of(payload, index)
        part = sums.encode_mean(means.wire, seed=self.pieced.seed(round, index), out=out, residual=unsent)
        if out is None:
            means.place(part, payload, index)

    def _clear(self, index: int) -> None:
        sums = self._sums[index]
        if sums is not None:
            sums.clear()
