"""Few elements instead of all: the largest."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bytescheduler.checks import is_finite, require_one_of
from lightning_bytescheduler.compression.compressor import Compressor, damaged, flat_fp32
from lightning_bytescheduler.compression.dense import Dense, DenseKind, Rounding
from lightning_bytescheduler.compression.positions import (
    index_bytes,
    kept_of,
    largest_indices,
    pack_indices,
    unpack_indices,
)
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["KEPT_AS", "TopK"]

KEPT_AS: tuple[DenseKind, ...] = ("fp32", "bf16", "int8", "int4")
"""What the elements that are kept can travel as."""


class TopK(Compressor):
    """The elements of the largest magnitude, with their positions at about 10 bits each.

    With ``density`` d, ``|x - C(x)|^2 <= (1 - d) |x|^2`` as long as they travel as fp32, so that training with error
    feedback converges as without compression (Stich et al., "Sparsified SGD with Memory"). Without error feedback it
    need not.

    Args:
        density: Share of the elements that are kept, above 0 and at most 1; of a part, one at least.
        kept_as: One of ``KEPT_AS``.
        rounding: Of int8 and int4.

    Raises:
        OptionError: Names the value that is not allowed.
    """

    def __init__(self, density: float, kept_as: DenseKind = "fp32", rounding: Rounding = "stochastic") -> None:
        self.density = _density(density)
        self.kept_as = require_one_of("kept_as", kept_as, KEPT_AS)
        self.values = Dense(kept_as, rounding)

    @property
    def spec(self) -> str:
        """See Compressor."""
        return f"topk:{_in_short(self.density)}" + (f":{self.kept_as}" if self.kept_as != "fp32" else "")

    def kept(self, elements: int) -> int:
        """How many of so many elements are kept."""
        return kept_of(elements, self.density)

    def payload_bytes(self, elements: int) -> int:
        """See Compressor."""
        kept = self.kept(elements)
        return self.values.payload_bytes(kept) + index_bytes(elements, kept)

    def compress(self, part: Tensor, *, seed: int = 0, worker: int = 0, key: str = "") -> Tensor:
        """See Compressor."""
        values = flat_fp32(part)
        return self._payload(values, largest_indices(values, self.kept(values.numel())), seed, worker)

    def compress_with(
        self,
        residual: Tensor,
        part: Tensor,
        *,
        seed: int = 0,
        worker: int = 0,
        key: str = "",
    ) -> Tensor:
        """See Compressor; what is not sent is not touched."""
        residual.add_(part)
        indices = largest_indices(residual, self.kept(residual.numel()))
        payload = self._payload(residual, indices, seed, worker)
        values = self.values.decompress(payload[: self.values.payload_bytes(len(indices))], len(indices))
        residual[indices] = residual[indices] - values
        return payload

    def decompress(self, payload: Tensor, elements: int, *, out: Tensor | None = None) -> Tensor:
        """See Compressor."""
        indices, values = self.entries(payload, elements)
        return _scattered(indices, values, elements, out)

    def add(self, payload: Tensor, sums: Tensor) -> None:
        """See Compressor; as much work as there are elements that were kept."""
        indices, values = self.entries(payload, sums.numel())
        sums.index_add_(0, indices, values)

    def entries(self, payload: Tensor, elements: int) -> tuple[Tensor, Tensor]:
        """What a payload holds: the positions of the elements that were kept, ascending, and their values in fp32.

        Raises:
            ValueError: If it is not the payload of so many elements.
        """
        self.check(payload, elements)
        kept = self.kept(elements)
        size = self.values.payload_bytes(kept)
        return unpack_indices(payload[size:], elements), self.values.decompress(payload[:size], kept)

    def scales(self, payload: Tensor, elements: int) -> Tensor:
        """Those of the values, see :class:`Dense`."""
        kept = self.kept(elements)
        return self.values.scales(payload[: self.values.payload_bytes(kept)], kept)

    def largest(self, payload: Tensor, elements: int) -> float:
        """A bound of the magnitudes in a payload, see :class:`Dense`."""
        kept = self.kept(elements)
        return self.values.largest(payload[: self.values.payload_bytes(kept)], kept)

    def check(self, payload: Tensor, elements: int) -> None:
        """Make sure that a payload has the size of one.

        Raises:
            ValueError: If it has not.
        """
        if payload.dtype != torch.uint8 or payload.shape != (self.payload_bytes(elements),):
            raise damaged(payload, elements, self.spec)

    def _payload(self, values: Tensor, indices: Tensor, seed: int, worker: int) -> Tensor:
        kept = self.values.compress(values[indices], seed=seed, worker=worker)
        return torch.cat([kept, pack_indices(indices, values.numel())])


def _density(value: float) -> float:
    if not is_finite(value) or not 0 < value <= 1:
        raise OptionError("density", value, "a number above 0, at most 1")
    return float(value)


def _scattered(indices: Tensor, values: Tensor, elements: int, out: Tensor | None) -> Tensor:
    result = torch.zeros(elements, dtype=torch.float32, device=values.device) if out is None else out.zero_()
    result[indices] = values
    return result


def _in_short(density: float) -> str:
    short = f"{density:g}"
    return short if float(short) == density else repr(density)
