"""A tracker that counts what is merged: each sample is in the weights of an epoch once, whichever worker dies."""

from __future__ import annotations

import io
from collections import Counter
from dataclasses import dataclass, field

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lightning_bytescheduler.slices.catalogue import SliceCatalogue
from lightning_bytescheduler.slices.slice import SliceState, joined, samples_of, without
from lightning_bytescheduler.slices.tracker import (
    Assignment,
    HeldSlice,
    JoinTracker,
    QuarantineSlice,
    Receipt,
    ReportProgress,
    RequestSlice,
    SliceTracker,
    TrainedRun,
    WaitReason,
)
from lightning_bytescheduler.slices.training import TrackerPlan
from tests.slices.tracker_workers import Clock, slices


def make(counts: list[int], *, shuffle: bool = False) -> SliceTracker:
    return SliceTracker(SliceCatalogue(slices(counts)), shuffle=shuffle, clock=Clock(), counts_merged=True)


def held_by(tracker: SliceTracker, worker: str, *, trained: int = 0) -> tuple[int, Assignment]:
    """The next slice, begun and trained on so far; returns the session, too."""
    session = tracker.join(JoinTracker(worker=worker, incarnation="1")).session
    found = tracker.request(RequestSlice(session=session, epoch=0))
    assert isinstance(found, Assignment)
    report = ReportProgress(session=session, grant=found.grant, trained=trained)
    assert tracker.progress(report) == Receipt(accepted=True)
    return session, found


def run(start: int, stop: int, *, index: int = 0, epoch: int = 0) -> TrainedRun:
    return TrainedRun(epoch=epoch, slice_index=index, start=start, stop=stop)


def test_runs_of_samples() -> None:
    assert joined([(5, 7), (0, 2), (2, 3), (6, 9)]) == [(0, 3), (5, 9)]
    assert without([(0, 10)], [(2, 3), (8, 12)]) == [(0, 2), (3, 8)]
    assert without([(0, 4), (6, 9)], [(0, 9)]) == []
    assert samples_of([(0, 2), (5, 9)]) == 6


def test_what_a_worker_reports_does_not_count_before_it_is_merged() -> None:
    tracker = make([8])
    session, held = held_by(tracker, "a", trained=8)
    assert tracker.report().trained == 0
    answer = tracker.request(RequestSlice(session=session, epoch=0, holding=(held.grant,)))
    assert getattr(answer, "reason", None) is WaitReason.MERGING
    assert tracker.fits("a", [run(0, 8)])
    tracker.book("a", [run(0, 8)])
    assert tracker.report().trained == 0
    tracker.settle([run(0, 8)], merged=True)
    assert tracker.report().trained == 8
    assert tracker.over
    answer = tracker.request(RequestSlice(session=session, epoch=0))
    assert getattr(answer, "reason", None) is WaitReason.OVER


def test_what_a_dead_worker_had_not_sent_comes_back_and_what_it_had_sent_does_not() -> None:
    tracker = make([8])
    held_by(tracker, "a", trained=6)
    tracker.book("a", [run(0, 3)])
    tracker.release("a")
    assert held_by(tracker, "b")[1].todo == ((3, 8),)
    tracker.settle([run(0, 3)], merged=True)
    assert tracker.report().trained == 3


def test_a_sum_that_is_dropped_gives_a_dead_workers_samples_back() -> None:
    tracker = make([8])
    held_by(tracker, "a", trained=8)
    tracker.book("a", [run(0, 8)])
    tracker.release("a")
    session = tracker.join(JoinTracker(worker="b", incarnation="1")).session
    waits = tracker.request(RequestSlice(session=session, epoch=0))
    assert getattr(waits, "reason", None) is WaitReason.MERGING  # all is in an update on its way
    tracker.settle([run(0, 8)], merged=False)
    found = tracker.request(RequestSlice(session=session, epoch=0))
    assert isinstance(found, Assignment)
    assert found.todo == ((0, 8),)


def test_the_rest_of_a_slice_whose_first_part_was_dropped_is_handed_out_again() -> None:
    tracker = make([8])
    held_by(tracker, "a", trained=4)
    tracker.book("a", [run(0, 4)])
    tracker.release("a")
    held_by(tracker, "b", trained=8)
    tracker.settle([run(0, 4)], merged=False)
    tracker.book("b", [run(4, 8)])
    tracker.settle([run(4, 8)], merged=True)
    assert held_by(tracker, "c")[1].todo == ((0, 4),)


