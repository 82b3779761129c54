"""A checkpoint saved in mid-epoch is DDP's, and either strategy carries on from either's."""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch.optim import AdamW
from torch.optim.lr_scheduler import OneCycleLR

from tests.parity.checks import DDP, assert_overlapped, assert_same, train_on
from tests.support.fit import Recipe, Run
from tests.support.models import Tower
from tests.support.rank_pool import RankPool

SAVED_AT, ENDS_AT = 21, 40  # 16 batches an epoch: both are in mid-epoch
OURS = Run()


class SaveAt(Callback):
    """Saves a checkpoint with one name for both strategies, as the second run overwrites the first's."""

    def __init__(self, step: int, folder: Path) -> None:
        self.step = step
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == self.step:
            name = type(trainer.strategy).__name__
            trainer.save_checkpoint(self.folder / f"{name}.ckpt")


model = partial(Tower, optimizer=partial(AdamW, lr=0.005), schedule=partial(OneCycleLR, max_lr=0.02, total_steps=60))


def saved(tmp_path: Path, name: str) -> dict[str, Any]:
    checkpoint: dict[str, Any] = torch.load(tmp_path / f"{name}.ckpt", weights_only=False)
    return checkpoint


def test_checkpoint_of_one_strategy_is_resumed_under_the_other(two_ranks: RankPool, tmp_path: Path) -> None:
    first = Recipe(model=model, steps=SAVED_AT, callbacks=(partial(SaveAt, SAVED_AT, tmp_path),))
    ddp, ours = train_on(two_ranks, first, DDP, OURS)
    assert_same(ddp, ours)
    assert_overlapped(ours)

    by_ddp, by_us = saved(tmp_path, "DDPStrategy"), saved(tmp_path, "ByteSchedulerStrategy")
    assert by_ddp.keys() == by_us.keys()
    for part in ("state_dict", "optimizer_states", "lr_schedulers", "loops"):
        assert repr(by_ddp[part]) == repr(by_us[part])
        assert all(map(torch.equal, tensors_of(by_ddp[part]), tensors_of(by_us[part])))

    from_ddp = Recipe(model=model, steps=ENDS_AT, resume=str(tmp_path / "DDPStrategy.ckpt"))
    from_us = Recipe(model=model, steps=ENDS_AT, resume=str(tmp_path / "ByteSchedulerStrategy.ckpt"))
    expected, crossed = train_on(two_ranks, from_ddp, DDP, OURS)
    (crossed_back,) = train_on(two_ranks, from_us, DDP)
    assert len(expected[0].losses) == ENDS_AT - SAVED_AT
    assert_same(expected, crossed)
    assert_same(expected, crossed_back)
    assert_overlapped(crossed, share=0.94)  # one of 19 steps is synchronised, the first


def tensors_of(value: Any) -> list[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        return [value]
    if isinstance(value, dict):
        value = list(value.values())
    return [t for v in value for t in tensors_of(v)] if isinstance(value, (list, tuple)) else []


def fit_on(trainer: Trainer, module: Any) -> None:
    """Validate and fit once more, with one Trainer and one strategy that were torn down in between."""
    trainer.validate(module, verbose=False)
    trainer.fit_loop.epoch_loop.max_steps = ENDS_AT
    trainer.fit(module)


def test_one_trainer_fits_twice(two_ranks: RankPool) -> None:
    recipe = Recipe(model=model, steps=SAVED_AT, after=fit_on, trainer={"limit_val_batches": 1.0})
    ddp, ours = train_on(two_ranks, recipe, DDP, OURS)
    assert_same(ddp, ours)
    assert_overlapped(ours, share=0.94)
    assert len(ours[0].losses) == ENDS_AT
