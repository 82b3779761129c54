"""Workers that take batches from a tracker: each sample once, whatever is read ahead and whichever waits."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices.epoch_plan import SliceBatch
from lightning_bytescheduler.slices.slice import SliceState
from lightning_bytescheduler.slices.tracker import SliceTracker
from lightning_bytescheduler.slices.training import TrackerPlan
from tests.slices.tracker_workers import Clock, make_tracker, slices, state_of


class _Waits(Exception):
    """The plan would wait now."""


class Trains:
    """A training loop that fetches batches ahead, and remembers what it trained on."""

    def __init__(self, tracker: SliceTracker, clock: Clock, name: str, trained: Counter, **options) -> None:
        self.plan = TrackerPlan(
            tracker,
            worker=name,
            incarnation="a",
            slices=tuple(tracker.catalogue),
            clock=clock,
            **{"batch_size": 3, **options},
        )
        self.clock = clock
        self.trained = trained
        self.begin()

    def begin(self) -> None:
        self.batches = self.one_pass()
        self.fetched: list[SliceBatch] = []

    def one_pass(self) -> Iterator[SliceBatch]:
        self.plan.begin_pass()
        while (found := self.plan.poll()) is not None:
            if isinstance(found, float):
                self.clock.now += found
                raise _Waits
            yield found

    def fetch(self) -> bool:
        try:
            self.fetched.append(next(self.batches))
        except _Waits:
            assert not self.fetched, "it waited while a batch was not trained on"
            self.begin()
            return False
        except StopIteration:
            return False
        return True

    def train(self) -> int:
        if not self.fetched:
            return 0
        batch = self.fetched.pop(0)
        for run in batch.runs:
            self.trained.update((batch.epoch, run.slice_index, sample) for sample in range(run.start, run.stop))
        self.plan.trained(batch)
        self.plan.report()
        return sum(run.stop - run.start for run in batch.runs)

    def epoch(self) -> list[int]:
        """Sizes of the batches of a pass, fetched one ahead as Lightning does."""
        self.begin()
        self.fetch()
        sizes = []
        while self.fetched:
            self.fetch()
            sizes.append(self.train())
        return sizes


def all_of(counts: list[int], epochs: int = 1) -> Counter:
    return Counter(
        (epoch, index, sample)
        for epoch in range(epochs)
        for index, count in enumerate(counts)
        for sample in range(count)
    )


def test_one_worker_goes_from_epoch_to_epoch():
    clock = Clock()
    trained: Counter = Counter()
    worker = Trains(make_tracker([4, 5, 2], clock), clock, "w", trained, batch_size=4)
    assert [worker.epoch() for _ in range(3)] == [[4, 4, 3]] * 3
    assert trained == all_of([4, 5, 2], epochs=3)
    assert worker.plan.epoch == 2


def test_the_batch_size_may_change():
    clock = Clock()
    trained: Counter = Counter()
    worker = Trains(make_tracker([10], clock), clock, "w", trained, batch_size=4)
    worker.fetch()
    worker.plan.batch_size = 1
    worker.fetch()
    assert [worker.train(), worker.train()] == [4, 1]


@given(st.data())
def test_each_sample_once_in_any_order_of_fetching_and_training(data):
    counts = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    clock = Clock()
    trained: Counter = Counter()
    tracker = make_tracker(counts, clock, seed=3)
    workers = [
        Trains(tracker, clock, f"w{number}", trained, batch_size=data.draw(st.integers(1, 5)), ahead=ahead)
        for number, ahead in enumerate(data.draw(st.lists(st.sampled_from([0, 2, 3]), min_size=1, max_size=4)))
    ]
    for _ in range(data.draw(st.integers(0, 60))):
        worker = data.draw(st.sampled_from(workers))
        getattr(worker, data.draw(st.sampled_from(["fetch", "train", "train", "begin"])))()
    wanted = tracker.epoch + 1
    for _ in range(1000):
        if tracker.epoch >= wanted:
            break
        for worker in workers:
            if not worker.fetched and not worker.fetch():
                worker.begin()
            worker.train()
    assert tracker.epoch >= wanted
    done = Counter({sample: count for sample, count in trained.items() if sample[0] < tracker.epoch})
    assert done == all_of(counts, epochs=tracker.epoch)
    assert set(trained.values()) == {1}


def test_a_pass_is_of_one_epoch_and_of_what_came_back_of_the_one_before():
    clock = Clock()
    trained: Counter = Counter()
    tracker = make_tracker([4, 4, 4], clock)
    slow, fast = (Trains(tracker, clock, name, trained, batch_size=3, ahead=0) for name in ("slow", "fast"))
    slow.fetch()
    slow.train()
    assert fast.epoch() == [3, 3, 2]
    fast.begin()
    fast.fetch()
    fast.fetch()
    assert [batch.epoch for batch in fast.fetched] == [1, 1]
    tracker.release("slow")  # what it has not trained on is a batch of its own
    found = []
    while fast.fetched or fast.fetch():
        found.append(fast.fetched[0].epoch)
        fast.train()
    assert sorted(found) == [0, 1, 1, 1, 1, 1]
    assert tracker.epoch == 1
    assert tracker.over
    assert trained == all_of([4, 4, 4], epochs=2)


def test_a_dead_workers_slice_is_continued_where_it_was():
    clock = Clock()
    trained: Counter = Counter()
    tracker = make_tracker([6, 6], clock)
    dead, other = (Trains(tracker, clock, name, trained) for name in "ab")
    dead.fetch()
    dead.train()
    dead.fetch()  # and is never trained
    other.epoch()
    tracker.release("a")
    other.epoch()  # the next one, and what the dead one had
    assert trained == all_of([6, 6], epochs=2)


def test_a_worker_that_was_given_up_joins_again():
    clock = Clock()
    trained: Counter = Counter()
    tracker = make_tracker([4, 4], clock)
    worker = Trains(tracker, clock, "w", trained, batch_size=2)
    worker.fetch()
    tracker.release("w")
    worker.train()  # of a slice that is still its own, as no other worker has taken it
    worker.epoch()
    assert trained == all_of([4, 4])
    assert tracker.over


def test_a_corrupt_slice_is_quarantined_and_what_was_handed_out_of_it_is_not_reported():
    clock = Clock()
    trained: Counter = Counter()
    tracker = make_tracker([3, 3], clock, shuffle=False)
    worker = Trains(tracker, clock, "w", trained)
    first = next(worker.batches)
    worker.plan.quarantine([("slice0", "it is damaged.")])
    worker.plan.trained(first)
    worker.plan.report()
    assert first.runs[0].slice_index == 0
    assert state_of(tracker, "slice0") == SliceState.QUARANTINED
    worker.fetch()
    worker.train()
    assert trained == {(0, 1, sample): 1 for sample in range(3)}
    assert tracker.over


@pytest.mark.parametrize("batch_size", [0, -1, 1.5, True])
def test_misuse(batch_size):
    with pytest.raises(OptionError, match="batch_size"):
        TrackerPlan(make_tracker([1]), worker="w", incarnation="a", batch_size=batch_size, slices=slices([1]))


def test_other_slices_than_the_trackers_are_an_error():
    plan = TrackerPlan(make_tracker([1]), worker="w", incarnation="a", batch_size=1, slices=slices([1], prefix="other"))
    with pytest.raises(OptionError, match="'slice0'"):
        plan.poll()


def test_without_waiting_epochs_end_together():
    clock = Clock()
    trained: Counter = Counter()
    tracker = make_tracker([4], clock)
    busy, idle = (Trains(tracker, clock, name, trained, batch_size=2, waits=False) for name in "ab")
    busy.fetch()
    assert idle.epoch() == []
    assert idle.plan.rest() is False
    assert busy.plan.rest()  # it has samples of its own
    idle.plan.end_epoch()
    assert idle.plan.epoch == 0
    while busy.fetched:
        busy.fetch()
        busy.train()
    assert busy.plan.rest() is None
    assert idle.epoch() == []  # it does not go on by itself
    assert idle.plan.rest() is None
    for worker in (idle, busy):
        worker.plan.end_epoch()
    assert idle.epoch() == [2, 2]
    assert busy.plan.epoch == 1
    assert trained == all_of([4], epochs=2)


def test_a_worker_whose_pass_is_over_takes_no_slice_by_asking_what_is_left():
    clock = Clock()
    tracker = make_tracker([100, 100, 30], clock, shuffle=False)
    slow = Trains(tracker, clock, "slow", Counter(), batch_size=10, ahead=1, waits=False)
    fast = Trains(tracker, clock, "fast", Counter(), batch_size=30, ahead=1, waits=False)
    for _ in range(8):  # of one slice, with another one ahead
        assert slow.fetch()
        slow.train()
    assert fast.fetch()
    assert not fast.fetch(), "it would have more to do than the other worker"
    fast.train()
    slow.fetch()
    slow.train()
    assert fast.plan.rest() is False
    assert slow.plan.rest()


def test_a_worker_that_asks_what_is_left_is_given_slices_that_no_worker_holds():
    clock = Clock()
    tracker = make_tracker([4], clock)
    worker, other = (Trains(tracker, clock, name, Counter(), batch_size=2, waits=False) for name in "ab")
    worker.fetch()
    assert other.plan.rest() is False
    tracker.release("a")
    assert other.plan.rest()
    assert other.epoch() == [2, 2]
