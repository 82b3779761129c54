"""The ranks of one worker share its batches: equally many steps, each sample once, faults are told."""

from __future__ import annotations

import queue
import threading
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.slices.epoch_plan import ReadReport, SampleRun, SliceBatch
from lightning_bytescheduler.slices.tracker import SliceTracker
from lightning_bytescheduler.slices.training import TrackedTraining, cut_batch
from tests.slices.tracker_workers import make_tracker, tracked_training

LIMIT_S = 60.0


class Worker:
    """What its ranks share, in one process."""

    def __init__(self, ranks: int) -> None:
        self.said: list[queue.Queue[str]] = [queue.Queue() for _ in range(ranks)]
        self.numbers: list[list[float]] = [[] for _ in range(ranks)]
        self.meeting = threading.Barrier(ranks, timeout=LIMIT_S)
        self.ranks = [Rank(self, rank) for rank in range(ranks)]


class Rank:
    """A ``WorkerRanks``; each on a thread of its own."""

    def __init__(self, worker: Worker, rank: int) -> None:
        self.worker, self.rank = worker, rank

    def tell(self, text: str = "") -> str:
        if self.rank:
            return self.worker.said[self.rank].get(timeout=LIMIT_S)
        for others in self.worker.said[1:]:
            others.put(text)
        return text

    def total(self, numbers: list[float]) -> list[float]:
        self.worker.numbers[self.rank] = list(numbers)
        self.worker.meeting.wait()
        sums = [sum(each) for each in zip(*self.worker.numbers, strict=True)]
        self.worker.meeting.wait()
        return sums


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
def plans() -> Iterator[list[TrackedTraining]]:
    made: list[TrackedTraining] = []
    yield made
    for plan in made:
        assert plan.halt()


def worker_of(
    plans: list[TrackedTraining], tracker: Any, sizes: tuple[int, ...], idle: list[IdleCalls] | None = None
) -> list[TrackedTraining]:
    """Its ranks."""
    ranks = Worker(len(sizes)).ranks
    made = [
        tracked_training(
            tracker,
            tracker.catalogue,
            batch_sizes=sizes,
            rank=rank,
            worker=9,
            ranks=ranks[rank],
            idle=None if idle is None else idle[rank],
        )
        for rank in range(len(sizes))
    ]
    plans += made
    return made


def on_each(ranks: list[TrackedTraining], function: Callable[[TrackedTraining], Any]) -> list[Any]:
    with ThreadPoolExecutor(len(ranks)) as threads:
        return list(threads.map(function, ranks))


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


def train(rank: TrackedTraining) -> list[list[tuple[int, int]]]:
    """One pass."""
    found = []
    for batch in rank:
        rank.received(ReadReport({}))
        rank.trained()
        found.append(samples(batch))
    return found


def test_each_rank_gets_its_part_of_every_batch(plans: list[TrackedTraining]) -> None:
    counts = [6, 5, 4, 7]
    tracker = make_tracker(counts)
    ranks = worker_of(plans, tracker, (2, 1, 1))
    parts = on_each(ranks, train)
    ranks[0].settle()
    trained = Counter(
        sample for batches in zip(*parts, strict=True) for sample in {*batches[0], *batches[1], *batches[2]}
    )
    assert trained == Counter((index, sample) for index, count in enumerate(counts) for sample in range(count))
    assert [len(part) for part in parts[0][:5]] == [2] * 5
    assert tracker.report().trained == sum(counts)


def test_a_pass_that_is_given_up_is_made_again(plans: list[TrackedTraining]) -> None:
    def give_up(rank: TrackedTraining) -> list[tuple[int, int]]:
        batches = iter(rank)
        found = [samples(next(batches)) for _ in range(3)]
        for _ in range(2):
            rank.received(ReadReport({}))
            rank.trained()
        return found[2]  # is not trained on

    ranks = worker_of(plans, make_tracker([12]), (1, 1))
    assert on_each(ranks, give_up) == on_each(ranks, lambda rank: samples(next(iter(rank))))


def test_what_another_rank_finds_corrupt_is_left_out_from_the_next_pass_on(plans: list[TrackedTraining]) -> None:
    tracker = make_tracker([4, 4, 4])
    ranks = worker_of(plans, tracker, (1, 1))

    def find(rank: TrackedTraining) -> int:
        batch = next(iter(rank))
        if rank is ranks[1]:
            key = tracker.catalogue[batch.runs[0].slice_index].key
            rank.received(ReadReport({}, corrupt=((key, "on purpose"),)))
        return batch.runs[0].slice_index

    corrupt = on_each(ranks, find)[1]
    rest = on_each(ranks, train)[0]
    ranks[0].settle()
    assert corrupt not in {index for batch in rest for index, _ in batch}
    assert len(tracker.report().quarantined) == 1


def hold_all(tracker: SliceTracker, plans: list[TrackedTraining]) -> None:
    """Have others hold the only slice, in the running epoch and in the next one, which has begun by then."""
    for worker in range(2):
        plans.append(tracked_training(tracker, tracker.catalogue, worker=worker, batch_sizes=(4,)))
        for _ in range(worker):
            assert list(plans[-1]) == []  # all of the first epoch is held
        next(iter(plans[-1]))


def test_all_do_at_once_what_the_first_does_while_others_hold_all(plans: list[TrackedTraining]) -> None:
    tracker = make_tracker([4])
    hold_all(tracker, plans)
    idle = [IdleCalls(), IdleCalls()]
    ranks = worker_of(plans, tracker, (1, 1), idle)
    for _ in range(2):  # of the epochs that are held
        assert on_each(ranks, list) == [[], []]
    with ThreadPoolExecutor(2) as threads:
        found = [threads.submit(next, iter(rank)) for rank in ranks]
        assert idle[0].waiting.wait(LIMIT_S)
        tracker.release("worker-0")
        assert sorted(sample for each in found for sample in samples(each.result(LIMIT_S))) == [(0, 0), (0, 1)]
    assert idle[0].calls == idle[1].calls
    assert idle[0].calls[-1] == "goes on"


def test_all_give_up_together(plans: list[TrackedTraining]) -> None:
    tracker = make_tracker([4])
    hold_all(tracker, plans)
    idle = [IdleCalls(gives_up=True), IdleCalls(gives_up=True)]
    ranks = worker_of(plans, tracker, (1, 1), idle)
    for _ in range(2):  # of the epochs that are held
        assert on_each(ranks, list) == [[], []]
    assert [one.calls for one in idle] == [[], []]
    assert on_each(ranks, list) == [[], []]
    assert [one.calls for one in idle] == [["waits"], ["waits"]]
