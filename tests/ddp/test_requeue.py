"""SLURM's signal, to one rank in the middle of a step: all save at its end, and the job is requeued once."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
from lightning.fabric.plugins.environments import SLURMEnvironment
from lightning.pytorch import Callback, Trainer
from torch.utils.data import DataLoader, TensorDataset

from lightning_bytescheduler import ByteSchedulerStrategy
from lightning_bytescheduler.ddp.sigterm import RequeueForAll, requeues
from tests.ddp.fits import trainer_with
from tests.support.fit import SIZES
from tests.support.models import Tower
from tests.support.rank_pool import RankPool
from tests.support.waiting import until


class Signals(Callback):
    """Has a rank signal itself in the middle of a step, twice; rank 0 waits until it knows."""

    def __init__(self, signalled: bool) -> None:
        self.signalled = signalled

    def on_before_backward(self, trainer: Trainer, *_: Any) -> None:
        if self.signalled and trainer.fit_loop.batch_idx in (4, 6):
            os.kill(os.getpid(), signal.SIGUSR1)
        if trainer.fit_loop.batch_idx == 6 and trainer.global_rank == 0:
            until(lambda: trainer.strategy._sigterm.requeue.known)  # type: ignore[attr-defined]


def fit_signalled(rank: int, *, folder: str, signalled: int) -> tuple[int, torch.Tensor]:
    """Returns how many steps were taken, and a weight."""
    variables = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "2", "SLURM_NTASKS_PER_NODE": "2", "SLURM_NNODES": "1"}
    variables |= {"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank), "SLURM_NODEID": "0"}
    before = dict(os.environ)
    os.environ.update(variables, PATH=f"{folder}:{os.environ['PATH']}")
    try:
        torch.manual_seed(7)
        trainer = trainer_with(
            rank,
            ByteSchedulerStrategy(**SIZES, mode="overlapped"),
            plugins=[SLURMEnvironment()],
            default_root_dir=folder,
            accumulate_grad_batches=2,
            max_steps=8,
            callbacks=[Signals(rank == signalled)],
        )
        model = Tower(dropout=0.0)
        trainer.fit(model, DataLoader(TensorDataset(torch.randn(64, 12), torch.randn(64, 3)), batch_size=2))
        return trainer.global_step, next(model.parameters()).detach().clone()
    finally:
        os.environ.clear()
        os.environ.update(before)


def test_all_save_at_the_end_of_the_same_step(two_ranks: RankPool, tmp_path: Path) -> None:
    script = tmp_path / "scontrol"
    script.write_text(f'#!/bin/sh\necho "$@" >> "{tmp_path}/asked"\n')
    script.chmod(0o755)
    ends = two_ranks.run(fit_signalled, folder=str(tmp_path), signalled=1)
    assert [steps for steps, _ in ends] == [8, 8], "training goes on"
    assert torch.equal(ends[0][1], ends[1][1])
    assert (tmp_path / "asked").read_text() == "requeue 7\n"
    (file,) = tmp_path.glob("*.ckpt")
    saved = torch.load(file, weights_only=False)
    progress = saved["loops"]["fit_loop"]["epoch_loop.batch_progress"]["current"]
    assert 3 <= saved["global_step"] <= 5
    assert progress["processed"] == 2 * saved["global_step"], "nothing of a step is left out"


class Loop:
    """Whether a step has ended."""

    accumulates = True

    def _should_accumulate(self) -> bool:
        return self.accumulates


def test_one_rank_saves_at_the_end_of_a_step() -> None:
    asked: list[str] = []
    requeue = RequeueForAll(None)
    requeue._requeue = lambda: asked.append("requeue")
    trainer: Any = type("Trainer", (), {"fit_loop": Loop()})()
    module: Any = None

    def batch() -> None:
        requeue.on_train_batch_end(trainer, module, None, None, 0)

    batch()
    requeue.ask()
    batch()
    assert not asked
    trainer.fit_loop.accumulates = False
    batch()
    batch()
    assert asked == ["requeue"]


def test_where_nothing_is_to_be_requeued() -> None:
    assert requeues(SLURMEnvironment())
    assert not requeues(SLURMEnvironment(auto_requeue=False))
    assert not requeues(None)
