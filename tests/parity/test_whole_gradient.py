"""Norm clipping: every update needs to know something about all gradients, and overlaps still.

With fp16 loss scaling steps are synchronised. The norm is formed from shards, so a clipped step has other bits than
DDP's. The first step of a fit is synchronised, so a fit of two steps is one step from an identical state.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins.precision import MixedPrecision
from torch import Tensor, nn
from torch.optim import Adam, AdamW, Optimizer

from tests.parity.checks import DDP, assert_overlapped, assert_same, assert_same_as_ddp, train_on
from tests.parity.gate_models import Conditional
from tests.parity.sabotage import forgets_to_clip
from tests.support.compare import bit_differences
from tests.support.fit import Outcome, Recipe, Run, differences
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

adam = partial(Adam, lr=0.01)
NORM = {"gradient_clip_val": 0.05, "gradient_clip_algorithm": "norm"}
HELD = Run(network="held")


def scaler(**options: Any) -> MixedPrecision:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", **options))


# Half precision overflows at 65504: the first steps are left out, and later ones when the scale has grown again.
overflowing = partial(scaler, init_scale=2.0**18, growth_interval=3, growth_factor=8.0)


def assert_one_step_is_ddps(pool: RankPool, recipe: Recipe, **run: Any) -> list[Outcome]:
    """From an identical state, within 1e-6 of each tensor's norm, and the same on every rank."""
    ddp, ours = train_on(pool, replace(recipe, steps=2), DDP, replace(HELD, **run))
    for one, other in zip(ddp, ours, strict=True):
        assert one.weights.keys() == other.weights.keys()
        for name, weight in one.weights.items():
            distance = (weight.double() - other.weights[name].double()).norm()
            assert distance <= 1e-6 * weight.double().norm(), name
        assert not bit_differences(ours[0].weights, other.weights), "ranks differ"
    assert_overlapped(ours, share=0.4)
    return ours


def assert_overlaps(pool: RankPool, recipe: Recipe, *, near: float = 1e-3, **run: Any) -> list[Outcome]:
    """Over many steps: deferred, the same on every rank, and near DDP."""
    ddp, ours = train_on(pool, recipe, DDP, replace(HELD, **run))
    assert_overlapped(ours)
    for one, other in zip(ddp, ours, strict=True):
        assert not bit_differences(ours[0].weights, other.weights), "ranks differ"
        for name, weight in one.weights.items():
            assert (weight - other.weights[name]).norm() <= near * weight.norm(), name
    return ours


@pytest.mark.parametrize(
    "optimizer", [adam, pytest.param(partial(AdamW, lr=0.01, foreach=True), marks=pytest.mark.slow)]
)
def test_norm_clipping(two_ranks: RankPool, optimizer: Any) -> None:
    recipe = Recipe(model=partial(Tower, optimizer=optimizer), trainer=NORM)
    ours = assert_one_step_is_ddps(two_ranks, recipe)
    assert ours[0].plan is not None
    assert ours[0].plan.gradients == "reduce-scatter"
    assert_overlaps(two_ranks, replace(recipe, model=partial(Tower)))


def test_norm_clipping_is_what_is_tested(two_ranks: RankPool) -> None:
    recipe = Recipe(model=Tower, trainer=NORM, steps=2)
    ddp, broken = train_on(two_ranks, recipe, DDP, Run(sabotage=forgets_to_clip))
    assert any((ddp[0].weights[name] - w).norm() > 1e-3 * w.norm() for name, w in broken[0].weights.items())


def test_norms_below_the_limit_leave_every_bit(two_ranks: RankPool) -> None:
    trainer = {**NORM, "gradient_clip_val": 1e4}
    assert_same_as_ddp(two_ranks, Recipe(model=partial(Tower, optimizer=adam), trainer=trainer))


@pytest.mark.parametrize("precision", ["32-true", pytest.param("bf16-mixed", marks=pytest.mark.slow)])
def test_value_clipping(two_ranks: RankPool, precision: str) -> None:
    trainer = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value", "precision": precision}
    recipe = Recipe(model=partial(Tower, optimizer=adam), trainer=trainer)
    assert_same_as_ddp(two_ranks, recipe, broken=forgets_to_clip)


@pytest.mark.slow
def test_norm_clipping_on_more_ranks(three_ranks: RankPool) -> None:
    recipe = Recipe(model=Tower, trainer=NORM)
    # Parts of one parameter too: most ranks have no shard of these.
    assert_one_step_is_ddps(three_ranks, recipe, options={"bucket_cap_mb": 0.002, "partition_size": 5, "credit": 100})
    assert_overlaps(three_ranks, replace(recipe, steps=12))


