"""Slices that the coordinator of the rounds hands out, too."""

from __future__ import annotations

import threading
import traceback
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple
from unittest.mock import Mock, patch

import pytest

from lightning_bytescheduler import DiLoCoStrategy, SliceDataModule
from lightning_bytescheduler.coordinator.service import CoordinatorServer
from lightning_bytescheduler.coordinator.slice_routes import SliceRoutes
from lightning_bytescheduler.coordinator.status import RunStatus
from lightning_bytescheduler.diloco.coordinator_client import Answer
from lightning_bytescheduler.diloco.process_groups import WorkerGroup
from lightning_bytescheduler.diloco.training_loop import CoordinatedBoundaries
from lightning_bytescheduler.diloco.worker_slices import CoordinatedSlices
from lightning_bytescheduler.exceptions import CoordinatorError, OptionError, RankFailedError, SchedulerTimeoutError
from lightning_bytescheduler.slices.tracker import (
    Assignment,
    JoinAgain,
    Joined,
    JoinTracker,
    Receipt,
    ReportProgress,
    RequestSlice,
    TrackerReport,
    encode,
)
from lightning_bytescheduler.slices.training import TrackedTraining
from tests.diloco.coordinated_fits import alone, coordinator_options, together
from tests.diloco.coordinated_workers import until
from tests.diloco.fits import diloco_trainer
from tests.slices.fits import Remembers, make_rows
from tests.support.rank_pool import RankPool, free_port

COUNTS = [5, 7, 3, 9, 1, 6, 8, 2]
SAMPLES = sum(COUNTS)
LONG = 3600.0


def fit_slices(rank: int, *, url: str, rows: str, folder: str, **options: Any) -> list[list[int]]:
    module = Remembers()
    with alone():
        trainer = diloco_trainer(
            0,
            DiLoCoStrategy(coordinator={"url": url, "name": f"w{rank}"}, **options),
            default_root_dir=folder,
        )
        trainer.fit(module, datamodule=SliceDataModule(rows, batch_size=2))
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("bytescheduler")]
    return module.batches


@pytest.fixture
def rows(tmp_path: Path) -> str:
    return make_rows(tmp_path / "rows", COUNTS)


def hold_slice(slices: SliceRoutes, worker: str, *, epoch: int) -> tuple[int, Assignment]:
    """A member that has a slice, and does nothing; returns its session, too."""
    session = slices.tracker.join(JoinTracker(worker=worker, incarnation="1")).session
    held = slices.tracker.request(RequestSlice(session=session, epoch=epoch))
    assert isinstance(held, Assignment)
    return session, held


def check_epochs(trained: Counter[int], status: RunStatus, *, repeated: bool = False) -> TrackerReport:
    """Each sample is once in the weights in each epoch before the running one, and what is in them counts.

    Where the ranks of a worker ``repeated`` some, as there were fewer than ranks, steps had more than that.
    """
    slices = status.slices
    assert slices is not None
    merged = slices.epoch * slices.samples + slices.trained + slices.ahead
    assert status.samples >= merged if repeated else status.samples == merged
    assert sum(trained.values()) >= merged  # not what came too late for the last round
    assert min(trained.values()) >= slices.epoch
    return slices


def test_each_epoch_is_shared_and_goes_on_by_itself(diloco_ranks: RankPool, tmp_path: Path, rows: str) -> None:
    slices = SliceRoutes([rows])
    options = coordinator_options(inner_steps=4, outer_steps=8, rounds={"start_workers": 2})
    with CoordinatorServer(options, slices=slices) as server:
        batches = diloco_ranks.run(fit_slices, url=server.url, rows=rows, folder=str(tmp_path))
        status = server.status()
    trained = Counter(number for worker in batches for batch in worker for number in batch)
    assert set(trained) == set(range(SAMPLES))  # at least one epoch was gone through
    check_epochs(trained, status)
    assert all(batches)


def test_a_worker_without_a_slice_takes_part_before_its_first_batch(diloco_ranks: RankPool, tmp_path: Path) -> None:
    """The first round is to have two workers, and there is one slice for them: one waits for what others have."""
    slices = SliceRoutes([make_rows(tmp_path / "one", [48])])
    hold_slice(slices, "ghost", epoch=0)
    options = coordinator_options(inner_steps=4, outer_steps=4, rounds={"start_workers": 2})
    with CoordinatorServer(options, slices=slices) as server:
        batches = diloco_ranks.run(fit_slices, url=server.url, rows=str(tmp_path / "one"), folder=str(tmp_path))
    assert sorted(map(bool, batches)) == [False, True]


