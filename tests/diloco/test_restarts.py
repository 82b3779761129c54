"""A training that is restarted from a checkpoint ends with the weights of one that was not."""

from __future__ import annotations

import os
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.optim import AdamW
from torch.optim.lr_scheduler import StepLR

from tests.diloco.fits import Result, fit_alone, fit_diloco
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

STEPS = 16  # of each of two workers in an epoch


class Noted(Tower):
    """Has all that a worker has alone and a checkpoint keeps: buffers, an optimizer with state, a schedule."""

    def __init__(self, **arguments: Any) -> None:
        super().__init__(
            optimizer=partial(AdamW, lr=0.01),
            schedule=partial(StepLR, step_size=5, gamma=0.8),
            dropout=0.0,
            **arguments,
        )
        self.norm = nn.BatchNorm1d(12)

    def predict(self, inputs: Tensor) -> Tensor:
        return super().predict(self.norm(inputs))

    def training_step(self, batch: list[Tensor], batch_idx: int) -> Tensor | None:
        self.notes.append([round(float(row[0]), 5) for row in batch[0]])
        return super().training_step(batch, batch_idx)


class Saves(Callback):
    """Writes checkpoints after some of the steps, and at the ends of epochs."""

    def __init__(self, folder: str, steps: tuple[int, ...]) -> None:
        self.folder = folder
        self.steps = steps

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(os.path.join(self.folder, f"{trainer.global_step}.ckpt"))

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(os.path.join(self.folder, f"epoch{trainer.current_epoch}.ckpt"))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(os.path.join(self.folder, f"validated{trainer.global_step}.ckpt"))


def fit(
    ranks: RankPool,
    folder: Path,
    *,
    saved: Path | None = None,
    steps: tuple[int, ...] = (),
    alone: bool = False,
    **more: Any,
) -> Any:
    arguments: dict[str, Any] = {
        "options": {"inner_steps": 4, "equal_steps": True, **more.pop("options", {})},
        "model": Noted,
        "default_root_dir": str(folder),
        "max_epochs": 2,
        "ckpt_path": None if saved is None else str(saved),
        "callbacks": (partial(Saves, str(folder), steps),),
        **more,
    }
    return ranks.run(fit_alone if alone else fit_diloco, **arguments)


def assert_same_end(rest: list[Result], whole: list[Result], *, after: int) -> None:
    """The rest of a training is the whole one's: the same samples, losses and weights on each worker."""
    for part, all_of_it in zip(rest, whole, strict=True):
        assert part.notes == all_of_it.notes[-len(part.notes) :]  # some are of validations
        assert part.losses == all_of_it.losses[after:]
        assert part.global_step == all_of_it.global_step
        for name, value in all_of_it.weights.items():
            assert torch.equal(part.weights[name], value), name


def test_a_restart_changes_nothing(diloco_ranks: RankPool, tmp_path: Path) -> None:
    more: dict[str, Any] = {"limit_val_batches": 1}
    whole = fit(diloco_ranks, tmp_path, steps=(22,), **more)
    assert not torch.equal(whole[0].weights["norm.running_mean"], whole[1].weights["norm.running_mean"])
    # In the middle of a round; after the validation at an epoch's end, and at that end itself.
    for name, after in {"22": 20, "validated16": STEPS, "epoch0": STEPS}.items():
        rest = fit(diloco_ranks, tmp_path / name, saved=tmp_path / f"{name}.ckpt", **more)
        assert_same_end(rest, whole, after=after)


