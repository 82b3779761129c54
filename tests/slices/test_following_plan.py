"""The ranks of one worker share its batches: equally many steps, each sample once, faults are told."""

from __future__ import annotations

import queue
import threading
from collections import Counter, deque
from collections.abc import Callable, Iterator
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.exceptions import OptionError, SchedulerTimeoutError
from lightning_bytescheduler.slices.batches import ReadReport, SampleRun, SliceBatch
from lightning_bytescheduler.slices.tracked_plan import PlanThread, TrackerPlan
from lightning_bytescheduler.slices.tracker import SliceTracker
from lightning_bytescheduler.slices.training import FollowingPlan, LeadingRank, cut_batch, read
from tests.slices.tracker_workers import make_tracker

LIMIT_S = 10.0


class Worker:
    """What its ranks share, in one process."""

    def __init__(self, ranks: int) -> None:
        self.said: list[queue.Queue[str]] = [queue.Queue() for _ in range(ranks)]
        self.heeds: dict[int, Callable[[str], object]] = {}
        self.early: dict[int, deque[str]] = {rank: deque() for rank in range(ranks)}
        self.failure: BaseException | None = None
        self.lock = threading.Lock()
        self.ranks = [Rank(self, rank, ranks) for rank in range(ranks)]


class Rank:
    """A ``WorkerRanks``."""

    def __init__(self, worker: Worker, rank: int, count: int) -> None:
        self.worker, self.rank, self.count, self.timeout = worker, rank, count, LIMIT_S

    def tell(self, text: str = "") -> str:
        if self.rank:
            return self.worker.said[self.rank].get(timeout=LIMIT_S)
        for others in self.worker.said[1:]:
            others.put(text)
        return text

    def listen(self, heed: Callable[[str], object], on_error: Callable[[BaseException], object]) -> None:
        with self.worker.lock:
            self.worker.heeds[self.rank] = heed
            while self.worker.early[self.rank]:
                heed(self.worker.early[self.rank].popleft())

    def post(self, rank: int, text: str) -> None:
        with self.worker.lock:
            if rank in self.worker.heeds:
                self.worker.heeds[rank](text)
            else:
                self.worker.early[rank].append(text)

    def check(self) -> None:
        if self.worker.failure is not None:
            raise self.worker.failure


class IdleCalls:
    """Gives up, if it is to."""

    def __init__(self, *, gives_up: bool = False) -> None:
        self.calls: list[str] = []
        self.gives_up = gives_up
        self.waiting = threading.Event()

    def waits(self) -> bool:
        self.calls.append("waits")
        self.waiting.set()
        return self.gives_up

    def goes_on(self) -> None:
        self.calls.append("goes on")


@pytest.fixture
def plans() -> Iterator[list[PlanThread]]:
    made: list[PlanThread] = []
    yield made
    for plan in made:
        assert plan.stop()


def leading(
    plans: list[PlanThread], rank: Rank, tracker: Any, sizes: tuple[int, ...], *, worker: str = "w", idle: Any = None
) -> PlanThread:
    others = LeadingRank(rank, sizes)
    own = TrackerPlan(tracker, worker=worker, incarnation="a", batch_size=sum(sizes), slices=tuple(tracker.catalogue))
    plan = PlanThread(own, timeout=LIMIT_S, idle=idle, others=others)
    others.listen(plan.quarantine)
    plans.append(plan)
    return plan


def samples(batch: SliceBatch) -> list[tuple[int, int]]:
    return [(run.slice_index, sample) for run in batch.runs for sample in range(run.start, run.stop)]


@given(
    lengths=st.lists(st.integers(1, 7), min_size=1, max_size=4),
    sizes=st.lists(st.integers(1, 5), min_size=1, max_size=4),
)
def test_parts_are_the_batch_and_none_is_empty(lengths: list[int], sizes: list[int]) -> None:
    sizes[0] += max(sum(lengths) - sum(sizes), 0)
    runs = [SampleRun(slice_index=index, start=2, stop=2 + length) for index, length in enumerate(lengths)]
    whole = SliceBatch(3, tuple(runs), (9,))
    parts = cut_batch(whole, sizes)
    assert len(parts) == len(sizes)
    assert all(part.epoch == 3 and 9 in part.ahead for part in parts)
    found = [sample for part in parts for sample in samples(part)]
    assert all(samples(part) for part in parts)
    assert set(found) == set(samples(whole))
    if sum(lengths) >= len(sizes):
        assert found == samples(whole)
    if sum(lengths) == sum(sizes):
        assert [len(samples(part)) for part in parts] == sizes


