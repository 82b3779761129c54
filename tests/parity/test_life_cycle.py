"""A process trains, evaluates, fails and trains again, with one Trainer or several: each time as with DDP."""

from __future__ import annotations

import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, OnExceptionCheckpoint
from lightning.pytorch.strategies import Strategy
from torch import Tensor
from torch.optim import AdamW

from lightning_bytescheduler import ByteSchedulerStrategy
from lightning_bytescheduler.ddp.fit_report import ONE_RANK
from tests.parity.checks import DDP, assert_overlapped, assert_same, assert_same_as_ddp, train_on
from tests.parity.observers import sums
from tests.parity.sabotage import nothing_lands_after_a_failure, nothing_lands_at_the_end
from tests.support.fit import SIZES, Recipe, Run
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

adamw = partial(AdamW, lr=0.005)
STEPS = 11  # 8 batches an epoch: it ends in mid-epoch


class Evaluated(Tower):
    """Can be tested and asked for predictions too."""

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.notes.append(("test", self(batch[0]).sum().item()))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self(batch[0])


class FailsAt(Callback):
    """Raises on all ranks, after a step whose updates are still on their way; once."""

    def __init__(self, step: int, error: BaseException) -> None:
        self.step = step
        self.error = error
        self.has_raised = False

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step and not self.has_raised:
            self.has_raised = True
            raise self.error


model = partial(Evaluated, optimizer=adamw, samples=64)


def another_trainer(trainer: Trainer, steps: int, **options: Any) -> Trainer:
    """With a new strategy of the same kind."""
    ours = isinstance(trainer.strategy, ByteSchedulerStrategy)
    strategy: str | Strategy = ByteSchedulerStrategy(**SIZES) if ours else "ddp"
    return Trainer(
        strategy=strategy,
        accelerator="cpu",
        devices=trainer.world_size,
        max_steps=steps,
        logger=False,
        enable_checkpointing=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        limit_val_batches=0,
        **options,
    )


def evaluate(trainer: Trainer, module: Any) -> None:
    loader = module.val_dataloader()
    trainer.limit_val_batches = 1.0
    trainer.validate(module, loader, verbose=False)
    trainer.test(module, loader, verbose=False)
    predictions = trainer.predict(module, loader)
    assert predictions
    module.notes.append(("predictions", sums(predictions)))  # type: ignore[arg-type]
    trainer.limit_val_batches = 0


def fit_further(trainer: Trainer, module: Any) -> None:
    evaluate(trainer, module)
    trainer.fit_loop.epoch_loop.max_steps = 2 * STEPS
    trainer.fit(module)
    evaluate(trainer, module)


def fit_with_another_trainer(trainer: Trainer, module: Any) -> None:
    """Evaluate with one that has never fitted, then fit with it."""
    second = another_trainer(trainer, STEPS)
    evaluate(second, module)
    second.fit(module)
    evaluate(second, module)


def fit_others_in_between(trainer: Trainer, module: Any) -> None:
    """The same Trainer trains another model; then a new one goes on with the first."""
    torch.manual_seed(7)
    other = Evaluated(optimizer=adamw, width=16)
    trainer.fit_loop.epoch_loop.max_steps = 2 * STEPS
    trainer.fit(other)
    another_trainer(trainer, STEPS).fit(module)
    module.notes.append((other.losses, sums(other.parameters())))


@pytest.mark.parametrize(
    "after",
    [
        evaluate,
        pytest.param(fit_further, marks=pytest.mark.slow),
        pytest.param(fit_with_another_trainer, marks=pytest.mark.slow),
        pytest.param(fit_others_in_between, marks=pytest.mark.slow),
    ],
)
def test_after_a_fit(two_ranks: RankPool, after: Any) -> None:
    recipe = Recipe(model=model, steps=STEPS, after=after)
    assert_same_as_ddp(two_ranks, recipe, overlap=False, broken=nothing_lands_at_the_end)


def resume(trainer: Trainer, module: Any, *, path: Path) -> None:
    """Save, fail in mid-epoch with updates on their way, evaluate, go back to what was saved, and fit on."""
    saved = path / f"{type(trainer.strategy).__name__}.ckpt"
    trainer.save_checkpoint(saved)
    trainer.fit_loop.epoch_loop.max_steps = 3 * STEPS
    trainer.callbacks.append(FailsAt(STEPS + 6, ValueError("boom")))  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="boom"):
        trainer.fit(module)
    module.notes.append((trainer.global_step, sums(module.parameters())))
    evaluate(trainer, module)
    trainer.fit(module, ckpt_path=saved)
    assert trainer.global_step == 3 * STEPS


@pytest.mark.slow
def test_fit_that_fails_and_is_resumed_with_the_same_strategy(two_ranks: RankPool, tmp_path: Path) -> None:
    recipe = Recipe(model=model, steps=STEPS, after=partial(resume, path=tmp_path))
    ddp, ours = assert_same_as_ddp(two_ranks, recipe, overlap=False, broken=nothing_lands_after_a_failure)
    assert len(ddp[0].losses) == STEPS + 6 + 2 * STEPS
    assert_overlapped(ours)


def fit_again_as_it_is(trainer: Trainer, module: Any) -> None:
    """After a failure, with the weights of that moment and another Trainer."""
    trainer.fit_loop.epoch_loop.max_steps = 3 * STEPS
    trainer.callbacks.append(FailsAt(STEPS + 6, ValueError("boom")))  # type: ignore[attr-defined]
    with pytest.raises(ValueError, match="boom"):
        trainer.fit(module)
    module.notes.append(trainer.strategy.broadcast(trainer.global_rank))  # the ranks can still talk to each other
    another_trainer(trainer, STEPS).fit(module)


