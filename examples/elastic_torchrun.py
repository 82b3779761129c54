"""Trains on as many machines as there are: torchrun starts all ranks anew when one dies, and each sample counts once.

On each machine, one to four of them, at any time:

    torchrun --nnodes 1:4 --nproc-per-node 1 --max-restarts 100 --rdzv-backend c10d --rdzv-endpoint FIRST:29400 -m examples.elastic_torchrun

On this machine alone, with two processes:

    torchrun --nproc-per-node 2 --max-restarts 100 -m examples.elastic_torchrun

Kill a process while it trains, or start torchrun on one machine more. All go on from the last checkpoint, with the batch
that comes next, shared by however many there are. Each rank writes down which samples it takes. At the end they are
counted.
"""  # noqa: E501  (commands are not broken)

from __future__ import annotations

import argparse
import collections
import os
import time
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset

from lightning_bytescheduler import ByteSchedulerStrategy, DiLoCoStrategy


class Points(Dataset[tuple[Tensor, Tensor, int]]):
    """Points of a function, with their numbers.

    Args:
        size: How many.
    """

    def __init__(self, size: int) -> None:
        self.inputs = torch.rand(size, 8, generator=torch.Generator().manual_seed(1)) * 2 - 1
        self.targets = (self.inputs * 3).sin().sum(dim=1, keepdim=True)

    def __len__(self) -> int:
        return len(self.inputs)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        return self.inputs[index], self.targets[index], index


class Learner(L.LightningModule):
    """Learns the function.

    Args:
        pause: Seconds that a step takes besides.
        rate: Of learning.
    """

    def __init__(self, pause: float, rate: float = 0.05) -> None:
        super().__init__()
        self.pause, self.rate = pause, rate
        self.layers = nn.Sequential(nn.Linear(8, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))

    def training_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> Tensor:
        inputs, targets, _ = batch
        time.sleep(self.pause)
        return nn.functional.mse_loss(self.layers(inputs), targets)

    def validation_step(self, batch: tuple[Tensor, Tensor, Tensor], batch_idx: int) -> None:
        inputs, targets, _ = batch
        self.log("validation_loss", nn.functional.mse_loss(self.layers(inputs), targets), sync_dist=True)

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.rate, momentum=0.9)


class Record(L.Callback):
    """Writes down which samples this rank takes, before it takes them.

    Args:
        folder: One file for each process.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.start = 0

    def on_train_start(self, trainer: L.Trainer, *_: Any) -> None:
        self.start = trainer.strategy.broadcast(time.time_ns())
        self.folder.mkdir(parents=True, exist_ok=True)

    def on_train_batch_start(self, trainer: L.Trainer, _: Any, batch: Any, batch_idx: int) -> None:
        taken = " ".join(map(str, batch[2].tolist()))
        with (self.folder / f"{self.start}.{trainer.global_rank}").open("a") as file:
            file.write(f"{trainer.current_epoch},{batch_idx},{taken}\n")


def samples_by_batch(folder: Path) -> dict[tuple[int, int], list[int]]:
    """The samples of all ranks in each batch that counts, by epoch and number: those that were taken last."""
    found: dict[tuple[int, int], dict[int, list[int]]] = collections.defaultdict(lambda: collections.defaultdict(list))
    for file in sorted(folder.iterdir(), key=lambda file: int(file.suffix[1:])):
        for line in file.read_text().splitlines():
            epoch, batch, samples = line.split(",")
            found[int(epoch), int(batch)][int(file.stem)] += map(int, samples.split())
    return {key: starts[max(starts)] for key, starts in sorted(found.items())}


def strategy_of(asked: argparse.Namespace) -> Any:
    if asked.strategy == "diloco":
        return DiLoCoStrategy(inner_steps=10, equal_steps=True)  # so that a restart changes nothing
    return ByteSchedulerStrategy(weighting="samples", batch_size="global")


def main(arguments: Sequence[str] | None = None) -> None:
    """Train, from the last checkpoint if there is one, and count."""
    parser = argparse.ArgumentParser(prog="python -m examples.elastic_torchrun", description=__doc__.splitlines()[0])
    parser.add_argument("--strategy", choices=["bytescheduler", "diloco"], default="bytescheduler")
    parser.add_argument("--epochs", type=int, default=3)
    parser.add_argument("--samples", type=int, default=8_000, help="samples of an epoch (default: %(default)s)")
    parser.add_argument(
        "--batch-size", type=int, default=48, help="batch size of all ranks together (default: %(default)s)"
    )
    parser.add_argument("--accumulate", type=int, default=1, help="batches of a step (default: %(default)s)")
    parser.add_argument("--loader-workers", type=int, default=0, help="that load data (default: %(default)s)")
    parser.add_argument("--every", type=int, default=20, help="steps from checkpoint to checkpoint")
    parser.add_argument("--validate-every", type=float, default=0.5, help="share of an epoch (default: %(default)s)")
    parser.add_argument("--pause", type=float, default=0.02, help="seconds that a step takes besides")
    parser.add_argument("--output", type=Path, default=Path("elastic_output"))
    asked = parser.parse_args(arguments)
    warnings.filterwarnings("ignore", message=".*does not have many workers.*")
    torch.set_num_threads(1)
    L.seed_everything(1, verbose=False)
    record = Record(asked.output / "record")
    save = ModelCheckpoint(
        asked.output, save_top_k=0, save_last=True, every_n_train_steps=asked.every, enable_version_counter=False
    )
    trainer = L.Trainer(
        accelerator="cpu",
        devices=int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
        num_nodes=int(os.environ.get("GROUP_WORLD_SIZE", "1")),
        strategy=strategy_of(asked),
        max_epochs=asked.epochs,
        accumulate_grad_batches=asked.accumulate,
        val_check_interval=asked.validate_every,
        num_sanity_val_steps=0,
        callbacks=[record, save],
        default_root_dir=asked.output,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    data = DataLoader(
        Points(asked.samples), batch_size=asked.batch_size, shuffle=True, num_workers=asked.loader_workers
    )
    learner = Learner(asked.pause, rate=0.05 if asked.strategy == "bytescheduler" else 0.01)  # outer steps add up
    trainer.fit(learner, data, DataLoader(Points(200), batch_size=50), ckpt_path="last")
    trainer.save_checkpoint(asked.output / "final.ckpt")
    if trainer.is_global_zero:
        print(f"validation loss {float(trainer.callback_metrics['validation_loss']):.4f}")
        for epoch in range(asked.epochs):
            batches = [taken for (of, _), taken in samples_by_batch(record.folder).items() if of == epoch]
            counts = collections.Counter(number for taken in batches for number in taken)
            print(f"epoch {epoch}: {len(counts)} samples, each {min(counts.values())} to {max(counts.values())} times")


if __name__ == "__main__":
    main()
