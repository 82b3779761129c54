"""Who takes part in a step: what DDP has a gradient for, whether or not it is in a bucket."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.optim import ASGD, AdamW

from tests.parity.checks import DDP, assert_same, assert_same_as_ddp, train_on
from tests.parity.gate_models import Conditional, PartlyFrozen, WithUnused
from tests.parity.sabotage import no_parameter_sits_out, only_buckets_step
from tests.support.fit import Recipe, Run
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

adamw = partial(AdamW, lr=0.005, weight_decay=0.1)  # decays whatever takes part, with or without a gradient
UNUSED = {"find_unused_parameters": True}
STEPS = 12


class Unfreezes(Callback):
    """Lets the first layers learn from the seventh batch on. DDP has not seen them: each rank steps its own."""

    def on_train_batch_start(self, trainer: Trainer, module: Any, batch: Any, batch_idx: int) -> None:
        if trainer.global_step == 6:
            module.first.requires_grad_(True)


class FreezesLate(Unfreezes):
    """Freezes them until then, once DDP has wrapped the model: it averages their gradients when there are some."""

    def on_fit_start(self, trainer: Trainer, module: Any) -> None:
        module.first.requires_grad_(False)


class AddsGroup(Callback):
    """Hands the optimizer a group of parameters in mid-training, as Lightning's finetuning callback does."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        if trainer.global_step == 6:
            trainer.optimizers[0].add_param_group({"params": list(module.last.parameters()), "lr": 0.001})


def all_but_last(parameters: Any) -> AdamW:
    return adamw(list(parameters)[:-2])


