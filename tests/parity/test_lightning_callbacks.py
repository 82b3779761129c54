"""Lightning's own callbacks read, replace, freeze and prune weights between steps; what comes of it is DDP's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import (
    BaseFinetuning,
    BatchSizeFinder,
    GradientAccumulationScheduler,
    LearningRateFinder,
    ModelCheckpoint,
    ModelPruning,
    Timer,
)
from lightning.pytorch.tuner import Tuner
from torch import Tensor
from torch.optim import AdamW

from tests.parity.checks import DDP, assert_same, assert_same_as_ddp, train_on
from tests.parity.sabotage import blind_between_steps, blind_to_weights_and_state, only_buckets_step
from tests.support.fit import Recipe, Run
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

adamw = partial(AdamW, lr=0.005)
model = partial(Tower, optimizer=adamw)
STEPS = 12
EPOCHS = {"max_epochs": 4, "limit_train_batches": 6}


class NotesCheckpoints(ModelCheckpoint):
    """Notes what was saved: both strategies write to one folder, so the second would overwrite the first's."""

    def _save_checkpoint(self, trainer: Trainer, filepath: str) -> None:
        super()._save_checkpoint(trainer, filepath)
        module: Any = trainer.lightning_module
        if trainer.is_global_zero:
            module.notes.append((trainer.global_step, tensors_by_key(torch.load(filepath, weights_only=False))))


def tensors_by_key(value: Any, path: str = "") -> dict[str, Any]:
    """A checkpoint as one flat dictionary; of what is no tensor, the type."""
    if isinstance(value, dict):
        items: Any = value.items()
    elif isinstance(value, (list, tuple)):
        items = enumerate(value)
    else:
        return {path: value.clone() if isinstance(value, Tensor) else type(value).__name__}
    return {key: leaf for name, part in items for key, leaf in tensors_by_key(part, f"{path}/{name}").items()}


class WritesCheckpointsWithWeights(Callback):
    """`trainer.save_checkpoint(weights_only=True)` in mid-epoch, and the module's state dict in a callback's state."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 3 == 2:
            saved = trainer._checkpoint_connector.dump_checkpoint(weights_only=True)
            module.notes.append(tensors_by_key(saved["state_dict"]))


def ema(**options: Any) -> Any:
    if not hasattr(lightning_callbacks, "EMAWeightAveraging"):
        pytest.skip("this version of Lightning has no EMAWeightAveraging")
    return partial(lightning_callbacks.EMAWeightAveraging, decay=0.9, **options)


def test_checkpoints_in_mid_epoch(two_ranks: RankPool, tmp_path: Path) -> None:
    """The same keys and the same tensors under both strategies."""
    saves = partial(NotesCheckpoints, tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    recipe = Recipe(model=model, steps=STEPS, callbacks=(saves,), trainer={"enable_checkpointing": True})
    ddp, _ = assert_same_as_ddp(two_ranks, recipe, network="late", broken=blind_to_weights_and_state)
    assert len(ddp[0].notes) == 4
    assert "/state_dict/layers.0.weight" in ddp[0].notes[0][1]
    assert "/optimizer_states/0/state/3/exp_avg" in ddp[0].notes[0][1]


@pytest.mark.slow
def test_checkpoint_of_the_weights_alone(two_ranks: RankPool) -> None:
    recipe = Recipe(model=model, steps=STEPS, callbacks=(WritesCheckpointsWithWeights,))
    assert_same_as_ddp(two_ranks, recipe, network="late", broken=blind_to_weights_and_state)


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [{"update_every_n_steps": 3}, {"update_starting_at_epoch": 1}],
    ids=str,
)
def test_exponential_moving_average(two_ranks: RankPool, options: dict[str, int]) -> None:
    """With validation in mid-epoch, which swaps the average in and out."""
    trainer = {**EPOCHS, "val_check_interval": 4, "limit_val_batches": 1.0}
    recipe = Recipe(model=model, steps=-1, callbacks=(ema(**options),), trainer=trainer)
    assert_same_as_ddp(two_ranks, recipe, network="late", broken=blind_between_steps)


@pytest.mark.slow
def test_moving_average_in_a_checkpoint(two_ranks: RankPool, tmp_path: Path) -> None:
    saves = partial(NotesCheckpoints, tmp_path, every_n_train_steps=3, save_top_k=-1, filename="{step}")
    recipe = Recipe(model=model, steps=STEPS, callbacks=(ema(), saves), trainer={"enable_checkpointing": True})
    ddp, _ = assert_same_as_ddp(two_ranks, recipe, network="late", broken=blind_between_steps)
    assert "/current_model_state/layers.0.weight" in ddp[0].notes[0][1]


class PrunesLayers(ModelPruning):
    """By magnitude, in every epoch."""

    def __init__(self, *, lottery: bool = False, unstructured: bool = True) -> None:
        method = {} if unstructured else {"pruning_dim": 0, "pruning_norm": 1}
        super().__init__(
            "l1_unstructured" if unstructured else "ln_structured",
            amount=0.2,
            use_global_unstructured=unstructured,
            use_lottery_ticket_hypothesis=lottery,
            parameter_names=["weight"],
            **method,
        )


@pytest.mark.slow
@pytest.mark.parametrize("lottery", [False, True], ids=["pruned", "rewound"])
def test_pruning(two_ranks: RankPool, lottery: bool) -> None:
    """Weights are computed from parameters and masks from the first epoch's end on; some go back to their start."""
    recipe = Recipe(model=model, steps=-1, callbacks=(partial(PrunesLayers, lottery=lottery),), trainer=EPOCHS)
    ddp, _ = assert_same_as_ddp(two_ranks, recipe, overlap=False, broken=None if lottery else blind_between_steps)
    assert (ddp[0].weights["layers.0.weight"] == 0).float().mean() > 0.2