def test_each_rank_gets_its_part_of_every_batch(plans: list[PlanThread]) -> None:
    tracker, worker = make_tracker([6, 5, 4, 7]), Worker(3)
    first = leading(plans, worker.ranks[0], tracker, (2, 1, 1))
    followers = [FollowingPlan(rank, batch_size=1) for rank in worker.ranks[1:]]
    trained: Counter[Any] = Counter()
    passes = [iter(first), *map(iter, followers)]
    for part in passes[0]:
        parts = [part, *(next(each) for each in passes[1:])]
        for plan in (first, *followers):
            plan.received(ReadReport({}))
            plan.trained()
        trained.update({sample for each in parts for sample in samples(each)})
    assert [next(each, None) for each in passes[1:]] == [None, None]
    first.settle()
    assert trained == Counter((index, sample) for index, count in enumerate([6, 5, 4, 7]) for sample in range(count))
    assert tracker.report().trained == 22


def test_a_pass_that_is_given_up_is_made_again(plans: list[PlanThread]) -> None:
    tracker, worker = make_tracker([12]), Worker(2)
    first, second = leading(plans, worker.ranks[0], tracker, (1, 1)), FollowingPlan(worker.ranks[1], batch_size=1)
    one, other = iter(first), iter(second)
    for _ in range(3):  # the third is not trained on
        before = samples(next(one)) + samples(next(other))
    first.trained()
    first.trained()
    assert samples(next(iter(first))) + samples(next(iter(second))) == before


def test_what_another_rank_finds_corrupt_is_left_out_at_once(plans: list[PlanThread]) -> None:
    tracker, worker = make_tracker([4, 4, 4]), Worker(2)
    first, second = leading(plans, worker.ranks[0], tracker, (1, 1)), FollowingPlan(worker.ranks[1], batch_size=1)
    one, other = iter(first), iter(second)
    next(one)
    corrupt = next(other).runs[0].slice_index
    second.received(ReadReport({}, corrupt=((tuple(tracker.catalogue)[corrupt].key, "on purpose"),)))
    first.trained()
    first.settle()
    assert len(tracker.report().quarantined) == 1


def hold_all(tracker: SliceTracker, plans: list[PlanThread]) -> None:
    """Have others hold the only slice, in the running epoch and in the next one, which has begun by then."""
    for name in ("holder", "next holder"):
        slices = tuple(tracker.catalogue)
        plans.append(PlanThread(TrackerPlan(tracker, worker=name, incarnation="a", batch_size=4, slices=slices)))
        next(iter(plans[-1]))


def test_all_do_at_once_what_the_first_does_while_others_hold_all(plans: list[PlanThread]) -> None:
    tracker, worker = make_tracker([4]), Worker(2)
    hold_all(tracker, plans)
    idle = [IdleCalls(), IdleCalls()]
    first = leading(plans, worker.ranks[0], tracker, (1, 1), idle=idle[0])
    second = FollowingPlan(worker.ranks[1], batch_size=1, idle=idle[1])
    found: list[SliceBatch] = []
    thread = threading.Thread(target=lambda: found.append(next(iter(first))))
    thread.start()
    assert idle[0].waiting.wait(LIMIT_S)
    plans[0].leave()
    found.append(next(iter(second)))
    thread.join(LIMIT_S)
    assert sorted(sample for batch in found for sample in samples(batch)) == [(0, 0), (0, 1)]
    assert idle[0].calls == idle[1].calls
    assert idle[0].calls[-1] == "goes on"


def test_all_give_up_together(plans: list[PlanThread]) -> None:
    tracker, worker = make_tracker([4]), Worker(2)
    hold_all(tracker, plans)
    first = leading(plans, worker.ranks[0], tracker, (1, 1), idle=IdleCalls(gives_up=True))
    second = FollowingPlan(worker.ranks[1], batch_size=1, idle=IdleCalls(gives_up=True))
    assert list(first) == list(second) == []


def test_a_wait_for_the_first_rank_ends() -> None:
    worker = Worker(2)
    rank = worker.ranks[1]
    rank.timeout = 0.01
    plan = FollowingPlan(rank, batch_size=1)
    worker.said[1].put("1")
    with pytest.raises(SchedulerTimeoutError, match="made no batch"):
        next(iter(plan))
    worker.said[1].put("2")
    worker.failure = ConnectionError("on purpose")
    with pytest.raises(ConnectionError, match="on purpose"):
        next(iter(plan))


def test_a_damaged_text_is_refused() -> None:
    with pytest.raises(OptionError, match="text"):
        read('{"kind": "Part", "number": "one"}')
