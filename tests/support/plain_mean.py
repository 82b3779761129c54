"""The weighted mean of tensors by name, which travel in fp32."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from lightning_bytescheduler.compression.wire_format import WireFormat
from lightning_bytescheduler.diloco.weighted_mean import WeightedMean

FP32 = WireFormat()


class PlainMean(WeightedMean):
    """A ``WeightedMean`` of tensors of these shapes."""

    def __init__(self, like: Mapping[str, Tensor]) -> None:
        self.shapes = {name: tensor.shape for name, tensor in like.items()}
        super().__init__(sum(tensor.numel() for tensor in like.values()))

    def add_plain(self, tensors: Mapping[str, Tensor], *, weight: int) -> None:
        flat = torch.cat([tensors[name].detach().float().reshape(-1) for name in self.shapes])
        self.add(flat.view(torch.uint8), FP32, weight=weight)

    def mean(self) -> dict[str, Tensor]:
        flat = FP32.decode(self.encode_mean(FP32), self._elements)
        parts = flat.split([shape.numel() for shape in self.shapes.values()])
        return {name: part.reshape(shape) for (name, shape), part in zip(self.shapes.items(), parts, strict=True)}
