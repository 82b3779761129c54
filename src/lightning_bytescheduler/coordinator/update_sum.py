"""The exact sum of a round's updates, piece by piece, in several threads; the same bits in any order of arrival.

An update is checked while it comes in: its digest, and how large and how fine its numbers are. Updates are held as they
came as long as there are few: their mean is then formed in one pass, without sums in memory. When they would take more
memory than the sums do, 16 bytes for each element, all of them are added to these in one pass. What is held and what
the sums take does not depend on the number of workers. No piece depends on another: who works on which changes no bit.
"""

from __future__ import annotations

import asyncio
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from lightning_bytescheduler.checks import importing
from lightning_bytescheduler.compression.blocks import chunk_size
from lightning_bytescheduler.compression.wire_format import WireFormat
from lightning_bytescheduler.coordinator.spool import view_of
from lightning_bytescheduler.diloco.weighted_mean import (
    COARSE_SHIFT,
    FINE_SHIFT,
    FINEST,
    LARGEST,
    MOST_SPLIT,
    MOST_WEIGHT,
    WeightedMean,
)
from lightning_bytescheduler.exceptions import OptionError

PIECE = 1 << 20
"""Elements of a piece: whole blocks of every format, and whole bytes."""

_LARGEST_INTEGER = 128  # of int8; int4's are smaller
_ELEMENT_BITS: dict[str, int] = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}
"""Formats that can be cut; a payload of another one is one piece."""
_ELEMENTS_AT_ONCE = 1 << 16  # numbers, whose bits fit into a core's cache
_BIAS = 127  # of the exponents of fp32 and bf16


class Extent(NamedTuple):
    """Of numbers.

    Attributes:
        largest: A bound of their magnitudes; infinity if one is not finite.
        unit: A power of two that they all are multiples of; infinity if all are 0.
    """

    largest: float
    unit: float


NOTHING = Extent(0.0, math.inf)
"""Of no numbers."""


def extent_of(payload: Tensor, *, bits: int) -> Extent:
    """The extent of numbers in fp32 or bf16, in one pass.

    Args:
        payload: Their bytes: uint8, on the CPU.
        bits: Of a number, 32 or 16.
    """
    kind: Any = np.uint32 if bits == 32 else np.uint16
    numbers = payload.numpy().view(kind)
    scratch = np.empty(min(_ELEMENTS_AT_ONCE, numbers.size), kind)
    most, least = 0, (1 << bits) - 1  # of the bits without sign, twice as large; the least is one less
    for first in range(0, numbers.size, _ELEMENTS_AT_ONCE):
        part = numbers[first : first + _ELEMENTS_AT_ONCE]
        doubled = np.left_shift(part, 1, out=scratch[: part.size])
        most = max(most, int(doubled.max()))
        doubled -= kind(1)  # what is 0 becomes the largest of all
        least = min(least, int(doubled.min()))
    if not most:
        return NOTHING
    digits = bits - 9  # after the point: 8 bits are the exponent's, and one is the sign
    if most >> (digits + 1) == 0xFF:
        return Extent(math.inf, 0.0)
    largest = np.array([most >> 1 << (32 - bits)], np.uint32).view(np.float32)
    exponent = max((least + 1) >> (digits + 1), 1)
    return Extent(float(largest[0]), math.ldexp(1.0, exponent - _BIAS - digits))


class PiecedFormat:
    """Cuts payloads of so many elements, and puts them together.

    Args:
        wire: The format.
        elements: Of the whole.
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
        """The same for the means of such payloads."""
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
        """Bytes of the payload that have to be there before a piece can be read."""
        return int(self._sections(index)[-1].stop)

    def length_of(self, index: int) -> int:
        """Elements of a piece."""
        start, stop = self.pieces[index]
        return stop - start

    @property
    def is_cut(self) -> bool:
        """Whether the format can be cut, as its payload has all elements in order."""
        return bool(self._bits)

    def extent(self, payload: Tensor, index: int) -> Extent:
        """How large and how fine the numbers of one piece are, without decoding them."""
        if not self._bits:
            largest = self.wire.largest(self.part(payload, index), self.length_of(index))
            return Extent(largest if largest == largest else math.inf, 0.0)
        sections = self._sections(index)
        if len(sections) == 1:
            return extent_of(payload[sections[0]], bits=self._bits)
        # The product of a scale and a whole number is a multiple of the scale's unit, also once it is rounded.
        scales = extent_of(payload[sections[0]], bits=32)
        return scales._replace(largest=scales.largest * _LARGEST_INTEGER)

    def part(self, payload: Tensor, index: int) -> Tensor:
        """One piece of a payload; without a copy where the format has no scales."""
        sections: list[Tensor] = [payload[section] for section in self._sections(index)]
        return sections[0] if len(sections) == 1 else torch.cat(sections)

    def place_of(self, payload: Tensor, index: int) -> Tensor | None:
        """Where one piece lies in a payload, if it lies in one place."""
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
        """For a piece of a round's mean: each its own, as a seed makes the same roundings in every tensor."""
        return round * len(self.pieces) + index


