"""What a Lightning training may consist of besides forward, backward and step: the weights stay DDP's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint
from torch import Tensor, nn
from torch.optim import LBFGS, Adafactor, Adam
from torch.optim.lr_scheduler import ReduceLROnPlateau

from tests.parity.checks import DDP, assert_same, assert_same_as_ddp, train_on
from tests.parity.gate_models import Attention, SelectivelyCheckpointed
from tests.support.fit import SIZES, Recipe, Run
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

adam = partial(Adam, lr=0.005)


class KeepsGradients(Tower):
    """Zeroes gradients instead of dropping them: they stay views of DDP's buckets."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        optimizer.zero_grad(set_to_none=False)


class LosesALoss(Tower):
    """Has no loss in the sixth batch, which Lightning does not allow in distributed training."""

    expected_error = True

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss = super().training_step(batch, batch_idx)
        return None if batch_idx == 5 else loss


class LeavesEpochsEarly(Tower):
    """Skips the rest of an epoch, before a forward pass has seen the last update."""

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> int | None:
        return -1 if batch_idx == 7 else None


class WarmsUp(Tower):
    """Overrides the step: a rate of its own, and every third batch does not step at all."""

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        for group in optimizer.param_groups:
            group["lr"] = 0.05 * min(1.0, (self.trainer.global_step + 1) / 20)
        if batch_idx % 3 == 2:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


class AccumulatesByHand(Tower):
    """Steps and zeroes in every other batch only: the second backward pass adds to what the first has reduced."""

    def optimizer_zero_grad(self, epoch: int, batch_idx: int, optimizer: Any) -> None:
        if batch_idx % 2 == 0:
            optimizer.zero_grad()

    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, optimizer_closure: Any = None) -> None:
        if batch_idx % 2 == 0:
            optimizer_closure()
        else:
            optimizer.step(closure=optimizer_closure)


class Plateau(Tower):
    """Lowers its learning rate when a validation was no better than the one before."""

    def configure_optimizers(self) -> Any:
        optimizer = self.make_optimizer(self.parameters())
        schedule = ReduceLROnPlateau(optimizer, patience=0, threshold=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "monitor": "validation_loss"}}


class NotesBest(Callback):
    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        module.notes.append(("best", trainer.checkpoint_callback.best_model_score.item()))


class MixedTypes(Tower):
    """Parameters of two types, which DDP never puts in one bucket, and an empty one."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.layers[1].double()
        self.empty = nn.Parameter(torch.empty(0))

    def predict(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for layer in self.layers:
            hidden = hidden + torch.tanh(layer(hidden.to(layer.weight.dtype))).to(hidden.dtype)
        return self.last(hidden) + self.empty.sum()


class TwoOptimizers(Tower):
    """Manual optimization, as of a GAN."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def configure_optimizers(self) -> Any:
        return Adam(self.layers.parameters(), lr=0.01), Adam([*self.first.parameters(), *self.last.parameters()])

    def training_step(self, batch: Any, batch_idx: int) -> None:
        for optimizer in self.optimizers():
            optimizer.zero_grad()
            loss = F.mse_loss(self(batch[0]), batch[1])
            self.losses.append(loss.item())
            self.manual_backward(loss)
            optimizer.step()


@pytest.mark.parametrize("batches", [pytest.param(2, marks=pytest.mark.slow), 3])
def test_gradient_accumulation(two_ranks: RankPool, batches: int) -> None:
    model = partial(Tower, optimizer=adam, samples=104)  # 13 batches an epoch: the last window is a short one
    assert_same_as_ddp(two_ranks, Recipe(model=model, trainer={"accumulate_grad_batches": batches}))


def test_gradient_accumulation_by_hand(two_ranks: RankPool) -> None:
    assert_same_as_ddp(two_ranks, Recipe(model=partial(AccumulatesByHand, optimizer=adam)), network="late")


def test_a_step_due_inside_autocast_is_taken_outside(two_ranks: RankPool) -> None:
    """Adafactor multiplies matrices, which autocast would do in bfloat16."""
    model = partial(Tower, optimizer=partial(Adafactor, lr=0.05))
    assert_same_as_ddp(two_ranks, Recipe(model=model, trainer={"precision": "bf16-mixed"}))


def test_a_step_due_inside_selective_checkpointing_is_taken_outside(two_ranks: RankPool) -> None:
    """Muon multiplies matrices, which would be kept and handed out for those of the layers."""
    if not hasattr(torch.optim, "Muon"):
        pytest.skip("this version of torch has no Muon")
    model = partial(SelectivelyCheckpointed, optimizer=partial(torch.optim.Muon, lr=0.02), depth=2, bias=False)
    assert_same_as_ddp(two_ranks, Recipe(model=model))


@pytest.mark.parametrize(
    "precision", ["bf16-mixed", *(pytest.param(one, marks=pytest.mark.slow) for one in ("bf16-true", "64-true"))]
)
def test_precision(two_ranks: RankPool, precision: str) -> None:
    assert_same_as_ddp(two_ranks, Recipe(model=partial(Tower, optimizer=adam), trainer={"precision": precision}))


