"""At two ranks the weights are DDP's, bit for bit, whatever the optimizer: addition of two numbers commutes."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.lr_scheduler import LambdaLR, OneCycleLR

from tests.parity.checks import assert_same_as_ddp, train_on
from tests.support.fit import SIZES, Recipe, Run
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

OTHERS = {
    "ASGD": {"lr": 0.05, "t0": 5},
    "Adadelta": {"lr": 0.5},
    "Adafactor": {"lr": 0.05},
    "Adagrad": {"lr": 0.02, "lr_decay": 0.01},
    "Adamax": {"lr": 0.01},
    "Muon": {"lr": 0.02},
    "NAdam": {"lr": 0.01},
    "RAdam": {"lr": 0.02},
    "RMSprop": {"lr": 0.005, "momentum": 0.9, "centered": True},
    "Rprop": {"lr": 0.01},
}


def three_groups(parameters: Any) -> Optimizer:
    """Biases without weight decay and a slow last matrix: the classic reasons for groups."""
    parameters = list(parameters)
    biases = [p for p in parameters if p.ndim == 1]
    matrices = [p for p in parameters if p.ndim == 2]
    return AdamW(
        [
            {"params": biases, "weight_decay": 0.0},
            {"params": matrices[:-1], "lr": 0.01, "betas": (0.8, 0.95)},
            {"params": matrices[-1:], "lr": 0.001, "amsgrad": True},
        ],
        lr=0.003,
    )


def adam_with_tensor_lr(parameters: Any) -> Optimizer:
    return Adam(parameters, lr=torch.tensor(0.005))  # schedules change it in place, so each run needs its own


class KeepsStep(SGD):
    """A subclass that changes defaults only is stepped as its parent is."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, lr=0.05, nesterov=True, momentum=0.8)


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(
            partial(SGD, lr=0.05, momentum=0.9, weight_decay=0.01), id="SGD-momentum-decay", marks=pytest.mark.slow
        ),
        pytest.param(partial(Adam, lr=0.005), id="Adam"),
        pytest.param(partial(AdamW, lr=0.005, foreach=True), id="AdamW-foreach", marks=pytest.mark.slow),
    ],
)
def test_several_epochs(two_ranks: RankPool, optimizer: Any) -> None:
    recipe = Recipe(model=partial(Tower, optimizer=optimizer, samples=64), steps=20)
    assert_same_as_ddp(two_ranks, recipe)


# The others are in rows of the matrix, too.
@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in ("Muon", "RMSprop") else pytest.mark.slow) for name in OTHERS]
)
def test_every_other_per_parameter_optimizer(two_ranks: RankPool, name: str) -> None:
    if not hasattr(torch.optim, name):
        pytest.skip(f"this version of torch has no {name}")
    optimizer = partial(getattr(torch.optim, name), **OTHERS[name])
    model = partial(Tower, optimizer=optimizer, bias=name != "Muon")  # Muon is for matrices only
    assert_same_as_ddp(two_ranks, Recipe(model=model))


@pytest.mark.slow
@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(partial(Adam, lr=0.005, fused=True), id="fused"),
        pytest.param(adam_with_tensor_lr, id="tensor-lr"),
        pytest.param(KeepsStep, id="subclass"),
        pytest.param(three_groups, id="three-groups"),
    ],
)
def test_variants(two_ranks: RankPool, optimizer: Any) -> None:
    assert_same_as_ddp(two_ranks, Recipe(model=partial(Tower, optimizer=optimizer)))


def wavy(step: int) -> float:
    return 1.0 + 0.5 * (-1) ** step