@pytest.mark.parametrize(
    "runs",
    [
        [run(0, 2)],  # in the weights
        [run(2, 4)],  # in another update
        [run(3, 6)],
        [run(4, 6)],  # begun by another worker
        [run(4, 6), run(5, 7)],
        [run(0, 9, index=1)],  # more than there are
        [run(3, 3, index=1)],
        [run(0, 1, index=2)],
        [run(0, 1, epoch=1)],
        [run(0, 1, index=1), run(0, 1, index=1)],
    ],
)
def test_an_update_with_a_sample_that_is_not_its_senders_does_not_fit(runs: list[TrainedRun]) -> None:
    tracker = make([8, 8])
    held_by(tracker, "a", trained=4)
    for part in ([run(0, 2)], [run(2, 4)]):
        tracker.book("a", part)
    tracker.settle([run(0, 2)], merged=True)
    tracker.release("a")
    held_by(tracker, "b")
    assert not tracker.fits("a", runs)
    assert tracker.fits("b", [run(4, 6)])
    assert tracker.fits("a", [run(0, 8, index=1)])  # it is left to anybody


def test_a_slice_that_another_worker_has_not_begun_is_taken_from_it() -> None:
    tracker = make([8])
    held_by(tracker, "a")
    tracker.release("a")
    session = tracker.join(JoinTracker(worker="b", incarnation="1")).session
    found = tracker.request(RequestSlice(session=session, epoch=0))
    assert isinstance(found, Assignment)
    assert tracker.fits("a", [run(0, 5)])
    tracker.book("a", [run(0, 5)])
    assert tracker.progress(ReportProgress(session=session, grant=found.grant, trained=0)) == Receipt(accepted=False)


def test_a_worker_goes_on_after_a_restart_with_samples_that_no_worker_has_taken() -> None:
    tracker = make([8, 8, 8])
    held_by(tracker, "a", trained=3)
    state = tracker.state_dict()
    restarted = make([8, 8, 8])
    restarted.load_state_dict(state)
    other, _ = held_by(restarted, "b")
    claims = tuple(HeldSlice(epoch=0, slice_index=index, begun=True) for index in (0, 1, 2))
    joined = restarted.join(JoinTracker(worker="a", incarnation="1", holds=claims))
    assert [one.slice_index for one in joined.held] == [0, 2]
    assert joined.session != other


def test_a_quarantined_slice_of_an_update_does_not_matter() -> None:
    tracker = make([8, 8])
    session, _ = held_by(tracker, "a", trained=8)
    tracker.quarantine(QuarantineSlice(session=session, key="slice0", reason="broken"))
    assert tracker.fits("a", [run(0, 8)])
    tracker.book("a", [run(0, 8)])
    tracker.settle([run(0, 8)], merged=True)
    report = tracker.report()
    assert (report.trained, report.dropped) == (0, 8)
    assert tracker.state_dict()["epochs"][0]["done"] == {}


@dataclass
class Trainer:
    """A worker with its plan: what it has trained on, sent, and carries."""

    plan: TrackerPlan
    name: str
    pending: list[TrainedRun] = field(default_factory=list)  # trained on, in no update
    sent: list[TrainedRun] | None = None
    seen: int = 0  # round that the update is of


