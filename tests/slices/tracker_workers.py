"""A tracker with a clock to turn, and workers that train as the protocol says and remember what they trained on."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

from lightning_bytescheduler.slices.catalogue import SliceCatalogue
from lightning_bytescheduler.slices.slice import Slice
from lightning_bytescheduler.slices.tracker import (
    AskLater,
    Assignment,
    JoinAgain,
    JoinTracker,
    Receipt,
    ReportProgress,
    RequestSlice,
    SliceTracker,
    WaitReason,
)
from lightning_bytescheduler.slices.training import TrackedTraining


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def slices(counts: list[int], prefix: str = "slice") -> list[Slice]:
    return [
        Slice(key=f"{prefix}{index}", url=f"memory://{prefix}{index}", size=count, samples=count)
        for index, count in enumerate(counts)
    ]


def make_tracker(counts: list[int], clock: Clock | None = None, **options) -> SliceTracker:
    return SliceTracker(SliceCatalogue(slices(counts)), clock=clock or Clock(), **options)


def state_of(tracker: SliceTracker, key: str) -> int:
    """A ``SliceState`` of the running epoch."""
    return int(tracker._epochs[0].states[tracker.catalogue.find(key)])


def is_over(answer: Any) -> bool:
    """Whether nothing is left of the epoch that was asked for."""
    return isinstance(answer, AskLater) and answer.reason is WaitReason.OVER


class Held:
    """A slice as a worker sees it: ``position`` is where it really is."""

    def __init__(self, assignment: Assignment) -> None:
        self.grant = assignment.grant
        self.epoch = assignment.epoch
        self.key = assignment.key
        self.samples = assignment.samples
        self.position = assignment.todo[0][0]
        self.begun = False


class Worker:
    """Trains on what it is given, and writes every sample into ``trained``."""

    def __init__(self, tracker: SliceTracker, name: str, trained: Counter[Any], incarnation: str = "a", **join) -> None:
        self.tracker, self.name, self.trained, self.incarnation = tracker, name, trained, incarnation
        self.held: list[Held] = []
        self._join = join
        self.join()

    def join(self) -> None:
        joined = self.tracker.answer(JoinTracker(worker=self.name, incarnation=self.incarnation, **self._join))
        self.session, self.epoch = joined.session, joined.epoch
        self.held = []

    def ask(self, *, lose_answer: bool = False, **more) -> Any:
        message = RequestSlice(
            session=self.session, epoch=self.epoch, holding=tuple(held.grant for held in self.held), **more
        )
        answer: Any = self.tracker.answer(message)
        if lose_answer:
            return answer
        if isinstance(answer, JoinAgain):
            self.join()
        else:
            self.held = [held for held in self.held if held.grant not in answer.revoked]
        if isinstance(answer, Assignment):
            self.held.append(Held(answer))
        return answer

    def train(self, samples: int, *, report: bool = True) -> int:
        """Train on up to so many samples of the first slice held; returns how many."""
        held = self.current()
        if held is None:
            return 0
        count = min(samples, held.samples - held.position)
        for sample in range(held.position, held.position + count):
            self.count(held, sample)
        held.position += count
        if report:
            self.report()
        return count

    def count(self, held: Held, sample: int) -> None:
        self.trained[held.key, sample] += 1

    def current(self) -> Held | None:
        """The first slice that the tracker still leaves to this worker, begun."""
        while self.held:
            held = self.held[0]
            if held.begun or self._tell(held):
                held.begun = True
                return held
        return None

    def report(self) -> None:
        """Say where the first slice stands, and that it is done if it is."""
        if not self.held:
            return
        held = self.held[0]
        if self._tell(held) and held.position == held.samples:
            self.held.pop(0)

    def _tell(self, held: Held) -> bool:
        """Whether the tracker still leaves the first slice to this worker."""
        reply = self.tracker.answer(ReportProgress(session=self.session, grant=held.grant, trained=held.position))
        if isinstance(reply, JoinAgain):
            self.join()
            return False
        assert isinstance(reply, Receipt)
        if not reply.accepted:
            self.held.pop(0)
        return reply.accepted

    def leave(self) -> None:
        self.tracker.release(self.name)


def finish(tracker: SliceTracker, workers: list[Worker], clock: Clock, batch: int = 3) -> None:
    """Let the workers train until nothing is left of the epoch."""
    for _ in range(100_000):
        if tracker.over:
            return
        for worker in workers:
            if is_over(worker.ask()):
                worker.epoch = tracker.epoch
            worker.train(batch)
        clock.now += 1.0
    raise AssertionError(f"The epoch does not end: {tracker.report()}")


class Host:
    """A ``TrackerHost`` of a tracker that is there."""

    waits = True
    workers = 1

    def __init__(self, client: Any, worker: int = 0, idle: Any = None, ranks: Any = None) -> None:
        self.client, self.worker, self.idle, self.ranks = client, worker, idle, ranks

    def connect(self, make: Callable[[], SliceTracker]) -> Any:
        return self.client


def tracked_training(
    client: Any, data: Sequence[Slice], *, batch_sizes: Sequence[int] = (1,), rank: int = 0, **host: Any
) -> TrackedTraining:
    """One rank's, which has reached the tracker if it is the first."""
    store: Any = SimpleNamespace(source=SimpleNamespace(slices=tuple(data)), depth=2)
    training = TrackedTraining(Host(client, **host), store, batch_sizes=batch_sizes, rank=rank)
    training.open(None)
    return training
