"""Weights, gradients and state that are looked at outside the forward pass are what DDP would show there."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import StochasticWeightAveraging
from torch import Tensor
from torch.optim import AdamW

from tests.parity import observers
from tests.parity.checks import assert_same_as_ddp
from tests.parity.gate_models import Conditional
from tests.parity.sabotage import blind_between_steps, blind_to_gradients, blind_to_kept_state, no_gate_on_state
from tests.support.fit import Recipe
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

model = partial(Tower, optimizer=partial(AdamW, lr=0.005))
STEPS = 12


@pytest.mark.parametrize(
    "callback",
    [
        observers.ReadsWeightsAfterBatch,
        pytest.param(observers.ReadsWeightsBeforeBatch, marks=pytest.mark.slow),
        pytest.param(observers.ReadsStateDict, marks=pytest.mark.slow),
        pytest.param(observers.WeightNorm, marks=pytest.mark.slow),
        observers.WritesWeights,
        pytest.param(observers.CopiesModule, marks=pytest.mark.slow),
        pytest.param(observers.PicklesModule, marks=pytest.mark.slow),
        pytest.param(observers.ReloadsWeights, marks=pytest.mark.slow),
        pytest.param(observers.ZeroesGradients, marks=pytest.mark.slow),
        pytest.param(observers.RunsModule, marks=pytest.mark.slow),
    ],
)
def test_weights_between_steps(two_ranks: RankPool, callback: Any) -> None:
    """The updates are still deferred; it is the callback that waits, if there is anything to wait for."""
    recipe = Recipe(model=model, steps=STEPS, callbacks=(callback,))
    assert_same_as_ddp(two_ranks, recipe, network="late", broken=blind_between_steps)


def test_weights_in_inference_mode(two_ranks: RankPool) -> None:
    """With a layer whose optimizer state is made in the first deferred step, as it is not used before."""
    conditional = partial(Conditional, optimizer=partial(AdamW, lr=0.005))
    unused = {"find_unused_parameters": True}
    recipe = Recipe(model=conditional, steps=STEPS, ddp=unused, callbacks=(observers.ReadsWeightsInInferenceMode,))
    assert_same_as_ddp(two_ranks, recipe, network="late", broken=blind_between_steps)


def test_weights_after_the_forward_pass(two_ranks: RankPool) -> None:
    assert_same_as_ddp(two_ranks, Recipe(model=model, steps=STEPS, callbacks=(observers.ReadsWeightsInZeroGrad,)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("callback", "deferred"),
    [
        pytest.param(observers.ReadsGradients, (0.0, 0.0), id="reads-all"),
        # One of twelve parameters, or the two that share a bucket, is stepped at once; the others stay deferred.
        pytest.param(observers.ReadsOneGradient, (0.75, 0.92), id="reads-one"),
        pytest.param(observers.ScalesGradients, (0.0, 0.0), id="scales"),
        pytest.param(observers.ReplacesGradients, (0.1, 0.3), id="replaces"),
    ],
)
def test_gradients_before_the_step(two_ranks: RankPool, callback: Any, deferred: tuple[float, float]) -> None:
    recipe = Recipe(model=model, steps=STEPS, callbacks=(callback,))
    _, ours = assert_same_as_ddp(two_ranks, recipe, overlap=False, broken=blind_to_gradients)
    assert ours[0].statistics is not None
    assert deferred[0] <= ours[0].statistics.deferred_share <= deferred[1]


def test_hooks_on_parameters(two_ranks: RankPool) -> None:
    assert_same_as_ddp(two_ranks, Recipe(model=model, steps=STEPS, callbacks=(observers.AccumulatesHooks,)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("callback", "overlap"),
    [
        (observers.ReadsOptimizerState, True),
        (observers.ReloadsOptimizer, False),  # an optimizer goes on with the very tensors that it was given
    ],
)
def test_optimizer_state_between_steps(two_ranks: RankPool, callback: Any, overlap: bool) -> None:
    recipe = Recipe(model=model, steps=STEPS, callbacks=(callback,))
    assert_same_as_ddp(two_ranks, recipe, network="late", overlap=overlap, broken=no_gate_on_state)


def test_optimizer_state_that_somebody_keeps(two_ranks: RankPool) -> None:
    recipe = Recipe(model=model, steps=STEPS, callbacks=(observers.KeepsOptimizerState,))
    assert_same_as_ddp(two_ranks, recipe, overlap=False, broken=blind_to_kept_state)


@pytest.mark.parametrize(
    "callback", [observers.HooksSteps, pytest.param(observers.HooksAllSteps, marks=pytest.mark.slow)]
)
def test_step_hooks_that_come_late_are_called_once_a_step(two_ranks: RankPool, callback: Any) -> None:
    recipe = Recipe(model=model, steps=STEPS, callbacks=(callback,))
    ddp, _ = assert_same_as_ddp(two_ranks, recipe, overlap=False)
    assert ddp[0].notes == ["stepped"] * STEPS


def ema(average: Tensor, current: Tensor, count: Any) -> Tensor:
    return average * 0.9 + current * 0.1


def test_moving_average_of_weights(two_ranks: RankPool) -> None:
    """Lightning's callback averages after each step and trains to the average at the end."""
    if not hasattr(lightning_callbacks, "WeightAveraging"):
        pytest.skip("this version of Lightning has no WeightAveraging")
    average = partial(lightning_callbacks.WeightAveraging, avg_fn=ema)
    recipe = Recipe(
        model=model,
        steps=STEPS,
        callbacks=(average,),
        trainer={"val_check_interval": 5, "limit_val_batches": 1.0},
    )
    assert_same_as_ddp(two_ranks, recipe, network="late", broken=blind_between_steps)


@pytest.mark.slow
def test_stochastic_weight_averaging(two_ranks: RankPool) -> None:
    averaging = partial(StochasticWeightAveraging, swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1)
    recipe = Recipe(
        model=model,
        callbacks=(averaging,),
        steps=-1,
        trainer={"max_epochs": 4, "limit_train_batches": 8},
    )
    assert_same_as_ddp(two_ranks, recipe, network="late", broken=blind_between_steps)
