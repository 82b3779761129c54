"""Gradients as products of two thin matrices: PowerSGD.

It encodes whole matrices, not parts, and sums two thin factors over all ranks, one after the other. With x_i the input
of rank i (its gradient times its weight, plus its residual r_i), and Q of the last step made orthonormal::

    left     P = sum of x_i Q, over all ranks; each rank makes it orthonormal
    right    Q = sum of x_i^T P, over all ranks: P Q^T is the mean gradient, and the next step begins with Q
    then     r_i = x_i - P Q^T / n, so that the applied gradient and all ranks' residuals add up to the gradients

These are the products of torch's ``powerSGD_hook``, with its warm start and error feedback.

Source: Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", algorithms 1
and 2.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lightning_bytescheduler.checks import require_whole
from lightning_bytescheduler.compression.compressor import is_finite

__all__ = ["Matrix", "PowerSGD"]

_LEAST_SAVED = 2  # times fewer numbers, as torch's hook by default
_FLOAT_BYTES = 4


class PowerSGD:
    """A matrix M becomes P Qᵀ with at most ``rank`` columns, by one warm-started step of power iteration.

    The error is that of a projection, ``|M - P Qᵀ| <= |M|``. In experiments training converges with error feedback;
    without it, it need not.

    Args:
        rank: Columns of P and Q, 1 or more.

    Raises:
        OptionError: Names the value that is not allowed.
    """

    def __init__(self, rank: int = 4) -> None:
        self.rank = require_whole("rank", rank, 1)

    @property
    def spec(self) -> str:
        """The name for :func:`~lightning_bytescheduler.compression.make_codec`."""
        return f"powersgd:{self.rank}"

    def shape_of(self, parameter: nn.Parameter) -> tuple[int, int] | None:
        """Return rows and columns of a gradient in its bucket; ``None`` if the factors would exceed half its size.

        The first dimension in memory gives the rows, as with torch's hook.
        """
        with torch._C.DisableTorchFunctionSubclass():
            if parameter.dim() < 2 or not parameter.numel() or not parameter.dtype.is_floating_point:
                return None
            first = max(range(parameter.dim()), key=parameter.stride)
            rows = parameter.shape[first]
            columns = parameter.numel() // rows
        return (rows, columns) if (rows + columns) * self.rank * _LEAST_SAVED < rows * columns else None

    def payload_bytes(self, shape: tuple[int, int]) -> int:
        """Return the bytes of both factors of a matrix."""
        return self.rank * sum(shape) * _FLOAT_BYTES

    def first_right(self, name: str, columns: int) -> Tensor:
        """Return the start of the power iteration for a parameter of that name: the same on all ranks."""
        seed = int.from_bytes(hashlib.blake2b(name.encode(), digest_size=7).digest(), "little")
        generator = torch.Generator().manual_seed(seed)
        return torch.randn(columns, self.rank, dtype=torch.float32, device="cpu", generator=generator)


@dataclass(slots=True)
class Matrix:
    """One parameter's gradient in a bucket.

    Attributes:
        residual: Flat, fp32.
        right: Q of the last step, ``(columns, rank)``; filled with that of this step.
        later: The parameter's own residual, if the parameter has no gradient on this rank. It is not sent now, as
            nothing is applied if no rank has a gradient. At the end, ``residual``, zeros at first, is added to it.
    """

    first: int
    shape: tuple[int, int]
    residual: Tensor
    right: Tensor
    later: Tensor | None = None
    _added: float = 0.0

    @property
    def end(self) -> int:
        """Position after the last element."""
        return self.first + self.shape[0] * self.shape[1]

    def begin(self, buffer: Tensor, factor: float, left: Tensor) -> None:
        """Fill ``left`` with this rank's part of P, column by column; the residual becomes x."""
        gradient = self._gradient(buffer)
        if not factor or is_finite(gradient):  # with a weight of 0 the values are not used
            self._added = factor
            whole = self._kept.add_(gradient, alpha=factor) if factor else self._kept
            torch.mm(_orthonormal(self.right).t(), whole.t(), out=self._factor(left))
        else:
            left.fill_(torch.nan)

    def go_on(self, left: Tensor, right: Tensor) -> None:
        """Make P orthonormal, and fill ``right`` with this rank's part of Q, column by column."""
        factor = self._factor(left)
        if is_finite(left):
            factor.copy_(_orthonormal(factor.t()).t())
            torch.mm(factor, self._kept, out=self._factor(right))
        else:  # then on all ranks, as the sum is the same
            right.fill_(torch.nan)

    def end_with(self, buffer: Tensor, ranks: int, left: Tensor, right: Tensor) -> None:
        """Write P Q^T to the buffer, and keep the residual."""
        gradient = self._gradient(buffer)
        # an overflowed gradient is lost; the residual is restored except for rounding, and Q is kept
        if not is_finite(right):
            if self._added:
                self._kept.sub_(gradient, alpha=self._added)
            gradient.fill_(torch.nan)
            return
        rows, columns = self._factor(left).t(), self._factor(right)
        if bool(columns.any()):  # otherwise no rank has a gradient, and the next step begins with the old Q
            self.right.copy_(columns.t())
        # One product for both uses: the applied values equal those subtracted, whatever the rounding.
        product = torch.mm(rows, columns, out=gradient) if gradient.dtype is torch.float32 else rows @ columns
        self._kept.sub_(product, alpha=1.0 / ranks)
        if product is not gradient:
            gradient.copy_(product)
        if self.later is not None:
            self.later.add_(self.residual)

    @property
    def _kept(self) -> Tensor:
        return self.residual.view(self.shape)

    def _gradient(self, buffer: Tensor) -> Tensor:
        return buffer[self.first : self.end].view(self.shape)

    def _factor(self, flat: Tensor) -> Tensor:
        return flat.view(self.right.shape[1], -1)


def _orthonormal(matrix: Tensor) -> Tensor:
    found: Tensor = torch.linalg.qr(matrix).Q
    return found
