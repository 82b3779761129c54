"""Trainings with compressed gradients: the same bits however steps are taken, DDP's where nothing is compressed."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.plugins import MixedPrecision
from torch.optim import AdamW

from lightning_bytescheduler.exceptions import OptionError, RanksDifferError
from tests.parity.checks import DDP, assert_overlapped, assert_same, train_on
from tests.parity.test_checkpoints import SaveAt
from tests.support.fit import SIZES, Outcome, Recipe, Run, train
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

adamw = partial(AdamW, lr=0.005)
INT8 = {**SIZES, "compression": "int8", "compression_min_size": 40}


def same_weights(one: Outcome, other: Outcome) -> bool:
    return all(torch.equal(one.weights[name], other.weights[name]) for name in one.weights)


def max_difference(one: Outcome, other: Outcome) -> float:
    return max(float((one.weights[name] - other.weights[name]).abs().max()) for name in one.weights)


@pytest.mark.slow
def test_the_same_bits_however_steps_are_taken(two_ranks: RankPool) -> None:
    recipe = Recipe(model=partial(Tower, optimizer=adamw), steps=8, trainer={"accumulate_grad_batches": 2})
    nothing = {**SIZES, "compression": "int8", "compression_min_size": 1_000_000}
    ddp, exact, overlapped, as_ddp, waiting, tried = train_on(
        two_ranks,
        recipe,
        DDP,
        Run(options=nothing),
        Run(options=INT8, network="held"),
        Run(options={**INT8, "mode": "ddp"}),
        Run(options={**INT8, "cross_barrier": False}),
        Run(options={**INT8, "mode": "auto"}),
    )
    assert_same(ddp, exact)
    assert_overlapped(overlapped, share=0.85)  # all but the first of 8 steps
    assert_same(overlapped, as_ddp)
    assert_same(overlapped, waiting)
    assert_same(overlapped, tried)
    for rank in range(2):
        assert same_weights(overlapped[0], overlapped[rank]), "ranks drift apart"
        assert not same_weights(ddp[rank], overlapped[rank]), "nothing was compressed"
        assert max_difference(ddp[rank], overlapped[rank]) < 0.02
    statistics, plan = overlapped[0].statistics, overlapped[0].plan
    assert statistics is not None
    assert plan is not None
    assert statistics.compression_ratio == pytest.approx(plan.compression_ratio, rel=0.1)
    assert set(plan.compressed.values()) == {"int8:nearest"}
    assert "int8" in repr(plan)
    assert exact[0].statistics is not None
    assert exact[0].statistics.compression_ratio == 1.0


@pytest.mark.parametrize(
    ("codec", "precision"),
    [
        ("int8", "bf16-true"),
        pytest.param("topk:0.2", "64-true", marks=pytest.mark.slow),
        pytest.param("powersgd:1", "bf16-true", marks=pytest.mark.slow),
    ],
)
def test_a_precision_that_changes_the_default_dtype(two_ranks: RankPool, codec: str, precision: str) -> None:
    """While a forward pass is under way: then gradients are decoded."""
    recipe = Recipe(model=partial(Tower, optimizer=adamw), steps=8, trainer={"precision": precision})
    options = {**INT8, "compression": codec}
    overlapped, waiting = train_on(
        two_ranks, recipe, Run(options=options, network="held"), Run(options={**options, "cross_barrier": False})
    )
    assert_overlapped(overlapped, share=0.8)
    assert_same(overlapped, waiting)
    assert same_weights(overlapped[0], overlapped[1])


def test_clipping_sees_what_is_applied(two_ranks: RankPool) -> None:
    recipe = Recipe(model=Tower, trainer={"gradient_clip_val": 0.05}, ddp={"find_unused_parameters": True})
    sharded, waiting = train_on(
        two_ranks, recipe, Run(options=INT8, network="held"), Run(options={**INT8, "cross_barrier": False})
    )
    assert_overlapped(sharded)
    assert same_weights(sharded[0], sharded[1])
    for name, weight in sharded[0].weights.items():
        assert torch.allclose(weight, waiting[0].weights[name], rtol=1e-4, atol=1e-5)


class Overflows(Tower):
    """Its loss is far too large for fp16 in one step, and for the loss scale at first."""

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss: Any = super().training_step(batch, batch_idx)
        return loss * 1e36 if batch_idx == 6 and self.trainer.global_rank == 1 else loss


def scaled() -> Any:
    return MixedPrecision("16-mixed", "cpu", scaler=torch.amp.GradScaler("cpu", init_scale=2.0**14, growth_interval=4))


def scale_of(trainer: Trainer, model: Any) -> None:
    plugin: Any = trainer.precision_plugin
    model.notes.append(plugin.scaler.get_scale())


def test_an_overflow_is_seen_as_without_compression(two_ranks: RankPool) -> None:
    recipe = Recipe(model=Overflows, steps=12, plugins=(scaled,), after=scale_of)
    ddp, ours = train_on(two_ranks, recipe, DDP, Run(options=INT8))
    for rank in range(2):
        assert ours[rank].notes == ddp[rank].notes, "another loss scale"
        assert all(torch.isfinite(weight).all() for weight in ours[rank].weights.values())
        assert same_weights(ours[0], ours[rank])
        for name, weight in ours[rank].weights.items():
            assert torch.allclose(weight, ddp[rank].weights[name], atol=0.05), name


@pytest.mark.slow
def test_a_training_goes_on_from_its_checkpoint(two_ranks: RankPool, tmp_path: Path) -> None:
    model = partial(Tower, optimizer=adamw)
    saving = Recipe(model=model, steps=20, callbacks=(partial(SaveAt, 15, tmp_path),))
    (saved,) = train_on(two_ranks, saving, Run(options=INT8))
    (unsaved,) = train_on(two_ranks, Recipe(model=model, steps=20), Run(options=INT8))
    assert_same(unsaved, saved)

    path = tmp_path / "ByteSchedulerStrategy.ckpt"
    assert not [key for key in torch.load(path, weights_only=True) if "bytescheduler" in key]
    resumed = Recipe(model=model, steps=20, resume=str(path))
    ours, ddp = train_on(two_ranks, resumed, Run(options=INT8), DDP)
    assert len(ours[0].losses) == len(ddp[0].losses) == 5
    assert same_weights(ours[0], ours[1])
    assert max_difference(ddp[0], ours[0]) < 0.01


def differ(rank: int) -> str:
    options = {**SIZES, "compression": "int8" if rank else "bf16"}
    try:
        train(rank, Recipe(model=Tower), Run(options=options))
    except RanksDifferError as error:
        return str(error)
    return ""


def test_ranks_that_compress_differently_are_refused(two_ranks: RankPool) -> None:
    for said in two_ranks.run(differ):
        assert "compression is 'bf16 (min_size 1024)' on rank 0" in said
        assert "'int8:nearest (min_size 1024)' on rank 1" in said


def mistyped(rank: int, compression: dict[str, Any]) -> str:
    with pytest.raises(OptionError) as caught:
        train(rank, Recipe(model=Tower), Run(options={**SIZES, "compression": compression}))
    return str(caught.value)


def multiply_differently(rank: int) -> str:
    options = {**SIZES, "compression": "powersgd:1"}
    with patch.object(torch, "get_num_threads", lambda: rank + 1), pytest.raises(RanksDifferError) as raised:
        train(rank, Recipe(model=Tower), Run(options=options))
    return str(raised.value)


def test_ranks_that_may_multiply_to_other_bits_are_refused(two_ranks: RankPool) -> None:
    for said in two_ranks.run(multiply_differently):
        assert "torch.get_num_threads() is 1 on rank 0" in said
        assert "2 on rank 1" in said


def test_patterns_that_say_nothing_of_the_model_are_refused(two_ranks: RankPool) -> None:
    """On all ranks, before anything of the fit begins."""
    assert all("it fits no name" in said for said in two_ranks.run(mistyped, compression={"no.such.*": "int8"}))


class Sometimes(Tower):
    """Has two tensors with constant gradients, one of them only in every third step."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        self.always = torch.nn.Parameter(torch.zeros(60, 40))
        self.rarely = torch.nn.Parameter(torch.zeros(60, 40))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        slope = slope_of(batch_idx, self.trainer.global_rank)
        loss: Any = super().training_step(batch, batch_idx)
        loss = loss + (self.always * slope).sum()
        return loss + (self.rarely * slope).sum() if batch_idx % 3 == 0 else loss