@pytest.mark.parametrize(
    ("optimizer", "schedule"),
    [
        pytest.param(
            partial(SGD, lr=0.05, momentum=0.9),
            partial(OneCycleLR, max_lr=0.02, total_steps=80),
            id="SGD-one-cycle-with-momentum",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            partial(AdamW, lr=0.005),
            partial(OneCycleLR, max_lr=0.02, total_steps=80),
            id="AdamW-one-cycle-with-betas",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            adam_with_tensor_lr, partial(LambdaLR, lr_lambda=wavy), id="tensor-lr-in-place", marks=pytest.mark.slow
        ),
        pytest.param(three_groups, partial(LambdaLR, lr_lambda=wavy), id="three-groups"),
    ],
)
def test_schedule_that_steps_with_every_step(two_ranks: RankPool, optimizer: Any, schedule: Any) -> None:
    """The schedule has moved on when a deferred update happens: hyperparameters are those of the step."""
    recipe = Recipe(model=partial(Tower, optimizer=optimizer, schedule=schedule), steps=12)
    _, ours = assert_same_as_ddp(two_ranks, recipe)
    assert not [w for outcome in ours for w in outcome.warnings if "lr_scheduler" in w]


def test_sizes_that_follow_the_link(two_ranks: RankPool) -> None:
    """Link probe and default sizes."""
    recipe = Recipe(model=partial(Tower, width=96, optimizer=partial(AdamW, lr=0.001)))
    assert_same_as_ddp(two_ranks, recipe, options={"mode": "overlapped"})


def test_nothing_but_the_name(two_ranks: RankPool) -> None:
    """With what comes by default: sizes by the link, and a trial of both ways to step."""
    recipe = Recipe(model=partial(Tower, width=96, optimizer=partial(AdamW, lr=0.001)), steps=30)
    assert_same_as_ddp(two_ranks, recipe, options={}, overlap=False)


def clamps(optimizer: Optimizer) -> Optimizer:
    """Has the optimizer do more in its step, as users do who do not want a class for it."""
    inner = optimizer.step

    def step(closure: Any = None) -> Any:
        output = inner(closure)
        with torch.no_grad():
            for parameter in (p for group in optimizer.param_groups for p in group["params"]):
                parameter.clamp_(-0.2, 0.2)
        return output

    optimizer.step = step  # type: ignore[method-assign]
    return optimizer


def clamped_adamw(parameters: Any) -> Optimizer:
    return clamps(AdamW(parameters, lr=0.01))


class ClampsLater(Callback):
    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if trainer.global_step == 10:
            clamps(trainer.optimizers[0])


def test_a_step_that_was_replaced_is_taken_whole(two_ranks: RankPool) -> None:
    recipe = Recipe(model=partial(Tower, optimizer=clamped_adamw))
    _, ours = assert_same_as_ddp(two_ranks, recipe, network="plain", overlap=False)
    assert "the step of this AdamW was replaced" in ours[0].reasons[0]
    # Also in mid-fit, where the plan did not foresee it.
    recipe = Recipe(model=Tower, callbacks=(ClampsLater,))
    _, ours = assert_same_as_ddp(two_ranks, recipe, network="plain", overlap=False)
    assert ours[0].statistics is not None
    assert ours[0].statistics.overlapped_steps == 9, "steps 2 to 10"


class WithNothing(Tower):
    """A parameter without elements, of a type of its own: DDP gives it a bucket."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.nothing = torch.nn.Parameter(torch.empty(0, dtype=torch.float64))

    def predict(self, inputs: torch.Tensor) -> torch.Tensor:
        return super().predict(inputs) + self.nothing.sum().float()


def test_a_bucket_without_elements(two_ranks: RankPool) -> None:
    recipe = Recipe(model=partial(WithNothing, optimizer=partial(AdamW, lr=0.01)))
    _, ours = assert_same_as_ddp(two_ranks, recipe, overlap=False)
    # With clipping, rounding differs.
    (clipped,) = train_on(two_ranks, replace(recipe, trainer={"gradient_clip_val": 0.05}), Run(options=SIZES))
    for outcome in (ours[0], clipped[0]):
        assert outcome.statistics is not None
        assert outcome.statistics.overlapped_steps == recipe.steps - 1


def test_optimizer_of_some_parameters_only(two_ranks: RankPool) -> None:
    assert_same_as_ddp(two_ranks, Recipe(model=partial(Tower, optimizer=first_half)))


def first_half(parameters: Any) -> Optimizer:
    chosen = list(parameters)
    return SGD(chosen[: len(chosen) // 2], lr=0.05, momentum=0.9)
