"""A matrix of trainings in which every two features of a training meet, each compared with DDP's.

Which trainings these are is decided by a covering array, not by hand; what is expected of each by :mod:`.rule`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch import callbacks as lightning_callbacks
from lightning.pytorch.callbacks import StochasticWeightAveraging
from lightning.pytorch.plugins import MixedPrecision
from torch import Tensor

from tests.parity import checks, rule
from tests.parity.combined_models import BATCHES, CLIP, ChangesBetas, Unfreezes, build
from tests.parity.factors import FACTORS, GRADIENTS_IN_HAND, Combination, allowed
from tests.parity.observers import KeepsState, ReadsGradients, ReplacesOptimizerState
from tests.parity.own_gradients import GivesOtherMemory, LooksInHooks
from tests.parity.pairwise import covering_array
from tests.parity.second_passes import AddsPenalty
from tests.parity.silent_readers import READERS
from tests.support.fit import SIZES, Outcome, Recipe, Run
from tests.support.rank_pool import RankPool

__all__ = ["Scale", "check", "matrix", "recipe"]

SAVED_AT = 21
ONE_STEP_TOLERANCE = 1e-6
WHOLE_RUN_TOLERANCE = 1e-3  # with SGD; where updates do not shrink with gradients, rounding is amplified
_COARSE_TYPES = {"bf16-true": 2.0**-7}  # one unit in the last place of every element
FIRST_SCALE = 2.0**24  # overflows


@dataclass(frozen=True)
class Scale:
    """How large the model and the pieces it is sent in are.

    Attributes:
        depth: Layers of the model between first and last.
        width: Width of these layers.
        extra_steps: Beyond those that are needed for the shares that are asserted.
        options: Options of the strategy.
        reader: A callback that reads weights as no touch shows, by its name in :mod:`.silent_readers`.
    """

    depth: int = 3
    width: int = 24
    extra_steps: int = 0
    options: dict[str, Any] = field(default_factory=lambda: {**SIZES, "bucket_cap_mb": 0.001})
    reader: str | None = None


def matrix() -> list[Combination]:
    """Every allowed pair of values occurs in one of these."""
    rows = covering_array({**FACTORS, "loop": [v for v in FACTORS["loop"] if v not in GRADIENTS_IN_HAND]}, allowed)
    rows += covering_array(FACTORS, allowed, after=rows)
    return [Combination(**row) for row in rows]


def check(pool: RankPool, combination: Combination, folder: Path, scale: Scale | None = None, **run: Any) -> None:
    """Train ``combination`` under DDP and under the strategy, and compare as the rule says.

    Args:
        pool: Two ranks.
        combination: What is trained.
        folder: Folder for checkpoints.
        scale: How large.
        run: More arguments of :class:`~tests.support.fit.Run`.

    Raises:
        AssertionError: If the weights are not DDP's, or the steps not what the rule expects.
    """
    scale = scale or Scale()
    servers = 0 if combination.architecture == "ps" else None
    options = {**scale.options, "weighting": combination.weighting, "servers": servers}
    ours = Run(**{"options": options, "network": "late", **run})
    training = recipe(combination, scale)
    beginning = None  # of a training that goes on from a checkpoint
    if rule.comparison(combination) is rule.Comparison.ONE_STEP:
        _check_one_step(pool, combination, folder, scale, ours)
        runs = checks.train_on(pool, training, checks.DDP, ours)
        _assert_close(runs[0], runs[1], _whole_run_tolerance(combination))
    elif combination.loop == "resumed":
        first = replace(training, steps=SAVED_AT, callbacks=(*training.callbacks, partial(SavesAt, SAVED_AT, folder)))
        saved = checks.train_on(pool, first, checks.DDP, ours)
        checks.assert_same(*saved)
        beginning = saved[0][0]
        training = replace(training, resume=str(folder / "ByteSchedulerStrategy.ckpt"), steps=training.steps + SAVED_AT)
        runs = checks.train_on(pool, training, checks.DDP, ours)
        checks.assert_same(runs[0], runs[1])
    else:
        runs = checks.train_on(pool, training, checks.DDP, ours)
        checks.assert_same(runs[0], runs[1])
    for outcome in runs[1]:
        _assert_mode(combination, scale, outcome)
    if combination.precision == "fp16-scaler":
        _assert_skipped(beginning or runs[0][0])


class SavesAt(Callback):
    """Saves a checkpoint by the name of the strategy, as the second run overwrites the first's."""

    def __init__(self, step: int, folder: Path) -> None:
        self.step = step
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        path = self.folder / f"{type(trainer.strategy).__name__}.ckpt"
        if trainer.global_step == self.step:
            trainer.save_checkpoint(path)


