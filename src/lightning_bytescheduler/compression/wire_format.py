"""How pseudo-gradients travel: fp32, bf16, 8 or 4 bits with a scale for each block, or the largest alone.

This is the face that DiLoCo sees of :class:`~lightning_bytescheduler.compression.dense.Dense` and
:class:`~lightning_bytescheduler.compression.sparse.TopK`: what is not finite is refused at either end, as it would
spoil every worker's weights. Payloads are flat tensors of bytes, whose size follows from the number of elements.
Machines are taken to be little-endian. Whatever travels, sums are made in fp32 or better.

Bounds, for an element x of a block whose largest magnitude is m, with a step s of m/127 for int8 and m/7 for int4 that
is no smaller than the smallest normal number of fp32: decoded, it differs from x by s at most with stochastic rounding,
by s/2 with rounding to nearest, and by rounding of fp32 (2^-20 m); in bf16 by 2^-8 |x|.

Rounding of int8 and int4 is stochastic by default. To nearest, an element below s/2 is lost in every round, and a
weight that always moves a little never moves; stochastic rounding is right on average, over rounds and over workers. It
is a function of the seed: the same seed and tensor give the same bytes on the same kind of device.

With a *residual*, what is lost in one payload is part of the next (error feedback). ``sparse`` sends only a share of
the elements, the largest, in 4 bits, at 14 bits each with their positions; without a residual, the others are lost.
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
"""Share of the elements that ``sparse`` sends by default."""
_DENSER_MEANS = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class WireFormat:
    """Encodes and decodes tensors.

    Attributes:
        dtype: One of ``WIRE_DTYPES``.
        rounding: One of ``ROUNDINGS``; bf16 is always rounded to nearest.
        density: Share of the elements that ``sparse`` sends, above 0 and at most 1; ``DENSITY`` by default.

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
        """As options say it, in one way only: texts are compared."""
        return self.dtype if self.density in (None, DENSITY) else f"{self.dtype}:{self.density}"

    @property
    def keeps_residuals(self) -> bool:
        """Whether enough is lost for error feedback to be worth its memory."""
        return self.dtype in ("int8", "int4", "sparse")

    @property
    def of_means(self) -> WireFormat:
        """What the mean of several payloads travels in: as they do, but for ``sparse`` with twice the density.

        Workers keep different elements, so that with one density half of what two of them have sent would wait at the
        owner of the mean, and training was seen to be the worse for it. With twice the density the mean of two is sent
        whole.
        """
        if self.dtype != "sparse":
            return self
        density = DENSITY if self.density is None else self.density
        return replace(self, density=min(1.0, _DENSER_MEANS * density))

    def payload_bytes(self, elements: int) -> int:
        """Size of the payload of a tensor with so many elements."""
        return self._codec().payload_bytes(elements)

    def encode(
        self, tensor: Tensor, *, seed: int = 0, out: Tensor | None = None, residual: Tensor | None = None
    ) -> Tensor:
        """Make a payload.

        Args:
            tensor: Floating-point numbers, all finite, of any shape.
            seed: For stochastic rounding. Choose another one for every round, worker and fragment.
            out: Is filled with the payload, and returned: of its size, uint8, aligned to 4 bytes.
            residual: What former payloads have lost: flat, in fp32, of as many elements. Is sent too, and left with
                what this payload loses.

        Returns:
            ``payload_bytes(tensor.numel())`` of uint8, on the tensor's device.

        Raises:
            OptionError: If the seed is not a whole number from 0 on.
            ValueError: If a number is not finite, or becomes infinite in bf16; the residual is of no use then.
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
        """Make a payload of numbers as they come; the same bytes as those of :meth:`encode`.

        Args:
            chunks: Flat, in fp32, each of a multiple of 256 elements but for the last. Each is read before the next is
                asked for.
            elements: In all chunks.
            device: Where they are.
            seed: See :meth:`encode`.
            out: See :meth:`encode`.
            residual: See :meth:`encode`.

        Returns:
            See :meth:`encode`.

        Raises:
            OptionError: If the seed is not a whole number from 0 on.
            ValueError: If a number is not finite, or becomes infinite in bf16; the residual is of no use then.
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
            # What was added so far is all there is to send: nothing comes on top of it.
            payload = codec.compress_with(whole, whole.new_zeros(()), seed=seed)
            largest = codec.largest(payload, elements)
            payload = payload if out is None else out.copy_(payload)
        if not math.isfinite(largest):
            raise ValueError(f"The tensor cannot be sent as {self.dtype}: it holds infinities or NaN.")
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
        codec = self._codec()
        self._check(codec, payload, elements)
        return codec.decompress(payload, elements, out=out)

    def decode_chunks(self, payload: Tensor, elements: int) -> Iterator[Tensor]:
        """Read a payload chunk by chunk, the same numbers as those of :meth:`decode`.

        Args:
            payload: What ``encode`` made.
            elements: Of the tensor that was encoded.

        Returns:
            Flat tensors in fp32, not to be changed; each is overwritten when the next is asked for.

        Raises:
            ValueError: As :meth:`decode`.
        """
        codec = self._codec()
        if isinstance(codec, Dense):
            self._check(codec, payload, elements)
            return codec.read(payload, elements)
        return iter([self.decode(payload, elements)])

    def entries(self, payload: Tensor, elements: int) -> tuple[Tensor, Tensor] | None:
        """Positions, ascending, and values of what a sparse payload holds; ``None`` where all elements travel.

        Raises:
            ValueError: As :meth:`decode`.
        """
        codec = self._codec()
        if isinstance(codec, Dense):
            return None
        self._check(codec, payload, elements)
        return codec.entries(payload, elements)

    def largest(self, payload: Tensor, elements: int) -> float:
        """A bound of the magnitudes in a payload, without decoding it where it has scales; NaN if one is not finite.

        Raises:
            ValueError: If the payload has another size than that of so many elements.
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
