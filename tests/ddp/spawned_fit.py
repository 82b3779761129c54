"""A fit in processes that are made for it, and a checkpoint that is saved when they are gone: a script of its own."""

from __future__ import annotations

import sys
import warnings

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_bytescheduler import ByteSchedulerStrategy


class LargeModel(BoringModel):
    """Computes with several threads, where there are some."""

    def training_step(self, batch: torch.Tensor, batch_idx: int) -> torch.Tensor:
        return self.layer(batch).sum() + torch.ones(2**21).add_(1).mean()


def main(strategy: str, path: str, computed: str = "") -> None:
    if not computed:
        warnings.simplefilter("ignore")
    model = LargeModel() if computed else BoringModel()
    if computed:  # as in an earlier cell of a notebook
        torch.ones(2**21).add_(1)
    trainer = Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=2,
        max_steps=3,
        limit_val_batches=0,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    assert isinstance(trainer.strategy, ByteSchedulerStrategy)
    assert trainer.strategy.plan is None
    trainer.fit(model)
    plan, statistics = trainer.strategy.plan, trainer.strategy.statistics
    assert plan is not None
    assert statistics is not None
    trainer.save_checkpoint(path)
    saved = torch.load(path, weights_only=True)
    assert torch.equal(saved["state_dict"]["layer.weight"], model.layer.weight)
    print(f"plan: {plan.steps} steps: {statistics.steps}, saved")


if __name__ == "__main__":
    main(*sys.argv[1:])
