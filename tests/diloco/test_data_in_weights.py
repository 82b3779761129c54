"""With slices of a coordinator, each sample of each epoch is in the weights exactly once, whatever dies."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock, patch

import pytest
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping
from torch import Tensor

from lightning_bytescheduler import DiLoCoStrategy, SliceDataModule
from lightning_bytescheduler.coordinator.service import CoordinatorServer
from lightning_bytescheduler.coordinator.slice_routes import SliceRoutes
from lightning_bytescheduler.coordinator.state_store import StateStore
from lightning_bytescheduler.coordinator.status import RunStatus
from lightning_bytescheduler.diloco.coordinator_protocol import UpdateReceipt
from lightning_bytescheduler.diloco.session import Unmerged
from lightning_bytescheduler.diloco.training_loop import CoordinatedBoundaries
from lightning_bytescheduler.slices.tracker import JoinTracker, Receipt, ReportProgress, RequestSlice, TrainedRun
from tests.diloco.coordinated_fits import alone, coordinator_options
from tests.diloco.coordinated_workers import until
from tests.diloco.fits import diloco_trainer
from tests.slices.fits import Decays, Remembers, make_rows
from tests.support.rank_pool import RankPool, free_port

COUNTS = [5, 17, 30, 9, 1, 26, 8, 12, 20, 24]
SAMPLES = sum(COUNTS)
EPOCHS = 3
LONG = 3600.0


def fit_epochs(rank: int, *, url: str, rows: str, folder: str, seconds: float = 0.0, **options: Any) -> list[list[int]]:
    module = Remembers()
    module.on_step = lambda step: time.sleep(seconds)
    with alone():
        strategy = DiLoCoStrategy(coordinator={"url": url, "name": f"w{rank}"})
        trainer = diloco_trainer(0, strategy, default_root_dir=folder, **{"max_epochs": EPOCHS, **options})
        trainer.fit(module, datamodule=SliceDataModule(rows, batch_size=2))
    return module.batches


def check(status: RunStatus, batches: list[list[list[int]]], *, wasted: bool, epochs: int = EPOCHS) -> None:
    slices = status.slices
    assert slices is not None
    assert status.samples == epochs * SAMPLES == slices.epoch * SAMPLES + slices.trained
    trained = Counter(number for worker in batches for batch in worker for number in batch)
    assert min(trained.values()) >= epochs
    assert wasted or max(trained.values()) == epochs


@pytest.fixture
def rows(tmp_path: Path) -> str:
    return make_rows(tmp_path / "rows", COUNTS)


@pytest.mark.parametrize(
    "run",
    [
        pytest.param({}, id="plain"),
        pytest.param({"overlap_steps": 2}, id="steps beside the exchange", marks=pytest.mark.slow),
        pytest.param({"fragments": 2}, id="fragments", marks=pytest.mark.slow),
    ],
)
def test_the_last_epoch_ends_when_all_of_it_is_in_the_weights(
    run: dict[str, Any], diloco_ranks: RankPool, tmp_path: Path, rows: str
) -> None:
    slices = SliceRoutes([rows])
    options = coordinator_options(samples_per_round=40, rounds={"start_workers": 2}, **run)
    with CoordinatorServer(options, slices=slices) as server:
        batches = diloco_ranks.run(fit_epochs, url=server.url, rows=rows, folder=str(tmp_path))
        check(server.status(), batches, wasted=False)


class Missing(NamedTuple):
    """What a worker has trained on, in how many batches by the end of each epoch, at which rates, and its patience."""

    batches: list[list[int]]
    counts: list[int]
    rates: list[float]
    waited: int


class Logs(Decays):
    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        self.log("loss", loss, on_step=False, on_epoch=True, batch_size=len(batch))
        return loss


class Epochs(Callback):
    """Counts batches at the end of each epoch, and has the leader save a checkpoint."""

    def __init__(self, file: str) -> None:
        self.file = file
        self.counts: list[int] = []

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.counts.append(len(pl_module.batches))
        trainer.save_checkpoint(self.file)


def fit_missing_an_epoch(
    rank: int, *, url: str, rows: str, folder: str, max_epochs: int, ckpt_path: str | None = None
) -> Missing:
    """Rank 1 is in its first step until rank 0 waits for it: in its third epoch, as the first one is not over."""
    waits = Path(folder, "waits")
    wait_aside = CoordinatedBoundaries.wait_aside
    module, epochs = Logs(), Epochs(f"{folder}/saved.ckpt")
    callbacks: list[Callback] = [epochs]
    if rank == 1:
        module.on_step = lambda step: until(waits.exists, "the wait of the other worker")
    patient = EarlyStopping("loss", patience=100, min_delta=1e9)
    callbacks.append(patient)

    def wait(boundaries: CoordinatedBoundaries) -> bool:
        if rank == 0:
            waits.touch()
        return wait_aside(boundaries)

    with alone(), patch.object(CoordinatedBoundaries, "wait_aside", wait):
        strategy = DiLoCoStrategy(coordinator={"url": url, "name": f"w{rank}"})
        trainer = diloco_trainer(0, strategy, default_root_dir=folder, max_epochs=max_epochs, callbacks=callbacks)
        trainer.fit(module, datamodule=SliceDataModule(rows, batch_size=2), ckpt_path=ckpt_path)
    return Missing(module.batches, epochs.counts, module.rates, patient.wait_count)


def test_a_worker_that_misses_an_epoch_trains_on_no_other_instead(
    diloco_ranks: RankPool, tmp_path: Path, rows: str
) -> None:
    """Nor does a fit that goes on from a checkpoint."""
    slices = SliceRoutes([rows])
    options = coordinator_options(samples_per_round=10_000, rounds={"start_workers": 2})
    arguments = {"rows": rows, "folder": str(tmp_path)}
    with CoordinatorServer(options, slices=slices) as server:
        fast, slow = diloco_ranks.run(fit_missing_an_epoch, url=server.url, max_epochs=EPOCHS, **arguments)
        check(server.status(), [fast.batches, slow.batches], wasted=False)
        first, second, third = slow.counts[:EPOCHS]
        assert first == second < third
        assert slow.waited == 1  # after two epochs with a loss
        assert fast.rates[:EPOCHS] == slow.rates[:EPOCHS] == [0.01, 0.005, 0.0025]
        again = diloco_ranks.run(
            fit_missing_an_epoch,
            url=server.url,
            max_epochs=EPOCHS + 1,
            ckpt_path=f"{tmp_path}/saved.ckpt",
            **arguments,
        )
        batches = [fit.batches for fit in (fast, slow, *again)]
        check(server.status(), batches, wasted=False, epochs=EPOCHS + 1)


@pytest.mark.parametrize("limit", [3, 9])
def test_a_limit_ends_an_epoch_before_its_data_do(
    limit: int, diloco_ranks: RankPool, tmp_path: Path, rows: str
) -> None:
    slices = SliceRoutes([rows])
    options = coordinator_options(samples_per_round=40, rounds={"start_workers": 2})
    with CoordinatorServer(options, slices=slices) as server:
        limited = {"limit_train_batches": limit, "max_epochs": 2}
        batches = diloco_ranks.run(fit_epochs, url=server.url, rows=rows, folder=str(tmp_path), **limited)
    assert [len(one) for one in batches] == [2 * limit, 2 * limit]


def test_what_a_dead_worker_said_that_it_has_trained_on_is_trained_on(
    diloco_ranks: RankPool, tmp_path: Path, rows: str
) -> None:
    """It dies in the last epoch, when the others have nothing else left to do: they take one more epoch."""
    slices = SliceRoutes([rows])
    tracker = slices.tracker
    session = tracker.join(JoinTracker(worker="dies", incarnation="1")).session
    held = tracker.request(RequestSlice(session=session, epoch=0))
    for trained in (0, held.samples):
        assert tracker.progress(ReportProgress(session=session, grant=held.grant, trained=trained)) == Receipt(
            accepted=True
        )
    options = coordinator_options(samples_per_round=40, rounds={"start_workers": 2})
    with CoordinatorServer(options, slices=slices) as server, ThreadPoolExecutor(1) as beside:
        fits = beside.submit(diloco_ranks.run, fit_epochs, url=server.url, rows=rows, folder=str(tmp_path))
        merged = EPOCHS * SAMPLES - held.samples
        until(lambda: fits.done() or server.status().samples >= merged, "all that the living workers have")
        assert server.status().samples == merged
        tracker.release("dies")
        batches = fits.result()
        check(server.status(), batches, wasted=False)


class Crashing:
    """A coordinator that is killed, as far as its state shows it, and started anew at the same address."""

    def __init__(self, rows: str, folder: Path) -> None:
        self._rows = rows
        self._folder = folder / "state"
        self._port = free_port()
        self.server = self._start()

    def _start(self) -> CoordinatorServer:
        return CoordinatorServer(
            coordinator_options(samples_per_round=20, rounds={"start_workers": 2, "silent_after": 2.0}),
            port=self._port,
            store=StateStore(str(self._folder)),
            slices=SliceRoutes([self._rows]),
        )

    def crash(self) -> None:
        """What was saved so far is there; what is saved as it ends is not."""
        kept = self._folder.with_name("kept")
        until(lambda: self._copied(kept), "a copy while no state took the place of another")
        self.server.close()
        shutil.rmtree(self._folder)
        kept.rename(self._folder)
        self.server = self._start()

    def _copied(self, kept: Path) -> bool:
        shutil.rmtree(kept, ignore_errors=True)
        try:
            shutil.copytree(self._folder, kept, ignore=shutil.ignore_patterns("*.part", "lock"))
        except shutil.Error:
            return False
        return True


@pytest.mark.parametrize(
    "moments",
    [pytest.param((0.2, 0.9, 1.1), id="early"), pytest.param((1.0, 2.0, 2.5), id="late", marks=pytest.mark.slow)],
)
def test_a_coordinator_that_crashes_as_epochs_turn_loses_and_repeats_nothing(
    moments: tuple[float, ...], diloco_ranks: RankPool, tmp_path: Path, rows: str
) -> None:
    """Moments are in epochs. Of what workers have trained on since the last saved state some may be in vain."""
    coordinator = Crashing(rows, tmp_path)
    try:
        with ThreadPoolExecutor(1) as beside:
            url = coordinator.server.url
            fits = beside.submit(diloco_ranks.run, fit_epochs, url=url, rows=rows, folder=str(tmp_path), seconds=0.005)
            for moment in moments:

                def has_come(moment: float = moment) -> bool:
                    return fits.done() or coordinator.server.status().samples >= moment * SAMPLES

                until(has_come, "the moment of a crash")
                coordinator.crash()
            batches = fits.result()
        check(coordinator.server.status(), batches, wasted=True)
    finally:
        coordinator.server.close()


@pytest.mark.parametrize(("verdict", "is_known"), [("added", True), ("again", False)])
def test_an_update_that_was_there_before_does_not_say_which_samples_are_merged(verdict: str, is_known: bool) -> None:
    """It may have had fewer: what a worker has trained on since its connection broke is sent with the same update."""
    unmerged = Unmerged()
    unmerged.data = Mock()
    runs = (TrainedRun(epoch=0, slice_index=0, start=0, stop=4),)
    receipt = UpdateReceipt(verdict=verdict, weight=4)
    unmerged.counts(Mock(upload=Mock(answer=receipt), update=Mock(trained=runs)))
    assert unmerged.data.merged.called is is_known
    assert unmerged.data.reset.called is not is_known