def test_fp16_loss_scaling(two_ranks: RankPool) -> None:
    """Every scale that callbacks and checkpoints see, and the weights, with the steps that are left out."""
    recipe = Recipe(model=partial(Tower, optimizer=adam), plugins=(overflowing,), callbacks=(NotesScale,), steps=30)
    ddp, ours = assert_same_as_ddp(two_ranks, recipe, overlap=False)
    scales = [scale for scale, _ in ddp[0].notes]
    assert any(b < a for a, b in itertools.pairwise(scales[2:])), "no step was left out in mid-training"
    assert any("fp16 loss scaling" in reason for reason in ours[0].reasons)


@pytest.mark.slow
@pytest.mark.parametrize("algorithm", ["norm", "value"])
def test_fp16_and_clipping(two_ranks: RankPool, algorithm: str) -> None:
    trainer = {"gradient_clip_val": 0.01, "gradient_clip_algorithm": algorithm}
    recipe = Recipe(model=Tower, trainer=trainer, plugins=(partial(scaler, init_scale=2.0**8),))
    assert_same_as_ddp(two_ranks, recipe, overlap=False)


@pytest.mark.slow
def test_accumulation_and_schedules(two_ranks: RankPool) -> None:
    trainer = {**NORM, "accumulate_grad_batches": 2}
    assert_overlaps(two_ranks, Recipe(model=partial(Tower, schedule=_halving), trainer=trainer))


@pytest.mark.slow
def test_parameters_without_gradients(two_ranks: RankPool) -> None:
    recipe = Recipe(model=Conditional, trainer=NORM, ddp={"find_unused_parameters": True})
    assert_one_step_is_ddps(two_ranks, recipe)
    assert_overlaps(two_ranks, recipe)


def test_parameters_the_optimizer_does_not_have(two_ranks: RankPool) -> None:
    """Their gradients are reduced, but neither clipped nor part of the norm: steps are taken whole."""
    recipe = Recipe(model=partial(Tower, optimizer=_every_second), trainer=NORM)
    ddp, ours = train_on(two_ranks, recipe, DDP, Run())
    assert_same(ddp, ours)
    assert ours[0].plan is not None
    assert any("parameters that it does not have" in why for why in ours[0].plan.waits)


class Drops(Tower):
    """Whose first layer does not learn, as its gradient is dropped."""

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.first.weight.grad = None


def test_a_gradient_that_is_dropped_is_said_to_be(two_ranks: RankPool) -> None:
    ddp, ours = train_on(two_ranks, Recipe(model=Drops, trainer=NORM), DDP, Run())
    assert_same(ddp, ours)
    assert ours[0].plan is not None
    assert any("others were dropped" in why for why in ours[0].plan.waits)


class Freezes(Tower):
    """Whose first layer is in DDP's buckets and does not learn yet, as with ``BackboneFinetuning``."""

    def on_fit_start(self) -> None:
        self.first.requires_grad_(False)


def test_parameters_that_are_frozen(two_ranks: RankPool) -> None:
    """Buckets have zeros for them, so that they change no norm."""
    recipe = Recipe(model=Freezes, trainer=NORM, ddp={"find_unused_parameters": True})
    assert_one_step_is_ddps(two_ranks, recipe)
    assert_overlaps(two_ranks, recipe)


class DropsOne(Tower):
    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.last.weight.grad = None


def test_a_gradient_that_is_dropped_is_not_part_of_the_norm(two_ranks: RankPool) -> None:
    ddp, ours = train_on(two_ranks, Recipe(model=DropsOne, trainer=NORM), DDP, Run())
    assert_same(ddp, ours)


def test_bfloat16_weights(two_ranks: RankPool) -> None:
    """The norm is rounded as torch rounds it; torch also rounds that of each parameter before."""
    trainer = {**NORM, "precision": "bf16-true"}
    ddp, ours = train_on(two_ranks, Recipe(model=Tower, trainer=trainer, steps=2), DDP, HELD)
    for name, weight in ddp[0].weights.items():
        assert (weight.double() - ours[0].weights[name].double()).norm() <= 2**-8 * weight.double().norm(), name
    assert_overlapped(ours, share=0.4)


@pytest.mark.slow
def test_gradients_read_on_one_rank(two_ranks: RankPool) -> None:
    """A logger on rank 0 waits for gradients there; ranks still clip alike, to the last bit."""
    recipe = Recipe(model=Tower, trainer=NORM, callbacks=(ReadsOnRankZero,), steps=24)
    ddp, ours = train_on(two_ranks, recipe, DDP, Run(network="late"))
    assert not bit_differences(ours[0].weights, ours[1].weights)
    assert not bit_differences(ddp[0].notes, ours[0].notes[:2])
    assert_one_step_is_ddps_on(ddp, ours)


def assert_one_step_is_ddps_on(ddp: Sequence[Outcome], ours: Sequence[Outcome]) -> None:
    for name, weight in ddp[0].weights.items():
        assert (weight - ours[0].weights[name]).norm() <= 1e-3 * weight.norm(), name