_DIGITS = 53  # binary, of a double


class Weighted(NamedTuple):
    """A payload that is part of a mean.

    Attributes:
        payload: As it has travelled.
        weight: With which it counts, 1 or more.
        extent: Of its numbers.
    """

    payload: Tensor
    weight: int
    extent: Extent


def is_exact(parts: Iterable[tuple[int, Extent]]) -> bool:
    """Whether :func:`exact_mean` can form the mean of payloads: what is larger is for ``WeightedMean``.

    Args:
        parts: Weight and extent of each.
    """
    return sum(weight * extent.largest for weight, extent in parts) <= MOST_SPLIT


def exact_mean(parts: Sequence[Weighted], wire: WireFormat, elements: int) -> Iterator[Tensor]:
    """The weighted mean of payloads for which :func:`is_exact` holds.

    Args:
        parts: The payloads, one at least.
        wire: What they were encoded with.
        elements: Of each.

    Yields:
        Flat tensors in fp32, of which each is overwritten when the next is asked for.
    """
    bound = sum(part.weight * part.extent.largest for part in parts)
    unit = min(part.extent.unit for part in parts)
    share = 1 / sum(part.weight for part in parts)
    weights = [part.weight for part in parts]
    plain = unit >= FINEST and bound < unit * 2.0**_DIGITS
    scratch = _Scratch.of_thread(min(chunk_size(torch.device("cpu")), elements))
    add = _Plain(scratch) if plain else _Split(scratch, rounds=unit < FINEST)
    mean = scratch.mean
    for chunks in zip(*(wire.decode_chunks(part.payload, elements) for part in parts), strict=True):
        sums = add.of(chunks, weights)
        yield mean[: sums.numel()].copy_(sums.mul_(share))


class _Scratch:
    """What a thread needs, and keeps: to touch fresh memory takes as long as to sum in it."""

    _kept = threading.local()

    def __init__(self, size: int) -> None:
        self.doubles: list[Tensor] = [torch.empty(size, dtype=torch.float64) for _ in range(4)]
        self.mean = torch.empty(size, dtype=torch.float32)

    @classmethod
    def of_thread(cls, size: int) -> _Scratch:
        """That of the thread which calls, for chunks of ``size`` elements at most."""
        kept: _Scratch | None = getattr(cls._kept, "scratch", None)
        if kept is None or kept.mean.numel() < size:
            kept = cls._kept.scratch = cls(size)
        return kept