class TurnsUnused(Tower):
    """Stops using its last hidden layer without having said that it would."""

    expected_error = True

    def __init__(self, *, after: int, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.after = after

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        self.skips = batch_idx >= self.after
        return super().training_step(batch, batch_idx)

    def predict(self, inputs: Tensor) -> Tensor:
        hidden = self.first(inputs)
        for layer in self.layers[: 3 if self.skips else 4]:
            hidden = hidden + torch.tanh(layer(hidden))
        return self.last(hidden)


def test_unused_layer_is_neither_decayed_nor_given_state(two_ranks: RankPool) -> None:
    recipe = Recipe(model=partial(WithUnused, optimizer=adamw), steps=STEPS, ddp=UNUSED)
    _, ours = assert_same_as_ddp(two_ranks, recipe, broken=no_parameter_sits_out)
    names = list(dict(ours[0].weights))
    assert names.index("unused.weight") not in ours[0].optimizers[0]["state"]


def test_layer_used_now_and_then_is_stepped_only_then(two_ranks: RankPool) -> None:
    recipe = Recipe(model=partial(Conditional, optimizer=adamw), steps=STEPS, ddp=UNUSED)
    assert_same_as_ddp(two_ranks, recipe, broken=no_parameter_sits_out)


class DiffersByRank(Conditional):
    """The ranks take their branches in different batches: a rank may get a gradient for what it has not used."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return super().training_step(batch, batch_idx + 2 * self.global_rank)


def test_layer_used_by_one_rank_only(two_ranks: RankPool) -> None:
    recipe = Recipe(model=partial(DiffersByRank, optimizer=adamw), steps=STEPS, ddp=UNUSED)
    # What has a gradient in the first step and was not used there looks as if it had been read unseen.
    assert_same_as_ddp(two_ranks, recipe, overlap=False)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("precision", "optimizer"),
    [("64-true", adamw), ("bf16-true", partial(ASGD, lr=0.05, t0=5))],
    ids=["64-true, AdamW", "bf16-true, ASGD"],
)
def test_state_made_in_the_forward_pass_is_of_the_steps_own_type(
    two_ranks: RankPool, precision: str, optimizer: Any
) -> None:
    """Lightning changes the default type for the forward pass, where a layer's first step may be taken."""
    recipe = Recipe(
        model=partial(Conditional, optimizer=optimizer), steps=STEPS, ddp=UNUSED, trainer={"precision": precision}
    )
    assert_same_as_ddp(two_ranks, recipe, network="late")


class Unreduced(Tower):
    """Has DDP leave a layer alone; each rank steps its own."""

    _ddp_params_and_buffers_to_ignore = ("layers.1.weight", "layers.1.bias")


def test_parameters_ddp_is_told_to_ignore(two_ranks: RankPool) -> None:
    recipe = Recipe(model=partial(Unreduced, optimizer=adamw), steps=STEPS)
    ddp, _ = assert_same_as_ddp(two_ranks, recipe, overlap=False, broken=only_buckets_step)
    assert not torch.equal(ddp[0].weights["layers.1.weight"], ddp[1].weights["layers.1.weight"])


@pytest.mark.slow
def test_layer_used_now_and_then_with_accumulated_gradients(two_ranks: RankPool) -> None:
    trainer = {"accumulate_grad_batches": 2}
    recipe = Recipe(model=partial(Conditional, optimizer=adamw), steps=STEPS, ddp=UNUSED, trainer=trainer)
    assert_same_as_ddp(two_ranks, recipe)


@pytest.mark.slow
def test_frozen_layers_stay_as_they_are(two_ranks: RankPool) -> None:
    recipe = Recipe(model=partial(PartlyFrozen, optimizer=adamw), steps=STEPS)
    assert_same_as_ddp(two_ranks, recipe, broken=no_parameter_sits_out)


def test_layers_unfrozen_later_are_stepped_though_in_no_bucket(two_ranks: RankPool) -> None:
    recipe = Recipe(model=partial(PartlyFrozen, optimizer=adamw), steps=STEPS, callbacks=(Unfreezes,))
    ddp, _ = assert_same_as_ddp(two_ranks, recipe, overlap=False, broken=only_buckets_step)
    assert not torch.equal(ddp[0].weights["first.weight"], ddp[1].weights["first.weight"])


def test_layers_frozen_after_the_wrap_are_averaged_when_they_learn(two_ranks: RankPool) -> None:
    recipe = Recipe(model=partial(Tower, optimizer=adamw), steps=STEPS, callbacks=(FreezesLate,), ddp=UNUSED)
    ddp, ours = assert_same_as_ddp(two_ranks, recipe, network="late", broken=no_parameter_sits_out)
    assert torch.equal(ddp[0].weights["first.weight"], ddp[1].weights["first.weight"])
    assert not [warning for warning in ours[0].warnings if "not averaged over ranks" in warning]


def test_group_added_later(two_ranks: RankPool) -> None:
    recipe = Recipe(model=partial(Tower, optimizer=all_but_last), steps=STEPS, callbacks=(AddsGroup,))
    assert_same_as_ddp(two_ranks, recipe)


@pytest.mark.parametrize("after", [0, 5], ids=["from-the-start", "later"])
def test_an_unused_layer_that_was_not_announced_is_ddps_error(two_ranks: RankPool, after: int) -> None:
    recipe = Recipe(model=partial(TurnsUnused, after=after, optimizer=adamw), steps=STEPS)
    ddp, ours = train_on(two_ranks, recipe, DDP, Run(network="late"))
    # A rank that is behind may learn of the other's first.
    first_heard = [one.error or "" for one in ours]
    heard = [replace(one, error=re.sub(r"^RankFailedError: Rank \d failed: ", "", one.error or "")) for one in ours]
    assert_same(ddp, heard)
    assert any(error.startswith("RuntimeError") for error in first_heard)
    for outcome in ours:
        assert outcome.error is not None
        # Lightning's wording of DDP's "Expected to have finished reduction in the prior iteration".
        assert "has parameters that were not used in producing the loss" in outcome.error


class ByLossBackward(Tower):
    """Manual optimization whose gradients travel to no other rank: DDP learns of ``manual_backward`` only."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer: Any = self.optimizers()
        loss = torch.nn.functional.mse_loss(self(batch[0]), batch[1])
        self.losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()


class GrowsInItsFirstStep(Tower):
    """Makes its last layer when it sees the first batch, as lazy layers written by hand do."""

    def predict(self, inputs: Tensor) -> Tensor:
        if not hasattr(self, "late"):
            self.late = torch.nn.Linear(3, 3)
            self.trainer.optimizers[0].add_param_group({"params": list(self.late.parameters())})
        return self.late(super().predict(inputs))


@pytest.mark.parametrize(
    ("model", "said"),
    [
        (ByLossBackward, "Call self.manual_backward(loss) in place of loss.backward()"),
        (GrowsInItsFirstStep, "'late.weight', 'late.bias' are not averaged over ranks"),
    ],
)
def test_gradients_that_no_rank_averages_are_said_in_the_first_step(
    model: type[Tower], said: str, two_ranks: RankPool
) -> None:
    (ours,) = train_on(two_ranks, Recipe(model=partial(model, optimizer=adamw), steps=3), Run())
    assert [said in warning for warning in ours[0].warnings].count(True) == 1, ours[0].warnings
