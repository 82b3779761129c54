"""One rank: trains as its run specification says, and reports. Started by the demo, not by hand.

The training itself is ordinary Lightning code; the strategy is one argument of the `Trainer`.
"""

from __future__ import annotations

import hashlib
import os
import sys
import threading
import warnings
from pathlib import Path

import torch
from lightning.pytorch import LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import DDPStrategy, Strategy
from torch.utils.data import DataLoader, Subset

from examples.demo.measure import LinkTime, StepTimes
from examples.demo.model import CharacterGPT
from examples.demo.report import RankResult, ReportWriter, report_path
from examples.demo.run_spec import ALONE, BYTESCHEDULER, RANKS, SEED, RunSpec
from examples.demo.text import Windows, training_and_validation_text


def strategy_of(spec: RunSpec) -> str | Strategy:
    """What the `Trainer` is given as its strategy."""
    if spec.strategy == ALONE:
        return "auto"
    if spec.strategy == BYTESCHEDULER:
        from lightning_bytescheduler import ByteSchedulerStrategy

        return ByteSchedulerStrategy(timeline=str(spec.timeline))
    if spec.bucket_mb is not None:
        return DDPStrategy(bucket_cap_mb=spec.bucket_mb)
    return spec.strategy


def train(spec: RunSpec) -> None:
    """Trains, validates and reports the result."""
    seed_everything(SEED)
    training_text, validation_text = training_and_validation_text()
    training = Windows(training_text, spec.size.context)
    validation = Windows(validation_text, spec.size.context)
    # Spread over all held-out files, not only the first ones.
    count = min(len(validation), RANKS * spec.batch_size * spec.validation_batches)
    chosen = Subset(validation, range(0, len(validation), len(validation) // count)[:count])

    rank = int(os.environ.get("NODE_RANK", 0)) + int(os.environ.get("LOCAL_RANK", 0))
    report = ReportWriter(report_path(spec.folder, rank))
    step_times, link_time = StepTimes(report), LinkTime()
    module = CharacterGPT(spec.size, spec.steps)
    trainer = Trainer(
        strategy=strategy_of(spec),
        accelerator="cpu",
        num_nodes=spec.nodes,
        devices=spec.devices,
        # One epoch of exactly these steps, so that validation comes once, at its end.
        max_epochs=1,
        limit_train_batches=spec.steps,
        num_sanity_val_steps=0,
        callbacks=[step_times, link_time],
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(
        module,
        DataLoader(training, batch_size=spec.batch_size, shuffle=True, drop_last=True),
        DataLoader(chosen, batch_size=spec.batch_size),
    )
    report.result(
        RankResult(
            parameters=sum(parameter.numel() for parameter in module.parameters()),
            step_seconds=step_times.seconds,
            communication_seconds=link_time.seconds,
            validation_loss=float(trainer.callback_metrics["validation_loss"]),
            digests=_digests(module),
            weights=_save(module, spec.folder / "weights.pt") if rank == 0 else None,
        )
    )


def _digests(module: LightningModule) -> dict[str, str]:
    return {
        name: hashlib.sha256(tensor.contiguous().numpy().tobytes()).hexdigest()
        for name, tensor in module.state_dict().items()
    }


def _save(module: LightningModule, path: Path) -> str:
    torch.save(module.state_dict(), path)
    return str(path)


def _end_with_parent() -> None:
    """Ends this process when the demo is gone, which holds the other end of standard input and writes
    nothing."""

    def watch() -> None:
        os.read(0, 1)
        os._exit(1)

    threading.Thread(target=watch, daemon=True).start()


def main(path: str) -> None:
    """Trains the run whose specification is at ``path``."""
    _end_with_parent()
    # Each rank has a core to itself; more threads than that would fight over it.
    torch.set_num_threads(1)
    # The data is in memory, so that workers for loading it would only take the cores from the training.
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    train(RunSpec.load(Path(path)))


if __name__ == "__main__":
    main(sys.argv[1])