class NotesScale(Callback):
    """Notes by what the loss is multiplied: less than before means that a step was skipped."""

    def on_train_batch_end(self, trainer: Trainer, module: Any, *_: Any) -> None:
        module.notes.append(("scale", trainer.precision_plugin.scaler.get_scale()))


def recipe(combination: Combination, scale: Scale) -> Recipe:
    """How a combination is trained."""
    overlaps = rule.mode(combination) < rule.Mode.READ
    steps = (24 if overlaps else 12) + scale.extra_steps
    if combination.loop == "two-optimizers":
        steps *= 2  # each optimizer's count
    if overlaps and combination.loop == "SWA" and combination.model == "batch-norm":
        steps += 16  # the step that belongs to the pass for batch statistics has no backward pass, so is not deferred
    callbacks: list[Any] = []
    plugins: list[Any] = []
    ddp: dict[str, Any] = {}
    trainer: dict[str, Any] = {}
    manual = combination.loop in ("manual", "two-optimizers")
    if not manual:
        trainer["accumulate_grad_batches"] = int(combination.accumulation)
        if combination.clipping in CLIP:
            trainer["gradient_clip_val"], trainer["gradient_clip_algorithm"] = CLIP[combination.clipping]
    if combination.precision == "fp16-scaler":
        plugins.append(_fp16_on_cpu)
        callbacks.append(NotesScale)
    else:
        trainer["precision"] = combination.precision
    if combination.schedule == "plateau" or combination.loop == "validation":
        trainer["limit_val_batches"] = 2
    if combination.loop == "validation":
        trainer["val_check_interval"] = 3
    if combination.loop == "SWA":
        # It wants a last epoch that it knows of.
        epochs = math.ceil(steps / math.ceil(BATCHES / int(combination.accumulation)))
        trainer["max_epochs"], steps = epochs, -1
    if combination.loop in _CALLBACKS:
        callbacks.append(_CALLBACKS[combination.loop])
    if combination.optimizer == "AdamW-tensor-betas":
        callbacks.append(ChangesBetas)
    if scale.reader is not None:
        callbacks.append(READERS[scale.reader])
    if combination.ddp == "find-unused" or combination.model == "conditional":
        ddp["find_unused_parameters"] = True
    if combination.ddp == "static-graph":
        ddp["static_graph"] = True
    if combination.ddp == "no-bucket-views":
        ddp["gradient_as_bucket_view"] = False
    return Recipe(
        model=partial(build, combination, depth=scale.depth, width=scale.width),
        steps=steps,
        trainer=trainer,
        callbacks=tuple(callbacks),
        plugins=tuple(plugins),
        ddp=ddp,
    )


def _fp16_on_cpu() -> MixedPrecision:
    scaler = torch.amp.GradScaler("cpu", init_scale=FIRST_SCALE, growth_interval=5)
    return MixedPrecision("16-mixed", "cpu", scaler=scaler)


def _ema(average: Tensor, current: Tensor, count: Any) -> Tensor:
    return average * 0.9 + current * 0.1


def _weight_averaging() -> Callback:
    return lightning_callbacks.WeightAveraging(avg_fn=_ema)


