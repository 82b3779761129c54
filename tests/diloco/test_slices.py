"""Slices that a tracker at worker 0 hands out to workers of unequal speed."""

from __future__ import annotations

import threading
from collections import Counter
from itertools import pairwise
from pathlib import Path
from typing import Any
from unittest.mock import Mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_bytescheduler import DiLoCoStrategy, SliceDataModule
from lightning_bytescheduler.diloco.worker_slices import SharedSlices
from lightning_bytescheduler.exceptions import SchedulerTimeoutError
from lightning_bytescheduler.slices.epoch_plan import ReadReport
from lightning_bytescheduler.slices.tracker import RequestSlice
from lightning_bytescheduler.slices.training import TrackedTraining
from tests.diloco.fits import FAST_AND_SLOW, Pause, diloco_trainer
from tests.slices.fits import Decays, Evaluates, Remembers, make_rows
from tests.slices.tracker_workers import make_tracker
from tests.support.rank_pool import RankPool, RanksFailed

COUNTS = [5, 7, 3, 9, 1, 6, 8, 2, 4, 7, 5, 6]
SAMPLES = sum(COUNTS)


class NotesEpochs(Callback):
    """How many batches there were at the end of each epoch, whose learning rate halves with each."""

    def __init__(self) -> None:
        self.batches: list[int] = []

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert trainer.optimizers[0].param_groups[0]["lr"] == 0.01 / 2**trainer.current_epoch

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert isinstance(pl_module, Remembers)
        self.batches.append(len(pl_module.batches))


def fit_slices(
    rank: int,
    *,
    rows: str,
    folder: str,
    options: dict[str, Any],
    data: dict[str, Any] | None = None,
    pauses: dict[int, float] | None = None,
    saves: bool = False,
    resume: str | None = None,
    fails: int | None = None,
    **trainer_options: Any,
) -> tuple[list[list[int]], list[int], list[int], dict[str, torch.Tensor]]:
    """On a rank; returns the batches, how many there were after each epoch, what was validated, and the weights."""
    module: Remembers = Evaluates() if data and "val" in data else Decays()
    epochs = NotesEpochs()
    callbacks: list[Callback] = [Pause(rank, FAST_AND_SLOW if pauses is None else pauses), epochs]
    if saves:
        callbacks.append(ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1))
    if fails == rank:

        def fail(step: int) -> None:
            if step == 3:
                raise ZeroDivisionError("on purpose")

        module.on_step = fail
    trainer = diloco_trainer(
        rank,
        DiLoCoStrategy(**options),
        callbacks=callbacks,
        default_root_dir=folder,
        enable_checkpointing=saves,
        **trainer_options,
    )
    slices = SliceDataModule(rows, **{"batch_size": [4, 2], **(data or {})})
    trainer.fit(module, datamodule=slices, ckpt_path=resume, weights_only=True)
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("bytescheduler")]
    return module.batches, epochs.batches, module.seen, module.state_dict()


def trained(*workers: list[list[int]]) -> Counter[int]:
    return Counter(number for batches in workers for batch in batches for number in batch)


def samples(batches: list[list[int]]) -> int:
    return sum(map(len, batches))


@pytest.fixture
def rows(tmp_path: Path) -> str:
    return make_rows(tmp_path / "rows", COUNTS)


@pytest.mark.parametrize(
    "options",
    [
        {"inner_steps": 3},
        pytest.param({"inner_steps": 3, "equal_steps": True}, marks=pytest.mark.slow),
        {"samples_per_round": 20, "overlap_steps": 1},
    ],
)
def test_workers_share_each_epoch(options: dict[str, Any], diloco_ranks: RankPool, tmp_path: Path, rows: str) -> None:
    fast, slow = diloco_ranks.run(
        fit_slices, rows=rows, folder=str(tmp_path), options=options, data={"batch_size": 3}, max_epochs=2
    )
    assert len(fast[1]) == len(slow[1]) == 2
    ends = [(0, 0), *zip(fast[1], slow[1], strict=True)]
    for first, last in pairwise(ends):
        epoch = trained(fast[0][first[0] : last[0]], slow[0][first[1] : last[1]])
        assert epoch == Counter(range(SAMPLES))
    assert all(torch.equal(value, slow[3][name]) for name, value in fast[3].items())


def test_a_worker_that_finds_nothing_has_empty_epochs(diloco_ranks: RankPool, tmp_path: Path) -> None:
    rows = make_rows(tmp_path / "rows", [11])
    results = diloco_ranks.run(
        fit_slices,
        rows=rows,
        folder=str(tmp_path),
        options={"inner_steps": 2},
        data={"batch_size": 2, "val": rows},
        limit_val_batches=1.0,
        max_epochs=3,
    )
    assert trained(*(batches for batches, *_ in results)) == Counter(dict.fromkeys(range(11), 3))
    assert [len(epochs) for _, epochs, *_ in results] == [3, 3]
    assert trained(*([seen] for _, _, seen, _ in results)) == Counter(dict.fromkeys(range(11), 3))  # together