def test_parameters_of_several_types(two_ranks: RankPool) -> None:
    assert_same_as_ddp(two_ranks, Recipe(model=partial(MixedTypes, optimizer=adam)))


@pytest.mark.parametrize("model", [Tower, pytest.param(Attention, marks=pytest.mark.slow)])
def test_validation_in_mid_epoch(two_ranks: RankPool, model: Any) -> None:
    """Validation runs in inference mode and drops gradients; what it measures has to be the updated weights."""
    trainer = {"val_check_interval": 3, "limit_val_batches": 1.0, "num_sanity_val_steps": 2}
    recipe = Recipe(model=partial(model, optimizer=adam), trainer=trainer)
    ddp, _ = assert_same_as_ddp(two_ranks, recipe, network="late")
    assert len(ddp[0].notes) > 6


def test_gradients_that_are_zeroed_but_kept(two_ranks: RankPool) -> None:
    assert_same_as_ddp(two_ranks, Recipe(model=partial(KeepsGradients, optimizer=adam)))


@pytest.mark.slow
def test_uneven_last_batch(two_ranks: RankPool) -> None:
    assert_same_as_ddp(two_ranks, Recipe(model=partial(Tower, optimizer=adam, samples=42)))


def test_a_step_without_a_loss_is_lightnings_error(two_ranks: RankPool) -> None:
    ddp, ours = assert_same_as_ddp(two_ranks, Recipe(model=LosesALoss), overlap=False)
    assert ours[0].error is not None
    assert "by returning None in distributed training is not supported" in ours[0].error
    assert ours[1].error == ddp[0].error


def test_epochs_that_are_left_early(two_ranks: RankPool) -> None:
    assert_same_as_ddp(two_ranks, Recipe(model=partial(LeavesEpochsEarly, optimizer=adam)))


def test_overridden_optimizer_step(two_ranks: RankPool) -> None:
    # A step that is left out leaves its gradients to the next zero_grad, which waits for them.
    assert_same_as_ddp(two_ranks, Recipe(model=WarmsUp, steps=20), network="late")


@pytest.mark.parametrize(
    "ddp",
    [
        {"find_unused_parameters": True},
        pytest.param({"static_graph": True}, marks=pytest.mark.slow),
        pytest.param({"broadcast_buffers": False}, marks=pytest.mark.slow),
    ],
    ids=lambda ddp: next(iter(ddp)),
)
def test_options_of_ddp_that_keep_the_overlap(two_ranks: RankPool, ddp: dict[str, bool]) -> None:
    assert_same_as_ddp(two_ranks, Recipe(model=partial(Tower, optimizer=adam), ddp=ddp))


def test_strategy_by_the_name_of_a_variant(two_ranks: RankPool) -> None:
    named = Run(strategy="bytescheduler_find_unused_parameters_true", options={}, network="plain")
    ddp, ours = train_on(two_ranks, Recipe(model=partial(Tower, optimizer=adam), steps=10), DDP, named)
    assert_same(ddp, ours)
    assert ours[0].plan is not None
    assert ours[0].plan.overlapped, "as soon as there is something to hide"


@pytest.mark.slow
def test_epochs_with_what_metrics_drive(two_ranks: RankPool, tmp_path: Path) -> None:
    """Validation, checkpoints of the best weights, early stopping, and a schedule that looks at a metric."""
    recipe = Recipe(
        model=partial(Plateau, optimizer=adam),
        steps=-1,
        trainer={"max_epochs": 6, "limit_train_batches": 6, "limit_val_batches": 1.0, "enable_checkpointing": True},
        callbacks=(
            partial(EarlyStopping, "validation_loss", patience=1),
            partial(ModelCheckpoint, tmp_path, monitor="validation_loss", save_top_k=2, every_n_train_steps=4),
            NotesBest,
        ),
    )
    ddp, _ = assert_same_as_ddp(two_ranks, recipe, overlap=False)
    assert ddp[0].notes[-1][0] == "best"


def test_switched_off_barrier_crossing(two_ranks: RankPool) -> None:
    _, ours = assert_same_as_ddp(
        two_ranks, Recipe(model=Tower), overlap=False, options={**SIZES, "cross_barrier": False}
    )
    assert "cross_barrier=False" in ours[0].reasons[0]


@pytest.mark.parametrize(
    ("recipe", "reason"),
    [
        pytest.param(Recipe(model=TwoOptimizers), "manual", id="manual-optimization"),
        pytest.param(
            Recipe(model=partial(Tower, optimizer=partial(LBFGS, max_iter=4)), steps=4),
            "LBFGS",
            id="LBFGS",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            Recipe(model=Tower, ddp={"gradient_as_bucket_view": False}),
            "gradient_as_bucket_view",
            id="no-bucket-views",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_cannot_be_deferred_is_synchronised(two_ranks: RankPool, recipe: Recipe, reason: str) -> None:
    _, ours = assert_same_as_ddp(two_ranks, recipe, overlap=False)
    assert any(reason in given for given in ours[0].reasons)
    assert ours[0].statistics is not None
    assert ours[0].statistics.deferred_updates == 0