@pytest.mark.slow
def test_nor_with_what_rounds_leave_to_be_sent(diloco_ranks: RankPool, tmp_path: Path) -> None:
    """Also with validations amid an epoch."""
    more: dict[str, Any] = {"options": {"wire_dtype": "int8"}, "part": 1000, "limit_val_batches": 1}
    more["val_check_interval"] = 10
    whole = fit(diloco_ranks, tmp_path, steps=(22,), **more)
    for name in ("22", min(file.stem for file in tmp_path.glob("validated*.ckpt"))):
        saved = tmp_path / f"{name}.ckpt"
        rest = fit(diloco_ranks, tmp_path / name, saved=saved, **more)
        for part, all_of_it in zip(rest, whole, strict=True):
            assert part.losses == all_of_it.losses[-len(part.losses) :]
            assert all(torch.equal(part.weights[weight], value) for weight, value in all_of_it.weights.items())


@pytest.mark.parametrize("overlap_steps", [0, 2])
def test_fragments_go_on_from_the_global_weights_amid_a_round(
    overlap_steps: int, diloco_ranks: RankPool, tmp_path: Path
) -> None:
    more: dict[str, Any] = {"options": {"fragments": 3, "overlap_steps": overlap_steps}, "limit_val_batches": 1}
    whole = fit(diloco_ranks, tmp_path, steps=(23,), **more)
    saved = tmp_path / "23.ckpt"
    after = torch.load(saved, weights_only=True)["global_step"]
    assert after == 20 + overlap_steps  # where the round began
    rest = fit(diloco_ranks, tmp_path / "rest", saved=saved, **more)
    for part, all_of_it in zip(rest, whole, strict=True):
        batches, all_batches = ([note for note in one.notes if isinstance(note, list)] for one in (part, all_of_it))
        assert batches == all_batches[after:]  # each sample once
        assert part.global_step == all_of_it.global_step
    assert all(
        torch.equal(value, rest[1].weights[name]) for name, value in rest[0].weights.items() if "norm" not in name
    )


def test_workers_go_and_come(diloco_ranks: RankPool, tmp_path: Path) -> None:
    """Two workers, then one, then two, each time in the middle of an epoch, which begins anew."""
    first = fit(diloco_ranks, tmp_path, steps=(10,), max_steps=12)
    second, _ = fit(diloco_ranks, tmp_path, saved=tmp_path / "10.ckpt", steps=(18,), alone=True, max_steps=20)
    assert not torch.equal(second.weights["first.weight"], first[0].weights["first.weight"])
    third = fit(diloco_ranks, tmp_path / "third", saved=tmp_path / "18.ckpt")
    assert [one.epoch for one in third] == [2, 2]
    assert [len(one.losses) for one in third] == [2 * STEPS, 2 * STEPS]
    for epoch in (slice(STEPS), slice(STEPS, None)):
        samples = [sample for worker in third for batch in worker.notes[epoch] for sample in batch]
        assert len(samples) == len(set(samples)) == 128
    assert torch.equal(third[0].weights["first.weight"], third[1].weights["first.weight"])
    again = fit(diloco_ranks, tmp_path / "again", saved=tmp_path / "18.ckpt")
    assert_same_end(again, third, after=0)


def test_a_round_that_begins_with_a_restart_at_an_epochs_end_is_of_the_next_epoch(
    diloco_ranks: RankPool, tmp_path: Path
) -> None:
    """A checkpoint in its middle has none of the batches of the epoch before."""
    more: dict[str, Any] = {"limit_val_batches": 1}
    whole = fit(diloco_ranks, tmp_path, **more)
    for name in ("validated16", "epoch0"):
        again = tmp_path / name
        fit(diloco_ranks, again, saved=tmp_path / f"{name}.ckpt", steps=(18,), **more)
        rest = fit(diloco_ranks, again / "rest", saved=again / "18.ckpt", **more)
        assert_same_end(rest, whole, after=STEPS)


def test_an_epoch_follows_one_that_was_left_amid(diloco_ranks: RankPool, tmp_path: Path) -> None:
    """It is whole: Lightning counts the other one as done."""
    fit(diloco_ranks, tmp_path, max_steps=10)
    rest = fit(diloco_ranks, tmp_path / "rest", saved=tmp_path / "epoch0.ckpt")
    assert [(one.epoch, len(one.losses)) for one in rest] == [(2, STEPS), (2, STEPS)]
    samples = [sample for worker in rest for batch in worker.notes for sample in batch]
    assert len(samples) == len(set(samples)) == 128