@pytest.mark.parametrize(
    "how",
    [
        pytest.param("in place", marks=pytest.mark.slow),
        "behind autograd's back",
        pytest.param("replaced", marks=pytest.mark.slow),
    ],
)
def test_gradients_changed_before_they_are_clipped(two_ranks: RankPool, how: str) -> None:
    """The norm is that of the changed gradients; DDP's arithmetic, so DDP's bits."""
    recipe = Recipe(model=Tower, trainer=NORM, callbacks=(partial(ChangesGradients, how),), steps=24)
    ddp, ours = train_on(two_ranks, recipe, DDP, Run(network="late"))
    assert_same(ddp, ours)


@pytest.mark.parametrize("model", ["ClipsTwice", "ClipsByHand", "ClipsItsOwnWay"])
def test_clipping_of_ones_own(two_ranks: RankPool, model: str) -> None:
    ddp, ours = train_on(two_ranks, Recipe(model=globals()[model], steps=2), DDP, Run(network="late"))
    assert ours[0].plan is not None
    assert ours[0].plan.norm_needed_by == ("configure_gradient_clipping",)
    assert ours[0].statistics is not None
    # The norm of clipped gradients has to be taken of what has arrived; ClipsByHand looks at one layer's only.
    assert (ours[0].statistics.deferred_updates > 0) == (model != "ClipsTwice")
    for name, weight in ddp[0].weights.items():
        assert (weight - ours[0].weights[name]).norm() <= 1e-6 * weight.norm(), name
    assert not bit_differences(ours[0].weights, ours[1].weights)


def test_gradients_that_are_not_finite_without_a_scaler(two_ranks: RankPool) -> None:
    """Norm clipping makes everything not a number then; so do we."""
    recipe = Recipe(model=Explodes, trainer=NORM, steps=3)
    ddp, ours = train_on(two_ranks, recipe, DDP, Run())
    for one, other in zip(ddp, ours, strict=True):
        for name, weight in one.weights.items():
            assert torch.equal(weight.isnan(), other.weights[name].isnan()), name
    assert all(weight.isnan().any() for weight in ddp[0].weights.values())


def test_parameters_of_a_class_of_their_own(two_ranks: RankPool) -> None:
    recipe = Recipe(model=OwnParameters, trainer=NORM, callbacks=(NotesGradients,), steps=2)
    ddp, ours = train_on(two_ranks, recipe, DDP, Run(network="late"))
    for one, other in zip(ddp, ours, strict=True):
        assert not [line for line in differences(one, other) if line.startswith("notes")], "gradients were seen early"
        for name, weight in one.weights.items():
            assert (weight - other.weights[name]).norm() <= 1e-6 * weight.norm(), name


def _halving(optimizer: Optimizer) -> Any:
    return torch.optim.lr_scheduler.StepLR(optimizer, 5, gamma=0.5)


def _every_second(parameters: Any) -> Optimizer:
    return torch.optim.SGD(list(parameters)[::2], lr=0.05, momentum=0.9)


class NotesScale(Callback):
    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        module.notes.append((trainer.precision_plugin.scaler.get_scale(), trainer.precision_plugin.state_dict()))


class ReadsOnRankZero(Callback):
    def on_before_optimizer_step(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_rank == 0:
            norm = float(torch.stack([p.grad.norm() for p in module.parameters()]).norm())
            if trainer.global_step < 2:
                module.notes.append(norm)
                return
        if trainer.global_step < 2:
            module.notes.append(None)


class NotesGradients(Callback):
    def on_before_optimizer_step(self, trainer: Trainer, module: Any, *_: Any) -> None:
        module.notes.append([p.grad.clone() for p in module.parameters()])


class ChangesGradients(Callback):
    def __init__(self, how: str) -> None:
        self.how = how

    def on_before_optimizer_step(self, trainer: Trainer, module: Any, *_: Any) -> None:
        for parameter in list(module.parameters())[::3]:
            if self.how == "in place":
                parameter.grad.mul_(3.0)
            elif self.how == "replaced":
                parameter.grad = parameter.grad * 3.0
            else:
                parameter.grad.data.mul_(3.0)


class ClipsTwice(Tower):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        self.clip_gradients(optimizer, gradient_clip_val=0.2, gradient_clip_algorithm="norm")
        self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="value")
        self.clip_gradients(optimizer, gradient_clip_val=0.04, gradient_clip_algorithm="norm")


class ClipsByHand(Tower):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        nn.utils.clip_grad_norm_(self.first.parameters(), 0.01)


class ClipsItsOwnWay(Tower):
    def configure_gradient_clipping(self, optimizer: Any, *_: Any, **__: Any) -> None:
        if self.global_step % 2:
            self.clip_gradients(optimizer, gradient_clip_val=0.05, gradient_clip_algorithm="norm")


class Explodes(Tower):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        assert isinstance(loss, Tensor)
        return loss * (float("nan") if self.global_step == 2 and self.global_rank == 0 else 1.0)


class OwnParameter(nn.Parameter):
    pass


class OwnParameters(Tower):
    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.last.weight = OwnParameter(self.last.weight.detach().clone())
