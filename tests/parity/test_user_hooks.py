"""Hooks that users override, and what they usually write into them, see what DDP would show there."""

from __future__ import annotations

import re
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import LearningRateMonitor
from lightning.pytorch.loggers import CSVLogger
from lightning.pytorch.loggers.logger import Logger
from lightning.pytorch.utilities.rank_zero import rank_zero_only
from torch import Tensor, nn
from torch.optim import AdamW, Optimizer

from tests.parity.checks import assert_same_as_ddp
from tests.parity.observers import sums
from tests.parity.sabotage import blind_between_steps, blind_to_gradients, blind_to_weights_and_state
from tests.support.fit import Recipe
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

adamw = partial(AdamW, lr=0.005)
model = partial(Tower, optimizer=adamw)
STEPS = 12


class HooksOfTheModule(Tower):
    """Overrides the hooks around a step, each of which looks at all it can."""

    def look(self, where: str) -> None:
        self.notes.append((where, sums(self.parameters())))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.look("start")

    def on_before_zero_grad(self, optimizer: Optimizer) -> None:
        self.look("zero_grad")

    def on_before_backward(self, loss: Tensor) -> None:
        self.look("backward")

    def on_after_backward(self) -> None:
        self.look("after backward")

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        self.look("end")


class LooksBeforeTheStep(Tower):
    """At gradients, weights and the optimizer's state, as debugging code does."""

    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        weights = list(self.parameters())
        states = [sums(optimizer.state[p].values()) for p in weights if p in optimizer.state]
        gradients = [p.grad for p in weights if p.grad is not None]
        self.notes.append((sums(weights), sums(gradients), states))


class LooksAfterBackward(Tower):
    def on_after_backward(self) -> None:
        self.notes.append({name: p.grad.norm().item() for name, p in self.named_parameters() if p.grad is not None})


class ClipsByHand(Tower):
    """Overrides how gradients are clipped."""

    def configure_gradient_clipping(self, optimizer: Optimizer, *_: Any, **__: Any) -> None:
        self.notes.append(nn.utils.clip_grad_norm_(self.parameters(), 0.1).item())


class StepsScheduleByWeights(Tower):
    """A schedule that looks at weights: it is asked right after the step."""

    def lr_scheduler_step(self, scheduler: Any, metric: Any) -> None:
        scheduler.base_lrs = [0.005 / (1.0 + self.last.weight.norm().item())]
        scheduler.step()


class ChangesOptimizerState(Callback):
    """Forgets momenta now and then, through the state."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 5 == 3:
            for state in trainer.optimizers[0].state.values():
                state["exp_avg"].mul_(0.5)


class NotesOptimizerStateDict(Callback):
    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        states = trainer.optimizers[0].state_dict()["state"]
        module.notes.append([sums(state.values()) for state in states.values()])


def constant(optimizer: Optimizer) -> Any:
    return torch.optim.lr_scheduler.LambdaLR(optimizer, lr_lambda=lambda _: 1.0)


@pytest.mark.parametrize(
    ("model", "overlap", "broken"),
    [
        pytest.param(HooksOfTheModule, True, blind_between_steps, id="weights-at-every-hook"),
        pytest.param(
            LooksBeforeTheStep, False, blind_to_gradients, id="everything-before-the-step", marks=pytest.mark.slow
        ),
        pytest.param(LooksAfterBackward, False, blind_to_gradients, id="gradients-after-backward"),
        pytest.param(ClipsByHand, False, blind_to_gradients, id="clips-by-hand", marks=pytest.mark.slow),
        pytest.param(
            partial(StepsScheduleByWeights, schedule=constant),
            True,
            blind_between_steps,
            id="schedule-by-weights",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_hooks_of_the_module(two_ranks: RankPool, model: Any, overlap: bool, broken: Any) -> None:
    recipe = Recipe(model=partial(model, optimizer=adamw), steps=STEPS)
    assert_same_as_ddp(two_ranks, recipe, network="late", overlap=overlap, broken=broken)


@pytest.mark.slow
@pytest.mark.parametrize("callback", [ChangesOptimizerState, NotesOptimizerStateDict])
def test_optimizer_state(two_ranks: RankPool, callback: Any) -> None:
    recipe = Recipe(model=model, steps=STEPS, callbacks=(callback,))
    assert_same_as_ddp(two_ranks, recipe, network="late", broken=blind_to_weights_and_state)


class LooksAtNothing(Callback):
    """Overrides the hooks around a step, and asks for nothing that depends on the weights."""

    def look(self, trainer: Trainer, module: Any) -> None:
        names = [name for name, p in module.named_parameters() if p.requires_grad]
        sizes = [(p.numel(), p.shape, p.ndim, p.dtype, p.device, p.is_leaf) for p in module.parameters()]
        rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
        module.notes.append((trainer.global_step, len(names), len(sizes), rates, module.training))

    def on_train_batch_start(self, trainer: Trainer, module: Any, *_: Any) -> None:
        self.look(trainer, module)

    def on_after_backward(self, trainer: Trainer, module: Any) -> None:
        self.look(trainer, module)

    def on_before_optimizer_step(self, trainer: Trainer, module: Any, optimizer: Optimizer) -> None:
        self.look(trainer, module)

    def on_before_zero_grad(self, trainer: Trainer, module: Any, optimizer: Optimizer) -> None:
        self.look(trainer, module)

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *_: Any) -> None:
        self.look(trainer, module)
        module.notes.append(outputs["loss"].item())

    def on_train_epoch_end(self, trainer: Trainer, module: Any) -> None:
        module.notes.append(trainer.callback_metrics["loss_epoch"].item())


class LogsLoss(Tower):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=True, on_epoch=True, prog_bar=True)
        return loss


def test_hooks_that_look_at_nothing_keep_the_overlap(two_ranks: RankPool) -> None:
    recipe = Recipe(model=partial(LogsLoss, optimizer=adamw), steps=18, callbacks=(LooksAtNothing,))
    assert_same_as_ddp(two_ranks, recipe, network="held")


class LooksOnceInAWhile(Callback):
    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step % 10 == 0:
            module.notes.append(sums(module.parameters()))


@pytest.mark.slow
def test_a_look_costs_its_own_step_only(two_ranks: RankPool) -> None:
    """With gradients held back until the next training step begins, other steps do not wait for theirs."""
    recipe = Recipe(model=model, steps=22, callbacks=(LooksOnceInAWhile,))
    assert_same_as_ddp(two_ranks, recipe, network="late", broken=blind_between_steps)


class KeepsRecords(Logger):
    """A logger as users write them."""

    def __init__(self) -> None:
        super().__init__()
        self.records: list[Any] = []

    @property
    def name(self) -> str:
        return "records"

    @property
    def version(self) -> int:
        return 0

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass

    @rank_zero_only
    def log_metrics(self, metrics: dict[str, float], step: int | None = None) -> None:
        ours = re.compile("bytescheduler/")
        self.records.append((step, {name: value for name, value in metrics.items() if not ours.match(name)}))


class LogsWeights(Tower):
    """Logs norms of weights in the training step and after it, and of gradients before the optimizer's step."""

    gradients = False

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        self.log("weight norm in step", self.last.weight.norm())
        return loss

    def on_train_batch_end(self, *_: Any) -> None:
        self.log_dict({f"norm/{name}": p.detach().norm() for name, p in self.named_parameters()}, on_epoch=True)