_CALLBACKS: dict[str, Any] = {
    "unfreezing": Unfreezes,
    "weight-averaging": _weight_averaging,
    "SWA": partial(StochasticWeightAveraging, swa_lrs=0.01, swa_epoch_start=1, annealing_epochs=1),
    "reads-gradients": ReadsGradients,
    "second-pass": AddsPenalty,
    "other-memory": GivesOtherMemory,
    "looks-in-hooks": LooksInHooks,
    "new-state": ReplacesOptimizerState,
    "keeps-state": KeepsState,
}


def _assert_mode(combination: Combination, scale: Scale, outcome: Outcome) -> None:
    """The steps were what the rule says, for the reasons that it says."""
    expected = rule.mode(combination)
    words = rule.reasons(combination)
    for word in words:
        assert any(word in reason for reason in outcome.reasons), f"{word!r} is not among {outcome.reasons}"
    if not words:
        assert not outcome.reasons, f"the rule knows of no reason, but there is: {outcome.reasons}"
    statistics = outcome.statistics
    assert statistics is not None
    assert statistics.updates > 0
    if expected is rule.Mode.OVERLAPPED:  # exports have all weights updated at once, now and then
        assert statistics.deferred_share >= (0.75 if scale.reader == "exports" else 0.95), statistics
    elif expected is rule.Mode.PARTLY:
        assert statistics.deferred_share < 0.95, statistics
        if scale == Scale():  # where buckets are larger, all may share one with what is stepped at the step
            assert statistics.deferred_updates > 0, statistics
    else:
        assert statistics.deferred_updates == 0, statistics


def _assert_skipped(outcome: Outcome) -> None:
    """The scaler has skipped steps, and taken others."""
    scales = [FIRST_SCALE, *(note[1] for note in outcome.notes if note and note[0] == "scale")]
    assert any(after < before for before, after in itertools.pairwise(scales)), scales
    assert any(after >= before for before, after in itertools.pairwise(scales)), scales


# ---------------------------------------------------------------------- within rounding


def _check_one_step(pool: RankPool, combination: Combination, folder: Path, scale: Scale, ours: Run) -> None:
    """From DDP's checkpoint in mid-training both take two steps; the strategy's first one is synchronised."""
    if combination.loop not in ("straight", "uneven", "validation"):
        combination = replace(combination, loop="straight")  # the others have nothing to do with a single step
    training = recipe(combination, scale)
    first = replace(training, steps=SAVED_AT, callbacks=(*training.callbacks, partial(SavesAt, SAVED_AT, folder)))
    checks.train_on(pool, first, checks.DDP)
    resumed = replace(training, resume=str(folder / "DDPStrategy.ckpt"), steps=SAVED_AT + 2)
    expected, actual = checks.train_on(pool, resumed, checks.DDP, ours)
    for one, other in zip(expected, actual, strict=True):
        assert one.losses == other.losses, "the state before the step that is compared is not the same"
        assert other.statistics is not None
        assert other.statistics.deferred_updates > 0 or rule.mode(combination) is rule.Mode.PARTLY
    _assert_close(expected, actual, _COARSE_TYPES.get(combination.precision, ONE_STEP_TOLERANCE))


def _whole_run_tolerance(combination: Combination) -> float:
    gross = WHOLE_RUN_TOLERANCE if combination.optimizer.startswith("SGD") else 0.1
    return gross if combination.precision not in _COARSE_TYPES else 0.1


def _assert_close(expected: Sequence[Outcome], actual: Sequence[Outcome], tolerance: float) -> None:
    """Every weight tensor within ``tolerance`` of its norm."""
    for rank, (one, other) in enumerate(zip(expected, actual, strict=True)):
        assert one.weights.keys() == other.weights.keys()
        for name, weight in one.weights.items():
            difference = (other.weights[name].double() - weight.double()).norm().item()
            limit = tolerance * weight.double().norm().item()
            assert math.isfinite(difference), f"rank {rank}, {name}: a training that explodes proves nothing"
            assert difference <= limit, f"rank {rank}, {name}: differs by {difference:g}, more than {limit:g}"
