"""What every way to compress a gradient can do, whatever it does inside.

A *part* is a flat tensor: a partition of a gradient, a shard of one, a pseudo-gradient. A *payload* is what travels
instead of it: a flat tensor of bytes on the same device, with all that is needed to read it again but the number of
elements. Machines are taken to be little-endian.

What is infinite or not a number arrives as such: an element at least of what is read again is not finite then, so that
a gradient scaler, or whoever looks for a divergence, sees what would be seen without compression.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod

import torch
from torch import Tensor

__all__ = ["Compressor", "flat_fp32", "is_finite"]


class Compressor(ABC):
    """Makes payloads of parts, and parts of payloads."""

    @property
    @abstractmethod
    def spec(self) -> str:
        """As :func:`~lightning_bytescheduler.compression.make_compressor` is asked for it."""

    @abstractmethod
    def payload_bytes(self, elements: int) -> int:
        """Size of the payload of so many elements."""

    @abstractmethod
    def compress(self, part: Tensor, *, seed: int = 0, worker: int = 0) -> Tensor:
        """Make a payload.

        Args:
            part: Floating-point numbers, flat; not changed.
            seed: Of all random numbers: the same on all workers, another one for every step and part.
            worker: Tells workers apart where their random numbers must differ.

        Returns:
            Of uint8, flat, on the part's device.
        """

    @abstractmethod
    def decompress(self, payload: Tensor, elements: int, *, out: Tensor | None = None) -> Tensor:
        """Read a payload.

        Args:
            payload: What :meth:`compress` made.
            elements: Of the part.
            out: Is filled with the part, and returned.

        Returns:
            Flat, in fp32.

        Raises:
            ValueError: If the payload is not one of so many elements.
        """

    def check(self, payload: Tensor, elements: int) -> None:
        """Make sure that a payload has the size of one.

        Raises:
            ValueError: If it has not.
        """
        if payload.dtype != torch.uint8 or payload.shape != (self.payload_bytes(elements),):
            raise ValueError(
                f"The payload is not that of {elements} elements in {self.spec}: it is {payload.dtype} of shape "
                f"{tuple(payload.shape)}."
            )

    def add(self, payload: Tensor, sums: Tensor) -> None:
        """Add what a payload holds to ``sums``, flat and in fp32."""
        sums.add_(self.decompress(payload, sums.numel()))

    def compress_with(self, residual: Tensor, part: Tensor, *, seed: int = 0, worker: int = 0) -> Tensor:
        """Compress a part and what was not sent before: error feedback.

        Whatever is lost in a step is so sent later: with a compressor that keeps a share of ``|x|^2``, SGD converges as
        fast as without compression up to a term of higher order (Karimireddy et al., "Error Feedback Fixes SignSGD and
        other Gradient Compression Schemes").

        Args:
            residual: Like ``part``, in fp32, zeros at first. Left with what is not sent now: it and what is read again
                add up to the part and the residual before, but for one rounding of fp32.
            part: See :meth:`compress`; finite, else the residual is of no use.
            seed: See :meth:`compress`.
            worker: See :meth:`compress`.
        """
        residual.add_(part)
        payload = self.compress(residual, seed=seed, worker=worker)
        residual.sub_(self.decompress(payload, part.numel()))
        return payload


def flat_fp32(part: Tensor) -> Tensor:
    """The numbers of a part in fp32; the same tensor if they are."""
    return part.detach().reshape(-1).float()


def is_finite(part: Tensor) -> bool:
    """Whether all numbers are; looked at one by one only if their squares overflow."""
    flat = part.view(-1)
    return math.isfinite(torch.dot(flat, flat)) or bool(torch.isfinite(flat).all())
