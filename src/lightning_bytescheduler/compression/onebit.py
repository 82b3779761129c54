"""The sign of each element, and one scale for all: onebit."""

from __future__ import annotations

import torch
from torch import Tensor

from lightning_bytescheduler.compression.bits import pack_bits, unpack_bits
from lightning_bytescheduler.compression.compressor import Compressor, damaged, flat_fp32
from lightning_bytescheduler.compression.dense import aligned

__all__ = ["OneBit"]

_SCALE_BYTES = 4


class OneBit(Compressor):
    """The sign of each element, times the mean magnitude of all; nought counts as positive.

    ``|x - C(x)|^2 = (1 - d) |x|^2`` with ``d = |x|_1^2 / (n |x|_2^2)``, so that training with error feedback converges
    (Karimireddy et al., "Error Feedback Fixes SignSGD and other Gradient Compression Schemes"); the more alike the
    magnitudes, the faster. One huge element takes the scale with it. Without error feedback training need not converge.

    What is not finite makes the scale infinite or not a number, and with it all elements.
    """

    @property
    def spec(self) -> str:
        """See Compressor."""
        return "onebit"

    def payload_bytes(self, elements: int) -> int:
        """See Compressor."""
        return _SCALE_BYTES + -(-elements // 8)

    def compress(self, part: Tensor, *, seed: int = 0, worker: int = 0, key: str = "") -> Tensor:
        """See Compressor."""
        values = flat_fp32(part)
        # Summed in double precision, so that large but finite numbers do not become infinite.
        scale = torch.linalg.vector_norm(values, 1, dtype=torch.float64) / max(values.numel(), 1)
        return torch.cat([scale.float().view(1).view(torch.uint8), pack_bits(values < 0)])

    def decompress(self, payload: Tensor, elements: int, *, out: Tensor | None = None) -> Tensor:
        """See Compressor."""
        if payload.dtype != torch.uint8 or payload.shape != (self.payload_bytes(elements),):
            raise damaged(payload, elements, self.spec)
        result = torch.empty(elements, dtype=torch.float32, device=payload.device) if out is None else out
        scale = aligned(payload)[:_SCALE_BYTES].view(torch.float32)
        result.copy_(unpack_bits(payload[_SCALE_BYTES:], elements))
        return torch.addcmul(scale, result, scale, value=-2.0, out=result)
