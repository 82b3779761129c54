"""A fit in processes that are made for it, and a checkpoint that is saved when they are gone: a script of its own."""

from __future__ import annotations

import sys
import warnings

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_bytescheduler import ByteSchedulerStrategy


def main(strategy: str, path: str) -> None:
    warnings.simplefilter("ignore")
    model = BoringModel()
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