def slope_of(step: int, rank: int) -> torch.Tensor:
    return torch.randn(60, 40, generator=torch.Generator().manual_seed(10 * step + rank))


class KeepsResiduals(Callback):
    """Keeps what a fit drops at its end, for what looks at it afterwards."""

    def on_train_start(self, trainer: Trainer, pl_module: Any) -> None:
        fit = getattr(trainer.strategy, "fit", None)
        pl_module.residuals = None if fit is None else fit.codec.residuals


def residuals_of(trainer: Trainer, model: Any) -> None:
    kept = model.residuals
    left = {name: kept.of(name, 2400).view(60, 40) / kept._scale for name in ("always", "rarely")}
    model.notes.append(left)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["topk:0.05", "powersgd:1"])
def test_what_is_left_waits_for_a_step_that_applies_it(two_ranks: RankPool, codec: str) -> None:
    """In the others no rank steps the parameter, and whatever travelled would be gone."""
    plain = partial(torch.optim.SGD, lr=0.5)
    model = partial(Sometimes, optimizer=plain)
    recipe = Recipe(model=model, steps=8, ddp={"find_unused_parameters": True})
    options = {**SIZES, "compression": {"always": codec, "rarely": codec}, "mode": "overlapped"}
    (ours,) = train_on(
        two_ranks, replace(recipe, after=residuals_of, callbacks=(KeepsResiduals,)), Run(options=options)
    )
    for name, every in (("always", 1), ("rarely", 3)):
        gradients: Any = sum(slope_of(step, rank) / 2 for step in range(0, 8, every) for rank in range(2))
        left = ours[0].notes[-1][name] + ours[1].notes[-1][name]
        assert float(left.abs().max()) > 0
        torch.testing.assert_close(-ours[0].weights[name] / 0.5 + left, gradients, rtol=1e-4, atol=1e-4)