def test_no_worker_waits_at_the_end_of_an_epoch_for_a_slice_that_another_one_has(
    diloco_ranks: RankPool, tmp_path: Path, rows: str
) -> None:
    """A member in no hurry has begun one of the first epoch; the workers train on all of the next one in that time."""
    slices = SliceRoutes([rows])
    session, held = hold_slice(slices, "ghost", epoch=0)
    begins = ReportProgress(session=session, grant=held.grant, trained=0)
    assert slices.tracker.progress(begins) == Receipt(accepted=True)
    # 32 steps: more than are left of the first epoch, and fewer than of both.
    options = coordinator_options(inner_steps=4, equal_steps=True, outer_steps=4, rounds={"start_workers": 2})
    with CoordinatorServer(options, slices=slices) as server:
        batches = diloco_ranks.run(fit_slices, url=server.url, rows=rows, folder=str(tmp_path))
        status = server.status().slices
    assert status is not None
    assert status.epoch == 0
    assert status.ahead > 0
    trained = Counter(number for worker in batches for batch in worker for number in batch)
    first = sum(COUNTS[: held.slice_index])
    missing = set(range(first, first + held.samples))
    assert all(count <= (1 if number in missing else 2) for number, count in trained.items())
    assert sum(trained.values()) == status.trained + status.ahead


class Trained(NamedTuple):
    """What a rank has trained on, and how often it was asked whether to wait for other workers."""

    batches: list[list[int]]
    waits: int


def fit_beside(rank: int, *, url: str, rows: str, folder: str, port: int, **options: Any) -> Trained:
    """Ranks 0 and 1 are a worker, rank 2 is another one."""
    module = Remembers()
    is_alone = rank == 2
    strategy = (
        DiLoCoStrategy(coordinator={"url": url, "name": "alone"})
        if is_alone
        else DiLoCoStrategy(coordinator={"url": url, "name": "pair"}, **options)
    )
    wait_aside = CoordinatedBoundaries.wait_aside

    def wait(boundaries: CoordinatedBoundaries) -> bool:
        if rank == 0:
            Path(folder, "waits").touch()
        return wait_aside(boundaries)

    waits = patch.object(CoordinatedBoundaries, "wait_aside", autospec=True, side_effect=wait)
    with alone() if is_alone else together(rank, ranks=2, port=port), waits as waited:
        trainer = diloco_trainer(0 if is_alone else rank, strategy, default_root_dir=folder)
        trainer.fit(module, datamodule=SliceDataModule(rows, batch_size=2))
    assert not [thread.name for thread in threading.enumerate() if thread.name.startswith("bytescheduler")]
    return Trained(module.batches, waited.call_count)


def samples_of_steps(first: list[list[int]], second: list[list[int]]) -> Iterator[int]:
    """What two ranks have trained on together; a sample that was repeated for the second one counts once."""
    assert len(first) == len(second)
    for one, other in zip(first, second, strict=True):
        assert one
        assert other
        assert set(one).isdisjoint(other) or one == other
        yield from set(one) | set(other)


@pytest.mark.parametrize(
    ("inner", "counts", "waits"),
    [
        pytest.param("ddp", COUNTS, False, id="ddp", marks=pytest.mark.slow),
        pytest.param("bytescheduler", [24], True, id="bytescheduler, and the worker has to wait"),
    ],
)
def test_the_ranks_of_a_worker_share_its_batches(
    inner: str, counts: list[int], waits: bool, three_plain_ranks: RankPool, tmp_path: Path
) -> None:
    rows = make_rows(tmp_path / "rows", counts)
    slices = SliceRoutes([rows])
    ghosts = [f"ghost{epoch}" for epoch in range(2 * waits)]  # have all that is to be had
    for epoch, ghost in enumerate(ghosts):
        hold_slice(slices, ghost, epoch=epoch)

    def let_go() -> None:
        until((tmp_path / "waits").exists, "the worker's waiting")
        for ghost in ghosts:
            slices.tracker.release(ghost)

    letting_go = threading.Thread(target=let_go if waits else lambda: None, daemon=True)
    letting_go.start()
    options = coordinator_options(inner_steps=4, outer_steps=4 if waits else 10, rounds={"start_workers": 2})
    with CoordinatorServer(options, slices=slices) as server:
        first, second, alone = three_plain_ranks.run(
            fit_beside, url=server.url, rows=rows, folder=str(tmp_path), port=free_port(), inner=inner
        )
        status = server.status()
    letting_go.join()
    trained = Counter(samples_of_steps(first.batches, second.batches))
    trained.update(number for batch in alone.batches for number in batch)
    assert set(trained) == set(range(sum(counts)))
    check_epochs(trained, status, repeated=True)
    assert first.waits == second.waits
    assert (first.batches and alone.batches) or waits  # of two slices, one worker may get both
    assert first.waits or not waits


def fit_beside_a_failure(rank: int, **arguments: Any) -> list[list[int]]:
    """Rank 1 fails in its third step."""
    if rank == 2:
        return fit_beside(rank, **arguments).batches
    module = Remembers()

    def fail(step: int) -> None:
        if rank == 1 and step == 3:
            raise ValueError("on purpose")

    module.on_step = fail
    with together(rank, ranks=2, port=arguments["port"]):
        strategy = DiLoCoStrategy(coordinator={"url": arguments["url"], "name": "pair"}, inner="bytescheduler")
        trainer = diloco_trainer(rank, strategy, default_root_dir=arguments["folder"])
        with pytest.raises(Exception, match="on purpose") as raised:
            trainer.fit(module, datamodule=SliceDataModule(arguments["rows"], batch_size=2))
    assert not [thread.name for thread in threading.enumerate() if thread.name == "bytescheduler-slice-plan"]
    assert rank == 1 or "ank 1" in "".join(traceback.format_exception(raised.value))
    return module.batches


