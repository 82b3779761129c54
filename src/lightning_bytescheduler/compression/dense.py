"""Every element in fewer bits: bf16, fp16, 8 or 4 bits with a scale for each block of 256 or 128, or only its sign.

Payloads are encoded and decoded chunk by chunk, so that values are produced or summed while they are in a processor's
cache. A payload of int8 or int4 has the fp32 scales of all blocks, then the elements.

*Blocks*: on a CPU, arithmetic runs on chunks that fit into a core's cache: values are read from memory once and
integers written once. To keep the overhead of allocations, views and calls low, scratch memory and its views are passed
from one quantiser to the next, and NumPy packs integers, as its calls are faster than torch's. On other devices there
is one chunk, and torch does everything.

Stochastic rounding adds a number from (-1/2, 1/2) and rounds to nearest. On a CPU the numbers are odd multiples of
2^-16 from a NumPy PCG64DXSM stream, selected by the seed, with a position for each element, so they do not depend on
the chunks. They are symmetric about 0, so rounding is unbiased and integers stay unchanged.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import suppress
from typing import Any, ClassVar, Literal, get_args

import numpy as np
import torch
from torch import Tensor

from lightning_bytescheduler.checks import require_one_of
from lightning_bytescheduler.compression.compressor import Compressor, flat_fp32

__all__ = ["DENSE", "ROUNDINGS", "Dense", "DenseKind", "OneBit", "Rounding", "aligned", "chunk_size", "chunks_of"]

DenseKind = Literal["fp32", "bf16", "fp16", "int8", "int4"]
DENSE: tuple[DenseKind, ...] = get_args(DenseKind)
Rounding = Literal["stochastic", "nearest"]
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
"""Rounding modes of int8 and int4."""

_SCALE_BYTES = 4
_BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "int8": 8, "int4": 4}
_QUANTISED = ("int8", "int4")
_FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LARGEST_FP16 = 65504.0
_LARGEST_INTEGER = {"int8": 128, "int4": 8}  # in any payload, even one that another program made
BLOCKS = {8: 256, 4: 128}
"""Elements that share a scale of 4 bytes, by bits per element: 1.6 % on top of int8, 6 % on top of int4."""
_CHUNK = 1 << 16  # per thread, a multiple of all blocks; with scratch it fits into a cache of 1 MB
_THREADS = 8  # most torch threads per chunk; starting more costs more than it saves
_LEVELS = {8: 127, 4: 7}
_SMALLEST_BLOCK, _LARGEST_BLOCK = min(BLOCKS.values()), max(BLOCKS.values())
_STEP = 2.0**-16  # between the numbers that stochastic rounding adds
_PER_DRAW = 4  # 16-bit numbers per draw of the generator
_ODD = np.uint64(0x0001_0001_0001_0001)
_SMALLEST = float(torch.finfo(torch.float32).tiny)
# masks for two elements in 16 bits: the bits kept of each, and a bias that makes them positive
_NIBBLES, _BIAS = 0x0F0F, 0x0808
_MOST_SIZES = 64  # chunk sizes whose views are kept


def chunk_size(device: torch.device) -> int:
    """Return the elements to process at once, a multiple of all ``BLOCKS``. Results do not depend on it."""
    return _CHUNK * min(torch.get_num_threads(), _THREADS) if device.type == "cpu" else 1 << 40


def chunks_of(elements: int, size: int) -> Iterator[tuple[int, int]]:
    """Yield the first element of each chunk and its length."""
    for first in range(0, elements, max(1, size)):
        yield first, min(size, elements - first)


def generator_on(device: torch.device, *seed: int) -> torch.Generator:
    """Return a generator for a device other than a CPU, seeded with integers of any size, 0 or more."""
    whole = int(np.random.SeedSequence(seed).generate_state(1, np.uint64)[0])
    return torch.Generator(device=device).manual_seed(whole >> 1)


class _Views:
    """Views of scratch memory for chunks of one size.

    Args:
        numbers: Two fp32 rows; their length is a multiple of all ``BLOCKS``.
        words: 16-bit words, at least as many bytes as elements.
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
        # the first element of a pair is in the low byte
        self.pairs: Any = own.numpy() if own.device.type == "cpu" else own