class SweepsAndGoesBack(Callback):
    """Does what LearningRateFinder does, in the middle of a fit."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy: Any = trainer.strategy
        if trainer.global_step == 4:
            strategy.flush()
            residuals, path = strategy.fit.codec.residuals, self.folder / f"{trainer.global_rank}.ckpt"
            assert residuals.of("first.weight", pl_module.first.weight.numel()).any()
            torch.save({}, path)
            strategy.load_checkpoint(path)
            assert not residuals.of("first.weight", pl_module.first.weight.numel()).any()


def test_nothing_that_was_left_goes_with_loaded_weights(two_ranks: RankPool, tmp_path: Path) -> None:
    recipe = Recipe(model=partial(Tower, optimizer=adamw), steps=8, callbacks=(partial(SweepsAndGoesBack, tmp_path),))
    (ours,) = train_on(two_ranks, recipe, Run(options=INT8))
    assert same_weights(ours[0], ours[1])


class Placeholder(Tower):
    """Has a tensor without elements, and otherwise only matrices."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(**arguments)
        for parameter in self.parameters():
            parameter.requires_grad_(parameter.dim() > 1)
        self.placeholder = torch.nn.Parameter(torch.empty(0))

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        loss: Any = super().training_step(batch, batch_idx)
        return loss + self.placeholder.sum()


def test_a_tensor_without_elements_is_no_hindrance_to_factors(two_ranks: RankPool) -> None:
    recipe = Recipe(model=Placeholder, steps=6)
    (ours,) = train_on(two_ranks, recipe, Run(options={**INT8, "compression": "powersgd:1"}))
    assert same_weights(ours[0], ours[1])


def test_ranks_without_a_shard_take_part(three_ranks: RankPool) -> None:
    options = {**INT8, "compression_min_size": 1, "compression": {"*.bias": "bf16", "*": "int8"}}
    ddp, ours = train_on(three_ranks, Recipe(model=Tower, steps=6), DDP, Run(options=options))
    for rank in range(3):
        assert same_weights(ours[0], ours[rank]), "ranks drift apart"
        assert max_difference(ddp[rank], ours[rank]) < 0.02


def test_gradients_as_factors(two_ranks: RankPool) -> None:
    options = {**INT8, "compression": "powersgd:1"}
    recipe = Recipe(model=partial(Tower, optimizer=adamw), steps=8)
    clipped = replace(recipe, trainer={"gradient_clip_val": 0.05})
    ddp, overlapped, waiting = train_on(
        two_ranks, recipe, DDP, Run(options=options, network="held"), Run(options={**options, "cross_barrier": False})
    )
    assert_overlapped(overlapped, share=0.85)
    assert_same(overlapped, waiting)
    for rank in range(2):
        assert same_weights(overlapped[0], overlapped[rank]), "ranks drift apart"
        assert not same_weights(ddp[rank], overlapped[rank]), "nothing was compressed"
        assert max_difference(ddp[rank], overlapped[rank]) < 0.05
    plan = overlapped[0].plan
    assert plan is not None
    assert set(plan.compressed.values()) == {"powersgd:1"}

    (waits,) = train_on(two_ranks, clipped, Run(options=options))
    plan = waits[0].plan
    assert plan is not None
    assert "cannot reduce in shards" in plan.summary()
    assert same_weights(waits[0], waits[1])
