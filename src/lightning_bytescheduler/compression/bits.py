"""Small whole numbers side by side in bytes."""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

__all__ = ["pack_bits", "pack_nibbles", "unpack_bits", "unpack_nibbles"]


def pack_bits(bits: Tensor) -> Tensor:
    """Eight truth values in a byte, the first in the lowest bit."""
    if bits.device.type == "cpu":
        return torch.from_numpy(np.packbits(bits.numpy(), bitorder="little"))
    padded = torch.nn.functional.pad(bits.to(torch.uint8), (0, -bits.numel() % 8)).view(-1, 8)
    return (padded << torch.arange(8, dtype=torch.uint8, device=bits.device)).sum(dim=1, dtype=torch.uint8)


def unpack_bits(packed: Tensor, count: int) -> Tensor:
    """The first ``count`` truth values, as 0 and 1 in uint8."""
    if packed.device.type == "cpu":
        return torch.from_numpy(np.unpackbits(packed.contiguous().numpy(), count=count, bitorder="little"))
    places = torch.arange(8, dtype=torch.uint8, device=packed.device)
    return ((packed[:, None] >> places) & 1).view(-1)[:count]


def pack_nibbles(numbers: Tensor) -> Tensor:
    """Two numbers from 0 to 15, in uint8, in a byte; the first in the lower half."""
    even = torch.nn.functional.pad(numbers, (0, numbers.numel() % 2))
    pairs = even.view(torch.int16)  # the first of two in the low byte
    return torch.bitwise_or(pairs, pairs >> 4).to(torch.uint8)


def unpack_nibbles(packed: Tensor, count: int) -> Tensor:
    """The first ``count`` numbers, in uint8."""
    pairs = packed.to(torch.int16)
    return torch.bitwise_or(pairs, pairs << 4).bitwise_and_(0x0F0F).view(torch.uint8)[:count]