class LogsGradients(LogsWeights):
    def on_before_optimizer_step(self, optimizer: Optimizer) -> None:
        self.log_dict({f"gradient/{name}": p.grad.norm() for name, p in self.named_parameters() if p.grad is not None})


def note_records(trainer: Trainer, module: Any) -> None:
    assert isinstance(trainer.logger, KeepsRecords)
    module.notes += [record for record in trainer.logger.records if record[1]]
    trainer.logger.records.clear()  # the next run has the same logger


@pytest.mark.slow
@pytest.mark.parametrize(
    ("model", "overlap", "broken"),
    [
        pytest.param(LogsWeights, True, blind_between_steps, id="weights"),
        pytest.param(LogsGradients, False, blind_to_gradients, id="gradients"),
    ],
)
def test_logged_weights_and_gradients(two_ranks: RankPool, model: Any, overlap: bool, broken: Any) -> None:
    trainer = {"logger": KeepsRecords(), "log_every_n_steps": 3}
    recipe = Recipe(
        model=partial(model, optimizer=adamw),
        steps=STEPS,
        trainer=trainer,
        after=note_records,
        callbacks=(LearningRateMonitor,),
    )
    ddp, _ = assert_same_as_ddp(two_ranks, recipe, network="late", overlap=overlap, broken=broken)
    assert sum("norm/layers.0.weight_step" in record for _, record in ddp[0].notes) == STEPS // 3


def note_file(trainer: Trainer, module: Any) -> None:
    assert isinstance(trainer.logger, CSVLogger)
    if trainer.is_global_zero:
        lines = Path(trainer.logger.log_dir, "metrics.csv").read_text().splitlines()
        rows = [dict(zip(lines[0].split(","), line.split(","), strict=True)) for line in lines[1:]]
        rows = [{name: value for name, value in row.items() if value and "bytescheduler" not in name} for row in rows]
        module.notes += [row for row in rows if len(row) > 2]
    trainer.logger._experiment = None  # the next run has the same logger


@pytest.mark.slow
def test_file_of_lightnings_logger(two_ranks: RankPool, tmp_path: Path) -> None:
    trainer = {"logger": CSVLogger(tmp_path, version=0), "log_every_n_steps": 4}
    recipe = Recipe(model=partial(LogsWeights, optimizer=adamw), steps=STEPS, trainer=trainer, after=note_file)
    ddp, _ = assert_same_as_ddp(two_ranks, recipe, network="late", broken=blind_between_steps)
    assert len(ddp[0].notes) >= STEPS // 4
