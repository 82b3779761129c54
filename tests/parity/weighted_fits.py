"""Fits on batches of unequal sizes, and what one process on all of their samples makes of the same steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor, nn
from torch.optim import SGD, AdamW
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader

from tests.support.fit import SIZES, Outcome, Recipe, Run, train
from tests.support.models import Tower

__all__ = ["Case", "Unequal", "alone", "batches_of", "fitted", "fitted_all"]

OPTIMIZERS: Any = {
    "SGD": partial(SGD, lr=0.1, momentum=0.9, weight_decay=0.01),
    "AdamW": partial(AdamW, lr=0.005, weight_decay=0.1),
}


@dataclass(frozen=True, kw_only=True)
class Case:
    """What is trained.

    Attributes:
        sizes: Sizes of each rank's batches, in order.
        optimizer: Name of the optimizer.
        accumulate: Batches of a step.
        clip: Limit and algorithm, if any.
        scaled: Whether losses are scaled as for fp16.
        manual: Whether the module steps by hand, with two optimizers.
        options: Options of the strategy.
        trainer: Options of the Trainer.
    """

    sizes: Sequence[Sequence[int]]
    optimizer: str = "SGD"
    accumulate: int = 1
    clip: tuple[float, str] | None = None
    scaled: bool = False
    manual: bool = False
    options: dict[str, Any] = field(default_factory=dict)
    trainer: dict[str, Any] = field(default_factory=dict)


def first_step_without_effect(step: int) -> float:
    """The first step of a fit is synchronised: what overlaps begins from the weights that it began from."""
    return float(step > 0)


def batches_of(case: Case, rank: int) -> list[tuple[Tensor, Tensor]]:
    made = []
    for number, size in enumerate(case.sizes[rank]):
        generator = torch.Generator().manual_seed(1000 * number + rank)
        made.append((torch.randn(size, 12, generator=generator), torch.randn(size, 3, generator=generator)))
    return made


class Unequal(Tower):
    """Brings batches of its rank's sizes."""

    def __init__(self, case: Case, rank: int) -> None:
        super().__init__(
            optimizer=OPTIMIZERS[case.optimizer],
            schedule=partial(LambdaLR, lr_lambda=first_step_without_effect),
            dropout=0.0,
        )
        self.case = case
        self.rank = rank
        self.automatic_optimization = not case.manual

    def train_dataloader(self) -> DataLoader[Any]:
        batches: Any = batches_of(self.case, self.rank)
        return DataLoader(batches, batch_size=None)

    def configure_optimizers(self) -> Any:
        if not self.case.manual:
            return super().configure_optimizers()
        halves = _halves(self)
        optimizers = [OPTIMIZERS[self.case.optimizer](half) for half in halves]
        return optimizers, [LambdaLR(each, first_step_without_effect) for each in optimizers]

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        if not self.case.manual:
            return super().training_step(batch, batch_idx)
        for optimizer, schedule in zip(self.optimizers(), self.lr_schedulers(), strict=True):  # type: ignore[arg-type]
            optimizer.zero_grad()
            loss = super().training_step(batch, batch_idx)
            assert loss is not None
            self.manual_backward(loss)
            optimizer.step()
            schedule.step()  # type: ignore[call-arg]
        return None


class ScaledInSinglePrecision(MixedPrecision):
    """Scales losses as for fp16, and computes exactly."""

    def __init__(self) -> None:
        scaler = torch.amp.GradScaler("cpu", init_scale=2.0**10, growth_interval=1000)
        super().__init__("16-mixed", "cpu", scaler=scaler)

    def forward_context(self) -> Any:
        return nullcontext()


def _halves(module: nn.Module) -> list[list[nn.Parameter]]:
    parameters = list(module.parameters())
    return [parameters[::2], parameters[1::2]]


def fitted(rank: int, case: Case, run: Run | None = None) -> tuple[Outcome, dict[str, Tensor]]:
    """What the strategy comes to on this rank, and the weights of one process on all samples."""
    options = {**SIZES, "weighting": "samples", **case.options}
    trainer: dict[str, Any] = {"use_distributed_sampler": False, "max_epochs": 1, **case.trainer}
    if case.accumulate > 1:
        trainer["accumulate_grad_batches"] = case.accumulate
    if case.clip is not None:
        trainer["gradient_clip_val"], trainer["gradient_clip_algorithm"] = case.clip
    recipe = Recipe(
        model=partial(_seeded, case, rank),
        steps=-1,
        trainer=trainer,
        plugins=(ScaledInSinglePrecision,) if case.scaled else (),
    )
    return train(rank, recipe, run or Run(options=options)), alone(case)


def fitted_all(rank: int, cases: Sequence[Case]) -> list[tuple[Outcome, dict[str, Tensor]]]:
    """:func:`fitted` for each of ``cases``."""
    return [fitted(rank, case) for case in cases]


def _seeded(case: Case, rank: int) -> Unequal:
    torch.manual_seed(7)
    return Unequal(case, rank)


def alone(case: Case) -> dict[str, Tensor]:
    """Weights after the same steps in one process: a step's loss is the mean over all its samples."""
    module = _seeded(case, 0)
    made = module.configure_optimizers()
    optimizers = made[0]
    schedules = [each["scheduler"] if isinstance(each, dict) else each for each in made[1]]
    batches = [batches_of(case, rank) for rank in range(len(case.sizes))]
    count = max(map(len, case.sizes))
    for first in range(0, count, case.accumulate):
        window = range(first, min(first + case.accumulate, count))
        together = [each[number] for each in batches for number in window if number < len(each)]
        inputs, targets = (torch.cat(parts) for parts in zip(*together, strict=True))
        for optimizer, schedule in zip(optimizers, schedules, strict=True):
            module.zero_grad()
            loss = nn.functional.mse_loss(module.predict(inputs), targets)
            (loss * len(window) / case.accumulate).backward()  # Lightning divides a short window's losses, too
            if case.clip is not None and case.clip[1] == "norm":
                nn.utils.clip_grad_norm_(module.parameters(), case.clip[0])
            elif case.clip is not None:
                nn.utils.clip_grad_value_(module.parameters(), case.clip[0])
            optimizer.step()
            schedule.step()
    return {name: value.detach().clone() for name, value in module.state_dict().items()}
