"""Who is there, and what those who take part in the round come to together: kept up to date worker by worker.

Whoever changes a worker says so with :meth:`RoundRoster.refresh`. Then sums, bounds and the moment at which the next
worker will have been silent for too long are right again, at a cost that hardly grows with the number of workers.

Nothing here grows without end: those who were lost or have left are forgotten, with their step times, when they have
not been heard of for ``expiry`` seconds, or when there are very many of them.

What the batch scheduler knows of one worker: where it is in the round, and how long its steps take.

A step's time is the mean of the middle half of the last ones, so that it is steady under blips. When several in a row
lie well above it, or well below, things have changed for good, and what was before is forgotten. Limits: a lasting
change of less than half takes up to the whole window to be seen.
"""

from __future__ import annotations

import heapq
import math
from collections import OrderedDict, deque
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, TypeAlias, TypedDict, get_args

import msgspec

from lightning_bytescheduler.diloco.messages import JoinRounds, StepReport
from lightning_bytescheduler.diloco.projection import Pace, RunningMaximum, RunningSum, Tally
from lightning_bytescheduler.diloco.round_end import RoundOptions, RoundTarget
from lightning_bytescheduler.diloco.round_record import Activity, WorkerRound

_WINDOW = 16
_CHANGED_AFTER = 5  # values in a row: a blip is shorter
_CHANGED_BY = 1.5
_FIRST_STEPS = 4  # of rounds, that are kept
_SILENT_STEPS = 3
_SHORTEST_S = 1e-9


class RobustMean:
    """Middle half mean of the last sixteen values, each 0 or more.

    Args:
        values: Observed already.
    """

    def __init__(self, values: Iterable[float] = ()) -> None:
        self._values: deque[float] = deque(values, maxlen=_WINDOW)
        self._mean = _middle_mean(self.values) if self._values else None

    @property
    def values(self) -> list[float]:
        """What it rests on."""
        return list(self._values)

    @property
    def mean(self) -> float | None:
        """The estimate, or ``None`` before the first value."""
        return self._mean

    def observe(self, value: float) -> None:
        """Take note of a value."""
        self._values.append(value)
        if value == self._mean and self._values.count(value) == len(self._values):
            return  # as batch sizes mostly are
        values = list(self._values)
        before, recent = values[:-_CHANGED_AFTER], values[-_CHANGED_AFTER:]
        if before and _may_differ(before, recent):
            mean = _middle_mean(before)
            if min(recent) > mean * _CHANGED_BY or max(recent) < mean / _CHANGED_BY:
                self._values, values = deque(recent, maxlen=_WINDOW), recent
        self._mean = _middle_mean(values)


def _may_differ(before: list[float], recent: list[float]) -> bool:
    """Whether values may all lie well above, or below, the mean of others, which is nowhere beyond these."""
    return min(recent) > min(before) * _CHANGED_BY or max(recent) < max(before) / _CHANGED_BY


def _middle_mean(values: list[float]) -> float:
    ordered = sorted(values)
    cut = max(len(ordered) // 4, 1) if len(ordered) > 2 else 0
    kept = ordered[cut : len(ordered) - cut]
    return sum(kept) / len(kept)


_Number: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]


class StepTimeState(TypedDict):
    """What to keep of a ``StepTime`` over a restart."""

    seconds: list[_Number]
    first: list[_Number]
    batch_sizes: list[_Number]


class BatchSchedulerState(TypedDict):
    """What to keep of a ``BatchScheduler`` over a restart: primitives only."""

    round: Annotated[int, msgspec.Meta(ge=0)]
    samples: Annotated[int, msgspec.Meta(ge=0)]
    step_times: dict[str, StepTimeState]