def test_another_number_of_ranks_in_a_worker_begins_the_epoch_anew(diloco_ranks: RankPool, tmp_path: Path) -> None:
    options = {"inner": {"strategy": "ddp", "size": 2}}
    fit(diloco_ranks, tmp_path, steps=(10,), max_steps=12, options=options)
    rest, _ = fit(diloco_ranks, tmp_path / "rest", saved=tmp_path / "10.ckpt", alone=True, max_epochs=1)
    samples = [sample for batch in rest.notes for sample in batch]
    assert len(samples) == len(set(samples)) == 128


class EndsEarly(Callback):
    """Leaves the epoch in the middle of a round, and writes a checkpoint when training is over."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 10:
            raise StopIteration

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        trainer.save_checkpoint(os.path.join(self.folder, "end.ckpt"))


def test_a_checkpoint_at_the_end_is_of_the_end(diloco_ranks: RankPool, tmp_path: Path) -> None:
    """However it was ended, which merges what was trained in the round that was on."""
    done = fit(diloco_ranks, tmp_path, max_epochs=1, callbacks=(partial(EndsEarly, str(tmp_path)),))
    saved = torch.load(tmp_path / "end.ckpt", weights_only=True)
    assert saved["global_step"] == 10
    assert torch.equal(saved["state_dict"]["first.weight"], done[1].weights["first.weight"])
    workers = saved["lightning_bytescheduler.diloco"]["workers"]
    assert workers[1]["global_step"] == 10


class Deaf(Callback):
    """Worker 1 cannot answer."""

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: Any) -> None:
        if trainer.global_rank == 1:
            trainer.strategy._runtime.states.answer = None


def test_a_training_that_was_through_with_its_outer_steps_amid_an_epoch_is_over(
    diloco_ranks: RankPool, tmp_path: Path
) -> None:
    more: dict[str, Any] = {"options": {"outer_steps": 2}, "limit_val_batches": 1, "val_check_interval": 8}
    whole = fit(diloco_ranks, tmp_path, **more)
    assert [one.global_step for one in whole] == [8, 8]
    rest = fit(diloco_ranks, tmp_path / "rest", saved=tmp_path / "validated8.ckpt", **more)
    for one, before in zip(rest, whole, strict=True):
        assert (one.global_step, one.losses) == (8, [])
        assert all(torch.equal(one.weights[name], value) for name, value in before.weights.items())


@pytest.mark.slow
def test_a_checkpoint_that_lacks_a_worker_is_one_all_the_same(diloco_ranks: RankPool, tmp_path: Path) -> None:
    """With ``worker_states=False`` workers are asked for places in the epoch, not for optimizer states."""
    light = {"worker_states": False}
    whole = fit(diloco_ranks, tmp_path, steps=(10,), max_steps=14, options=light)
    path = tmp_path / "10.ckpt"
    assert "optimizers" not in torch.load(path, weights_only=True)["lightning_bytescheduler.diloco"]["workers"][1]
    rest = fit(diloco_ranks, tmp_path / "light", saved=path, max_steps=14, options=light)
    assert [one.notes for one in rest] == [one.notes[8:] for one in whole]
    callbacks = (partial(Saves, str(tmp_path / "deaf"), (10,)), Deaf)
    fit(diloco_ranks, tmp_path / "deaf", steps=(10,), max_steps=12, callbacks=callbacks)
    saved = torch.load(tmp_path / "deaf" / "10.ckpt", weights_only=True)
    assert saved["lightning_bytescheduler.diloco"]["workers"][1] is None
    rest = fit(diloco_ranks, tmp_path / "rest", saved=tmp_path / "deaf" / "10.ckpt", max_steps=14)
    assert [one.global_step for one in rest] == [14, 14]
