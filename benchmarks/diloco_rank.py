"""One rank of one contender of ``diloco.py``: trains, and notes time, samples and loss."""

from __future__ import annotations

import statistics
import time
from collections.abc import Iterable
from typing import Any

import lightning as L
import torch
from torch.utils.data import DataLoader, Dataset

from benchmarks.contenders import contender
from benchmarks.models import validation_windows
from benchmarks.rank import fit
from benchmarks.ranks import Job
from examples.demo.model import CharacterGPT
from examples.demo.size import GPTSize
from examples.demo.text import Windows, training_and_validation_text
from lightning_bytescheduler import DiLoCoStrategy

__all__ = ["RANKS", "train"]

RANKS = 2
_CONTEXT, _WIDTH = 64, 288  # 5.1 million parameters
_WARM_UP_STEPS = 10
_VALIDATION_WINDOWS = 64
_TRIAL_STEPS = 12


class Model(CharacterGPT):
    """With a learning rate that does not depend on how long the training will be."""

    def __init__(self, asked: Job) -> None:
        super().__init__(GPTSize(context=_CONTEXT, width=asked.get("width", _WIDTH), heads=8, layers=5), steps=1)
        self.learning_rate = asked["learning_rate"]
        self.inner = asked.get("inner", "adamw")

    def configure_optimizers(self) -> Any:
        if self.inner == "muon":
            from examples.muon import MuonAndAdamW  # needs torch 2.9

            matrices = [weight for weight in self.blocks.parameters() if weight.ndim == 2]
            optimizer: Any = MuonAndAdamW(self.parameters(), matrices=matrices, lr=self.learning_rate, fused=True)
        else:
            optimizer = torch.optim.AdamW(self.parameters(), lr=self.learning_rate, fused=True)
        warm_up = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / _WARM_UP_STEPS))
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": warm_up, "interval": "step"}}


class Curve(L.Callback):
    """Makes steps as slow as asked for, and notes time, samples, loss and waiting until the training is good enough.

    Time is that of training: what a validation takes is left out, and so is what happens before the first step.
    """

    def __init__(self, asked: dict[str, Any], compute_s: float) -> None:
        self.asked = asked
        self.compute_s = compute_s
        self.points: list[tuple[float, int, float]] = []
        self.trained = self.waited = 0.0
        self.began: float | None = None  # when training last went on
        self.waited_before = 0.0
        self.steady = (0.0, 0.0)  # seconds trained and waited before the last step
        self.last: float | None = None
        self.steps_s: list[float] = []
        self.kept: list[tuple[float, int, dict[str, torch.Tensor]]] = []  # seconds, samples, global weights
        self.rounds = 0

    def on_train_batch_start(self, trainer: L.Trainer, *_: Any) -> None:
        now = time.perf_counter()
        if self.began is None:
            self.began, self.waited_before = now, _waited(trainer.strategy)
        elif self.last is not None:
            self.steps_s.append(now - self.last)
        self.last = now
        if "snapshot_s" in self.asked:
            trained = self.trained + now - self.began
            if trainer.global_rank == 0:
                self._keep(trainer.strategy, trained)
            if trained > self.asked["seconds"]:
                trainer.should_stop = True
        spent = self.waited + _waited(trainer.strategy) - self.waited_before
        self.steady = (self.trained + now - self.began, spent)
        time.sleep(max(self.asked["step_s"][trainer.global_rank] - self.compute_s, 0.0))

    def _keep(self, strategy: Any, trained: float) -> None:
        """Keep the global weights, if a round has ended and the last ones are not of just now."""
        if strategy.statistics.rounds == self.rounds:
            return
        self.rounds = strategy.statistics.rounds
        state = strategy._runtime.state  # not public: who trains on needs no copy of the global weights
        if state is not None and trained - (self.kept[-1][0] if self.kept else 0.0) >= self.asked["snapshot_s"]:
            weights = {name: tensor.clone() for name, tensor in state.weights.items()}
            self.kept.append((trained, strategy.statistics.merged_samples, weights))

    def take_losses(self, model: Model, loader: Iterable[Any]) -> None:
        """Take the losses of the weights that were kept."""
        batches = list(loader)
        for seconds, samples, weights in self.kept:
            model.load_state_dict(weights)
            with torch.no_grad():
                losses = [float(model.training_step(batch, 0)) for batch in batches]
            self.points.append((seconds, samples, sum(losses) / len(losses)))
        self.points.sort()  # the end of the training has had a validation

    def on_validation_start(self, trainer: L.Trainer, *_: Any) -> None:
        if self.began is not None:
            self.trained += time.perf_counter() - self.began
            self.waited += _waited(trainer.strategy) - self.waited_before
            self.began = self.last = None

    def on_validation_end(self, trainer: L.Trainer, *_: Any) -> None:
        loss = float(trainer.callback_metrics["validation_loss"])
        strategy = trainer.strategy
        if isinstance(strategy, DiLoCoStrategy):
            samples = 0 if strategy.statistics is None else strategy.statistics.merged_samples
        else:
            samples = trainer.global_step * RANKS * self.asked["batch"]
        self.points.append((self.trained, samples, loss))
        target, enough = self.asked.get("loss"), self.asked.get("samples")
        good = target is None or loss <= target
        if (good and enough is not None and samples >= enough) or self.trained > self.asked["seconds"]:
            trainer.should_stop = True


def _waited(strategy: object) -> float:
    """Seconds that the training thread has waited for updates or for a round to start; 0 where that is not known."""
    known = strategy.statistics if isinstance(strategy, DiLoCoStrategy) else None
    return 0.0 if known is None else known.exchange_s + known.start_s


def train(asked: Job) -> Job:
    """Train as asked for; returns this rank's curve."""
    training, validation = (Windows(text, _CONTEXT) for text in training_and_validation_text())
    compute_s = _compute_seconds(Model(asked), training, asked["batch"])
    L.seed_everything(asked["seed"], verbose=False)
    strategy: Any = DiLoCoStrategy(**asked["diloco"]) if "diloco" in asked else contender(asked["name"]).strategy()
    curve = Curve(asked, compute_s)
    validated = DataLoader(validation_windows(validation, _VALIDATION_WINDOWS), batch_size=16)
    model = Model(asked)
    fit(
        model,
        strategy,
        DataLoader(training, batch_size=asked["batch"], shuffle=True),
        validated,
        callbacks=[curve],
        max_steps=asked["steps"],
        val_check_interval=asked["validate"],
        check_val_every_n_epoch=None,
        default_root_dir=asked["folder"],
    )
    curve.take_losses(model, validated)
    return {
        "points": curve.points,
        "compute_s": compute_s,
        "step_s": statistics.median(curve.steps_s) if curve.steps_s else None,
        "waited": curve.waited / curve.trained if curve.trained else 0.0,
        "waited_in_rounds": curve.steady[1] / curve.steady[0] if curve.steady[0] else 0.0,
    }


def _compute_seconds(model: Model, windows: Dataset[Any], batch: int) -> float:
    """What a step's arithmetic takes: processor time, which does not depend on what else the machine does."""
    optimizer = model.configure_optimizers()["optimizer"]
    loader = iter(DataLoader(windows, batch_size=batch))
    taken = []
    for _ in range(_TRIAL_STEPS):
        began = time.process_time()
        model.training_step(next(loader), 0).backward()
        optimizer.step()
        optimizer.zero_grad()
        taken.append(time.process_time() - began)
    return statistics.median(taken[_TRIAL_STEPS // 3 :])