class _Scratch:
    _idle: ClassVar[deque[_Scratch]] = deque(maxlen=4)  # on a CPU; a deque needs no lock

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._room = 0
        self._views: dict[tuple[int, int], _Views] = {}

    @classmethod
    def take(cls, device: torch.device) -> _Scratch:
        """Take scratch memory for exclusive use until it is given back."""
        if device.type == "cpu":
            with suppress(IndexError):
                return cls._idle.pop()
        return cls(device)

    def give_back(self) -> None:
        """Give the memory back; its contents must not be read afterwards."""
        if self._device.type == "cpu":
            self._idle.append(self)

    def views(self, size: int, block: int) -> _Views:
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
    """Quantises values and dequantises integers, one chunk after the other. For one thread.

    Args:
        bits: Bits of an element, 8 or 4.
        seed: Seed of stochastic rounding; ``None`` rounds to nearest.
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
        """Release the scratch memory; neither results nor the quantiser may be used afterwards."""
        self._scratch.give_back()

    def quantise(self, values: Tensor, scales: Tensor, packed: Tensor, *, first: int = 0) -> None:
        """Quantise a chunk.

        A block with infinities or NaN gets a non-finite scale, so its decoded elements are not finite either.

        Args:
            values: Flat, fp32.
            scales: Filled with one fp32 number per block.
            packed: Filled with the elements, uint8; an odd last 4-bit element takes a byte.
            first: Position of the chunk in the whole, a multiple of the block.
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
            # Multiplying is twice as fast as dividing. A block of tiny values gets the smallest step that has a
            # reciprocal, so that no value is rounded beyond the largest level; a block of zeros has scale 0.
            steps = torch.clamp_min(scales, _SMALLEST, out=work.inverse)
            torch.mul(steps, scales.sign_(), out=scales)
            torch.mul(blocks, steps.reciprocal_()[:, None], out=rows).round_()
        else:
            # Division keeps integers exact. A block of zeros has scale 0 and decodes to zeros.
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
        """Return the decoded chunk of ``size`` elements that was quantised last; overwritten by the next one."""
        work = self._scratch.views(size, self._block)
        work.rows.mul_(scales[:, None])
        return work.flat

    def dequantise(self, scales: Tensor, packed: Tensor, values: Tensor) -> None:
        """Decode a chunk.

        Args:
            scales: From :meth:`quantise`.
            packed: From :meth:`quantise`.
            values: Filled with the values: flat, fp32.
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
        """Return the decoded chunk of ``size`` elements; overwritten by the next one."""
        values = self._scratch.views(size, self._block).values
        self.dequantise(scales, packed, values)
        return values

    def _noise(self, first: int, size: int) -> Tensor:
        """Return odd integers, symmetric about 0, between -2^15 and 2^15."""
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
    return tensor.numpy() if isinstance(other, np.ndarray) else tensor


def _padded(values: Tensor, rows: Tensor) -> Tensor:
    flat = rows.view(-1)
    flat[: values.numel()] = values
    flat[values.numel() :] = 0
    return rows


class Dense(Compressor):
    """Every element in fewer bits.

    Bounds, for an element x of a block with largest magnitude m, and a step s of m/127 for int8 and m/7 for int4 that
    is at least the smallest normal fp32 number: the decoded value differs from x by at most s with stochastic rounding,
    s/2 with rounding to nearest, plus rounding of fp32 (2^-20 m). In bf16 the error is at most 2^-8 |x|, in fp16 2^-11
    |x| or 2^-25. In fp16, values beyond 65504 become infinite; with error feedback they become 65504, and the rest is
    sent later.

    Stochastic rounding is unbiased (Alistarh et al., "QSGD", for each block), so training converges without error
    feedback, with more variance; rounding to nearest needs it. A block with non-finite values decodes to NaN.

    Args:
        rounding: One of ``ROUNDINGS``; for int8 and int4.

    Raises:
        OptionError: Names the value that is not allowed.
    """

    def __init__(self, kind: DenseKind, rounding: Rounding = "stochastic") -> None:
        self.kind = require_one_of("kind", kind, DENSE)
        self.rounding = require_one_of("rounding", rounding, ROUNDINGS)
        self._block = BLOCKS[_BITS[kind]] if kind in _QUANTISED else 0  # 0: no blocks

    @property
    def spec(self) -> str:
        """See Compressor."""
        return f"{self.kind}:nearest" if self.kind in _QUANTISED and self.rounding == "nearest" else self.kind

    def payload_bytes(self, elements: int) -> int:
        """See Compressor."""
        return self._scale_bytes(elements) + -(-elements * _BITS[self.kind] // 8)

    def compress(self, part: Tensor, *, seed: int = 0, worker: int = 0) -> Tensor:
        """See Compressor."""
        return self._compressed(part, None, seed, worker)

    def compress_with(self, residual: Tensor, part: Tensor, *, seed: int = 0, worker: int = 0) -> Tensor:
        """See Compressor; in one pass."""
        return self._compressed(part, residual, seed, worker)

    def decompress(self, payload: Tensor, elements: int, *, out: Tensor | None = None) -> Tensor:
        """See Compressor."""
        self.check(payload, elements)
        result = torch.empty(elements, dtype=torch.float32, device=payload.device) if out is None else out
        for _ in self.read(payload, elements, result):
            pass
        return result

    def add(self, payload: Tensor, sums: Tensor) -> None:
        """See Compressor; chunk by chunk."""
        self.check(payload, sums.numel())
        first = 0
        for values in self.read(payload, sums.numel()):
            sums[first : first + values.numel()].add_(values)
            first += values.numel()

    def write(
        self,
        chunks: Iterable[Tensor],
        elements: int,
        *,
        device: torch.device,
        seed: int = 0,
        out: Tensor | None = None,
        residual: Tensor | None = None,
        bounded: bool = True,
    ) -> tuple[Tensor, float]:
        """Encode chunks of values one by one.

        Args:
            chunks: Flat, fp32, each a multiple of 256 elements except the last. Each is read before the next is
                requested.
            elements: Elements of all chunks.
            device: Device of the chunks.
            seed: Seed of stochastic rounding.
            out: Filled with the payload: of its size, uint8, aligned to 4 bytes.
            residual: See :meth:`compress_with`.
            bounded: Whether to compute the second result.

        Returns:
            The payload, and a number that is finite if and only if the largest magnitude is; 0 if not ``bounded``.

        Raises:
            ValueError: If ``out`` has another size, or a chunk but the last ends within a block.
        """
        payload = torch.empty(self.payload_bytes(elements), dtype=torch.uint8, device=device) if out is None else out
        self.check(payload, elements)
        body, scales = self._halves(payload, elements)
        quantiser = self._quantiser(device, seed if self.rounding == "stochastic" else None)
        largest: list[Tensor] = []
        first, half = 0, self.kind == "fp16"
        for values in chunks:
            if self._block and first % self._block:
                raise ValueError(f"A chunk begins at element {first}, and blocks of {self.kind} have {self._block}.")
            end = first + values.numel()
            if residual is not None:
                values = residual[first:end].add_(values)
            if quantiser is None:
                # Values beyond fp16 are sent over several steps if there is a residual; infinity would stay in it.
                near = values.clamp(-_LARGEST_FP16, _LARGEST_FP16) if residual is not None and half else values
                read = body.view(_FLOATS[self.kind])[first:end].copy_(near)
                if bounded and read.numel():
                    largest.append(read.abs().amax().float())
            else:
                own = scales[first // self._block : -(-end // self._block)]
                quantiser.quantise(values, own, self._packed(body, first, end), first=first)
                if bounded:
                    largest.append(own.amax())
                if residual is not None:
                    read = quantiser.sent(own, end - first)
            if residual is not None:
                values.sub_(read)
            first = end
        if quantiser is not None:
            quantiser.close()
        return payload, float(torch.stack(largest).amax()) if largest else 0.0

    def read(self, payload: Tensor, elements: int, result: Tensor | None = None) -> Iterator[Tensor]:
        """Decode a payload of checked size, chunk by chunk.

        Args:
            payload: The payload.
            elements: Elements of the part.
            result: Filled with the values, if given.

        Yields:
            Flat fp32 tensors, not to be changed: parts of ``result``, or memory that the next chunk overwrites.
        """
        payload = aligned(payload)
        body, scales = self._halves(payload, elements)
        size = min(chunk_size(payload.device), elements)
        quantiser = self._quantiser(payload.device, None)
        for first, length in chunks_of(elements, size):
            end = first + length
            if quantiser is None:
                values = body.view(_FLOATS[self.kind])[first:end]
                yield values.float() if result is None else result[first:end].copy_(values)
                continue
            own, packed = scales[first // self._block : -(-end // self._block)], self._packed(body, first, end)
            if result is None:
                yield quantiser.dequantised(own, packed, length)
            else:
                quantiser.dequantise(own, packed, result[first:end])
                yield result[first:end]
        if quantiser is not None:
            quantiser.close()

    def scales(self, payload: Tensor, elements: int) -> Tensor:
        """Return the scales of all blocks; empty without blocks."""
        return aligned(payload[: self._scale_bytes(elements)]).view(torch.float32)

    def largest(self, payload: Tensor, elements: int) -> float:
        """Return a bound of the magnitudes in a payload, from its scales if it has any; NaN if one is not finite."""
        if not elements:
            return 0.0
        if self.kind in _QUANTISED:
            bound = float(self.scales(payload, elements).abs().amax()) * _LARGEST_INTEGER[self.kind]
        else:
            values, size = aligned(payload).view(_FLOATS[self.kind]), chunk_size(payload.device)
            parts = [values[first : first + length].abs().amax() for first, length in chunks_of(elements, size)]
            bound = float(torch.stack(parts).amax())
        return bound if math.isfinite(bound) else math.nan

    def _compressed(self, part: Tensor, residual: Tensor | None, seed: int, worker: int) -> Tensor:
        values = part.detach().reshape(-1)
        size, device = chunk_size(values.device), values.device
        chunks = (values[first : first + length].float() for first, length in chunks_of(values.numel(), size))
        own = seed if not worker else (seed << 32) + worker
        return self.write(chunks, values.numel(), device=device, seed=own, residual=residual, bounded=False)[0]

    def _quantiser(self, device: torch.device, seed: int | None) -> BlockQuantiser | None:
        return BlockQuantiser(_BITS[self.kind], device, seed) if self.kind in _QUANTISED else None

    def _halves(self, payload: Tensor, elements: int) -> tuple[Tensor, Tensor]:
        scale_bytes = self._scale_bytes(elements)
        return payload[scale_bytes:], payload[:scale_bytes].view(torch.float32)

    def _packed(self, body: Tensor, first: int, end: int) -> Tensor:
        return body[first:end] if self.kind == "int8" else body[first // 2 : -(-end // 2)]

    def _scale_bytes(self, elements: int) -> int:
        return -(-elements // self._block) * _SCALE_BYTES if self._block else 0


def aligned(payload: Tensor) -> Tensor:
    """Return the same bytes in aligned, contiguous memory."""
    return payload.clone() if payload.storage_offset() % _SCALE_BYTES or not payload.is_contiguous() else payload


class OneBit(Compressor):
    """The sign of each element, times the mean magnitude of all; 0 counts as positive.

    ``|x - C(x)|^2 = (1 - d) |x|^2`` with ``d = |x|_1^2 / (n |x|_2^2)``, so training with error feedback converges
    (Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes"), faster if magnitudes
    are similar. One huge element dominates the scale. Without error feedback training need not converge. Non-finite
    values make the scale, and so all elements, non-finite.
    """

    @property
    def spec(self) -> str:
        """See Compressor."""
        return "onebit"

    def payload_bytes(self, elements: int) -> int:
        """See Compressor."""
        return _SCALE_BYTES + -(-elements // 8)

    def compress(self, part: Tensor, *, seed: int = 0, worker: int = 0) -> Tensor:
        """See Compressor."""
        values = flat_fp32(part)
        # Double precision keeps sums of large finite values finite.
        scale = torch.linalg.vector_norm(values, 1, dtype=torch.float64) / max(values.numel(), 1)
        return torch.cat([scale.float().view(1).view(torch.uint8), _pack_bits(values < 0)])

    def decompress(self, payload: Tensor, elements: int, *, out: Tensor | None = None) -> Tensor:
        """See Compressor."""
        self.check(payload, elements)
        result = torch.empty(elements, dtype=torch.float32, device=payload.device) if out is None else out
        scale = aligned(payload)[:_SCALE_BYTES].view(torch.float32)
        result.copy_(_unpack_bits(payload[_SCALE_BYTES:], elements))
        return torch.addcmul(scale, result, scale, value=-2.0, out=result)


def _pack_bits(bits: Tensor) -> Tensor:
    """Pack eight booleans into a byte, the first in the lowest bit."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little"))
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.numel() % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(dim=1, dtype=torch.uint8)


def _unpack_bits(packed: Tensor, count: int) -> Tensor:
    """Unpack the first ``count`` booleans, as 0 and 1 in uint8."""
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.contiguous().numpy(), count=count, bitorder="little"))
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> places) & 1).view(-1)[:count]
