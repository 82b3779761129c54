"""A small GPT over characters, as a LightningModule that knows nothing of strategies or links."""

from __future__ import annotations

import math
from dataclasses import asdict

import torch
from lightning.pytorch import LightningModule
from lightning.pytorch.utilities.types import OptimizerLRSchedulerConfig
from torch import Tensor, nn
from torch.nn import functional

from examples.demo.size import VOCABULARY, GPTSize

_LEARNING_RATE = 1e-3
_WEIGHT_DECAY = 0.1
_WARM_UP_SHARE = 0.1


class Block(nn.Module):
    """Causal self-attention and a feed-forward layer, each normalised before and added to its input."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.attention_norm = nn.LayerNorm(width)
        self.query_key_value = nn.Linear(width, 3 * width)
        self.attention_out = nn.Linear(width, width)
        self.feed_forward_norm = nn.LayerNorm(width)
        self.feed_forward_in = nn.Linear(width, 4 * width)
        self.feed_forward_out = nn.Linear(4 * width, width)

    def forward(self, hidden: Tensor) -> Tensor:
        hidden = hidden + self._attend(self.attention_norm(hidden))
        expanded = functional.gelu(self.feed_forward_in(self.feed_forward_norm(hidden)))
        return hidden + self.feed_forward_out(expanded)

    def _attend(self, hidden: Tensor) -> Tensor:
        batch, length, width = hidden.shape
        projected = self.query_key_value(hidden).view(batch, length, 3, self.heads, width // self.heads)
        query, key, value = projected.permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(query, key, value, is_causal=True)
        return self.attention_out(mixed.transpose(1, 2).reshape(batch, length, width))


class CharacterGPT(LightningModule):
    """Predicts the next character; trained with AdamW, warm-up and cosine decay.

    Args:
        size: Dimensions of the network.
        steps: Optimizer steps of the whole training, for the learning-rate schedule.
    """

    def __init__(self, size: GPTSize, steps: int) -> None:
        super().__init__()
        self.steps = steps
        self.characters = nn.Embedding(VOCABULARY, size.width)
        self.positions = nn.Embedding(size.context, size.width)
        self.blocks = nn.Sequential(*(Block(size.width, size.heads) for _ in range(size.layers)))
        self.norm = nn.LayerNorm(size.width)
        self.head = nn.Linear(size.width, VOCABULARY, bias=False)
        self.apply(_initialise)
        self.save_hyperparameters({"size": asdict(size), "steps": steps}, logger=False)

    def forward(self, characters: Tensor) -> Tensor:
        """Returns the logits ``(batch, length, vocabulary)`` for ``characters`` of shape ``(batch,
        length)``."""
        positions = torch.arange(characters.shape[1], device=characters.device)
        hidden = self.characters(characters) + self.positions(positions)
        logits: Tensor = self.head(self.norm(self.blocks(hidden)))
        return logits

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        return self._loss(batch)

    def validation_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> None:
        self.log("validation_loss", self._loss(batch), on_epoch=True, sync_dist=True)

    def configure_optimizers(self) -> OptimizerLRSchedulerConfig:
        optimizer = torch.optim.AdamW(self.parameters(), lr=_LEARNING_RATE, weight_decay=_WEIGHT_DECAY)
        schedule = torch.optim.lr_scheduler.LambdaLR(optimizer, self._share_of_learning_rate)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def _loss(self, batch: tuple[Tensor, Tensor]) -> Tensor:
        characters, successors = batch
        return functional.cross_entropy(self(characters).flatten(0, 1), successors.flatten())

    def _share_of_learning_rate(self, step: int) -> float:
        warm_up = max(1, round(_WARM_UP_SHARE * self.steps))
        if step < warm_up:
            return (step + 1) / warm_up
        progress = (step - warm_up) / max(1, self.steps - warm_up)
        return 0.1 + 0.45 * (1 + math.cos(math.pi * min(1.0, progress)))


def _initialise(module: nn.Module) -> None:
    if isinstance(module, nn.Linear | nn.Embedding):
        nn.init.normal_(module.weight, std=0.02)
    if isinstance(module, nn.Linear) and module.bias is not None:
        nn.init.zeros_(module.bias)
