"""The interface of all compressors.

A *part* is a flat tensor: a partition of a gradient, a shard of one, or a pseudo-gradient. A *payload* is its encoding:
a flat tensor of bytes on the same device. The payload and the number of elements suffice to decode the part. Machines
must be little-endian.

Non-finite values survive: at least one decoded element is then not finite. So a gradient scaler, or a check for
divergence, sees the same as without compression.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

__all__ = ["Compressor", "flat_fp32", "is_finite"]


class Compressor(ABC):
    """Encodes parts as payloads, and decodes payloads."""

    @property
    @abstractmethod
    def spec(self) -> str:
        """The name for :func:`~lightning_bytescheduler.compression.make_compressor`."""

    @abstractmethod
    def payload_bytes(self, elements: int) -> int:
        """Return the bytes of the payload of ``elements`` elements."""

    @abstractmethod
    def compress(self, part: Tensor, *, seed: int = 0, worker: int = 0) -> Tensor:
        """Encode a part.

        Args:
            part: Flat floating-point tensor; not changed.
            seed: Random seed: the same on all workers, different for every step and part.
            worker: The worker's number, for random numbers that must differ between workers.

        Returns:
            Flat, uint8, on the part's device.
        """

    @abstractmethod
    def decompress(self, payload: Tensor, elements: int, *, out: Tensor | None = None) -> Tensor:
        """Decode a payload.

        Args:
            payload: Result of :meth:`compress`.
            elements: Elements of the part.
            out: Filled with the part and returned; ``None`` for a new tensor.

        Returns:
            Flat, fp32.

        Raises:
            ValueError: If the payload does not fit ``elements``.
        """

    def check(self, payload: Tensor, elements: int) -> None:
        """Check the size of a payload.

        Raises:
            ValueError: If it does not fit ``elements``.
        """
        if payload.dtype != torch.uint8 or payload.shape != (self.payload_bytes(elements),):
            raise ValueError(
                f"The payload is not that of {elements} elements in {self.spec}: it is {payload.dtype} of shape "
                f"{tuple(payload.shape)}."
            )

    def add(self, payload: Tensor, sums: Tensor) -> None:
        """Add a payload's values to ``sums``, flat fp32."""
        sums.add_(self.decompress(payload, sums.numel()))

    def compress_with(self, residual: Tensor, part: Tensor, *, seed: int = 0, worker: int = 0) -> Tensor:
        """Compress the sum of a part and its residual: error feedback.

        Whatever a step leaves out is sent later. With a compressor that keeps a fraction of ``|x|^2``, SGD converges as
        fast as without compression up to a higher-order term (Karimireddy et al., "Error Feedback Fixes SignSGD and
        other Gradient Compression Schemes").

        Args:
            residual: Like ``part``, fp32, zeros at first; replaced by what is left out now. It and the decoded payload
                add up to the part and the earlier residual, except for one rounding of fp32.
            part: See :meth:`compress`; must be finite, otherwise the residual becomes useless.
            seed: See :meth:`compress`.
            worker: See :meth:`compress`.
        """
        residual.add_(part)
        payload = self.compress(residual, seed=seed, worker=worker)
        residual.sub_(self.decompress(payload, part.numel()))
        return payload


def flat_fp32(part: Tensor) -> Tensor:
    """Return the values of a part in fp32; without a copy if they already are."""
    return part.detach().reshape(-1).float()


def is_finite(part: Tensor) -> bool:
    """Whether all values are finite; checks them one by one only if their squares overflow."""
    flat = part.view(-1)
    return math.isfinite(torch.dot(flat, flat)) or bool(torch.isfinite(flat).all())