class MergedMachine(RuleBasedStateMachine):
    """Workers train, send and die; rounds are merged or dropped; the tracker dies, and another has its last state."""

    @initialize(
        counts=st.lists(st.integers(1, 9), min_size=1, max_size=6),
        prefetch=st.integers(1, 3),
        shuffle=st.booleans(),
    )
    def start(self, counts, prefetch, shuffle):
        self.counts, self.prefetch, self.shuffle = counts, prefetch, shuffle
        self.tracker = make(counts, shuffle=shuffle)
        self.merged: Counter = Counter()
        self.round = 1
        self.booked: list[tuple[str, list[TrainedRun]]] = []
        self.workers: dict[str, Trainer] = {}
        self.processes = 0
        self.save()
        self.join("a", 3)

    def answer(self, message):
        """As the coordinator does: a worker from before the restart is told to join again."""
        return self.tracker.answer(message)

    def save(self):
        file = io.BytesIO()
        torch.save(self.tracker.state_dict(), file)
        file.seek(0)
        self.saved = torch.load(file, weights_only=True), Counter(self.merged), self.round

    @rule(name=st.sampled_from("abc"), batch=st.integers(1, 5))
    def join(self, name, batch):
        if name in self.workers:
            return
        self.processes += 1
        plan = TrackerPlan(
            self,
            worker=name,
            incarnation=f"process {self.processes}",
            batch_size=batch,
            ahead=self.prefetch,
            slices=tuple(self.tracker.catalogue),
            counts_merged=True,
            clock=Clock(),
        )
        self.workers[name] = Trainer(plan, name)
        plan.begin_pass()

    def one(self, data):
        return self.workers[data.draw(st.sampled_from(sorted(self.workers)))]

    @precondition(lambda self: self.workers)
    @rule(data=st.data(), batches=st.integers(1, 4), ahead=st.integers(0, 2))
    def train(self, data, batches, ahead):
        """Batches are handed out before they are trained on."""
        worker = self.one(data)
        self.advance(worker, batches, ahead)

    def advance(self, worker, batches, ahead=0):
        plan, taken = worker.plan, []
        for _ in range(batches + ahead):
            batch = plan.poll()
            if batch is None:
                break
            if isinstance(batch, float):
                plan._ask_at = 0.0
                break
            taken.append(batch)
        for batch in taken[:batches]:
            plan.trained(batch)
            worker.pending += [TrainedRun(batch.epoch, *one) for one in batch.runs]
        plan.report()
        if len(taken) < batches + ahead:  # the pass is over; a batch that was not trained on is given up with it
            plan.begin_pass()
        else:
            for batch in taken[batches:]:  # they are trained on first of all
                plan.trained(batch)
                worker.pending += [TrainedRun(batch.epoch, *one) for one in batch.runs]

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def send(self, data):
        worker = self.one(data)
        if worker.sent is not None or not worker.pending:
            return
        runs, worker.pending = worker.pending, []
        if self.tracker.fits(worker.name, runs):
            self.tracker.book(worker.name, runs)
            self.booked.append((worker.name, runs))
            worker.sent, worker.seen = runs, self.round
        else:  # it is dropped, and the worker is told
            worker.plan.reset([])

    @rule(data=st.data(), merged=st.booleans(), keeps=st.booleans())
    def end_round(self, data, merged, keeps):
        booked, self.booked = self.booked, []
        for _, runs in booked:
            self.tracker.settle(runs, merged=merged)
            if merged:
                self.count(runs)
        for worker in self.workers.values():
            sent, worker.sent = worker.sent, None
            if sent is None:
                continue
            runs = sent
            if merged:
                worker.plan.merged(runs)
            else:  # carried into the next round
                worker.pending = runs + worker.pending
        self.round += 1
        if keeps:
            self.save()

    def count(self, runs):
        for one in runs:
            self.merged.update((one.epoch, one.slice_index, sample) for sample in range(one.start, one.stop))

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def die(self, data):
        worker = self.one(data)
        self.tracker.release(worker.name)
        del self.workers[worker.name]

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def lose(self, data):
        """A worker takes the run's weights, and what it has trained on since its last update is lost."""
        worker = self.one(data)
        worker.pending = []
        worker.plan.reset(worker.sent or [])

    @precondition(lambda self: self.workers)
    @rule(data=st.data())
    def fall_silent(self, data):
        """It was taken for dead, and is not."""
        self.tracker.release(self.one(data).name)

    @rule()
    def restart(self):
        """The tracker is killed. Weights and state are those of the last save; what was sent is sent again."""
        state, self.merged, _ = self.saved
        self.merged = Counter(self.merged)
        self.tracker = make(self.counts, shuffle=self.shuffle)
        self.tracker.load_state_dict(state)
        self.booked = []
        for worker in self.workers.values():
            runs, worker.sent = worker.sent, None
            worker.pending = (runs or []) + worker.pending

    @invariant()
    def counts_once(self):
        if not hasattr(self, "tracker"):
            return
        assert not self.merged or max(self.merged.values()) == 1
        for one in self.tracker._epochs:
            assert all(one.todo(index) for index, state in enumerate(one.states) if state == SliceState.AVAILABLE)
            assert one.trained == sum(count for sample, count in self.merged.items() if sample[0] == one.epoch)
        for epoch in range(self.tracker.epoch):
            assert sum(1 for sample in self.merged if sample[0] == epoch) == sum(self.counts)

    def teardown(self):
        """All of the epoch comes to be in the weights."""
        if not hasattr(self, "tracker"):
            return
        self.join("a", 3)
        wanted = self.tracker.epoch + 1
        for name in list(self.workers):  # the others are gone for good
            if name != "a":
                self.tracker.release(name)
                del self.workers[name]
        for name in list(self.tracker._workers):
            if name not in self.workers:
                self.tracker.release(name)
        worker = self.workers["a"]
        for _ in range(200):
            self.advance(worker, 5)
            runs, worker.pending = worker.pending, []
            if runs and self.tracker.fits("a", runs):
                self.tracker.book("a", runs)
                self.booked.append(("a", runs))
                worker.sent = (worker.sent or []) + runs
            elif runs:
                worker.plan.reset(worker.sent or [])
            self.end_round(None, True, False)
            self.counts_once()
            if self.tracker.epoch >= wanted:
                return
        raise AssertionError(f"The epoch does not end: {self.tracker.report()}")


TestMergedMachine = MergedMachine.TestCase
TestMergedMachine.settings = settings(stateful_step_count=30)
