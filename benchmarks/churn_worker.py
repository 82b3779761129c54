"""One process of ``benchmarks.churn``: trains a small network, with a coordinator or under torchrun, until it is ended.

A step takes a fixed time, by sleeping for what its arithmetic does not take. What it has trained on and which weights
it had after each round goes into a file, line by line, so that nothing of it is lost with the process.
"""

from __future__ import annotations

import hashlib
import json
import os
import sys
import time
import warnings
from pathlib import Path
from typing import IO, Any

import lightning as L
import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

from lightning_bytescheduler import DiLoCoStrategy, SliceDataModule

__all__ = ["FEATURES", "Network", "make_rows", "train"]

FEATURES = 16
_ROW = FEATURES + 2  # the features, what is to be predicted, and the number of the sample


def make_rows(folder: Path, *, slices: int, samples: int) -> str:
    """Write slices of numbered samples of a function to learn; returns what is opened."""
    rng = np.random.default_rng(1)
    mixing = rng.normal(size=(FEATURES, 4))
    folder.mkdir(parents=True, exist_ok=True)
    for number in range(slices):
        features = rng.normal(size=(samples, FEATURES))
        target = np.tanh(features @ mixing).prod(axis=1) + 0.01 * rng.normal(size=samples)
        numbers = np.arange(number * samples, (number + 1) * samples)
        np.save(folder / f"rows-{number:04}.npy", np.column_stack([features, target, numbers]))
    return f"{folder}/*.npy"


class Network(L.LightningModule):
    """A few thousand parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(FEATURES, 64), nn.Tanh(), nn.Linear(64, 64), nn.Tanh(), nn.Linear(64, 1))
        self.numbers: list[int] = []

    def training_step(self, batch: Tensor | list[Tensor], batch_idx: int) -> Tensor:
        rows = batch if isinstance(batch, Tensor) else batch[0]
        self.numbers = rows[:, -1].long().tolist()
        loss = nn.functional.mse_loss(self.layers(rows[:, :FEATURES].float()).flatten(), rows[:, FEATURES].float())
        self.log("loss", loss)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=2e-3)


class Journal(L.Callback):
    """Makes steps as slow as asked for, and writes down what happens.

    Args:
        file: Of lines of JSON.
        step_s: Of a step.
    """

    def __init__(self, file: IO[str], step_s: float) -> None:
        self.file = file
        self.step_s = step_s
        self.rounds = 0
        self.began = 0.0

    def on_train_batch_start(self, *_: Any) -> None:
        self.began = time.monotonic()

    def on_train_batch_end(self, trainer: L.Trainer, pl_module: L.LightningModule, *_: Any) -> None:
        numbers = pl_module.numbers if isinstance(pl_module, Network) else []
        strategy = trainer.strategy
        if isinstance(strategy, DiLoCoStrategy):
            known = strategy.statistics
            if known is not None and known.rounds != self.rounds:
                self.rounds = known.rounds
                weights = digest(strategy.lightning_module_state_dict())
                self.write(round=int(strategy.progress()["round"]), sha256=weights)
            self.write(numbers=numbers, loss=float(trainer.callback_metrics["loss"]))
        else:
            self.write(step=trainer.global_step, samples=len(numbers))
        time.sleep(max(self.began + self.step_s - time.monotonic(), 0.0))

    def write(self, **what: Any) -> None:
        self.file.write(json.dumps({"t": time.time(), "pid": os.getpid(), **what}) + "\n")
        self.file.flush()


def digest(weights: dict[str, Tensor]) -> str:
    """Of all weights, in their order."""
    sha = hashlib.sha256()
    for name, tensor in weights.items():
        sha.update(name.encode())
        sha.update(tensor.contiguous().numpy().tobytes())
    return sha.hexdigest()


def train(asked: dict[str, Any]) -> None:
    """Train as asked.

    Args:
        asked: ``url`` of the coordinator, or none under torchrun; ``rows``, ``folder``, ``name``, ``step_s``,
            ``batch``, ``steps``.
    """
    warnings.filterwarnings("ignore")
    torch.set_num_threads(1)
    torch.manual_seed(1)
    folder = Path(asked["folder"])
    name = asked["name"] if asked["url"] else f"rank{os.environ['RANK']}"
    common: dict[str, Any] = {
        "accelerator": "cpu",
        "logger": False,
        "enable_progress_bar": False,
        "enable_model_summary": False,
        "max_epochs": -1,
        "max_steps": asked["steps"],
        "default_root_dir": folder,
    }
    with (folder / f"{name}.jsonl").open("a", encoding="utf-8") as file:
        journal = Journal(file, asked["step_s"])
        journal.write(began=True)
        if asked["url"]:
            files = {key: asked[key] for key in ("token_file", "authority") if asked.get(key)}
            strategy = DiLoCoStrategy(coordinator={"url": asked["url"], "name": name, **files})
            trainer = L.Trainer(devices=1, strategy=strategy, callbacks=[journal], enable_checkpointing=False, **common)
            cache = folder / "cache" / name
            data = SliceDataModule(asked["rows"], batch_size=asked["batch"], num_workers=0, cache=str(cache))
            trainer.fit(Network(), datamodule=data)
        else:
            saves = L.pytorch.callbacks.ModelCheckpoint(
                dirpath=folder, filename="last", every_n_train_steps=asked["save_every"], enable_version_counter=False
            )
            rows = np.concatenate([np.load(path) for path in sorted(Path(asked["rows"]).parent.glob("*.npy"))])
            loader = DataLoader(TensorDataset(torch.from_numpy(rows)), batch_size=asked["batch"], shuffle=True)
            trainer = L.Trainer(
                devices=int(os.environ["LOCAL_WORLD_SIZE"]), strategy="ddp", callbacks=[journal, saves], **common
            )
            last = folder / "last.ckpt"
            trainer.fit(Network(), loader, ckpt_path=str(last) if last.exists() else None)
        journal.write(ended=True)


if __name__ == "__main__":
    train(json.loads(sys.argv[1]))
