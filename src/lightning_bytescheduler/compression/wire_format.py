"""How pseudo-gradients travel: fp32, bf16, or 8 or 4 bits with a scale for each block of 128 elements.

A payload is a flat tensor of bytes: the fp32 scales of all blocks, then the elements. Machines are taken to be
little-endian. Whatever travels, sums are made in fp32 or better.

Bounds, for an element x of a block whose largest magnitude is m, with a step s of m/127 for int8 and m/7 for int4 that
is no smaller than the smallest normal number of fp32: decoded, it differs from x by s at most with stochastic rounding,
by s/2 with rounding to nearest, and by rounding of fp32 (2^-20 m); in bf16 by 2^-8 |x|.

Rounding of int8 and int4 is stochastic by default. To nearest, an element below s/2 is lost in every round, and a
weight that always moves a little never moves; stochastic rounding is right on average, over rounds and over workers. It
is a function of the seed: the same seed and tensor give the same bytes on the same kind of device.

Payloads are made and read chunk by chunk (:mod:`~lightning_bytescheduler.compression.blocks`), so that whoever makes
the numbers, or adds them up, can do so while they are in a processor's cache.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_bytescheduler.checks import require_one_of, require_whole
from lightning_bytescheduler.compression.blocks import BLOCK, BlockQuantiser, chunk_size, chunks_of

__all__ = ["ROUNDINGS", "WIRE_DTYPES", "Rounding", "WireDtype", "WireFormat"]

WireDtype = Literal["fp32", "bf16", "int8", "int4"]
Rounding = Literal["stochastic", "nearest"]
WIRE_DTYPES: tuple[WireDtype, ...] = get_args(WireDtype)
"""From exact to small."""
ROUNDINGS: tuple[Rounding, ...] = get_args(Rounding)
"""Ways to round to int8 and int4."""

_SCALE_BYTES = 4
_BITS = {"fp32": 32, "bf16": 16, "int8": 8, "int4": 4}
_QUANTISED = ("int8", "int4")
_FLOATS = {"fp32": torch.float32, "bf16": torch.bfloat16}
_LARGEST_INTEGER = {"int8": 128, "int4": 8}  # that a payload can hold, if not one that encode() has made


@dataclass(frozen=True, kw_only=True, slots=True)
class WireFormat:
    """Encodes and decodes tensors.

    Attributes:
        dtype: One of ``WIRE_DTYPES``.
        rounding: One of ``ROUNDINGS``; bf16 is always rounded to nearest.

    Raises:
        OptionError: Names the value that is not allowed.
    """

    dtype: WireDtype = "fp32"
    rounding: Rounding = "stochastic"

    def __post_init__(self) -> None:
        require_one_of("dtype", self.dtype, WIRE_DTYPES)
        require_one_of("rounding", self.rounding, ROUNDINGS)

    def payload_bytes(self, elements: int) -> int:
        """Size of the payload of a tensor with so many elements."""
        return self._scale_bytes(elements) + -(-elements * _BITS[self.dtype] // 8)

    def encode(self, tensor: Tensor, *, seed: int = 0, out: Tensor | None = None) -> Tensor:
        """Make a payload.

        Args:
            tensor: Floating-point numbers, all finite, of any shape.
            seed: For stochastic rounding. Choose another one for every round, worker and fragment.
            out: Is filled with the payload, and returned: of its size, uint8, aligned to 4 bytes.

        Returns:
            ``payload_bytes(tensor.numel())`` of uint8, on the tensor's device.

        Raises:
            OptionError: If the seed is not a whole number from 0 on.
            ValueError: If a number is not finite, or becomes infinite in bf16.
        """
        values = tensor.detach().reshape(-1)
        size = chunk_size(values.device)
        chunks = (values[first : first + length].float() for first, length in chunks_of(values.numel(), size))
        return self.encode_chunks(chunks, values.numel(), device=values.device, seed=seed, out=out)

    def encode_chunks(
        self, chunks: Iterable[Tensor], elements: int, *, device: torch.device, seed: int = 0, out: Tensor | None = None
    ) -> Tensor:
        """Make a payload of numbers as they come; the same bytes as those of :meth:`encode`.

        Args:
            chunks: Flat, in fp32, each of a multiple of 128 elements but for the last. Each is read before the next is
                asked for.
            elements: In all chunks.
            device: Where they are.
            seed: See :meth:`encode`.
            out: See :meth:`encode`.

        Returns:
            See :meth:`encode`.

        Raises:
            OptionError: If the seed is not a whole number from 0 on.
            ValueError: If a number is not finite, or becomes infinite in bf16.
        """
        require_whole("seed", seed, 0)
        payload = torch.empty(self.payload_bytes(elements), dtype=torch.uint8, device=device) if out is None else out
        self._check_payload(payload, elements)
        body = payload[self._scale_bytes(elements) :]
        scales = payload[: self._scale_bytes(elements)].view(torch.float32)
        quantiser = self._quantiser(device, seed if self.rounding == "stochastic" else None)
        first = 0
        for values in chunks:
            end = first + values.numel()
            if quantiser is None:
                sent = body.view(_FLOATS[self.dtype])[first:end].copy_(values)
                largest = sent.abs().amax() if sent.numel() else sent.sum()
            else:
                own = scales[first // BLOCK : -(-end // BLOCK)]
                quantiser.quantise(values, own, self._packed(body, first, end), first=first)
                largest = own.amax()
            if not math.isfinite(largest):
                raise ValueError(f"The tensor cannot be sent as {self.dtype}: it holds infinities or NaN.")
            first = end
        return payload

    def decode(self, payload: Tensor, elements: int, *, out: Tensor | None = None) -> Tensor:
        """Read a payload.

        Args:
            payload: What ``encode`` made.
            elements: Of the tensor that was encoded.
            out: Is filled with the numbers, and returned: flat, in fp32.

        Returns:
            A flat tensor in fp32.

        Raises:
            ValueError: If the payload has another size than that of so many elements, or its scales are not finite.
        """
        result = torch.empty(elements, device=payload.device) if out is None else out
        for _ in self._decoded(payload, elements, result):
            pass
        return result

    def decode_chunks(self, payload: Tensor, elements: int) -> Iterator[Tensor]:
        """Read a payload chunk by chunk, the same numbers as those of :meth:`decode`.

        Args:
            payload: What ``encode`` made.
            elements: Of the tensor that was encoded.

        Yields:
            Flat tensors in fp32, not to be changed; each is overwritten when the next is asked for.

        Raises:
            ValueError: As :meth:`decode`, before the first.
        """
        return self._decoded(payload, elements, None)

    def largest(self, payload: Tensor, elements: int) -> float:
        """A bound of the magnitudes in a payload, without decoding it where it has scales; NaN if one is not finite.

        Raises:
            ValueError: If the payload has another size than that of so many elements.
        """
        self._check_payload(payload, elements)
        if not elements:
            return 0.0
        if self.dtype in _QUANTISED:
            found = _aligned(payload[: self._scale_bytes(elements)]).view(torch.float32).abs().amax()
            bound = float(found) * _LARGEST_INTEGER[self.dtype]
        else:
            values, size = _aligned(payload).view(_FLOATS[self.dtype]), chunk_size(payload.device)
            parts = [values[first : first + length].abs().amax() for first, length in chunks_of(elements, size)]
            bound = float(torch.stack(parts).amax())
        return bound if math.isfinite(bound) else math.nan

    def _decoded(self, payload: Tensor, elements: int, result: Tensor | None) -> Iterator[Tensor]:
        self._check_payload(payload, elements)
        payload = _aligned(payload)
        body = payload[self._scale_bytes(elements) :]
        scales = payload[: self._scale_bytes(elements)].view(torch.float32)
        if not bool(torch.isfinite(scales).all()):
            raise ValueError("The payload is damaged: its scales hold infinities or NaN.")
        size = min(chunk_size(payload.device), elements)
        quantiser = self._quantiser(payload.device, None)
        scratch = torch.empty(size, device=payload.device) if result is None else result
        for first, length in chunks_of(elements, size):
            end = first + length
            if self.dtype == "fp32" and result is None:
                yield body.view(torch.float32)[first:end]
                continue
            values = scratch[:length] if result is None else result[first:end]
            if quantiser is None:
                values.copy_(body.view(_FLOATS[self.dtype])[first:end])
            else:
                quantiser.dequantise(scales[first // BLOCK : -(-end // BLOCK)], self._packed(body, first, end), values)
            yield values

    def _quantiser(self, device: torch.device, seed: int | None) -> BlockQuantiser | None:
        return BlockQuantiser(_BITS[self.dtype], device, seed) if self.dtype in _QUANTISED else None

    def _packed(self, body: Tensor, first: int, end: int) -> Tensor:
        return body[first:end] if self.dtype == "int8" else body[first // 2 : -(-end // 2)]

    def _scale_bytes(self, elements: int) -> int:
        return -(-elements // BLOCK) * _SCALE_BYTES if self.dtype in _QUANTISED else 0

    def _check_payload(self, payload: Tensor, elements: int) -> None:
        if payload.dtype != torch.uint8 or payload.shape != (self.payload_bytes(elements),):
            raise ValueError(
                f"The payload is not that of {elements} elements in {self.dtype}: it is {payload.dtype} of shape "
                f"{tuple(payload.shape)}."
            )


def _aligned(payload: Tensor) -> Tensor:
    """The same bytes where they can be read as numbers."""
    return payload.clone() if payload.storage_offset() % _SCALE_BYTES or not payload.is_contiguous() else payload
