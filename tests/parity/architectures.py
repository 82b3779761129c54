"""Small versions of the networks people train."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from tests.support.models import Tokens, Trained

__all__ = ["Encoder", "MobileBlock", "ResNet"]


class Encoder(Tokens):
    """A transformer encoder with learned positions, whose blocks may be computed again in the backward pass.

    Args:
        checkpointed: ``"reentrant"``, ``"not reentrant"`` or ``None``.
        arguments: See :class:`Trained`.
    """

    def __init__(self, *, checkpointed: str | None = None, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.checkpointed = checkpointed
        self.embedding = nn.Embedding(16, 12)
        self.positions = nn.Parameter(torch.zeros(8, 12))
        self.blocks = nn.ModuleList(
            nn.TransformerEncoderLayer(12, 3, 24, dropout=0.1, batch_first=True, norm_first=bool(number % 2))
            for number in range(3)
        )
        self.norm = nn.LayerNorm(12)
        self.last = nn.Linear(12, 3)

    def predict(self, inputs: Tensor) -> Tensor:
        hidden = self.embedding(inputs) + self.positions
        for block in self.blocks:
            if self.checkpointed is None:
                hidden = block(hidden)
            else:
                hidden = checkpoint(block, hidden, use_reentrant=self.checkpointed == "reentrant")
        return self.last(self.norm(hidden).mean(1))


class Images(Trained):
    """For networks that look at small images."""

    def inputs(self, count: int, generator: torch.Generator) -> Tensor:
        return torch.randn(count, 3, 8, 8, generator=generator)


class ResidualBlock(nn.Module):
    """Two convolutions with batch norms, beside a shortcut that has its own where the size changes."""

    def __init__(self, channels_in: int, channels: int, stride: int = 1) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride > 1 or channels != channels_in:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, inputs: Tensor) -> Tensor:
        hidden = self.bn2(self.conv2(F.relu(self.bn1(self.conv1(inputs)), inplace=True)))
        return F.relu(hidden + self.shortcut(inputs))


class ResNet(Images):
    """Its batch statistics are buffers, which DDP broadcasts before each forward pass."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.stem = nn.Sequential(nn.Conv2d(3, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU(inplace=True))
        self.blocks = nn.Sequential(ResidualBlock(8, 8), ResidualBlock(8, 16, 2), ResidualBlock(16, 16))
        self.last = nn.Linear(16, 3)

    def predict(self, inputs: Tensor) -> Tensor:
        return self.last(self.blocks(self.stem(inputs)).mean((2, 3)))


class MobileBlock(Images):
    """Depthwise convolutions, group norm, squeeze and excitation, in channels-last memory."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.expand = nn.Conv2d(3, 12, 1)
        self.depthwise = nn.Conv2d(12, 12, 3, padding=1, groups=12)
        self.norm = nn.GroupNorm(3, 12)
        self.squeeze = nn.Conv2d(12, 3, 1)
        self.excite = nn.Conv2d(3, 12, 1)
        self.project = nn.Conv2d(12, 6, 1)
        self.last = nn.Linear(6, 3)
        self.to(memory_format=torch.channels_last)

    def predict(self, inputs: Tensor) -> Tensor:
        hidden = F.silu(self.norm(self.depthwise(self.expand(inputs.contiguous(memory_format=torch.channels_last)))))
        weights = torch.sigmoid(self.excite(F.silu(self.squeeze(hidden.mean((2, 3), keepdim=True)))))
        return self.last(self.project(hidden * weights).mean((2, 3)))
