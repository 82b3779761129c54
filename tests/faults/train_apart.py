"""A training script whose ranks may go separate ways. What happens is said in JSON in ``sys.argv[1]``."""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset

from lightning_bytescheduler import ByteSchedulerStrategy, DiLoCoStrategy
from lightning_bytescheduler.failures import rendezvous
from lightning_bytescheduler.failures.standstill import Standing, VitalSigns
from tests.faults.bounds import set_bounds

Options = dict[str, Any]


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


class Stream(IterableDataset[Tensor]):
    def __init__(self, batches: int, pause: float) -> None:
        self.batches, self.pause = batches, pause

    def __iter__(self) -> Iterator[Tensor]:
        for number in range(self.batches):
            if number == 2:
                time.sleep(self.pause)
            yield torch.randn(8)


class Model(LightningModule):
    def __init__(self, options: Options) -> None:
        super().__init__()
        self.options = options
        middle = nn.Tanh() if options.get("plain") else nn.BatchNorm1d(16)
        self.layers = nn.Sequential(nn.Linear(8, 16), middle, nn.Linear(16, 1))

    def at(self, hook: str) -> None:
        """Join a collective of all ranks here, or be busy, if the options say so."""
        if hook == self.options.get("collective") and self.trainer.global_step >= self.options.get("from_step", 0):
            self.log("extra", torch.tensor(1.0), sync_dist=True, on_step=False, on_epoch=True)
            self.all_gather(torch.ones(1))
        if hook == self.options.get("busy"):
            self.options["busy"] = ""
            time.sleep(7.0)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if "resume" in self.options:
            say("TRAINED")
        self.at("training_step")
        if batch_idx == 2 and "broadcasts" in self.options:
            self.options["told"].wait(60.0)
            dist.broadcast(torch.zeros(self.options["broadcasts"]), src=0)
        loss: Tensor = self.layers(batch[0] if isinstance(batch, list) else batch).square().mean()
        return None if batch_idx == self.options.get("none_at") else loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.at("on_train_batch_end")

    def on_train_epoch_end(self) -> None:
        self.at("on_train_epoch_end")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.at("validation_step")
        if self.options.get("sync"):
            self.log("loss", self.layers(batch[0]).mean(), sync_dist=True)

    def on_validation_epoch_end(self) -> None:
        self.at("on_validation_epoch_end")

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), lr=0.01, momentum=0.9)

    def train_dataloader(self) -> DataLoader[Any]:
        batches = self.options["batches"]
        if self.options.get("stream"):
            return DataLoader(Stream(2 * batches, self.options.get("pause", 0.0)), batch_size=2)
        return DataLoader(TensorDataset(torch.randn(2 * batches, 8)), batch_size=2)

    def val_dataloader(self) -> DataLoader[Any]:
        return DataLoader(TensorDataset(torch.randn(4, 8)), batch_size=2)


def told(batches: int) -> threading.Event:
    """Set once this rank has told the others that it has begun so many batches."""
    give, told = VitalSigns.give, threading.Event()

    def telling(signs: VitalSigns, standing: Standing, **options: Any) -> None:
        give(signs, standing, **options)
        if standing.batches >= batches:
            told.set()

    VitalSigns.give = telling  # type: ignore[method-assign, assignment]
    return told


class Ends(Callback):
    def on_train_epoch_end(self, *_: Any) -> None:
        say(f"EPOCH_ENDED {time.time()}")


def make_strategy(options: Options) -> Any:
    timeout = timedelta(seconds=options.get("timeout", 600.0))
    if options.get("strategy") == "ddp":
        return DDPStrategy(timeout=timeout)
    if options.get("strategy") == "diloco":
        return DiLoCoStrategy(inner_steps=options.get("inner_steps", 2), timeout=timeout)
    return ByteSchedulerStrategy(
        credit=options.get("credit"),
        partition_size=200,
        bucket_cap_mb=0.0001,
        mode=options.get("mode", "overlapped"),
        cross_barrier=options.get("cross_barrier", True),
        weighting=options.get("weighting", "ranks"),
        timeout=timeout,
    )


def main(options: Options) -> None:
    os.environ.update(options.get("environment", {}))
    if options.get("strategy") == "absent":
        say("ABSENT")
        time.sleep(options["timeout"])
        return
    torch.set_num_threads(1)
    torch.manual_seed(0)
    if "broadcasts" in options:
        options["told"] = told(batches=3)
    set_bounds()
    rendezvous._WARN_S = options.get("warn_after", 30.0)
    callbacks: list[Callback] = [Ends()]
    if "checkpoint" in options:
        callbacks.append(ModelCheckpoint(options["checkpoint"], filename="{step}", save_top_k=-1))
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=make_strategy(options),
        max_epochs=options.get("epochs", 1),
        max_steps=options.get("max_steps", -1),
        limit_val_batches=options.get("val_batches", 0),
        limit_train_batches=options.get("limit", 1.0),
        accumulate_grad_batches=options.get("accumulate", 1),
        use_distributed_sampler=False,
        num_sanity_val_steps=options.get("sanity", 0),
        enable_checkpointing="checkpoint" in options,
        enable_progress_bar=False,
        enable_model_summary=False,
        logger=False,
        callbacks=callbacks,
    )
    try:
        trainer.fit(Model(options), ckpt_path=options.get("resume"))
    except BaseException as error:
        say(f"FAILED {time.time()} {type(error).__name__}")
        raise
    finally:
        threads = sorted(t.name for t in threading.enumerate() if t.name.startswith("bytescheduler"))
        say(f"THREADS {threads} STEPS {trainer.global_step} INITIALISED {dist.is_initialized()}")


if __name__ == "__main__":
    main(json.loads(sys.argv[1]))
