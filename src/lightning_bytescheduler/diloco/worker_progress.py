"""What the batch scheduler knows of one worker: where it is in the round, and how long its steps take.

A step's time is the mean of the middle half of the last ones, so that it is steady under blips. When several in a row
lie well above it, or well below, things have changed for good, and what was before is forgotten. Limits: a lasting
change of less than half takes up to the whole window to be seen.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field
from enum import Enum
from typing import Annotated, TypeAlias, TypedDict, get_args

import msgspec

from lightning_bytescheduler.diloco.messages import JoinRounds, StepReport
from lightning_bytescheduler.diloco.projection import Pace
from lightning_bytescheduler.diloco.round_options import RoundOptions
from lightning_bytescheduler.diloco.round_record import Activity, WorkerRound

__all__ = ["BatchSchedulerState", "RobustMean", "StepTime", "StepTimeState", "WorkerProgress", "WorkerState"]

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
