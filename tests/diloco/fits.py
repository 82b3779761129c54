"""Fits with the strategy ``diloco`` that tests run on every rank of a pool of their own.

Other strategies leave a default process group behind, which this one refuses.
"""

from __future__ import annotations

import os
import signal
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any
from unittest.mock import patch

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import Strategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor
from torch.optim import SGD
from torch.utils.data import DataLoader
from torchmetrics import MeanMetric

from lightning_bytescheduler import DiLoCoStrategy
from lightning_bytescheduler.diloco import pseudo_gradient_exchange
from lightning_bytescheduler.diloco.messages import Message, SendAfter, StepReport
from lightning_bytescheduler.diloco.round_counter import RoundCounter
from tests.support.models import Tower

__all__ = [
    "FAST_AND_SLOW",
    "Measured",
    "Paced",
    "Pause",
    "Result",
    "SixOrTwo",
    "calm_tower",
    "diloco_trainer",
    "fit_alone",
    "fit_diloco",
    "plain_sgd",
]


FAST_AND_SLOW = {0: 0.002, 1: 0.012}
"""Seconds that a step takes on each rank."""


def plain_sgd(parameters: Any) -> SGD:
    return SGD(parameters, lr=0.01)


calm_tower = partial(Tower, optimizer=plain_sgd, dropout=0.0)


class SixOrTwo(Tower):
    """Has a batch size for each worker."""

    def __init__(self) -> None:
        super().__init__(optimizer=plain_sgd, dropout=0.0)

    def train_dataloader(self) -> DataLoader[Any]:
        self.batch_size = [6, 2][self.trainer.strategy.worker]
        return super().train_dataloader()


class Measured(Tower):
    """Validates with a torchmetric of its own, and says how many samples it has seen."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.mean = MeanMetric()

    def validation_step(self, batch: list[torch.Tensor], batch_idx: int) -> None:
        own = float(self.global_rank + 1)
        self.mean.update(torch.full((len(batch[0]),), own))
        self.log("of_metric", self.mean, on_epoch=True)
        self.log("of_number", own, sync_dist=True, on_epoch=True)
        loss = torch.nn.functional.mse_loss(self.predict(batch[0]), batch[1])
        self.log("validation_loss", loss, sync_dist=True)
        self.notes.append(("weights", [float(p.detach().double().sum()) for p in self.parameters()]))


@dataclass(kw_only=True)
class Result:
    """What a fit ended with on one rank."""

    weights: dict[str, Tensor]
    losses: list[float]
    notes: list[Any]
    global_step: int
    epoch: int
    rounds: int
    samples: int
    metrics: dict[str, float] = field(default_factory=dict)
    seen: list[Any] = field(default_factory=list)


class Paced(Callback):
    """Makes one worker fast and the others slow, whatever else the machine does. Not for ``equal_steps``.

    All steps are reported with the seconds that are given. A slow worker takes one step of a round, and further ones
    once it has been told when the round ends, which the steps of the fast one decide.
    """

    def __init__(self, rank: int, seconds: Mapping[int, float]) -> None:
        self.seconds = seconds[rank]
        self.is_slow = self.seconds > min(seconds.values())
        self.round = self.taken = self.told = 0
        self.heard = threading.Condition()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        round = int(trainer.strategy.progress().get("round", 0))  # only a worker's first rank knows it
        if not self.is_slow or not round:
            return
        if round != self.round:
            self.round, self.taken = round, 0
        if self.taken:
            with self.heard:
                assert self.heard.wait_for(lambda: self.told >= round, 60.0), f"the end of round {round} is not told"
        self.taken += 1

    @contextmanager
    def in_force(self) -> Iterator[None]:
        step, receive = RoundCounter.step, RoundCounter.receive

        def paced(counter: RoundCounter, *, seconds: float, **given: Any) -> StepReport:
            return step(counter, seconds=self.seconds, **given)

        def hear(counter: RoundCounter, message: Message) -> None:
            receive(counter, message)
            if isinstance(message, SendAfter):
                with self.heard:
                    self.told = max(self.told, message.round)
                    self.heard.notify()

        with patch.object(RoundCounter, "step", paced), patch.object(RoundCounter, "receive", hear):
            yield


class Pause(Callback):
    """Makes the steps of some ranks slow."""

    def __init__(self, rank: int, seconds: Mapping[int, float]) -> None:
        self.seconds = seconds.get(rank, 0.0)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self.seconds:
            time.sleep(self.seconds)


def diloco_trainer(rank: int, strategy: str | Strategy | None = None, **options: Any) -> Trainer:
    torch.set_num_threads(1)
    rank_zero_only.rank = rank
    return Trainer(
        strategy=DiLoCoStrategy() if strategy is None else strategy,
        **{
            "accelerator": "cpu",
            "devices": int(os.environ.get("LOCAL_WORLD_SIZE", "1")),
            "max_epochs": -1,
            "logger": False,
            "enable_checkpointing": False,
            "enable_progress_bar": False,
            "enable_model_summary": False,
            "num_sanity_val_steps": 0,
            "limit_val_batches": 0,
            **options,
        },
    )


def fit_diloco(
    rank: int,
    *,
    options: Mapping[str, Any],
    model: Callable[[], Tower] = Tower,
    pauses: Mapping[int, float] | None = None,
    paces: Mapping[int, float] | None = None,
    callbacks: tuple[Callable[[], Callback], ...] = (),
    ckpt_path: str | None = None,
    same_seed: bool = False,
    part: int | None = None,
    **trainer_options: Any,
) -> Result:
    """Fit once, on this rank of the pool; another seed on each rank, so that equal weights come from the strategy."""
    torch.manual_seed(100 if same_seed else 100 + rank)
    module = model()
    with ExitStack() as stack:
        stack.callback(signal.signal, signal.SIGINT, signal.getsignal(signal.SIGINT))
        if part is not None:
            stack.enter_context(patch.object(pseudo_gradient_exchange, "_LARGEST", part))
        speed: Callback = Pause(rank, pauses or {})
        if paces is not None:
            speed = Paced(rank, paces)
            stack.enter_context(speed.in_force())
        trainer = diloco_trainer(
            rank,
            DiLoCoStrategy(**options),
            callbacks=[speed, *(make() for make in callbacks)],
            **trainer_options,
        )
        trainer.fit(module, ckpt_path=ckpt_path)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("bytescheduler")]
    assert not dist.is_initialized()
    assert "_should_check_val_fx" not in vars(trainer.fit_loop.epoch_loop)
    statistics = trainer.strategy.statistics
    return Result(
        weights={name: value.detach().clone() for name, value in module.state_dict().items()},
        losses=module.losses,
        notes=module.notes,
        global_step=trainer.global_step,
        epoch=trainer.current_epoch,
        rounds=statistics.rounds,
        samples=statistics.samples,
        metrics={name: float(value) for name, value in trainer.callback_metrics.items()},
        seen=[getattr(callback, "seen", None) for callback in trainer.callbacks if hasattr(callback, "seen")],
    )


def fit_alone(rank: int, **arguments: Any) -> Result | None:
    """On rank 0, as if it were the only one."""
    alone = {"WORLD_SIZE": "1", "LOCAL_WORLD_SIZE": "1"}
    with patch.dict(os.environ, alone):
        return fit_diloco(rank, devices=1, **arguments) if rank == 0 else None