class UnfreezesLater(BaseFinetuning):
    """Trains the head alone, and everything from the second epoch on."""

    def freeze_before_training(self, module: Any) -> None:
        self.freeze([module.first, module.layers])

    def finetune_function(self, module: Any, epoch: int, optimizer: Any) -> None:
        if epoch == 1:
            self.unfreeze_and_add_param_group([module.first, module.layers], optimizer, initial_denom_lr=2.0)


class Finetuned(Tower):
    def configure_optimizers(self) -> Any:
        return self.make_optimizer(filter(lambda p: p.requires_grad, self.parameters()))


def test_finetuning(two_ranks: RankPool) -> None:
    """DDP reduces what was trainable when it was made, so each rank has its own weights of what follows later."""
    recipe = Recipe(model=partial(Finetuned, optimizer=adamw), steps=-1, callbacks=(UnfreezesLater,), trainer=EPOCHS)
    ddp, ours = assert_same_as_ddp(two_ranks, recipe, overlap=False, broken=only_buckets_step)
    assert len(ddp[0].optimizers[0]["param_groups"]) == 2
    assert ours[0].statistics is not None
    assert ours[0].statistics.deferred_updates > 0
    said = [warning for warning in ours[0].warnings if "not averaged over ranks" in warning]
    assert len(said) == 1
    assert "'first.weight', 'first.bias' and 8 more" in said[0]


def test_accumulation_that_changes_with_the_epoch(two_ranks: RankPool) -> None:
    schedule = partial(GradientAccumulationScheduler, {0: 1, 1: 3, 3: 2})
    recipe = Recipe(model=model, steps=-1, callbacks=(schedule,), trainer={**EPOCHS, "max_epochs": 6})
    assert_same_as_ddp(two_ranks, recipe, overlap=False)


class OutOfTime(Timer):
    """Its clock is the number of steps, so that both strategies run out of time together."""

    def time_elapsed(self, stage: Any = "train") -> float:
        return float(self.steps)

    def on_train_batch_end(self, trainer: Trainer, *args: Any, **kwargs: Any) -> None:
        self.steps = trainer.global_step
        super().on_train_batch_end(trainer, *args, **kwargs)

    steps = 0


def test_out_of_time_in_mid_epoch(two_ranks: RankPool) -> None:
    out_of_time = partial(OutOfTime, {"seconds": 11}, interval="step")
    ddp, _ = assert_same_as_ddp(two_ranks, Recipe(model=model, steps=100, callbacks=(out_of_time,)))
    assert len(ddp[0].losses) == 11


class HasRate(Tower):
    def __init__(self) -> None:
        super().__init__()
        self.lr = 0.001

    def configure_optimizers(self) -> Any:
        return AdamW(self.parameters(), lr=self.lr)


class NotesRate(Callback):
    def on_train_end(self, trainer: Trainer, module: Any) -> None:
        module.notes.append(module.lr)


def find_rate_then_fit(trainer: Trainer, module: Any) -> None:
    """With the Tuner, between two fits."""
    trainer.fit_loop.epoch_loop.max_steps = 2 * STEPS
    finder = Tuner(trainer).lr_find(module, num_training=20, early_stop_threshold=None)
    assert finder is not None
    module.notes.append((finder.results, module.lr))
    trainer.fit(module)


@pytest.mark.slow
def test_learning_rate_finder(two_ranks: RankPool, tmp_path: Path) -> None:
    """It trains, goes back to the weights it started from, and trains again."""
    trainer = {"default_root_dir": tmp_path}
    finds = partial(LearningRateFinder, num_training_steps=20, early_stop_threshold=None)
    recipe = Recipe(model=HasRate, steps=STEPS, callbacks=(finds, NotesRate), trainer=trainer)
    ddp, _ = assert_same_as_ddp(two_ranks, recipe, network="late", broken=blind_between_steps)
    assert ddp[0].notes[-1] != 0.001


@pytest.mark.slow
def test_tuner_finds_a_learning_rate(two_ranks: RankPool, tmp_path: Path) -> None:
    recipe = Recipe(model=HasRate, steps=STEPS, after=find_rate_then_fit, trainer={"default_root_dir": tmp_path})
    ddp, _ = assert_same_as_ddp(two_ranks, recipe, network="late", broken=blind_to_weights_and_state)
    results, rate = ddp[0].notes[-1]
    assert len(results["lr"]) == 20
    assert rate != 0.001


class RefusedByLightning(Tower):
    expected_error = True


def scale_batch_size(trainer: Trainer, module: Any) -> None:
    Tuner(trainer).scale_batch_size(module)


@pytest.mark.parametrize(
    "recipe",
    [
        pytest.param(Recipe(model=RefusedByLightning, callbacks=(BatchSizeFinder,)), id="callback"),
        pytest.param(Recipe(model=RefusedByLightning, steps=4, after=scale_batch_size), id="tuner"),
    ],
)
def test_batch_size_finder_is_refused_by_lightning(two_ranks: RankPool, recipe: Recipe) -> None:
    ddp, ours = train_on(two_ranks, recipe, DDP, Run())
    for one, other in zip(ddp, ours, strict=True):
        assert one.error is not None
        assert "not supported with distributed strategies" in one.error
        assert one.error == other.error
    if ddp[0].losses:
        assert_same(ddp, ours)