class StepTime:
    """Robust time and batch size of one worker's steps.

    The first step after a synchronisation is slower than others (caches, queues, allocations) and its time does not
    count, unless there is nothing else: a worker of one step a round has only first steps.

    Attributes:
        seconds: Of a step, or ``None`` before the first.
        batch_size: Samples of a step, or ``None`` before the first. A short last batch of an epoch does not change it.
    """

    def __init__(self) -> None:
        self._seconds = RobustMean()
        self._first: deque[float] = deque(maxlen=_FIRST_STEPS)
        self._batch_sizes = RobustMean()
        self.seconds: float | None = None
        self.batch_size: int | None = None

    @property
    def is_known(self) -> bool:
        """Whether the time rests on more than the first step ever, which may have taken any time."""
        return self._seconds.mean is not None or len(self._first) > 1

    def observe(self, seconds: float, batch_size: int, *, first: bool = False) -> None:
        """Take note of a step.

        Args:
            seconds: What it took. A step of less than a nanosecond is a clock's fault and does not count.
            batch_size: Its samples.
            first: Whether it was the first one after a synchronisation.
        """
        if seconds < _SHORTEST_S:
            return
        self._batch_sizes.observe(batch_size)
        if first:
            self._first.append(seconds)
        else:
            self._seconds.observe(seconds)
        self._estimate()

    def _estimate(self) -> None:
        seconds, batch_size = self._seconds.mean, self._batch_sizes.mean
        # What makes first steps slow only ever adds.
        self.seconds = min(self._first, default=None) if seconds is None else seconds
        self.batch_size = None if batch_size is None else max(round(batch_size), 1)

    def state_dict(self) -> StepTimeState:
        """What to keep over a restart."""
        return {
            "seconds": self._seconds.values,
            "first": list(self._first),
            "batch_sizes": self._batch_sizes.values,
        }

    def load_state_dict(self, state: StepTimeState) -> None:
        """Take over what was kept."""
        self._seconds = RobustMean(state["seconds"])
        self._first = deque(state["first"], maxlen=_FIRST_STEPS)
        self._batch_sizes = RobustMean(state["batch_sizes"])
        self._estimate()