def test_a_fit_goes_on_from_a_checkpoint(diloco_ranks: RankPool, tmp_path: Path, rows: str) -> None:
    arguments: dict[str, Any] = {"rows": rows, "folder": str(tmp_path), "options": {"inner_steps": 2}}
    start = diloco_ranks.run(fit_slices, limit_train_batches=5, max_epochs=1, saves=True, **arguments)
    assert 0 < sum(samples(batches) for batches, *_ in start) < SAMPLES
    rest = diloco_ranks.run(fit_slices, max_epochs=3, resume=f"{tmp_path}/epoch=0.ckpt", **arguments)
    assert [len(epochs) for _, epochs, *_ in rest] == [2, 2]
    fast, slow = rest
    first = [fast[0][: fast[1][0]], slow[0][: slow[1][0]]]
    assert trained(*(batches for batches, *_ in start), *first) == Counter(range(SAMPLES))
    assert trained(*(batches for batches, *_ in [*start, *rest])) == Counter(dict.fromkeys(range(SAMPLES), 2))


@pytest.mark.slow
def test_a_fit_goes_on_after_an_epoch_of_the_data(diloco_ranks: RankPool, tmp_path: Path, rows: str) -> None:
    arguments: dict[str, Any] = {"rows": rows, "folder": str(tmp_path), "options": {"inner_steps": 2}}
    diloco_ranks.run(fit_slices, max_epochs=1, saves=True, **arguments)
    rest = diloco_ranks.run(fit_slices, max_epochs=2, resume=f"{tmp_path}/epoch=0.ckpt", **arguments)
    assert trained(*(batches for batches, *_ in rest)) == Counter(range(SAMPLES))


def fit_twice(rank: int, *, rows: str, folder: str) -> list[list[int]]:
    model = Remembers()
    slices = SliceDataModule(rows, batch_size=3)
    for options in ({"limit_train_batches": 4}, {}):
        strategy = DiLoCoStrategy(inner_steps=3)
        trainer = diloco_trainer(rank, strategy, default_root_dir=folder, max_epochs=1, **options)
        trainer.fit(model, datamodule=slices)
    return model.batches


@pytest.mark.slow
def test_a_further_fit_goes_on(diloco_ranks: RankPool, tmp_path: Path, rows: str) -> None:
    results = diloco_ranks.run(fit_twice, rows=rows, folder=str(tmp_path))
    assert trained(*results) == Counter(range(SAMPLES))


@pytest.mark.parametrize("fails", [0, pytest.param(1, marks=pytest.mark.slow)])
def test_a_worker_s_failure_ends_all(fails: int, diloco_ranks: RankPool, tmp_path: Path, rows: str) -> None:
    with pytest.raises(RanksFailed, match=f"RankFailedError: Rank {fails} failed: ZeroDivisionError: on purpose"):
        diloco_ranks.run(
            fit_slices,
            rows=rows,
            folder=str(tmp_path),
            options={"inner_steps": 50},
            pauses={},
            fails=fails,
            max_epochs=2,
        )


def shared_slices(timeout: float) -> tuple[SharedSlices, SharedSlices, Mock]:
    """The slices of two workers in this process, and their data module."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    data: Any = Mock(training=None)
    first, second = (
        SharedSlices(data, Mock(worker=worker, workers=2, store=store), timeout=timeout, check=lambda: None)
        for worker in range(2)
    )
    return first, second, data


def test_a_worker_whose_training_is_over_asks_worker_0_for_nothing_and_does_not_join_again() -> None:
    first, second, data = shared_slices(5.0)
    tracker = make_tracker([4])
    assert first.connect(lambda: tracker) is tracker
    source: Any = Mock(depth=2, source=Mock(slices=tuple(tracker.catalogue)))
    data.training = training = TrackedTraining(second, source, batch_sizes=(2,))
    training.open(None)
    next(iter(training))
    training.received(ReadReport({}))
    second.finish()
    assert first.close(failed=False)  # worker 0 has gone
    training.trained()
    assert training.state_dict() == {}
    training.close()
    assert second.close(failed=False)
    assert len(tracker._workers) == 1
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("bytescheduler-slice")]


def test_a_question_without_an_answer_ends_with_the_training() -> None:
    _, second, _ = shared_slices(60.0)
    tracker, errors = second.connect(lambda: make_tracker([4])), list[BaseException]()

    def ask() -> None:
        try:
            tracker.answer(RequestSlice(session=1, epoch=0))
        except SchedulerTimeoutError as error:
            errors.append(error)

    asking = threading.Thread(target=ask, daemon=True)
    asking.start()
    assert second.close(failed=False)
    asking.join(30.0)
    assert "training ended before" in str(errors)
