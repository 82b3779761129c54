"""Every element in fewer bits: bf16, fp16, and 8 or 4 bits with a scale for each block, of 256 or 128 elements.

Payloads are made and read chunk by chunk (:mod:`~lightning_bytescheduler.compression.blocks`), so that whoever makes
the numbers, or adds them up, can do so while they are in a processor's cache. A payload of int8 or int4 is the fp32
scales of all blocks, then the elements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_bytescheduler.checks import require_one_of
from lightning_bytescheduler.compression.blocks import BLOCKS, BlockQuantiser, chunk_size, chunks_of
from lightning_bytescheduler.compression.compressor import Compressor, damaged

__all__ = ["DENSE", "ROUNDINGS", "Dense", "DenseKind", "Rounding", "aligned"]

DenseKind = Literal["fp32", "bf16", "fp16", "int8", "int4"]
DENSE: tuple[DenseKind, ...] = get_args(DenseKind)
Rounding = Literal["stochastic", "nearest"]
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
"""Ways to round to int8 and int4."""

_SCALE_BYTES = 4
_BITS = {"fp32": 32, "bf16": 16, "fp16": 16, "int8": 8, "int4": 4}
_QUANTISED = ("int8", "int4")
_FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
_LARGEST_FP16 = 65504.0
_LARGEST_INTEGER = {"int8": 128, "int4": 8}  # that a payload can hold, if not one that was made here


class Dense(Compressor):
    """Every element in fewer bits.

    Bounds, for an element x of a block whose largest magnitude is m, with a step s of m/127 for int8 and m/7 for int4
    that is no smaller than the smallest normal number of fp32: read again, it differs from x by s at most with
    stochastic rounding, by s/2 with rounding to nearest, and by rounding of fp32 (2^-20 m); in bf16 by 2^-8 |x|; in
    fp16 by 2^-11 |x| or 2^-25, and what is beyond 65504 becomes infinite; with error feedback it becomes 65504, and the
    rest is sent later.

    Stochastic rounding is right on average (Alistarh et al., "QSGD", for each block), so that training converges
    without error feedback, with more variance; rounding to nearest needs it. A block that holds what is not finite is
    not a number when it is read again.

    Args:
        kind: One of ``DENSE``.
        rounding: One of ``ROUNDINGS``; for int8 and int4.

    Raises:
        OptionError: Names the value that is not allowed.
    """

    def __init__(self, kind: DenseKind, rounding: Rounding = "stochastic") -> None:
        self.kind = require_one_of("kind", kind, DENSE)
        self.rounding = require_one_of("rounding", rounding, ROUNDINGS)
        self._block = BLOCKS[_BITS[kind]] if kind in _QUANTISED else 0  # none

    @property
    def spec(self) -> str:
        """See Compressor."""
        return f"{self.kind}:nearest" if self.kind in _QUANTISED and self.rounding == "nearest" else self.kind

    def payload_bytes(self, elements: int) -> int:
        """See Compressor."""
        return self._scale_bytes(elements) + -(-elements * _BITS[self.kind] // 8)

    def compress(self, part: Tensor, *, seed: int = 0, worker: int = 0, key: str = "") -> Tensor:
        """See Compressor."""
        return self._compressed(part, None, seed, worker)

    def compress_with(
        self,
        residual: Tensor,
        part: Tensor,
        *,
        seed: int = 0,
        worker: int = 0,
        key: str = "",
    ) -> Tensor:
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
        """Make a payload of numbers as they come.

        Args:
            chunks: Flat, in fp32, each of a multiple of 256 elements but for the last. Each is read before the next is
                asked for.
            elements: In all chunks.
            device: Where they are.
            seed: Of stochastic rounding.
            out: Is filled with the payload: of its size, uint8, aligned to 4 bytes.
            residual: See :meth:`compress_with`.
            bounded: Whether the largest magnitude is of interest.

        Returns:
            The payload, and a number that is as finite as the largest magnitude in it; 0 where nobody asks.

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
                # What fp16 cannot hold is sent over several steps where it is kept: infinity would be for good.
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
        """Read a payload, whose size was checked, chunk by chunk.

        Args:
            payload: The payload.
            elements: Of the part.
            result: Is filled with the numbers.

        Yields:
            Flat tensors in fp32, not to be changed: the parts of ``result``, or what is overwritten when the next is
            asked for.
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
        """Those of all blocks; none for what has no blocks."""
        return aligned(payload[: self._scale_bytes(elements)]).view(torch.float32)

    def largest(self, payload: Tensor, elements: int) -> float:
        """A bound of the magnitudes in a payload, of its scales where it has some; NaN if one is not finite."""
        if not elements:
            return 0.0
        if self.kind in _QUANTISED:
            bound = float(self.scales(payload, elements).abs().amax()) * _LARGEST_INTEGER[self.kind]
        else:
            values, size = aligned(payload).view(_FLOATS[self.kind]), chunk_size(payload.device)
            parts = [values[first : first + length].abs().amax() for first, length in chunks_of(elements, size)]
            bound = float(torch.stack(parts).amax())
        return bound if math.isfinite(bound) else math.nan

    def check(self, payload: Tensor, elements: int) -> None:
        """Make sure that a payload has the size of one.

        Raises:
            ValueError: If it has not.
        """
        if payload.dtype != torch.uint8 or payload.shape != (self.payload_bytes(elements),):
            raise damaged(payload, elements, self.kind)

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
    """The same bytes where they can be read as numbers."""
    return payload.clone() if payload.storage_offset() % _SCALE_BYTES or not payload.is_contiguous() else payload
