"""Gradients as products of two thin matrices: PowerSGD."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from torch import Tensor

from lightning_bytescheduler.checks import require_whole
from lightning_bytescheduler.compression.compressor import Compressor, damaged, flat_fp32, is_finite
from lightning_bytescheduler.compression.dense import aligned
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["PowerSGD"]

_FLOAT_BYTES = 4
_SEEDS = 1_000_000_000


class PowerSGD(Compressor):
    """A matrix M becomes P Qᵀ, with as few columns as the rank; one step of the power iteration a time, kept warm.

    Vogels et al., "PowerSGD: Practical Low-Rank Gradient Compression for Distributed Optimization", algorithm 1, which
    torch has as ``powerSGD_hook``: P = M Q, made orthonormal; Q = Mᵀ P, from which the next step goes on. The error is
    that of a projection, ``|M - P Qᵀ| <= |M|``, and training converges with error feedback, as far as is known from
    experiments; without it, it need not.

    Both products are linear in M. Workers that can add up P before it is made orthonormal, and then Q, get the
    approximation of their sum, which is what torch's hook does: :meth:`left`, :meth:`right`, :meth:`product`. A payload
    of :meth:`compress` is the approximation of one worker's part alone.

    What is not finite makes all elements not numbers, and leaves no trace in what is kept.

    Args:
        rank: Columns of P and Q, 1 or more.
        shape: Of the matrix: a part of any size by default becomes one that is as square as can be, with zeros at its
            end.

    Raises:
        OptionError: Names the value that is not allowed.
    """

    def __init__(self, rank: int = 4, shape: tuple[int, int] | None = None) -> None:
        self.rank = require_whole("rank", rank, 1)
        if shape is not None and (len(shape) != 2 or min(shape) < 1):
            raise OptionError("shape", shape, "two positive whole numbers")
        self.shape = shape
        self._kept: dict[str, Tensor] = {}

    @property
    def spec(self) -> str:
        """See Compressor."""
        return f"powersgd:{self.rank}"

    def payload_bytes(self, elements: int) -> int:
        """See Compressor."""
        return _FLOAT_BYTES * sum(self._sizes(elements))

    def left(self, part: Tensor, *, seed: int = 0, key: str = "") -> Tensor:
        """P = M Q of this worker's part, flat: to be added up over workers.

        Args:
            part: Flat; of a whole matrix.
            seed: Of the first Q, the same on all workers.
            key: Names the part, whose Q is kept.
        """
        matrix = self._matrix(flat_fp32(part))
        return (matrix @ self._start(matrix, seed, key)).view(-1)

    def right(self, part: Tensor, left: Tensor) -> tuple[Tensor, Tensor]:
        """P made orthonormal, and Q = Mᵀ P of this worker's part, both flat: Q is to be averaged over workers."""
        matrix = self._matrix(flat_fp32(part))
        orthonormal = _orthonormal(left.view(len(matrix), -1))
        return orthonormal.reshape(-1), (matrix.t() @ orthonormal).reshape(-1)

    def product(self, left: Tensor, right: Tensor, elements: int, *, key: str = "") -> Tensor:
        """P Qᵀ as a part of so many elements; Q is kept for the next step."""
        rows, columns, rank = self._dimensions(elements)
        if is_finite(right):
            self._kept[key] = right.view(columns, rank).clone()
        return (left.view(rows, rank) @ right.view(columns, rank).t()).view(-1)[:elements]

    def compress(self, part: Tensor, *, seed: int = 0, worker: int = 0, key: str = "") -> Tensor:
        """See Compressor."""
        values = flat_fp32(part)
        if not is_finite(values):
            return values.new_full((sum(self._sizes(values.numel())),), torch.nan).view(torch.uint8)
        if not values.numel():
            return values.view(torch.uint8)
        left, right = self.right(values, self.left(values, seed=seed, key=key))
        _, columns, rank = self._dimensions(values.numel())
        self._kept[key] = right.view(columns, rank).clone()
        return torch.cat([left, right]).view(torch.uint8)

    def decompress(self, payload: Tensor, elements: int, *, out: Tensor | None = None) -> Tensor:
        """See Compressor."""
        if payload.dtype != torch.uint8 or payload.shape != (self.payload_bytes(elements),):
            raise damaged(payload, elements, self.spec)
        rows, columns, rank = self._dimensions(elements)
        left, right = aligned(payload).view(torch.float32).split(list(self._sizes(elements)))
        found = (left.view(rows, rank) @ right.view(columns, rank).t()).view(-1)[:elements]
        return found if out is None else out.copy_(found)

    def state_dict(self) -> dict[str, Any]:
        """See Compressor."""
        return {"right": {key: kept.clone() for key, kept in self._kept.items()}}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See Compressor."""
        self._kept = {key: kept.clone() for key, kept in state["right"].items()}

    def _dimensions(self, elements: int) -> tuple[int, int, int]:
        """Rows, columns, rank."""
        if self.shape is not None and math.prod(self.shape) == elements:
            rows, columns = self.shape
        else:
            columns = max(1, math.isqrt(elements))
            rows = -(-elements // columns)
        return rows, columns, min(self.rank, rows, columns)

    def _sizes(self, elements: int) -> tuple[int, int]:
        rows, columns, rank = self._dimensions(elements)
        return rows * rank, columns * rank

    def _matrix(self, values: Tensor) -> Tensor:
        rows, columns, _ = self._dimensions(values.numel())
        return torch.nn.functional.pad(values, (0, rows * columns - values.numel())).view(rows, columns)

    def _start(self, matrix: Tensor, seed: int, key: str) -> Tensor:
        _, columns, rank = self._dimensions(matrix.numel())
        kept = self._kept.get(key)
        if kept is None or kept.shape != (columns, rank):
            # Drawn on the CPU, as torch's hook does, so that it is the same on any device.
            generator = torch.Generator().manual_seed(int(np.random.RandomState(seed % 2**32).randint(_SEEDS)))
            kept = torch.randn(columns, rank, dtype=torch.float32, generator=generator).to(matrix.device)
        return _orthonormal(kept)


def _orthonormal(matrix: Tensor) -> Tensor:
    found: Tensor = torch.linalg.qr(matrix).Q
    return found
