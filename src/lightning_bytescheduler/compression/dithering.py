"""Few levels between nought and the largest, one of the two next drawn at random: dithering."""

from __future__ import annotations

from typing import Literal, get_args

import numpy as np
import torch
from torch import Tensor

from lightning_bytescheduler.checks import require_one_of, require_whole
from lightning_bytescheduler.compression.bits import pack_nibbles, unpack_nibbles
from lightning_bytescheduler.compression.blocks import generator_on
from lightning_bytescheduler.compression.compressor import Compressor, damaged, flat_fp32
from lightning_bytescheduler.compression.dense import aligned
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["LEVEL_PARTITIONS", "NORMS", "Dithering", "LevelPartition", "Norm"]

LevelPartition = Literal["linear", "natural"]
LEVEL_PARTITIONS: tuple[LevelPartition, ...] = get_args(LevelPartition)
"""How levels are spread: evenly, or as powers of two."""
Norm = Literal["max", "l2"]
NORMS: tuple[Norm, ...] = get_args(Norm)
"""What the highest level stands for."""

_NORM_BYTES = 4
_MOST_LEVELS = 127
_IN_NIBBLES = 7
_DRAWN_BITS = 23  # as many as fp32 has behind the point
_BIAS = 127  # of its exponents


class Dithering(Compressor):
    """Each element becomes one of the two levels next to it, so that it is right on average.

    ``E C(x) = x``: training converges without error feedback, with more variance: of at most ``n m^2 / (4 s^2)`` for n
    elements, s even levels and a norm m (Alistarh et al., "QSGD"); with levels at powers of two, of ``|x|^2 / 8`` and
    ``n m^2 / 4^s`` for what is below the lowest (Horvath et al., "Natural Compression for Distributed Deep Learning").
    What is not finite makes the norm infinite or not a number, and all elements not numbers.

    Error feedback keeps what is left out within bounds where the largest element is the norm and there are two levels
    or more: each element leaves out a part of the largest one then. With the other norm, or with one level, more may be
    left out than there is, and that grows from step to step (``contracts``).

    Args:
        levels: Above nought, from 1 to 127; up to 7, two elements share a byte.
        partition: One of ``LEVEL_PARTITIONS``.
        norm: One of ``NORMS``.

    Raises:
        OptionError: Names the value that is not allowed.
    """

    def __init__(self, levels: int = _MOST_LEVELS, partition: LevelPartition = "linear", norm: Norm = "max") -> None:
        if require_whole("levels", levels, 1) > _MOST_LEVELS:
            raise OptionError("levels", levels, f"{_MOST_LEVELS} at most")
        self.levels = levels
        self.partition = require_one_of("partition", partition, LEVEL_PARTITIONS)
        self.norm = require_one_of("norm", norm, NORMS)
        self.contracts = self.norm == "max" and self.levels > 1

    @property
    def spec(self) -> str:
        """See Compressor."""
        parts = ["dithering", str(self.levels), self.partition, self.norm]
        while parts[-1] in ("linear", "max", str(_MOST_LEVELS)):
            parts.pop()
        return ":".join(parts)

    def payload_bytes(self, elements: int) -> int:
        """See Compressor."""
        return _NORM_BYTES + (-(-elements // 2) if self.levels <= _IN_NIBBLES else elements)

    def compress(self, part: Tensor, *, seed: int = 0, worker: int = 0, key: str = "") -> Tensor:
        """See Compressor."""
        values = flat_fp32(part)
        norm = self._norm_of(values)
        shares = (values / torch.where(norm == 0, torch.inf, norm)).abs_().clamp_(max=1.0)
        drawn = _drawn(values.numel(), (seed, worker), values.device)
        if self.partition == "linear":
            # The whole part of the sum is the level above with a probability of what the lower one lacks.
            codes = shares.mul_(self.levels).add_(drawn, alpha=2.0**-_DRAWN_BITS).floor_()
        else:
            codes = self._powers(shares, drawn)
        codes.clamp_(0, self.levels).copysign_(values)
        whole = codes.to(torch.int8)
        packed = pack_nibbles((whole + 8).view(torch.uint8)) if self.levels <= _IN_NIBBLES else whole.view(torch.uint8)
        return torch.cat([norm.view(1).view(torch.uint8), packed])

    def decompress(self, payload: Tensor, elements: int, *, out: Tensor | None = None) -> Tensor:
        """See Compressor."""
        if payload.dtype != torch.uint8 or payload.shape != (self.payload_bytes(elements),):
            raise damaged(payload, elements, self.spec)
        norm = aligned(payload)[:_NORM_BYTES].view(torch.float32)
        packed = payload[_NORM_BYTES:]
        nibbles = self.levels <= _IN_NIBBLES
        codes = unpack_nibbles(packed, elements).view(torch.int8) - 8 if nibbles else packed.view(torch.int8)
        result = torch.empty(elements, dtype=torch.float32, device=payload.device) if out is None else out
        result.copy_(codes)
        if self.partition == "linear":
            return result.mul_(norm / torch.full_like(norm, self.levels))  # a GPU multiplies where a number is given
        # Powers of two by their exponents alone: whoever computes them gets the same bits.
        exponents = codes.int().abs_().sub_(self.levels - _BIAS).bitwise_left_shift_(_DRAWN_BITS)
        magnitudes = exponents.view(torch.float32).mul_(norm).masked_fill_(result == 0, 0.0)
        return torch.copysign(magnitudes, result, out=result).add_(norm - norm)  # which is nothing, or not a number

    def _norm_of(self, values: Tensor) -> Tensor:
        if not values.numel():
            return values.new_zeros(())
        if self.norm == "max":
            return values.abs().amax()
        norm: Tensor = torch.linalg.vector_norm(values, dtype=torch.float64)
        return norm.float()

    def _powers(self, shares: Tensor, drawn: Tensor) -> Tensor:
        """Numbers of powers of two: ``levels`` for 1, one less for each half, 0 for what is rounded off.

        The exponent of a number to whose digits a random number is added goes up with a probability of what the digits
        are: just what is right on average.
        """
        lowest = 2.0 ** (1 - self.levels)
        powers = (shares.view(torch.int32) + drawn).bitwise_right_shift_(_DRAWN_BITS).sub_(_BIAS).add_(self.levels)
        below = (shares / lowest).add_(drawn, alpha=2.0**-_DRAWN_BITS).floor_()
        return torch.where(shares >= lowest, powers.float(), below)


def _drawn(count: int, seed: tuple[int, int], device: torch.device) -> Tensor:
    """Whole numbers of 23 bits, in int32."""
    if device.type != "cpu":
        generator = generator_on(device, *seed)
        return torch.randint(1 << _DRAWN_BITS, (count,), dtype=torch.int32, device=device, generator=generator)
    bits = np.random.PCG64DXSM(seed).random_raw(-(-count // 2)).view(np.int32)[:count]
    return torch.from_numpy(bits) & ((1 << _DRAWN_BITS) - 1)