def test_what_a_worker_held_of_which_a_rank_has_failed_goes_to_others(
    three_plain_ranks: RankPool, tmp_path: Path, rows: str
) -> None:
    slices = SliceRoutes([rows])
    options = coordinator_options(inner_steps=4, outer_steps=8, rounds={"start_workers": 2})
    with CoordinatorServer(options, slices=slices) as server:
        first, second, alone = three_plain_ranks.run(
            fit_beside_a_failure, url=server.url, rows=rows, folder=str(tmp_path), port=free_port()
        )
        status = server.status().slices
    assert status is not None
    assert status.epoch >= 1  # alone could end the first one
    assert len(first) <= 3 == len(second)
    told = first[:2] + second[:2]
    assert {number for batch in [*told, *alone] for number in batch} == set(range(SAMPLES))


def fit_reading_otherwise(rank: int, *, rows: str) -> None:
    trainer = diloco_trainer(rank, DiLoCoStrategy(coordinator="http://127.0.0.1:1", inner="ddp"))
    with pytest.raises(OptionError, match=r"num_workers.*the same on every rank"):
        trainer.fit(Remembers(), datamodule=SliceDataModule(rows, batch_size=2, num_workers=rank))


def test_ranks_of_a_worker_that_read_differently_far_ahead_are_told(diloco_ranks: RankPool, rows: str) -> None:
    diloco_ranks.run(fit_reading_otherwise, rows=rows)


class Answering:
    """Stands for a client: answers as it is told to, one after the other."""

    worker = "w0"

    def __init__(self, *answers: Answer) -> None:
        self.answers = list(answers)

    def request(self, method: str, path: str, *, body: bytes) -> Answer:
        return self.answers.pop(0)

    def start(self, answer: Answer) -> Future[Answer]:
        future: Future[Answer] = Future()
        future.set_result(answer)
        return future


GIVEN_UP = Answer(status=403, headers={}, body=b'{"error": "no session of this run"}')


def runtime_with(client: Any) -> Any:
    return Mock(client=client, group=WorkerGroup())


def connected(client: Any, check: Any = lambda: None, timeout: float = 30.0) -> CoordinatedSlices:
    slices = CoordinatedSlices(Mock(), runtime_with(client), timeout=timeout, check=check)
    assert slices.connect(Mock()) is slices
    return slices


def tracker_of(*answers: Answer, timeout: float = 30.0) -> CoordinatedSlices:
    return connected(Answering(*answers), timeout=timeout)


def test_a_worker_that_was_given_up_joins_again() -> None:
    """Its steps go on, and the slices that it held have gone to others."""
    tracker = tracker_of(GIVEN_UP, GIVEN_UP)
    assert tracker.answer(ReportProgress(session=1, grant=1, trained=3)) == JoinAgain()
    assert tracker.answer(RequestSlice(session=1, epoch=0)) == JoinAgain()
    joined = Joined(session=2, run="a", epoch=0)
    tracker = tracker_of(GIVEN_UP, Answer(status=200, headers={}, body=encode(joined).encode()))
    assert tracker.answer(JoinTracker(worker="w0", incarnation="1")) == joined


def test_a_worker_that_is_not_let_in_again_says_so() -> None:
    with pytest.raises(SchedulerTimeoutError, match="no answer about slices"):
        tracker_of(GIVEN_UP, timeout=0.0).answer(JoinTracker(worker="w0", incarnation="1"))
    refusing = tracker_of(Answer(status=404, headers={}, body=b'{"error": "no data"}'))
    with pytest.raises(CoordinatorError, match=r"hands out no slices to this worker: .*no data"):
        refusing.answer(RequestSlice(session=1, epoch=0))


def test_a_request_for_slices_says_what_has_ended_the_training() -> None:
    """Not that the connection ended, or that no answer came in a time that has not passed."""

    class Ended(Answering):
        def start(self, answer: Answer) -> Future[Answer]:
            future: Future[Answer] = Future()
            future.cancel()
            return future

    def fail() -> None:
        raise RankFailedError(1, "on purpose")

    ended = connected(Ended(GIVEN_UP), fail)
    with pytest.raises(RankFailedError, match="on purpose"):
        ended.answer(RequestSlice(session=1, epoch=0))
    closed = tracker_of(GIVEN_UP)
    closed.closed = True
    with pytest.raises(SchedulerTimeoutError, match="training ended before"):
        closed.answer(JoinTracker(worker="w0", incarnation="1"))


@pytest.mark.parametrize("halts", [True, False])
def test_it_says_whether_the_plan_has_ended(halts: bool) -> None:
    training = Mock(spec=TrackedTraining)
    training.halt.return_value = halts
    slices = CoordinatedSlices(Mock(training=training), runtime_with(Mock()), timeout=1.0, check=lambda: None)
    slices.connect(Mock())
    assert slices.close(failed=True) is halts