class WorkerState(Enum):
    """Where a worker is. It goes down this list once a round."""

    WAITING = "waiting"
    """Joins in with the next round."""
    STARTING = "starting"
    """Was told to start, and fetches the weights."""
    TRAINING = "training"
    SENDING = "sending"
    ARRIVED = "arrived"
    """Its pseudo-gradient is there; it waits for the others."""
    LOST = "lost"
    """Missed the end of a round. If it is heard of again, it joins in with the next round."""


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerProgress:
    """One worker in one round. Times are in seconds of the scheduler's clock.

    Attributes:
        name: Of the worker.
        number: Stands for it where names would do, but for two starts of one process.
        session: Which start of its process this is.
        state: Where it is.
        heard: When it was last heard of.
        paused: It lives, and does something else.
        began_late: Whether it was let into a round that others had begun before: nobody waits for what it does.
        left: It has left; what it has sent is waited for no more, and counts if it comes.
        resumed: What it had done, by its own account, in a round that is to begin, when it joined.
        step_time: Survives the round.
        transfer: Seconds from its last step until its pseudo-gradient was there; survives the round.
        receiving: Seconds from when it was told to start until it had the weights; survives the round.
        steps: Taken in this round.
        samples: Processed in this round.
        tokens: Processed in this round.
        in_flight: Steps that it has taken, about, before an answer reaches it; survives the round.
        send_after: Steps after which it was told to send its pseudo-gradient.
        told: When it was told to start.
        began: When it began to train.
        reported: When the step began that it is taking.
        sending: When it began to send.
        arrived: When its pseudo-gradient was there.
    """

    name: str
    heard: float
    number: int = 0
    session: int = 0
    state: WorkerState = WorkerState.WAITING
    paused: bool = False
    began_late: bool = False
    left: bool = False
    resumed: JoinRounds | None = None
    step_time: StepTime = field(default_factory=StepTime)
    transfer: RobustMean = field(default_factory=RobustMean)
    receiving: RobustMean = field(default_factory=RobustMean)
    steps: int = 0
    samples: int = 0
    tokens: int = 0
    in_flight: int = 0
    send_after: int | None = None
    told: float = 0.0
    began: float | None = None
    reported: float = 0.0
    sending: float | None = None
    arrived: float | None = None

    def tell_to_start(self, now: float, *, late: bool = False) -> None:
        """Begin a round anew.

        Args:
            now: In seconds.
            late: Whether the others have begun before.
        """
        self.state = WorkerState.STARTING
        self.began_late = late
        self.steps = self.samples = self.tokens = 0
        self.send_after = self.began = self.sending = self.arrived = None
        self.told = self.reported = self.heard = now

    def start(self, now: float) -> None:
        """It has the weights, and trains from now on."""
        self.state = WorkerState.TRAINING
        self.began = self.reported = now

    def resume(self, now: float) -> None:
        """It pauses no more: it begins a step now, or to fetch the weights."""
        if self.paused:
            self.paused = False
            self.told, self.reported = (now if self.state is WorkerState.STARTING else self.told), now

    def take_up(self, join: JoinRounds, now: float) -> None:
        """It is in the middle of the round, and says what it has done in it."""
        self.start(now)
        self.steps, self.samples, self.tokens = join.steps, join.samples, join.tokens

    def take_report(self, report: StepReport, now: float) -> None:
        """Take over a report that is newer than what is known."""
        self.step_time.observe(report.seconds, report.batch_size, first=report.steps == 1)
        self.steps, self.samples = report.steps, report.samples
        self.in_flight = min(report.in_flight, report.steps)  # no more than that can be true
        self.reported = now

    def end(self, now: float) -> None:
        """It has taken its last step of this round, and sends."""
        self.state = WorkerState.SENDING
        self.began = self.told if self.began is None else self.began
        self.sending = now

    def arrive(self, now: float) -> None:
        """Its pseudo-gradient is there."""
        self.state = WorkerState.ARRIVED
        self.arrived = now

    def record(self, now: float, *, merged: bool) -> WorkerRound:
        """Say what it did in the round that ends now."""
        times = (self.told, self.began, self.sending, self.arrived)
        known = [time for time in times if time is not None]
        return WorkerRound(
            worker=self.name,
            steps=self.steps,
            samples=self.samples,
            merged=merged,
            spans=tuple(
                (activity, start, end)
                for activity, start, end in zip(get_args(Activity), known, [*known[1:], now], strict=False)
                if start < end
            ),
        )

    @property
    def samples_per_second(self) -> float | None:
        """While it trains, or ``None`` before its first step."""
        seconds, batch_size = self.step_time.seconds, self.step_time.batch_size
        return None if seconds is None or batch_size is None else batch_size / seconds

    @property
    def is_member(self) -> bool:
        """Whether it takes part in this round."""
        return self.state is not WorkerState.WAITING and self.state is not WorkerState.LOST

    @property
    def is_training(self) -> bool:
        """Whether it has steps of this round before it."""
        return self.state in (WorkerState.STARTING, WorkerState.TRAINING)

    @property
    def has_ended(self) -> bool:
        """Whether it has taken its last step of this round."""
        return self.state in (WorkerState.SENDING, WorkerState.ARRIVED)

    def silent_at(self, options: RoundOptions) -> float:
        """When it will have been silent for so long that it is not counted on any more."""
        seconds = self.step_time.seconds
        if seconds is None:
            return self.heard + options.first_step_limit
        allowed = _SILENT_STEPS * seconds + options.silent_after
        if self.state is not WorkerState.STARTING:
            return self.heard + allowed
        # It says nothing while weights are on their way. That may take as long as a transfer the other way, and in all
        # no longer than a first step may.
        allowed += 2 * max(self.receiving.mean or 0.0, self.transfer.mean or 0.0)
        return min(self.heard + allowed, self.told + max(allowed, options.first_step_limit))

    def is_silent(self, options: RoundOptions, now: float) -> bool:
        """Whether it has something to do, and has said nothing for so long that rounds go on without it."""
        idle = self.paused or self.state in (WorkerState.WAITING, WorkerState.ARRIVED)
        return not idle and now >= self.silent_at(options)

    def pace(self, step_cap: int | None) -> Pace | None:
        """How it gets on, or ``None`` before its first step is known."""
        seconds, batch_size = self.step_time.seconds, self.step_time.batch_size
        if seconds is None or batch_size is None:
            return None
        return Pace(
            batch_size=batch_size,
            step_seconds=seconds,
            began=self.reported,
            steps=self.steps,
            most=step_cap,
            committed=self.in_flight + 1,
        )


