"""How pseudo-gradients travel: fp32, bf16, 8 or 4 bits with a scale for each block, or only the largest elements.

This is DiLoCo's interface to :class:`~lightning_bytescheduler.compression.dense.Dense` and
:class:`~lightning_bytescheduler.compression.sparse.TopK`. Non-finite values are refused on both sides, as they would
spoil every worker's weights. Payloads are flat tensors of bytes, whose size depends only on the number of elements.
Machines must be little-endian. Sums are always made in fp32 or better.
:class:`~lightning_bytescheduler.compression.dense.Dense` states the bounds of errors.

int8 and int4 round stochastically by default. With rounding to nearest, an element below half a step is lost in every
round, and a weight that moves slowly never moves; stochastic rounding is unbiased over rounds and workers. It depends
on the seed: the same seed and tensor give the same bytes on the same kind of device.

With a *residual*, what one payload leaves out is added to the next (error feedback). ``sparse`` sends only the largest
elements, each in 4 bits, or 14 bits with its position; without a residual, the others are lost.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Literal, get_args

import torch
from torch import Tensor

from lightning_bytescheduler.checks import require_one_of, require_whole
from lightning_bytescheduler.compression.dense import ROUNDINGS, Dense, Rounding, chunk_size, chunks_of
from lightning_bytescheduler.compression.sparse import TopK
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["DENSITY", "ROUNDINGS", "WIRE_DTYPES", "Rounding", "WireDtype", "WireFormat"]

WireDtype = Literal["fp32", "bf16", "int8", "int4", "sparse"]
WIRE_DTYPES: tuple[WireDtype, ...] = get_args(WireDtype)
"""From exact to small."""
DENSITY = 0.02
"""Fraction of the elements that ``sparse`` sends by default."""
_DENSER_MEANS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class WireFormat:
    """Encodes and decodes tensors.

    Attributes:
        dtype: One of ``WIRE_DTYPES``.
        rounding: One of ``ROUNDINGS``; bf16 is always rounded to nearest.
        density: Fraction of the elements that ``sparse`` sends, above 0 and at most 1; ``DENSITY`` by default.

    Raises:
        OptionError: Names the value that is not allowed.
    """

    dtype: WireDtype = "fp32"
    rounding: Rounding = "stochastic"
    density: float | None = None

    def __post_init__(self) -> None:
        require_one_of("dtype", self.dtype, WIRE_DTYPES)
        require_one_of("rounding", self.rounding, ROUNDINGS)
        if self.density is not None and self.dtype != "sparse":
            raise OptionError("density", self.density, f"left out with {self.dtype!r}, which sends all elements")
        self._codec()

    @property
    def name(self) -> str:
        """The option's value, in one canonical form, as texts are compared."""
        return self.dtype if self.density in (None, DENSITY) else f"{self.dtype}:{self.density}"

    @property
    def keeps_residuals(self) -> bool:
        """Whether enough is left out for error feedback to pay."""
        return self.dtype in ("int8", "int4", "sparse")

    @property
    def of_means(self) -> WireFormat:
        """The format of means of several payloads: the same, but ``sparse`` with twice the density.

        Workers keep different elements, so at the same density the owner would hold back half of what two of them have
        sent, which harms training. With twice the density the mean of two is sent whole.
        """
        if self.dtype != "sparse":
            return self
        density = DENSITY if self.density is None else self.density
        return replace(self, density=min(1.0, _DENSER_MEANS * density))

    def payload_bytes(self, elements: int) -> int:
        """Return the bytes of the payload of ``elements`` elements."""
        return self._codec().payload_bytes(elements)

    def encode(
        self, tensor: Tensor, *, seed: int = 0, out: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """Encode a tensor.

        Args:
            tensor: Floating-point values, all finite, of any shape.
            seed: Seed of stochastic rounding; use another one for every round, worker and fragment.
            out: Filled with the payload and returned: of its size, uint8, aligned to 4 bytes.
            residual: What earlier payloads left out: flat, fp32, as many elements. It is sent too, and replaced by what
                this payload leaves out.

        Returns:
            ``payload_bytes(tensor.numel())`` of uint8, on the tensor's device.

        Raises:
            OptionError: If the seed is not a whole number from 0 on.
            ValueError: If a value is not finite, or becomes infinite in bf16; the residual is then useless.
        """
        values = tensor.detach().reshape(-1)
        size = chunk_size(values.device)
        chunks = (values[first : first + length].float() for first, length in chunks_of(values.numel(), size))
        return self.encode_chunks(chunks, values.numel(), device=values.device, seed=seed, out=out, residual=residual)

    def encode_chunks(
        self,
        chunks: Iterable[Tensor],
        elements: int,
        *,
        device: torch.device,
        seed: int = 0,
        out: Tensor | None = None,
        residual: Tensor | None = None,
    ) -> Tensor:
        """Encode chunks of values one by one, with the same bytes as :meth:`encode`.

        Args:
            chunks: Flat, fp32, each a multiple of 256 elements except the last. Each is read before the next is
                requested.
            elements: Elements of all chunks.
            device: Device of the chunks.
            seed: See :meth:`encode`.
            out: See :meth:`encode`.
            residual: See :meth:`encode`.

        Returns:
            See :meth:`encode`.

        Raises:
            OptionError: See :meth:`encode`.
            ValueError: See :meth:`encode`.
        """
        require_whole("seed", seed, 0)
        if residual is not None and residual.shape != (elements,):
            raise ValueError(f"The residual is not one of {elements} elements: its shape is {tuple(residual.shape)}.")
        codec = self._codec()
        if isinstance(codec, Dense):
            payload, largest = codec.write(chunks, elements, device=device, seed=seed, out=out, residual=residual)
        else:
            whole = torch.zeros(elements, dtype=torch.float32, device=device) if residual is None else residual
            first = 0
            for values in chunks:
                whole[first : first + values.numel()] += values
                first += values.numel()
            # ``whole`` already has both residual and values, so nothing is added.
            payload = codec.compress_with(whole, whole.new_zeros(()), seed=seed)
            largest = codec.largest(payload, elements)
            payload = payload if out is None else out.copy_(payload)
        if not math.isfinite(largest):
            raise ValueError(f"The tensor cannot be sent as {self.dtype}: it holds infinities or NaN.")
        return payload

    def decode(self, payload: Tensor, elements: int, *, out: Tensor | None = None) -> Tensor:
        """Decode a payload.

        Args:
            payload: Result of ``encode``.
            elements: Elements of the encoded tensor.
            out: Filled with the values and returned: flat, fp32.

        Returns:
            A flat fp32 tensor.

        Raises:
            ValueError: If the payload does not fit ``elements``, or its scales are not finite.
        """
        codec = self._codec()
        self._check(codec, payload, elements)
        return codec.decompress(payload, elements, out=out)

    def decode_chunks(self, payload: Tensor, elements: int) -> Iterator[Tensor]:
        """Decode a payload chunk by chunk, with the same values as :meth:`decode`.

        Args:
            payload: Result of ``encode``.
            elements: Elements of the encoded tensor.

        Returns:
            Flat fp32 tensors, not to be changed; each is overwritten when the next is requested.

        Raises:
            ValueError: See :meth:`decode`.
        """
        codec = self._codec()
        if isinstance(codec, Dense):
            self._check(codec, payload, elements)
            return codec.read(payload, elements)
        return iter([self.decode(payload, elements)])

    def entries(self, payload: Tensor, elements: int) -> tuple[Tensor, Tensor] | None:
        """Return ascending positions and values of a sparse payload; ``None`` for dense ones.

        Raises:
            ValueError: See :meth:`decode`.
        """
        codec = self._codec()
        if isinstance(codec, Dense):
            return None
        self._check(codec, payload, elements)
        return codec.entries(payload, elements)

    def largest(self, payload: Tensor, elements: int) -> float:
        """Return a bound of the magnitudes in a payload, from its scales if it has any; NaN if one is not finite.

        Raises:
            ValueError: If the payload does not fit ``elements``.
        """
        codec = self._codec()
        codec.check(payload, elements)
        return codec.largest(payload, elements)

    def _codec(self) -> Dense | TopK:
        if self.dtype == "sparse":
            return TopK(DENSITY if self.density is None else self.density, "int4", self.rounding)
        return Dense(self.dtype, self.rounding)

    def _check(self, codec: Dense | TopK, payload: Tensor, elements: int) -> None:
        codec.check(payload, elements)
        if not bool(torch.isfinite(codec.scales(payload, elements)).all()):
            raise ValueError("The payload is damaged: its scales hold infinities or NaN.")
