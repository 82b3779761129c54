from __future__ import annotations

import faulthandler
import logging
import socket
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Any

import pytest
import torch.distributed as dist

from lightning_bytescheduler.exceptions import LaunchOrderError, RankFailedError, SchedulerTimeoutError
from lightning_bytescheduler.failures import board as board_module
from lightning_bytescheduler.failures import standstill
from lightning_bytescheduler.failures.board import FaultBoard
from lightning_bytescheduler.failures.rendezvous import Introduction, StorePresence
from lightning_bytescheduler.failures.standstill import Watchdog

BROKEN = RuntimeError("[/src/gloo/pair.cc:5] Connection closed by peer [::1]:1. This is typically caused by a worker.")
PATIENCE_S = 60.0  # for what takes a moment
LATE = RuntimeError("[/src/gloo/unbound_buffer.cc:78] Timed out waiting 3000ms for recv operation to complete")


class Scheduler:
    """What a board watches."""

    def __init__(self, steps: int = 3) -> None:
        self.failed_with: BaseException | None = None
        self.faults: list[tuple[RankFailedError, int | None]] = []
        self.told = threading.Event()
        self._steps = steps

    def rank_failed(self, fault: RankFailedError, step: int | None) -> None:
        self.faults.append((fault, step))
        self.told.set()

    def own_failure(self) -> BaseException | None:
        return self.failed_with

    def steps_handed_over(self) -> int:
        return self._steps


MakeBoard = Callable[..., FaultBoard]


def until(condition: Callable[[], object]) -> None:
    deadline = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.01)


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """A rank that lives is not silent, and waits end because of what they wait for, however busy the machine is."""
    monkeypatch.setattr(board_module, "_LINGER_S", 2 * PATIENCE_S)


@pytest.fixture
def no_rank_is_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(standstill, "_BEATS_MISSED", 10_000)


@pytest.fixture
def store() -> dist.TCPStore:
    return dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=10))


@pytest.fixture
def board(store: dist.TCPStore) -> Iterator[MakeBoard]:
    boards: list[FaultBoard] = []

    def make(rank: int, *, world_size: int = 2, **arguments: Any) -> FaultBoard:
        own = dist.TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
        boards.append(FaultBoard(own, rank=rank, world_size=world_size, **arguments))
        return boards[-1]

    yield make
    assert all(made.close(timeout=0.1) for made in boards)
    assert not [t for t in threading.enumerate() if t.name.startswith("bytescheduler")]


def test_a_failure_reaches_the_other_rank_with_rank_cause_and_step(
    board: MakeBoard, caplog: pytest.LogCaptureFixture
) -> None:
    failing, other, scheduler = board(1), board(0), Scheduler()
    failing.watch(Scheduler(steps=7))
    other.watch(scheduler)
    start = time.monotonic()
    with caplog.at_level(logging.ERROR):
        assert failing.publish(ValueError("boom"))
    # It has lingered only until the other knew.
    assert time.monotonic() - start < PATIENCE_S
    assert scheduler.told.is_set()
    ((fault, step),) = scheduler.faults
    assert (str(fault), fault.rank, step) == ("Rank 1 failed: ValueError: boom", 1, 7)
    assert other.fault is fault
    assert failing.fault is None
    assert "[rank 0] Rank 1 failed: ValueError: boom" in caplog.text


def test_a_rank_that_has_left_is_not_silent(board: MakeBoard) -> None:
    staying, leaving = board(0), board(1)
    assert leaving.close()
    error = RuntimeError("Connection closed by peer")
    assert staying.diagnose(error) is error


def test_a_rank_that_dies_where_no_collective_breaks_is_found_by_those_that_wait_for_it(
    board: MakeBoard, store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board_module, "NATIVE_S", 0.5)
    waiting = board(0)
    assert waiting.no_hope() is None
    store.set("signs/1", standstill.Sign(beat=3).encode())
    until(waiting.no_hope)
    assert str(waiting.no_hope()) == (
        "Rank 1 failed: it shows no sign of life; by the last signs of life, four in a second, rank 0 is in setup; "
        "rank 1 is in setup"
    )


