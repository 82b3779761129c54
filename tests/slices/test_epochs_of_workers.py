"""Workers that make as many passes train together on as many epochs of the data, whatever their pace."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.slices.catalogue import SliceCatalogue
from lightning_bytescheduler.slices.epoch_plan import SliceBatch
from lightning_bytescheduler.slices.tracker import RequestSlice, SliceTracker, TrainedRun, WaitReason
from lightning_bytescheduler.slices.training import EpochOfRun, TrackerPlan
from tests.slices.test_tracked_batches import all_of
from tests.slices.tracker_workers import Clock, slices

COUNTS = [5, 17, 30, 9, 1, 26, 8, 12, 20, 24]
EPOCHS = 3


class Run:
    """The tracker of a coordinator, and what is in the weights."""

    def __init__(self, counts: list[int]) -> None:
        self.clock = Clock()
        self.tracker = SliceTracker(SliceCatalogue(slices(counts)), clock=self.clock, counts_merged=True)
        self.merged: Counter[tuple[int, int, int]] = Counter()


class Fit:
    """A worker's fit, which counts its epochs as Lightning does.

    Args:
        done: Epochs that it has gone through before, by its checkpoint.
        begins: The position of its checkpoint.
        limit: Batches after which an epoch ends.
    """

    def __init__(
        self,
        run: Run,
        name: str,
        *,
        epochs: int = EPOCHS,
        done: int = 0,
        begins: EpochOfRun | None = None,
        **options: int,
    ) -> None:
        self.run, self.name, self.epochs, self.done = run, name, epochs, done
        self.limit = options.pop("limit", 1_000_000)
        self.plan = TrackerPlan(
            run.tracker,
            worker=name,
            incarnation=f"with {done} epochs done",
            slices=tuple(run.tracker.catalogue),
            clock=run.clock,
            resumes=done > 0,
            begins=begins,
            counts_merged=True,
            **{"batch_size": 2, "ahead": 0, **options},
        )
        self.sizes: list[list[int]] = []  # of the batches of each pass
        self.pending: list[TrainedRun] = []
        self.going = self.steps()
        self.is_over = False

    def step(self) -> bool:
        """Train on a batch and take the next one; returns whether there was one."""
        trained = next(self.going, None)
        self.is_over = trained is None
        return bool(trained)

    def steps(self) -> Iterator[bool]:
        repeats = False
        while True:
            self.plan.begin_pass(repeats=repeats)
            self.sizes.append([])
            while len(self.sizes[-1]) < self.limit and (found := self.plan.poll()) is not None:
                if isinstance(found, float):
                    self.run.clock.now += found
                    self.send()
                    yield False
                else:
                    yield True
                    self.train(found)
            self.done += 1
            if self.done >= self.epochs:
                while (rest := self.plan.rest()) is False:
                    self.send()
                    yield False
                if rest is None or self.limit == len(self.sizes[-1]):
                    return
                repeats = True

    def train(self, batch: SliceBatch) -> None:
        self.sizes[-1].append(sum(run.stop - run.start for run in batch.runs))
        self.plan.trained(batch)
        self.plan.report()
        self.pending += [TrainedRun(batch.epoch, *run) for run in batch.runs]
        if len(self.pending) > 10:
            self.send()

    def send(self) -> None:
        runs, self.pending = self.pending, []
        if not runs:
            return
        assert self.run.tracker.fits(self.name, runs)
        self.run.tracker.book(self.name, runs)
        self.run.tracker.settle(runs, merged=True)
        for run in runs:
            self.run.merged.update((run.epoch, run.slice_index, sample) for sample in range(run.start, run.stop))
        self.plan.merged(runs)


def go_on(fits: list[Fit], steps: int = 10_000) -> None:
    """Each one trains for as long as it finds something; later ones take one step in that time."""
    for fit in reversed(fits):
        fit.step()
    for _ in range(steps):
        for fit in fits:
            while not fit.is_over and fit.step() and fit is not fits[-1]:
                pass
        if all(fit.is_over for fit in fits):
            return
    raise AssertionError("The fits do not end.")


def test_a_worker_that_misses_an_epoch_has_one_without_a_batch() -> None:
    run = Run(COUNTS)
    fast, slow = Fit(run, "fast"), Fit(run, "slow")
    slow.step()  # and is in a step until the other one can do no more
    while fast.step():
        pass
    assert len(fast.sizes) == EPOCHS
    go_on([fast, slow])
    assert run.merged == all_of(COUNTS, EPOCHS)
    assert [len(sizes) > 0 for sizes in slow.sizes[:EPOCHS]] == [True, False, True]


@pytest.mark.parametrize("workers", [1, 2, 3])
def test_all_epochs_and_no_more_are_in_the_weights(workers: int) -> None:
    run = Run(COUNTS)
    fits = [Fit(run, f"w{number}", ahead=number) for number in range(workers)]
    go_on(fits)
    assert run.merged == all_of(COUNTS, EPOCHS)


@given(st.data())
def test_each_sample_is_in_the_weights_as_often_whatever_the_pace(data: st.DataObject) -> None:
    counts = data.draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    epochs = data.draw(st.integers(1, 4))
    run = Run(counts)
    fits = [
        Fit(run, f"w{number}", epochs=epochs, batch_size=data.draw(st.integers(1, 5)), ahead=ahead)
        for number, ahead in enumerate(data.draw(st.lists(st.integers(0, 3), min_size=1, max_size=4)))
    ]
    for fit in fits:
        fit.step()
    for _ in range(data.draw(st.integers(0, 60))):
        data.draw(st.sampled_from(fits)).step()
    go_on(fits)
    assert run.merged == all_of(counts, epochs)


def test_a_fit_goes_on_from_a_checkpoint_where_an_epoch_was_missed() -> None:
    run = Run(COUNTS)
    fast, slow = Fit(run, "fast", epochs=2), Fit(run, "slow", epochs=2)
    slow.step()
    while fast.step():
        pass
    go_on([fast, slow])
    assert run.merged == all_of(COUNTS, 2)
    go_on([Fit(run, fit.name, epochs=4, done=slow.done) for fit in (fast, slow)])
    assert run.merged == all_of(COUNTS, 4)


def test_a_fit_goes_on_from_a_checkpoint_while_two_epochs_of_the_data_are_open() -> None:
    run = Run(COUNTS)
    fits = [Fit(run, "fast"), Fit(run, "slow")]
    fits[1].step()
    while fits[0].step():
        pass
    for fit in fits:
        run.tracker.release(fit.name)
    go_on([Fit(run, fit.name, done=1) for fit in fits])
    assert run.merged == all_of(COUNTS, EPOCHS)


def test_a_checkpoint_of_the_middle_of_an_epoch_goes_on_with_that_while_another_worker_is_ahead() -> None:
    run = Run(COUNTS)
    fast, leads = Fit(run, "fast"), Fit(run, "leads")
    leads.step()
    while fast.step() and run.tracker.epoch == 0 and len(fast.sizes) < 2:
        pass
    begins = leads.plan.position
    assert (begins.epoch, leads.done) == (0, 0)
    for fit in (fast, leads):
        run.tracker.release(fit.name)
    go_on([Fit(run, fit.name, begins=begins) for fit in (fast, leads)])
    assert run.merged == all_of(COUNTS, EPOCHS)


@pytest.mark.parametrize("merges", [True, False])
def test_a_worker_that_goes_on_after_an_epoch_that_another_is_still_in_has_the_next_one(merges: bool) -> None:
    """All of the epoch is trained on and not all of it in the weights, or the other worker holds a slice of it."""
    run = Run(COUNTS)
    first, other = Fit(run, "first", epochs=1), Fit(run, "other", epochs=2)
    other.step()
    while first.step():
        pass
    first.send()
    if merges:
        while run.tracker.request(RequestSlice(session=first.plan._session, epoch=0)).reason is not WaitReason.MERGING:
            assert other.step()
    begins = first.plan.position
    assert (begins.epoch, first.done) == (1, 1)
    run.tracker.release("first")
    again = Fit(run, "first", epochs=2, done=1, begins=begins)
    assert again.step()
    assert again.plan.epoch == 1
    go_on([again, other])
    assert run.merged == all_of(COUNTS, 2)


def test_a_fit_goes_on_with_the_rest_of_an_epoch_that_has_come_back_and_with_the_next_one() -> None:
    """It was through with the epoch; what a dead worker had of it is trained on beside the epoch that comes next."""
    run = Run(COUNTS)
    lives, dies = Fit(run, "lives", epochs=1), Fit(run, "dies")
    dies.step()
    while lives.step():
        pass
    lives.send()
    begins = lives.plan.position
    assert (begins.epoch, lives.done) == (1, 1)
    for fit in (lives, dies):
        run.tracker.release(fit.name)
    go_on([Fit(run, "lives", epochs=2, done=1, begins=begins)])
    assert run.merged == all_of(COUNTS, 2)


def test_an_epoch_that_only_has_to_end_has_no_pass_and_asks_for_nothing_of_the_next_one() -> None:
    run = Run(COUNTS)
    go_on([first := Fit(run, "w", epochs=1)])
    run.tracker.release("w")
    again = Fit(run, "w", epochs=2, done=1, begins=first.plan.position)
    assert again.plan.rest() is None
    assert run.tracker.report().epoch == 0
    go_on([again])
    assert run.merged == all_of(COUNTS, 2)


def test_a_checkpoint_of_a_run_whose_coordinator_begins_anew_says_no_epoch_of_its() -> None:
    run = Run(COUNTS)
    go_on([Fit(run, "w", epochs=3, done=1, begins=EpochOfRun("another", 1))])
    assert run.merged == all_of(COUNTS, 2)


def test_a_worker_that_dies_in_its_last_epoch_leaves_one_more_to_the_others() -> None:
    run = Run(COUNTS)
    dies, lives = Fit(run, "dies"), Fit(run, "lives")
    dies.step()
    while lives.step():
        pass
    run.tracker.release("dies")
    go_on([lives])
    assert run.merged == all_of(COUNTS, EPOCHS)


def test_a_limit_that_ends_an_epoch_where_its_data_end_leaves_no_epoch_without_a_batch() -> None:
    run = Run([4, 4])
    fit = Fit(run, "w", limit=4)
    go_on([fit])
    assert fit.sizes == [[2, 2, 2, 2]] * EPOCHS
    fit.send()
    assert run.merged == all_of([4, 4], EPOCHS)


def test_a_batch_that_was_handed_out_ahead_of_a_limit_is_of_the_same_epoch_of_the_data() -> None:
    run = Run([10])
    plan = TrackerPlan(run.tracker, worker="w", incarnation="1", slices=tuple(run.tracker.catalogue), batch_size=2)
    plan.begin_pass()
    batches = []
    while (found := plan.poll()) is not None:
        assert isinstance(found, SliceBatch)
        batches.append(found)
    for batch in batches[:-1]:
        plan.trained(batch)
    plan.begin_pass()
    assert plan.poll() == batches[-1]
    assert plan.poll() is None


def test_an_epoch_that_was_over_before_a_training_is_none_of_it() -> None:
    run = Run(COUNTS)
    for epochs in (1, 2, 3):
        fits = [Fit(run, f"{epochs}-{number}", epochs=1) for number in range(2)]
        go_on(fits)
        assert run.merged == all_of(COUNTS, epochs)