@pytest.mark.slow
def test_fit_that_fails_and_is_followed_by_another(two_ranks: RankPool) -> None:
    recipe = Recipe(model=model, steps=STEPS, after=fit_again_as_it_is)
    assert_same_as_ddp(two_ranks, recipe, overlap=False, broken=nothing_lands_after_a_failure)


class FallsBehind(Evaluated):
    """Rank 0 comes to the step that fails long after the other rank has failed."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor | None:
        if self.global_rank == 0 and self.trainer.global_step == STEPS + 5:
            time.sleep(1.0)
        return super().training_step(batch, batch_idx)


@pytest.mark.slow
@pytest.mark.parametrize("mode", ["overlapped", "ddp"])
def test_a_rank_that_is_behind_fails_where_the_others_have(two_ranks: RankPool, mode: str) -> None:
    recipe = Recipe(model=partial(FallsBehind, optimizer=adamw, samples=64), steps=STEPS, after=fit_again_as_it_is)
    ours = Run(options={**SIZES, "mode": mode})
    ddp, overlapped = train_on(two_ranks, recipe, DDP, ours)
    assert_same(ddp, overlapped)


class Interrupted(Evaluated):
    expected_error = True


class NotesCheckpointOnException(OnExceptionCheckpoint):
    def on_exception(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self.filename = type(trainer.strategy).__name__  # by its own name, the next run would start from it
        super().on_exception(trainer, *args, **kwargs)
        module: Any = trainer.lightning_module
        if trainer.is_global_zero:
            saved = torch.load(self.ckpt_path, weights_only=False)
            module.notes.append((saved["global_step"], saved["state_dict"], saved["optimizer_states"][0]["state"]))


@pytest.mark.parametrize(
    "error",
    [KeyboardInterrupt(), pytest.param(ValueError("boom"), marks=pytest.mark.slow)],
    ids=lambda error: type(error).__name__,
)
def test_weights_after_an_interrupt_are_those_of_its_step(
    two_ranks: RankPool, error: BaseException, tmp_path: Path
) -> None:
    """And so are those in the checkpoint that is saved on exception."""
    recipe = Recipe(
        model=partial(Interrupted, optimizer=adamw),
        callbacks=(partial(FailsAt, 7, error), partial(NotesCheckpointOnException, tmp_path)),
        trainer={"enable_checkpointing": True},
    )
    ddp, ours = assert_same_as_ddp(two_ranks, recipe, overlap=False, broken=nothing_lands_after_a_failure)
    assert len(ddp[0].losses) == 7
    assert ddp[0].notes[0][0] == 7
    assert ours[0].statistics is not None
    assert ours[0].statistics.overlapped_steps == 6


class StopsAt(Callback):
    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        trainer.should_stop = trainer.should_stop or trainer.global_step == 7


class StopsEarly(EarlyStopping):
    """In mid-epoch, by a metric of the weights after each step."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        module.log("norm", module.last.weight.detach().norm())
        self._run_early_stopping_check(trainer)

    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        module.notes.append((self.stopped_epoch, trainer.global_step))


def test_stop_in_mid_epoch(two_ranks: RankPool) -> None:
    recipe = Recipe(model=model, callbacks=(StopsAt,), after=evaluate)
    ddp, _ = assert_same_as_ddp(two_ranks, recipe, overlap=False, broken=nothing_lands_at_the_end)
    assert len(ddp[0].losses) == 7


@pytest.mark.slow
def test_early_stopping_in_mid_epoch(two_ranks: RankPool) -> None:
    stops = partial(StopsEarly, "norm", mode="min", stopping_threshold=0.8429)
    recipe = Recipe(model=partial(model, samples=128), steps=60, callbacks=(stops,))
    ddp, _ = assert_same_as_ddp(two_ranks, recipe, overlap=False, broken=nothing_lands_at_the_end)
    assert len(ddp[0].losses) == 24


def fit_with_batches(trainer: Trainer, module: Any) -> None:
    assert not module.losses
    trainer.limit_train_batches = 1.0
    trainer.fit(module)


def test_a_fit_without_batches_and_one_with(two_ranks: RankPool) -> None:
    recipe = Recipe(model=model, steps=STEPS, trainer={"limit_train_batches": 0}, after=fit_with_batches)
    ddp, _ = assert_same_as_ddp(two_ranks, recipe, broken=nothing_lands_at_the_end)
    assert len(ddp[0].losses) == STEPS


@pytest.mark.slow
def test_epochs_of_one_batch(two_ranks: RankPool) -> None:
    """Each update is due in another epoch than its gradient."""
    trainer = {"limit_train_batches": 1, "max_epochs": 14, "reload_dataloaders_every_n_epochs": 2}
    assert_same_as_ddp(two_ranks, Recipe(model=model, steps=-1, trainer=trainer), broken=nothing_lands_at_the_end)


@pytest.fixture(scope="module")
def one_rank() -> Iterator[RankPool]:
    with RankPool(1) as pool:
        yield pool


def test_one_process_trains_as_without_a_strategy(one_rank: RankPool) -> None:
    """With the same order of samples, which is that of the distributed sampler: DDP has one on one process, too."""
    recipe = Recipe(model=model, steps=STEPS, after=evaluate, trainer={"use_distributed_sampler": False})
    plain, ours = train_on(one_rank, recipe, Run(strategy="auto", options={}), Run())
    assert_same(plain, ours)
    assert ours[0].statistics is None
    assert ours[0].reasons == (ONE_RANK,)


def test_one_process_and_what_it_warns_of(one_rank: RankPool) -> None:
    ddp, ours = train_on(one_rank, Recipe(model=model, steps=STEPS), DDP, Run(options={}))
    assert_same(ddp, ours)
    assert ours[0].warnings == ddp[0].warnings