class _Plain:
    """Adds in doubles."""

    def __init__(self, scratch: _Scratch) -> None:
        self._sum, self._value, *_ = scratch.doubles

    def of(self, chunks: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
        size = chunks[0].numel()
        sums, value = self._sum[:size], self._value[:size]
        sums.copy_(chunks[0]).mul_(weights[0])
        for chunk, weight in zip(chunks[1:], weights[1:], strict=True):
            sums.add_(value.copy_(chunk), alpha=weight)
        return sums


class _Split:
    """Adds in two doubles, each of multiples of its own unit."""

    def __init__(self, scratch: _Scratch, *, rounds: bool) -> None:
        self._rounds = rounds  # whether there may be more digits than are kept
        self._high, self._low, self._value, self._part = scratch.doubles
        self._shift = torch.tensor(COARSE_SHIFT, dtype=torch.float64)

    def of(self, chunks: Sequence[Tensor], weights: Sequence[int]) -> Tensor:
        size = chunks[0].numel()
        high, low, value, part = self._high[:size], self._low[:size], self._value[:size], self._part[:size]
        high.zero_()
        low.zero_()
        for chunk, weight in zip(chunks, weights, strict=True):
            value.copy_(chunk)
            torch.add(self._shift, value, alpha=weight, out=part)
            high.add_(part.sub_(COARSE_SHIFT))
            part.sub_(value, alpha=weight)  # what the high part has too much
            if self._rounds:
                part.add_(FINE_SHIFT).sub_(FINE_SHIFT)
            low.sub_(part)
        return high.add_(low)


_SUM_BYTES = 16  # of an element
_AT_ONCE = 1 << 23  # bytes that are checked together
_PIECE = "piece"
_CPU = torch.device("cpu")


class Inspection:
    """Checks one payload, in a thread beside its transfer.

    Args:
        pieced: Its format.
        payload: Filled from the front.
        executor: Of the threads.
    """

    def __init__(self, pieced: PiecedFormat, payload: Tensor, executor: Executor) -> None:
        with importing("The coordinator", extra="coordinator"):
            import xxhash
        self._pieced = pieced
        self._payload = payload
        self._executor = executor
        self._hash = xxhash.xxh3_128()
        self._hashed = 0
        self._extents: list[Extent] = []  # of the first pieces
        self._job: asyncio.Future[None] | None = None

    def advance(self, filled: int) -> None:
        """So many bytes are there; returns at once."""
        if filled - self._hashed >= _AT_ONCE and (self._job is None or self._job.done()):
            if self._job is not None:
                self._job.result()
            self._job = asyncio.get_running_loop().run_in_executor(self._executor, self._look, filled)

    async def finish(self) -> Update:
        """The update, once all of it is there."""
        if self._job is not None:
            await self._job
        await asyncio.get_running_loop().run_in_executor(self._executor, self._look, self._payload.numel())
        return Update(self._payload, self._extents, self._hash.hexdigest())

    def _look(self, filled: int) -> None:
        self._hash.update(view_of(self._payload)[self._hashed : filled])
        self._hashed = filled
        for index in range(len(self._extents), len(self._pieced.pieces)):
            if self._pieced.end_of(index) > filled:
                break
            self._extents.append(self._pieced.extent(self._payload, index))


class Update:
    """An update whose numbers are known.

    Args:
        payload: As it came.
        extents: Of its pieces.
        digest: Of the payload, in hexadecimal digits.
    """

    def __init__(self, payload: Tensor, extents: Sequence[Extent], digest: str) -> None:
        self.payload = payload
        self.extents = extents
        self.digest = digest
        self.weight = 0  # once it is part of a sum

    @property
    def largest(self) -> float:
        """A bound of the magnitudes of its numbers; infinity if one is not finite."""
        return max((extent.largest for extent in self.extents), default=0.0)

    @property
    def unit(self) -> float:
        """A power of two that all numbers are multiples of."""
        return min((extent.unit for extent in self.extents), default=math.inf)


class _MeanPlace(NamedTuple):
    """Where a mean is written to; see ``UpdateSum.encode_mean``."""

    payload: Tensor
    round: int
    known: Tensor | None
    lost: Tensor | None


class UpdateSum:
    """Sum of one fragment's updates in one round. Its methods are called on the event loop, its work is done elsewhere.

    Additions are announced on the loop with :meth:`begin`, so that :meth:`settled` waits for all of them.

    Args:
        pieced: The format of the updates.
        executor: Of the threads that add.
    """

    def __init__(self, pieced: PiecedFormat, executor: Executor) -> None:
        self.pieced = pieced
        self._executor = executor
        self._held: list[Update] = []
        size = max(pieced.payload_bytes, 1)
        self._most_held = max(_SUM_BYTES * pieced.elements // size, 1) if pieced.is_cut else 0
        self._sums: list[WeightedMean | None] = [None] * len(pieced.pieces)
        self._locks = [threading.Lock() for _ in pieced.pieces]  # each for its piece; no other is taken under one
        self._summed = False  # whether something is in the sums
        self._under_way = 0
        self._settled = asyncio.Event()
        self._settled.set()
        self._bound = 0.0
        self.weight = 0
        self.failed: BaseException | None = None

    def begin(self, update: Update, *, weight: int) -> None:
        """Reserve room for an update, and make :meth:`settled` wait for it.

        Args:
            update: The update.
            weight: With which it counts, 1 or more.

        Raises:
            OptionError: If it is not finite, or the sum could become too large with it.
        """
        largest = update.largest
        bound = self._bound + largest * weight
        if not bound < LARGEST:  # NaN is not less, either
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
        """Add an update that was begun; its payload belongs to the sum from now on."""
        self._held.append(update)
        try:
            if len(self._held) > self._most_held:
                await self._sum_held()
        except BaseException as error:
            self.failed = error  # part of it may be in the sum: nobody is to use that
            raise
        finally:
            self._under_way -= 1
            if not self._under_way:
                self._settled.set()

    async def settled(self) -> None:
        """Wait until nothing is being added."""
        # No timeout: what is waited for are additions in memory under way in threads, each of which sets the event
        # whether it succeeds or fails. The connection of the worker that sent the update does not matter any more.
        await self._settled.wait()
        if self._held and (self._summed or not self._is_exact()):
            await self._sum_held()

    @property
    def only(self) -> Update | None:
        """The one update that the sum is of, if its payload is the mean; to be asked once it is settled.

        That is so where the mean has the update's bits when it is formed: nothing is below the unit of the sums. In 8
        or 4 bits the mean would be rounded once more, for nothing.
        """
        if self._summed or len(self._held) != 1 or self._held[0].unit < FINEST:
            return None
        return self._held[0]

    async def encode_mean(
        self, payload: Tensor, *, round: int, known: Tensor | None = None, lost: Tensor | None = None
    ) -> None:
        """Write the mean; once it is settled and something was added.

        Args:
            payload: Of the whole fragment, which is written to.
            round: Whose mean it is, for its rounding.
            known: What former means have lost of the whole fragment, or ``None`` for nothing; only read, so that a
                mean can be formed once more.
            lost: What is lost with this one; ``None`` where the wire keeps none.

        Raises:
            ValueError: If nothing was added.
        """
        held = [] if self._summed else self._held
        place = _MeanPlace(payload, round, known, lost)
        await self._of_pieces(lambda index: self._encode(held, place, index))

    async def reopen(self) -> None:
        """Begin anew, in the same memory."""
        self._held = []
        if self._summed:
            await self._of_pieces(self._clear)
        self._summed = False
        self._bound = 0.0
        self.weight = 0

    def _is_exact(self) -> bool:
        pieces = range(len(self.pieced.pieces))
        return all(is_exact((one.weight, one.extents[index]) for one in self._held) for index in pieces)

    async def _sum_held(self) -> None:
        held, self._held = self._held, []
        self._summed = True
        await self._of_pieces(lambda index: self._add(held, index))

    # ── One piece, in a thread ───────────────────────────────────────────────────────────

    async def _of_pieces(self, work: Callable[[int], None]) -> None:
        loop = asyncio.get_running_loop()
        indices = range(len(self.pieced.pieces))
        await asyncio.gather(*(loop.run_in_executor(self._executor, work, index) for index in indices))

    def _add(self, updates: Sequence[Update], index: int) -> None:
        parts = [(self.pieced.part(update.payload, index), update.weight) for update in updates]
        with self._locks[index]:
            sums = self._sums[index]
            if sums is None:
                sums = self._sums[index] = WeightedMean(
                    {_PIECE: torch.empty(self.pieced.length_of(index), dtype=torch.float32)}
                )
            sums.add_several(parts, self.pieced.wire)

    def _encode(self, held: Sequence[Update], place: _MeanPlace, index: int) -> None:
        """Write the mean of one piece: of what is held, or else of what was added."""
        means, length = self.pieced.of_means, self.pieced.length_of(index)
        wire, out, seed = means.wire, means.place_of(place.payload, index), self.pieced.seed(place.round, index)
        unsent = self._residual(place, index)
        sums = self._sums[index]
        if held:
            parts = [Weighted(self.pieced.part(one.payload, index), one.weight, one.extents[index]) for one in held]
            chunks = exact_mean(parts, self.pieced.wire, length)
            part = wire.encode_chunks(chunks, length, device=_CPU, seed=seed, out=out, residual=unsent)
        elif sums is not None:
            part = sums.encode_mean(wire, seed=seed, out=out, residual=unsent)
        else:
            raise ValueError("There is no mean: nothing was added.")
        if out is None:
            means.place(part, place.payload, index)

    def _residual(self, place: _MeanPlace, index: int) -> Tensor | None:
        if place.lost is None:
            return None
        start, stop = self.pieced.pieces[index]
        unsent = place.lost[start:stop]
        return unsent.zero_() if place.known is None else unsent.copy_(place.known[start:stop])

    def _clear(self, index: int) -> None:
        sums = self._sums[index]
        if sums is not None:
            sums.clear()
