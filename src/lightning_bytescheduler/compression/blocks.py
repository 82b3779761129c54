"""Numbers in 8 or 4 bits, with a scale for each block: what int8 and int4 are made of, chunk by chunk.

Arithmetic on a CPU is done on chunks that fit into a core's cache: numbers are read from memory once and their integers
written once. What is left is as much arithmetic as preparation (fresh memory, views, one call after the other: 100 us
for 25,000 elements when each quantiser began anew), so scratch and its views are handed on from one quantiser to the
next, and integers are packed by NumPy, whose calls take a fifth of torch's. On other devices there is one chunk, the
whole, and torch does all of it.

Stochastic rounding adds a number from (-1/2, 1/2) and rounds to nearest. On a CPU the numbers are odd multiples of
2^-16, a stream of NumPy's PCG64DXSM that belongs to the seed, with a place in it for each element: it does not matter
in which chunks they are taken. They are symmetric about 0, so that nothing is favoured, and what is whole stays as it
is.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from contextlib import suppress
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor

__all__ = ["BLOCKS", "BlockQuantiser", "chunk_size", "chunks_of", "generator_on"]

BLOCKS = {8: 256, 4: 128}
"""Elements with a scale of 4 bytes in common, by the bits of each: 1.6 % on top of int8, 6 % on top of int4."""
_CHUNK = 1 << 16  # for each thread, a multiple of all blocks; with its scratch it fits into a cache of 1 MB
_THREADS = 8  # of torch's that work on a chunk; with more of them, starting and ending the work takes longer than it
_LEVELS = {8: 127, 4: 7}
_SMALLEST_BLOCK, _LARGEST_BLOCK = min(BLOCKS.values()), max(BLOCKS.values())
_STEP = 2.0**-16  # between the numbers that stochastic rounding adds
_PER_DRAW = 4  # numbers of 16 bits in what a generator makes at once
_ODD = np.uint64(0x0001_0001_0001_0001)
_SMALLEST = float(torch.finfo(torch.float32).tiny)
_NIBBLES, _BIAS = 0x0F0F, 0x0808  # of two elements in 16 bits: what is kept of each, and what makes it positive
_MOST_SIZES = 64  # of chunks, that views are kept for


def chunk_size(device: torch.device) -> int:
    """How many elements to work on at once; a multiple of all ``BLOCKS``. No result depends on it."""
    return _CHUNK * min(torch.get_num_threads(), _THREADS) if device.type == "cpu" else 1 << 40


def chunks_of(elements: int, size: int) -> Iterator[tuple[int, int]]:
    """The first element of each chunk, and its length."""
    for first in range(0, elements, max(1, size)):
        yield first, min(size, elements - first)


def generator_on(device: torch.device, *seed: int) -> torch.Generator:
    """Draws on a device that is no CPU; of whole numbers of any length, from 0 on, where torch takes one of 64 bits."""
    whole = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])
    return torch.Generator(device=device).manual_seed(whole >> 1)


class _Views:
    """Of scratch, for chunks of one size.

    Args:
        numbers: Two rows of fp32, a multiple of all ``BLOCKS`` long.
        words: Of 16 bits, for as many bytes as elements at least.
        scales: For as many blocks.
        size: Of the chunk.
        block: Elements that have a scale in common.
    """

    __slots__ = ("bytes", "flat", "inverse", "magnitudes", "pairs", "rows", "tail", "values")

    def __init__(self, numbers: Tensor, words: Tensor, scales: Tensor, size: int, block: int) -> None:
        blocks = -(-size // block)
        self.rows = numbers[0][: blocks * block].view(-1, block)
        self.magnitudes = numbers[1][: blocks * block].view(-1, block)
        self.flat = numbers[0][:size]
        self.values = numbers[1][:size]
        self.inverse = scales[:blocks]
        own = words[: -(-size // 2)]
        self.bytes = own.view(torch.int8)[:size]
        self.tail = own.view(torch.int8)[size:]
        self.pairs: Any = own.numpy() if own.device.type == "cpu" else own  # the first of two in the low byte


class _Scratch:
    """What a quantiser works in."""

    _idle: ClassVar[deque[_Scratch]] = deque(maxlen=4)  # on a CPU; a deque needs no lock

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._room = 0
        self._views: dict[tuple[int, int], _Views] = {}

    @classmethod
    def take(cls, device: torch.device) -> _Scratch:
        """Nobody else's until it is given back."""
        if device.type == "cpu":
            with suppress(IndexError):
                return cls._idle.pop()
        return cls(device)

    def give_back(self) -> None:
        """Whatever is in it must not be read any more."""
        if self._device.type == "cpu":
            self._idle.append(self)

    def views(self, size: int, block: int) -> _Views:
        """For a chunk of ``size`` elements, in blocks."""
        found = self._views.get((size, block))
        if found is None:
            if size > self._room:
                self._room = -(-size // _LARGEST_BLOCK) * _LARGEST_BLOCK
                self._numbers = torch.empty(2, self._room, dtype=torch.float32, device=self._device)
                self._words = torch.empty(self._room // 2, dtype=torch.int16, device=self._device)
                self._scales = torch.empty(self._room // _SMALLEST_BLOCK, dtype=torch.float32, device=self._device)
                self._views.clear()
            elif len(self._views) == _MOST_SIZES:
                self._views.clear()
            found = self._views[size, block] = _Views(self._numbers, self._words, self._scales, size, block)
        return found


class BlockQuantiser:
    """Makes integers of numbers, one chunk after the other, and numbers of integers. For one thread.

    Args:
        bits: 8 or 4, of an element.
        device: Where they are.
        seed: Of stochastic rounding; ``None`` rounds to nearest.
    """

    def __init__(self, bits: int, device: torch.device, seed: int | None = None) -> None:
        self._bits = bits
        self._levels = _LEVELS[bits]
        self._block = BLOCKS[bits]
        self._device = device
        self._seed = seed
        self._scratch = _Scratch.take(device)
        self._drawn = 0
        self._generator: torch.Generator | None = None
        if seed is not None:
            self._draws = np.random.PCG64DXSM(seed)
            if device.type != "cpu":
                self._generator = generator_on(device, seed)

    def close(self) -> None:
        """Let the next one have the scratch: nothing that was returned may be read any more, and nothing asked."""
        self._scratch.give_back()

    def quantise(self, values: Tensor, scales: Tensor, packed: Tensor, *, first: int = 0) -> None:
        """Make integers of a chunk.

        A block that holds infinities or NaN has a scale that is not finite, and so have its elements when they are read
        again.

        Args:
            values: Flat, in fp32.
            scales: Is filled with one number for each block, in fp32.
            packed: Is filled with the elements, of uint8; an odd one in 4 bits has a byte to itself.
            first: Position of the chunk in what it is a part of, a multiple of the block.
        """
        size = values.numel()
        if not size:
            return
        work = self._scratch.views(size, self._block)
        rows = work.rows
        blocks = values.view(-1, self._block) if size % self._block == 0 else _padded(values, rows)
        torch.amax(torch.abs(blocks, out=work.magnitudes), dim=1, out=scales)
        scales.div_(self._levels)
        if self._seed is None:
            # To multiply takes half as long. A block that is next to nothing gets the smallest step that has a
            # reciprocal, so that nothing is rounded beyond the largest level; one of zeros has scale 0.
            steps = torch.clamp_min(scales, _SMALLEST, out=work.inverse)
            torch.mul(steps, scales.sign_(), out=scales)
            torch.mul(blocks, steps.reciprocal_()[:, None], out=rows).round_()
        else:
            # Here what is whole stays so to the last digit. A block of zeros has scale 0 and decodes to zeros.
            torch.div(blocks, torch.where(scales == 0, torch.inf, scales)[:, None], out=rows)
            work.flat.add_(self._noise(first, size), alpha=_STEP)
            rows.round_().clamp_(-self._levels, self._levels)
        if self._bits == 8:
            packed.view(torch.int8).copy_(work.flat)
            return
        work.bytes.copy_(work.flat)
        work.tail.fill_(-self._levels - 1)
        pairs = work.pairs
        pairs &= _NIBBLES
        pairs ^= _BIAS
        _as(packed, pairs)[:] = pairs | (pairs >> 4)

    def sent(self, scales: Tensor, size: int) -> Tensor:
        """What is read again of the chunk of ``size`` elements that was quantised last; overwritten by the next."""
        work = self._scratch.views(size, self._block)
        work.rows.mul_(scales[:, None])
        return work.flat

    def dequantise(self, scales: Tensor, packed: Tensor, values: Tensor) -> None:
        """Make numbers of the integers of a chunk.

        Args:
            scales: As :meth:`quantise` has made them.
            packed: As well.
            values: Is filled with the numbers: flat, in fp32.
        """
        size = values.numel()
        if not size:
            return
        work = self._scratch.views(size, self._block)
        whole = size % self._block == 0
        flat = values if whole else work.flat
        if self._bits == 8:
            flat.copy_(packed.view(torch.int8))
        else:
            pairs = work.pairs
            pairs[:] = _as(packed, pairs)
            pairs |= pairs << 4
            pairs &= _NIBBLES
            flat.copy_(work.bytes.sub_(self._levels + 1))
        rows = values.view(-1, self._block) if whole else work.rows
        rows.mul_(scales[:, None])
        if not whole:
            values.copy_(flat)

    def dequantised(self, scales: Tensor, packed: Tensor, size: int) -> Tensor:
        """The numbers of a chunk of ``size`` elements; overwritten by the next."""
        values = self._scratch.views(size, self._block).values
        self.dequantise(scales, packed, values)
        return values

    def _noise(self, first: int, size: int) -> Tensor:
        """Odd whole numbers, as likely above 0 as below, between -2^15 and 2^15."""
        count = -(-size // _PER_DRAW)
        if self._generator is not None:
            drawn = torch.empty(count, dtype=torch.int64, device=self._device)
            drawn.random_(-(2**63), None, generator=self._generator)
            return drawn.view(torch.int16)[:size].bitwise_or_(1)
        place = first // _PER_DRAW
        bits = self._draws.advance(place - self._drawn).random_raw(count)
        self._drawn = place + count
        bits |= _ODD
        return torch.from_numpy(bits.view(np.int16))[:size]


def _as(tensor: Tensor, other: Any) -> Any:
    """The same memory as an array where ``other`` is one."""
    return tensor.numpy() if isinstance(other, np.ndarray) else tensor


def _padded(values: Tensor, rows: Tensor) -> Tensor:
    """The same in rows of one block, with zeros at the end."""
    flat = rows.view(-1)
    flat[: values.numel()] = values
    flat[values.numel() :] = 0
    return rows
