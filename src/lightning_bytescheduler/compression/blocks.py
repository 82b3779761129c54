"""Numbers in 8 or 4 bits, with a scale for each block of 128: what int8 and int4 are made of, chunk by chunk.

Arithmetic on a CPU is done on chunks that fit into a core's cache, with scratch that is allocated once: numbers are
read from memory once and their integers written once, so that what costs is the arithmetic (and random numbers: of 1 ns
for an element, 0.35 are theirs). On other devices there is one chunk, the whole.

Stochastic rounding adds a number from (-1/2, 1/2) and rounds to nearest. On a CPU the numbers are odd multiples of
2^-16, a stream of NumPy's PCG64DXSM that belongs to the seed, with a place in it for each element: it does not matter
in which chunks they are taken. They are symmetric about 0, so that nothing is favoured, and what is whole stays as it
is.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch
from torch import Tensor

__all__ = ["BLOCK", "BlockQuantiser", "chunk_size", "chunks_of"]

BLOCK = 128  # 4 bytes of scale: 3 % on top of int8, 6 % on top of int4
_CHUNK = 1 << 16  # for each thread, a multiple of BLOCK; with its scratch it fits into a cache of 1 MB
_THREADS = 8  # of torch's that work on a chunk; with more of them, starting and ending the work takes longer than it
_LEVELS = {8: 127, 4: 7}
_STEP = 2.0**-16  # between the numbers that stochastic rounding adds
_PER_DRAW = 4  # numbers of 16 bits in what a generator makes at once
_ODD = np.uint64(0x0001_0001_0001_0001)


def chunk_size(device: torch.device) -> int:
    """How many elements to work on at once; a multiple of ``BLOCK``. No result depends on it."""
    return _CHUNK * min(torch.get_num_threads(), _THREADS) if device.type == "cpu" else 1 << 40


def chunks_of(elements: int, size: int) -> Iterator[tuple[int, int]]:
    """The first element of each chunk, and its length."""
    for first in range(0, elements, max(1, size)):
        yield first, min(size, elements - first)


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
        self._device = device
        self._seed = seed
        self._scratch: dict[str, Tensor] = {}
        self._drawn = 0
        self._generator: torch.Generator | None = None
        if seed is not None:
            self._draws = np.random.PCG64DXSM(seed)
            if device.type != "cpu":
                self._generator = torch.Generator(device=device).manual_seed(seed)

    def quantise(self, values: Tensor, scales: Tensor, packed: Tensor, *, first: int = 0) -> None:
        """Make integers of a chunk.

        A block that holds infinities or NaN has a scale that is not finite, and so have its elements when they are read
        again.

        Args:
            values: Flat, in fp32.
            scales: Is filled with one number for each block, in fp32.
            packed: Is filled with the elements, of uint8; an odd one in 4 bits has a byte to itself.
            first: Position of the chunk in what it is a part of, a multiple of ``BLOCK``.
        """
        size = values.numel()
        if not size:
            return
        rows = self._rows("scaled", size)
        blocks = values.view(-1, BLOCK) if size % BLOCK == 0 else _padded(values, rows)
        torch.abs(blocks, out=self._rows("magnitudes", size))
        torch.amax(self._rows("magnitudes", size), dim=1, out=scales)
        scales.div_(self._levels)
        # A block of zeros, or of what is next to nothing, has scale 0 and decodes to zeros.
        torch.div(blocks, torch.where(scales == 0, torch.inf, scales)[:, None], out=rows)
        if self._seed is not None:
            rows.view(-1)[:size].add_(self._noise(first, size), alpha=_STEP)
        rows.round_().clamp_(-self._levels, self._levels)
        whole = rows.view(-1)[:size]
        if self._bits == 8:
            packed.view(torch.int8).copy_(whole)
            return
        nibbles = self._buffer("nibbles", size + size % 2, torch.uint8)
        nibbles[size:] = 0
        nibbles[:size].copy_(whole.add_(self._levels + 1))
        pairs = nibbles.view(torch.int16)  # the first of two in the low byte
        packed.copy_(torch.bitwise_or(pairs, pairs >> 4))

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
        rows = values.view(-1, BLOCK) if size % BLOCK == 0 else self._rows("padded", size)
        flat = rows.view(-1)[:size]
        if self._bits == 8:
            flat.copy_(packed.view(torch.int8))
        else:
            pairs = self._buffer("pairs", len(packed), torch.int16)
            pairs.copy_(packed)
            torch.bitwise_or(pairs, pairs << 4, out=pairs).bitwise_and_(0x0F0F)
            flat.copy_(pairs.view(torch.int8)[:size]).sub_(self._levels + 1)
        rows.mul_(scales[:, None])
        if flat.data_ptr() != values.data_ptr():
            values.copy_(flat)

    def dequantised(self, scales: Tensor, packed: Tensor, size: int) -> Tensor:
        """The numbers of a chunk of ``size`` elements; overwritten by the next."""
        values = self._buffer("values", size, torch.float32)
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

    def _rows(self, name: str, size: int) -> Tensor:
        return self._buffer(name, -(-size // BLOCK) * BLOCK, torch.float32).view(-1, BLOCK)

    def _buffer(self, name: str, size: int, dtype: torch.dtype) -> Tensor:
        held = self._scratch.get(name)
        if held is None or len(held) < size:
            held = self._scratch[name] = torch.empty(size, dtype=dtype, device=self._device)
        return held[:size]


def _padded(values: Tensor, rows: Tensor) -> Tensor:
    """The same in rows of one block, with zeros at the end."""
    flat = rows.view(-1)
    flat[: values.numel()] = values
    flat[values.numel() :] = 0
    return rows
