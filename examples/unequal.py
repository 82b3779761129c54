"""Two processes of unequal speed share DDP's training without long waits: batch sizes follow each one's pace.

From the repository's folder:

    python -m examples.unequal --speeds 1 3

The text is the Python standard library's source. Slowness is simulated: a process sleeps after each layer's work.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from typing import Any

import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import DataLoader

from examples.demo.text import Windows, training_and_validation_text
from lightning_bytescheduler import ByteSchedulerStrategy

LENGTH = 32  # characters of a sample


class _Takes(torch.autograd.Function):
    """Takes a third of a time forward and two thirds backward."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, seconds: float) -> Tensor:
        ctx.seconds = seconds
        time.sleep(seconds / 3)
        return hidden.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        time.sleep(2 * ctx.seconds / 3)
        return gradient, None


class Reader(LightningModule):
    """Reads text character by character.

    Args:
        seconds: Seconds per sample, by rank; may change during training.
        width: Width of its layers.
    """

    def __init__(self, seconds: Sequence[float], width: int = 48) -> None:
        super().__init__()
        self.seconds = list(seconds)
        self.embedding = nn.Embedding(128, width)
        self.mixer = nn.Linear(4 * width, width)
        self.head = nn.Linear(width, 128)

    def training_step(self, batch: tuple[Tensor, Tensor], batch_idx: int) -> Tensor:
        characters, successors = batch
        hidden = self.embedding(characters)
        padded = F.pad(hidden, (0, 0, 3, 0))
        hidden = torch.tanh(self.mixer(torch.cat([padded[:, n : n + LENGTH] for n in range(4)], dim=-1)))
        hidden = _Takes.apply(hidden, self.seconds[self.global_rank] * len(characters))
        loss = F.cross_entropy(self.head(hidden).flatten(0, 1), successors.flatten())
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=3e-3)


class SaysShares(Callback):
    """Says when shares change."""

    def __init__(self) -> None:
        self.shares: tuple[int, ...] = ()

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        plan = trainer.strategy.plan  # type: ignore[attr-defined]
        if trainer.is_global_zero and plan.batch_shares != self.shares:
            self.shares = plan.batch_shares
            print(f"step {trainer.global_step}: samples by rank {self.shares}", flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, and print how many samples each rank took."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument(
        "--speeds", type=float, nargs="+", default=[1.0, 3.0], help="speeds of the processes (default: 1 3)"
    )
    parser.add_argument("--steps", type=int, default=100, help="steps of the training (default: %(default)s)")
    options = parser.parse_args(arguments)
    data = Windows(training_and_validation_text()[0], LENGTH)
    trainer = Trainer(
        accelerator="cpu",
        devices=len(options.speeds),
        strategy=ByteSchedulerStrategy(weighting="samples", batch_size="balanced"),
        callbacks=[SaysShares()],
        max_steps=options.steps,
        max_epochs=-1,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    began = time.perf_counter()
    trainer.fit(Reader([0.003 / speed for speed in options.speeds]), DataLoader(data, batch_size=32, shuffle=True))
    if trainer.is_global_zero:
        print(f"{options.steps} steps in {time.perf_counter() - began:.1f} s.")
        print(trainer.strategy.plan)  # type: ignore[attr-defined]


if __name__ == "__main__":
    main()
