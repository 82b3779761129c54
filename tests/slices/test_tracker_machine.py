"""Workers that come, train, die and leave at random, over a transport that loses, delays and repeats."""

from __future__ import annotations

import io
from collections import Counter
from typing import Any

import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from lightning_bytescheduler.slices.slice import samples_of
from lightning_bytescheduler.slices.tracker import AskLater, QuarantineSlice, ReportProgress, WaitReason
from tests.slices.tracker_workers import Clock, Worker, finish, make_tracker

NAMES = st.sampled_from("abcd")


class Trains(Worker):
    """Tells the epochs of what it trains on apart."""

    def count(self, held, sample):
        self.trained[held.epoch, held.key, sample] += 1


class TrackerMachine(RuleBasedStateMachine):
    """Beside the tracker: what was really trained on in each epoch, and in which ones anybody died."""

    @initialize(
        counts=st.lists(st.integers(1, 9), min_size=1, max_size=8),
        seed=st.integers(0, 5),
    )
    def start(self, counts, seed):
        self.counts = counts
        self.options = {"seed": seed}
        self.clock = Clock()
        self.tracker = make_tracker(counts, self.clock, **self.options)
        self.trained: Counter = Counter()
        self.workers: dict[str, Worker] = {}
        self.dead: set[str] = set()  # the tracker has not noticed yet
        self.deaths: set[int] = set()  # epochs
        self.checked = 0  # epochs
        self.mail: list[tuple[str, object]] = []
        self.processes = 0
        self.saved: Any = None
        self.join("a")
        self.join("b")

    def worker(self, data):
        """One of the workers; one joins first if there is none."""
        if not self.workers:
            self.join("c")
        return self.workers[data.draw(st.sampled_from(sorted(self.workers)))]

    @property
    def gone(self):
        """Those that are dead unnoticed, or have not joined since a state was loaded."""
        return sorted(self.tracker._workers.keys() - self.workers.keys())

    @precondition(lambda self: self.gone)
    @rule(data=st.data())
    def notice(self, data):
        """The tracker's owner gives a worker up."""
        self.give_up(data.draw(st.sampled_from(self.gone)))

    def give_up(self, name):
        if name in self.dead:
            self.mourn()
            self.dead.discard(name)
        self.tracker.release(name)

    def mourn(self):
        """What was held may be of any epoch that is open, or was a moment ago."""
        self.deaths |= {self.tracker.epoch - 1, self.tracker.epoch, self.tracker.epoch + 1}

    @rule(name=NAMES)
    def join(self, name):
        if name in self.workers:
            return
        self.processes += 1
        if name in self.dead:
            self.mourn()
        self.dead.discard(name)
        self.workers[name] = Trains(
            self.tracker,
            name,
            self.trained,
            incarnation=f"process {self.processes}",
        )

    @rule(data=st.data(), lose=st.booleans())
    def ask(self, data, lose):
        worker = self.worker(data)
        answer = worker.ask(lose_answer=lose)
        if isinstance(answer, AskLater) and answer.reason in (WaitReason.OVER, WaitReason.HELD):
            worker.epoch += data.draw(st.integers(0, 1))

    @rule(data=st.data(), samples=st.integers(1, 12), copies=st.integers(0, 2))
    def train(self, data, samples, copies):
        """Reports are put in the mail; a report that is lost is made up for by a later one, but one of all samples is
        repeated until it is answered."""
        worker = self.worker(data)
        name = worker.name
        worker.ask()
        if not worker.train(samples, report=False):
            return
        held = worker.held[0]
        report = ReportProgress(session=worker.session, grant=held.grant, trained=held.position)
        is_done = held.position == held.samples
        self.mail += [(name, report)] * max(copies, is_done)
        if is_done:
            worker.held.pop(0)

    @precondition(lambda self: self.mail)
    @rule(data=st.data())
    def deliver(self, data):
        _, message = self.mail.pop(data.draw(st.integers(0, len(self.mail) - 1)))
        self.tracker.progress(message)

    def deliver_all(self, names):
        """Everything that these workers have to report arrives."""
        for name, message in self.mail:
            if name in names:
                self.tracker.progress(message)
        self.mail = [(name, message) for name, message in self.mail if name not in names]
        for name in names:
            worker = self.workers[name]
            if worker.held and worker.held[0].begun:
                worker.report()

    @rule(data=st.data(), noticed=st.booleans())
    def die(self, data, noticed):
        name = self.worker(data).name
        del self.workers[name]
        if noticed:
            self.mourn()
            self.tracker.release(name)
        else:
            self.dead.add(name)

    @rule(data=st.data())
    def leave(self, data):
        name = self.worker(data).name
        self.deliver_all([name])
        self.workers.pop(name).leave()

    @rule(data=st.data())
    def quarantine(self, data):
        worker = self.worker(data)
        if len(self.tracker.report().quarantined) < min(2, len(self.counts) - 1):
            index = data.draw(st.integers(0, len(self.counts) - 1))
            self.mourn()  # its holder may train on a batch or two more, which are not counted
            self.tracker.quarantine(QuarantineSlice(session=worker.session, key=f"slice{index}", reason="broken"))

    @rule()
    def save(self):
        """A checkpoint is made when what was trained on is reported, and no death is unnoticed."""
        if self.dead:
            return
        self.deliver_all(list(self.workers))
        file = io.BytesIO()
        torch.save(self.tracker.state_dict(), file)
        self.saved = (file.getvalue(), self.trained.copy(), self.deaths.copy())

    @precondition(lambda self: self.saved)
    @rule(stay=st.none() | st.sets(NAMES))
    def load(self, stay):
        state, trained, deaths = self.saved
        self.trained, self.deaths = trained.copy(), deaths.copy()
        self.workers, self.dead, self.mail = {}, set(), []
        self.tracker = make_tracker(self.counts, self.clock, **self.options)
        self.tracker.load_state_dict(torch.load(io.BytesIO(state), weights_only=True), workers=stay)

    @precondition(lambda self: self.tracker.over)
    @rule(data=st.data())
    def next_epoch(self, data):
        self.check_end(self.tracker.epoch)
        worker = self.worker(data)
        worker.epoch = before = self.tracker.epoch + 1
        worker.ask()
        assert self.tracker.epoch == before

    def of(self, epoch):
        return {sample: count for sample, count in self.trained.items() if sample[0] == epoch}

    @invariant()
    def counts_add_up(self):
        open_ = list(self.tracker._epochs)
        assert [one.epoch for one in open_] == [self.tracker.epoch, self.tracker.epoch + 1][: len(open_)]
        for slices in open_:
            trained = self.of(slices.epoch)
            left = sum(samples_of(slices.todo(index)) for index in range(len(self.counts)) if slices.states[index] < 2)
            assert slices.trained + slices.dropped + left == sum(self.counts)
            assert slices.trained <= len(trained)  # nothing counts that was not trained on
            assert slices.unfinished == sum(state == 0 for state in slices.states) + len(slices.holders)
            if slices.epoch not in self.deaths:
                assert not trained or max(trained.values()) == 1
        assert max((sample[0] for sample in self.trained), default=0) <= self.tracker.epoch + 1
        for epoch in range(self.checked, self.tracker.epoch):  # that have ended since
            self.check_ended(epoch)
        self.checked = self.tracker.epoch

    def check_ended(self, epoch):
        trained = self.of(epoch)
        if epoch not in self.deaths and not self.tracker.report().quarantined:
            assert len(trained) == sum(self.counts)
            assert max(trained.values()) == 1
        elif not self.tracker.report().quarantined:
            assert len(trained) == sum(self.counts)

    def check_end(self, epoch):
        report = self.tracker.report()
        assert len(self.of(epoch)) >= report.samples - report.dropped
        self.check_ended(epoch)
        if epoch not in self.deaths and not report.quarantined:
            assert report.trained == report.samples

    def teardown(self):
        if not hasattr(self, "tracker"):
            return
        self.deliver_all(list(self.workers))
        if not self.workers:
            self.join("d")
        for name in self.gone:
            self.give_up(name)
        finish(self.tracker, list(self.workers.values()), self.clock)
        self.counts_add_up()
        self.check_end(self.tracker.epoch)


TestTrackerMachine = TrackerMachine.TestCase
TestTrackerMachine.settings = settings(stateful_step_count=40)