LEAD_STEPS = 3
"""The end of a round is decided so many steps of the slowest worker before it: fewer make a better forecast, and with
one, a worker may be in the middle of a step that it should not have begun."""

_MOST_LOST = 1024
_MOST_REMEMBERED = 4096
_MICRO = 1e6  # of a sample a second, so that speeds add up in whole numbers


@dataclass(slots=True)
class _Remembered:
    """Of one who is not there."""

    since: float
    step_time: StepTimeState
    has_left: bool


class RoundRoster:
    """The workers, and their sums in the round that is on.

    Args:
        target: What ends a round.
        options: How long a worker may be silent, and for how long it is remembered.
    """

    def __init__(self, target: RoundTarget, options: RoundOptions) -> None:
        self.workers: dict[str, WorkerProgress] = {}
        self._target = target
        self._options = options
        self._numbers = 0
        self._departed: list[WorkerProgress] = []  # who has left in this round, and has sent
        self._remembered: OrderedDict[str, _Remembered] = OrderedDict()  # who left first is first
        self.begin_round()

    # ── Who is there ───────────────────────────────────────────────────────────

    def departed(self, name: str) -> WorkerProgress | None:
        """A worker that has left in this round, and whose pseudo-gradient may still come."""
        return next((one for one in self._departed if one.name == name and one.state is WorkerState.SENDING), None)

    def has_left(self, name: str) -> bool:
        """Whether it was there, and has said that it leaves."""
        remembered = self._remembered.get(name)
        return remembered is not None and remembered.has_left

    def add(self, name: str, session: int, now: float) -> WorkerProgress:
        """A worker joins. Its step times are known if it was there before."""
        self._numbers += 1
        worker = self.workers[name] = WorkerProgress(name=name, number=self._numbers, session=session, heard=now)
        remembered = self._remembered.pop(name, None)
        if remembered is not None:
            worker.step_time.load_state_dict(remembered.step_time)
        return worker

    def take_back(self, name: str, session: int, now: float) -> WorkerProgress | None:
        """One who has left in this round after it has sent is back, as the same process: it has its place again."""
        worker = next((one for one in self._departed if (one.name, one.session) == (name, session)), None)
        if worker is None or name in self.workers:
            return None
        self._departed.remove(worker)
        self._remembered.pop(name, None)
        self.workers[name], worker.left, worker.heard = worker, False, now
        return worker

    def remove(self, worker: WorkerProgress, now: float, *, has_left: bool) -> None:
        """It is gone, or was started anew. What it has sent still counts in this round."""
        self._remembered.pop(worker.name, None)
        self._remembered[worker.name] = _Remembered(now, worker.step_time.state_dict(), has_left)
        del self.workers[worker.name]
        worker.left = True
        if worker.has_ended:
            self._departed.append(worker)
        else:
            worker.state = WorkerState.LOST
        self.refresh(worker, now)
        self._forget_left(now)

    def _forget_left(self, now: float) -> None:
        for remembered in self._remembered.values():
            if remembered.since != math.inf:
                break
            remembered.since = now  # kept over a restart, by another clock
        while self._remembered:
            first = next(iter(self._remembered.values()))
            if len(self._remembered) <= _MOST_REMEMBERED and now < first.since + self._options.expiry:
                break
            self._remembered.popitem(last=False)

    def forget_lost(self, now: float) -> None:
        """Forget whoever was lost or has left, and was not heard of for long."""
        lost = [worker for worker in self.workers.values() if worker.state is WorkerState.LOST]
        lost.sort(key=lambda worker: -worker.heard)
        for index, worker in enumerate(lost):
            if index >= _MOST_LOST or now >= worker.heard + self._options.expiry:
                del self.workers[worker.name]
        self._forget_left(now)

    def members(self) -> list[WorkerProgress]:
        """Who takes part in this round."""
        return [worker for worker in (*self.workers.values(), *self._departed) if worker.is_member]

    def counted_training(self) -> list[WorkerProgress]:
        """Who has steps of this round before it, and is neither silent nor paused."""
        return [worker for worker in self.workers.values() if worker.number in self._watched]

    def step_times(self) -> dict[str, StepTimeState]:
        """What to keep of everybody over a restart."""
        known = {name: worker.step_time.state_dict() for name, worker in self.workers.items()}
        return {name: remembered.step_time for name, remembered in self._remembered.items()} | known

    def load_step_times(self, states: Mapping[str, StepTimeState]) -> None:
        """Take over what was kept."""
        kept = {name: _Remembered(math.inf, state, has_left=False) for name, state in states.items()}
        self._remembered = OrderedDict(kept)

    # ── The round ───────────────────────────────────────────────────────────

    def begin_round(self) -> None:
        """Nobody takes part yet."""
        self._departed = []
        self._all, self._counted = Tally(), Tally()
        self._outlook = self._target.outlook()
        self._leads = RunningMaximum()  # seconds before the end at which each worker has to be told
        self._untimed: set[int] = set()  # whose steps' time is not known well
        self._sending: set[int] = set()
        self._missing, self._idle = RunningSum(), RunningSum()
        self._watched: dict[int, WorkerProgress] = {}  # training, and not silent
        self._looks: list[tuple[float, int]] = []  # when to look whether a worker is silent
        self._look_of: dict[int, float] = {}

    def refresh(self, worker: WorkerProgress, now: float) -> None:
        """Take over what has changed of a worker that takes part, or did.

        Args:
            worker: Which.
            now: In seconds.
        """
        key, silent_at = worker.number, worker.silent_at(self._options)
        training = worker.is_training and not worker.paused and now < silent_at
        if training and key in self._watched:  # as with nearly all reports: it trains on
            self._all.set(key, samples=worker.samples, steps=worker.steps)
            self._counted.set(key, samples=worker.samples, steps=worker.steps)
            self._watch(worker, silent_at)
            self._foresee(worker, training, self.pace(worker))
            self._miss(worker)
            return
        if worker.is_member:
            self._all.set(key, samples=worker.samples, steps=worker.steps)
        else:
            self._all.discard(key)
        # Whoever is silent is not counted on, nor is what it did: its pseudo-gradient will probably not come.
        if training or (worker.has_ended and not (worker.left and worker.state is WorkerState.SENDING)):
            self._counted.set(key, samples=worker.samples, steps=worker.steps)
        else:
            self._counted.discard(key)
        if training:
            self._watch(worker, silent_at)
        elif key in self._watched:
            del self._watched[key], self._look_of[key]
        pace = self.pace(worker) if training else None
        self._foresee(worker, training, pace)
        is_sending = worker.state is WorkerState.SENDING and not worker.left
        (self._sending.add if is_sending else self._sending.discard)(key)
        if training or is_sending:
            self._miss(worker)
        else:
            self._missing.discard(key)
        if worker.state is WorkerState.ARRIVED and not worker.left:
            self._idle.set(key, round((worker.samples_per_second or 0.0) * _MICRO))
        else:
            self._idle.discard(key)

    def _miss(self, worker: WorkerProgress) -> None:
        more = 0 if worker.send_after is None else max(worker.send_after - worker.steps, 0)
        self._missing.set(worker.number, worker.samples + more * (worker.step_time.batch_size or 0))

    def _foresee(self, worker: WorkerProgress, training: bool, pace: Pace | None) -> None:
        key = worker.number
        if pace is None:
            self._outlook.discard(key)
            self._leads.discard(key)
        else:
            self._outlook.set(key, pace)
            # The end is decided some steps of the slowest before it; and each must hear of it before its last step.
            self._leads.set(key, max(LEAD_STEPS, pace.committed + 1) * pace.step_seconds)
        untimed = training and not worker.step_time.is_known and not worker.began_late
        (self._untimed.add if untimed else self._untimed.discard)(key)

    def pace(self, worker: WorkerProgress) -> Pace | None:
        """How a worker gets on, or ``None`` where the end of the round does not depend on it.

        Steps of one who has begun late are taken as they come where the round ends with the fastest worker's. Its first
        one is counted on nowhere: if it is not there when the end is decided, it is for the next round.
        """
        if worker.began_late and (self._target.step_cap is not None or not worker.steps):
            return None
        return worker.pace(self._target.step_cap)

    def _watch(self, worker: WorkerProgress, silent_at: float) -> None:
        key = worker.number
        self._watched[key] = worker
        # It is mostly later than when it was last looked for, which is found out when it is looked for again.
        if silent_at < self._look_of.get(key, math.inf):
            self._look_of[key] = silent_at
            heapq.heappush(self._looks, (silent_at, key))

    def look_for_silence(self, now: float) -> None:
        """Count no more on whoever has been silent for too long."""
        # Nobody is silent before the moment at which to look for that.
        while self._looks and self._looks[0][0] <= now and (at := self.next_silence) is not None and at <= now:
            self.refresh(self._watched[self._looks[0][1]], now)

    @property
    def next_silence(self) -> float | None:
        """When the next one will have been silent for too long."""
        while self._looks:
            at, key = self._looks[0]
            worker = self._watched.get(key)
            if worker is None or self._look_of[key] != at:
                heapq.heappop(self._looks)
                continue
            silent_at = worker.silent_at(self._options)
            if silent_at <= at:
                return at
            self._look_of[key] = silent_at
            heapq.heapreplace(self._looks, (silent_at, key))
        return None

    def __iter__(self) -> Iterator[WorkerProgress]:
        return iter(list(self.workers.values()))

    @property
    def left(self) -> int:
        """What is to go by what all have done."""
        return self._target.left(samples=self._all.samples, steps=self._all.steps)

    @property
    def left_to_count_on(self) -> int:
        """The same without those who are silent or paused."""
        return self._target.left(samples=self._counted.samples, steps=self._counted.steps)

    @property
    def training(self) -> int:
        """How many have steps before them and are counted on."""
        return len(self._watched)

    @property
    def awaited(self) -> int:
        """How many pseudo-gradients may still come."""
        return len(self._watched) + len(self._sending)

    @property
    def all_timed(self) -> bool:
        """Whether the time of a step is known of all who have steps before them and are counted on."""
        return not self._untimed

    @property
    def lead(self) -> float:
        """Seconds before its end that a round is decided: each worker must hear of it before its last step."""
        return self._leads.value or 0.0

    @property
    def missing_samples(self) -> int:
        """Of pseudo-gradients that may still come."""
        return self._missing.total

    @property
    def idle_speed(self) -> float:
        """Samples a second of those who are through."""
        return self._idle.total / _MICRO

    @property
    def longest_transfer(self) -> float | None:
        """Of all who are there, as it usually is with each; ``None`` before the first."""
        known = [worker.transfer.mean for worker in self if worker.state is not WorkerState.LOST]
        return max((seconds for seconds in known if seconds is not None), default=None)

    def is_far(self, left: int, *, now: float) -> bool:
        """Whether the end of the round is surely further away than :attr:`lead`."""
        return self._outlook.is_far(left, now=now, within=self.lead)