def test_a_rank_that_has_met_the_others_and_dies_before_its_first_sign_is_found(
    board: MakeBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board_module, "NATIVE_S", 0.5)
    waiting = board(0, all_came=True)
    until(waiting.no_hope)
    assert str(waiting.no_hope()) == "Rank 1 failed: it shows no sign of life"


def test_a_rank_that_has_vanished_is_found_by_those_whose_training_waits_for_it(
    board: MakeBoard, store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before the timeout: a machine without power closes no connection."""
    monkeypatch.setattr(board_module, "NATIVE_S", 0.5)
    waiting, scheduler = board(0), Scheduler()
    waiting.watch(scheduler)
    store.set("signs/1", standstill.Sign(beat=3).encode())
    waiting.stands(lambda: standstill.Standing(awaited_step=4))
    assert scheduler.told.wait(PATIENCE_S)
    assert str(waiting.fault).startswith("Rank 1 failed: it shows no sign of life")


def test_a_rank_that_has_not_come_yet_has_not_failed(board: MakeBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(board_module, "NATIVE_S", 0.0)
    monkeypatch.setattr(standstill, "_BEATS_MISSED", 0)
    waiting = board(0)
    looked: set[float] = set()
    while len(looked) < 4:
        assert waiting.no_hope() is None
        looked.add(waiting._signs.looked_at)
        time.sleep(0.01)
    assert waiting.fault is None


def test_the_rank_that_fails_first_is_published(board: MakeBoard) -> None:
    first, second = board(0), board(1)
    assert first.publish(ValueError("boom"))
    assert not second.publish(KeyError("consequence"))
    assert second.fault is not None
    assert second.fault.rank == 0


def test_a_scheduler_that_comes_later_is_told_too(board: MakeBoard) -> None:
    failing, other, scheduler = board(1), board(0), Scheduler()
    failing.publish(ValueError("boom"))
    other.watch(scheduler)
    assert scheduler.told.wait(PATIENCE_S)


def test_a_failure_of_the_schedulers_own_threads_is_published_without_being_asked(board: MakeBoard) -> None:
    failing, other, scheduler, own = board(1), board(0), Scheduler(), Scheduler()
    other.watch(scheduler)
    failing.watch(own)
    own.failed_with = LaunchOrderError("different programs")
    assert scheduler.told.wait(PATIENCE_S)
    assert str(other.fault) == "Rank 1 failed: LaunchOrderError: different programs"


def test_ranks_that_end_by_themselves_are_not_stopped(board: MakeBoard) -> None:
    leaving, other, scheduler = board(1), board(0), Scheduler()
    other.watch(scheduler)
    start = time.monotonic()
    assert leaving.publish(SystemExit(), orderly=True)
    assert time.monotonic() - start < PATIENCE_S  # it does not wait for the others
    until(lambda: other.fault)  # it would be named, if anything broke
    beats = {other._signs._told.sign.beat}
    while len(beats) < 4:
        beats.add(other._signs._told.sign.beat)
        time.sleep(0.01)
    assert not scheduler.told.is_set()


def test_a_rank_without_a_sign_of_life_is_named_to_all(board: MakeBoard) -> None:
    first, second, scheduler = board(0, world_size=3), board(1, world_size=3), Scheduler()  # there is no rank 2
    second.watch(scheduler)
    found = first.diagnose(BROKEN, timeout=PATIENCE_S)
    assert isinstance(found, RankFailedError)
    assert found.rank == 2
    assert str(found).startswith(
        "Rank 2 failed: it shows no sign of life; this broke here: Connection closed by peer [::1]:1; by the last "
    )
    assert found.__cause__ is BROKEN
    assert scheduler.told.wait(PATIENCE_S)
    assert str(second.diagnose(BROKEN)) == str(found)


def test_a_rank_that_was_busy_when_another_one_died_is_not_named(board: MakeBoard, store: dist.TCPStore) -> None:
    asking, numbers = board(0, world_size=3), count(1)

    def beat(rank: int) -> None:
        store.set(f"signs/{rank}", standstill.Sign(beat=next(numbers)).encode())

    def only_one_is_busy() -> bool:
        beat(2)
        return asking._signs.silent() == [1]

    beat(1)
    until(only_one_is_busy)
    looked_at = asking._signs.looked_at
    with ThreadPoolExecutor(1) as pool:
        found = pool.submit(asking.diagnose, BROKEN, PATIENCE_S)
        until(lambda: asking._signs.looked_at > looked_at)
        while not found.done():
            beat(1)
            time.sleep(0.01)
    assert str(found.result()).startswith("Rank 2 failed: it shows no sign of life; this broke here: ")


def test_an_error_without_words_is_named_by_its_class(board: MakeBoard) -> None:
    """As Lightning's for a SIGTERM."""
    found = board(0).diagnose(SystemExit())
    assert str(found) == "Rank 1 failed: it shows no sign of life; this broke here: SystemExit"


def test_several_ranks_without_a_sign_of_life_are_named(board: MakeBoard) -> None:
    found = board(0, world_size=3).diagnose(BROKEN)
    assert str(found).startswith("Rank 1 failed: it shows no sign of life (nor do ranks 2)")


@pytest.mark.usefixtures("no_rank_is_silent")
def test_an_error_whose_cause_cannot_be_told_stays_as_it_is(board: MakeBoard) -> None:
    first, _ = board(0), board(1)
    assert first.diagnose(BROKEN, timeout=0.5) is BROKEN


def test_errors_that_are_no_consequence_are_not_looked_into(board: MakeBoard, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FaultBoard, "diagnose", pytest.fail)
    own = ValueError("boom")
    assert board(0).explain(own) is own


def has_told(store: dist.TCPStore, rank: int, place: str) -> bool:
    return store.check([f"signs/{rank}"]) and place in store.get(f"signs/{rank}").decode()


@pytest.mark.parametrize("error", [LATE, SchedulerTimeoutError("bucket 3 did not finish within 3 s.")])
def test_a_timeout_says_where_the_ranks_are(board: MakeBoard, store: dist.TCPStore, error: BaseException) -> None:
    ranks = [board(rank, world_size=3) for rank in range(3)]
    places = ("in training_step, step 4", "in training_step, step 3", "")
    for each, place in zip(ranks[:2], places, strict=False):
        each.watch(Scheduler(), partial(standstill.Standing, place=place))
    for rank, place in enumerate(places):
        until(partial(has_told, store, rank, place))
    explained = ranks[0].explain(error)
    assert isinstance(explained, SchedulerTimeoutError)
    assert str(explained).endswith(
        "Where the ranks are: rank 0 is in training_step, step 4; rank 1 is in training_step, step 3; rank 2 is in "
        "setup. The strategy's timeout allows more."
    )
    assert ranks[0].explain(explained) is explained  # once is enough
    ranks[1].publish(ValueError("boom"))
    assert str(ranks[0].explain(error)) == "Rank 1 failed: ValueError: boom"


def test_a_timeout_names_a_rank_that_has_vanished(
    board: MakeBoard, store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board_module, "NATIVE_S", 1.0)
    store.set("signs/1", standstill.Sign(beat=3).encode())
    found = board(0).explain(LATE)
    assert str(found).startswith("Rank 1 failed: it shows no sign of life; this broke here: ")
    assert found.__cause__ is LATE


@pytest.mark.parametrize(
    ("agent", "names"), [("False", "Rank 0 failed: its process is gone"), ("True", "Another rank failed: the rendez")]
)
def test_a_store_that_is_gone_names_its_host(
    board: MakeBoard, agent: str, names: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", agent)
    with socket.create_server(("127.0.0.1", 0)) as host:
        presence = StorePresence(*host.getsockname())
        other = board(1, presence=presence)
        served, _ = host.accept()
        assert not other.hopeless
        served.close()
        found = other.diagnose(BROKEN, timeout=PATIENCE_S)
    assert str(found).startswith(names)
    assert other.hopeless
    assert not other.publish(ValueError("not heard"))


def test_boards_follow_one_another(store: dist.TCPStore) -> None:
    boards = [FaultBoard.open(rank=0, world_size=1, store=store) for _ in range(2)]
    assert boards[0].publish(ValueError("boom"))
    assert boards[1].publish(ValueError("boom"))
    for one in boards:
        one.close()


def test_a_rank_that_does_not_train_again_after_a_failure_is_named(
    store: dist.TCPStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    for fails in (False, True):
        first, second = (FaultBoard.open(rank=rank, world_size=2, store=store) for rank in range(2))
        if fails:
            first.publish(ValueError("boom"))
        second.close()
        first.close()
    monkeypatch.setattr(board_module, "NATIVE_S", 0.5)
    again = FaultBoard.open(rank=0, world_size=2, store=store)
    with pytest.raises(RankFailedError, match="Rank 1 failed: it shows no sign of life"):
        again.roll_call(Introduction(rank=0, facts={}), PATIENCE_S)
    again.close()


def test_ranks_wait_for_each_other_at_a_place_that_all_reach(board: MakeBoard) -> None:
    first, second = board(0), board(1)
    assert not first.all_reach("alone", 0.1)
    with ThreadPoolExecutor(2) as pool:
        assert list(pool.map(lambda each: each.all_reach("end", PATIENCE_S), (first, second))) == [True, True]
    second.publish(ValueError("boom"))
    assert not first.all_reach("after a failure", 10 * PATIENCE_S)


def assert_leaves_last(host: FaultBoard, other: FaultBoard) -> None:
    leaving = threading.Thread(target=host.close, args=(2 * PATIENCE_S,))
    leaving.start()
    leaving.join(0.5)
    assert leaving.is_alive()
    other.close()
    leaving.join(PATIENCE_S)
    assert not leaving.is_alive()


def test_the_host_of_the_store_leaves_last(board: MakeBoard) -> None:
    host, other = board(0), board(1)
    assert_leaves_last(host, other)


def test_the_host_of_the_store_does_not_wait_for_the_dead(board: MakeBoard) -> None:
    host = board(0)
    host.diagnose(BROKEN)
    start = time.monotonic()
    assert host.close(2 * PATIENCE_S)
    assert time.monotonic() - start < PATIENCE_S


def test_the_host_of_the_store_waits_for_one_that_was_silent_once(board: MakeBoard, store: dist.TCPStore) -> None:
    host = board(0)
    store.set("signs/1", standstill.Sign(beat=999).encode())
    until(lambda: host._signs.silent() == [1])
    host._look_every = 1e6
    other = board(1)
    until(lambda: standstill.Sign.decode(store.get("signs/1")).beat < 999)
    assert_leaves_last(host, other)


@pytest.mark.usefixtures("no_rank_is_silent")
def test_the_host_of_the_store_waits_for_the_living_after_a_failure(
    board: MakeBoard, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(board_module, "_LINGER_S", 0.3)
    host, other = board(0), board(1)
    host.publish(ValueError("boom"))  # the other takes its time
    leaving = threading.Timer(1.0, other.close)
    leaving.start()
    assert host.close(PATIENCE_S)
    leaving.join()
    assert not other._store_lost


def test_a_training_thread_that_does_not_come_back_is_ended(
    board: MakeBoard, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(faulthandler, "dump_traceback_later", lambda *_, **__: None)  # would end this process
    codes: list[int] = []
    failing, stuck = board(1), board(0, watchdog=Watchdog(patience=0.5, end=codes.append))
    with stuck.patient():  # it writes a checkpoint
        failing.publish(ValueError("boom"))
        time.sleep(1.2)
        assert not codes
    until(lambda: codes)
    assert codes == [1]
    assert "Rank 1 failed: ValueError: boom. The training thread did not come back within 0.5 s" in caplog.text
    assert "test_a_training_thread_that_does_not_come_back_is_ended" in caplog.text  # where it was


def test_a_training_thread_that_comes_back_is_left_alone(board: MakeBoard) -> None:
    codes: list[int] = []
    watchdog = Watchdog(patience=PATIENCE_S, end=codes.append)
    failing, other = board(1), board(0, watchdog=watchdog)
    failing.publish(ValueError("boom"))
    other.take_over()
    watchdog._since = 0.0
    time.sleep(0.8)
    assert not codes


def test_an_endless_message_is_cut(board: MakeBoard) -> None:
    failing, other = board(1), board(0)
    failing.publish(ValueError("x" * 100_000))
    assert other.fault is not None
    assert len(str(other.fault)) < 3000
