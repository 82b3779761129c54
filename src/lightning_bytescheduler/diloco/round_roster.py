"""What the rounds know of each worker: where it is in the round, and how long its steps take (``RobustMean``)."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum

from lightning_bytescheduler.ddp.sample_weights import RobustMean
from lightning_bytescheduler.diloco.messages import JoinRounds, StepReport
from lightning_bytescheduler.diloco.round_end import Pace, RoundOptions
from lightning_bytescheduler.diloco.round_record import Activity, WorkerRound

_FIRST_STEPS = 4  # first steps of rounds whose times are kept
_SILENT_STEPS = 3
_SHORTEST_S = 1e-9
RETURN_S = 2.0
"""Seconds for a worker to come back after its connection has closed. A living one first retries each half second."""


class StepTime:
    """Robust time and batch size of one worker's steps.

    The first step after a synchronisation is slower than others (caches, queues, allocations). Its time does not count,
    unless there is no other: a worker with one step per round has only first steps.

    Attributes:
        seconds: Seconds of a step, or ``None`` before the first.
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
            seconds: Its time. A step of less than a nanosecond is an error of the clock and does not count.
            batch_size: Its samples.
            first: Whether it was the first step after a synchronisation.
        """
        if seconds < _SHORTEST_S:
            return
        self._batch_sizes.observe(batch_size)
        if first:
            self._first.append(seconds)
        else:
            self._seconds.observe(seconds)
        mean, size = self._seconds.mean, self._batch_sizes.mean
        # The causes that slow first steps only ever add time.
        self.seconds = min(self._first, default=None) if mean is None else mean
        self.batch_size = None if size is None else max(round(size), 1)


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
    PAUSED = "paused"
    """Does something else until it joins again."""


@dataclass(slots=True, kw_only=True, eq=False)
class WorkerProgress:
    """One worker in one round. Times are in seconds of the scheduler's clock.

    Attributes:
        name: The worker's name.
        session: Identifies the start of its process.
        state: Where it is.
        heard: When it was last heard of.
        began_late: Whether it was let into a round that others had begun before. No worker waits for what it does.
        left: Whether it has left. Its update is not waited for, but counts if it comes.
        pauses: Whether it pauses after this round, of which its update is a part.
        resumed: Its own account, as it joined, of what it has done in a round that is to begin.
        step_time: Time of its steps; survives the round.
        transfer: Seconds from its last step until its pseudo-gradient was there; survives the round.
        receiving: Seconds from when it was told to start until it had the weights; survives the round.
        steps: Taken in this round.
        samples: Processed in this round.
        in_flight: About how many steps it takes before an answer reaches it; survives the round.
        send_after: Steps after which it was told to send its pseudo-gradient; 0 for after the one in progress.
        loss: Mean over its steps of this round, if it says one.
        told: When it was told to start.
        began: When it began to train.
        reported: When its current step began.
        sending: When it began to send.
        arrived: When its pseudo-gradient was there.
        gone: Since when it has no connection to its host; ``None`` if it has one, or the host cannot know.
    """

    name: str
    heard: float
    session: int = 0
    state: WorkerState = WorkerState.WAITING
    began_late: bool = False
    left: bool = False
    pauses: bool = False
    resumed: JoinRounds | None = None
    step_time: StepTime = field(default_factory=StepTime)
    transfer: RobustMean = field(default_factory=RobustMean)
    receiving: RobustMean = field(default_factory=RobustMean)
    steps: int = 0
    samples: int = 0
    in_flight: int = 0
    send_after: int = 0
    loss: float | None = None
    told: float = 0.0
    began: float | None = None
    reported: float = 0.0
    sending: float | None = None
    arrived: float | None = None
    gone: float | None = None

    def tell_to_start(self, now: float, *, late: bool = False) -> None:
        """Begin a round anew.

        Args:
            now: Time in seconds.
            late: Whether the others have begun before.
        """
        self.state = WorkerState.STARTING
        self.began_late = late
        self.steps = self.samples = self.send_after = 0
        self.began = self.sending = self.arrived = self.loss = None
        self.told = self.reported = self.heard = now

    def start(self, now: float) -> None:
        """It has the weights, and trains from now on."""
        self.state = WorkerState.TRAINING
        self.began = self.reported = now

    def take_up(self, join: JoinRounds, now: float) -> None:
        """It is in the middle of the round, and says what it has done in it."""
        self.start(now)
        self.steps, self.samples = join.steps, join.samples

    def take_report(self, report: StepReport, now: float) -> None:
        """Take over a report that is newer than what is known."""
        self.step_time.observe(report.seconds, report.batch_size, first=report.steps == 1)
        self.steps, self.samples = report.steps, report.samples
        self.loss = report.loss
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
        self.measure_transfer(now)

    def measure_transfer(self, now: float) -> None:
        """Its pseudo-gradient has been on its way until now."""
        if self.sending is not None:
            self.transfer.observe(now - self.sending)

    def record(self, now: float, *, merged: bool, all_there: float | None = None) -> WorkerRound:
        """Return what it did in the round that ends now.

        Args:
            now: Time in seconds.
            merged: Whether its pseudo-gradient became part of the weights.
            all_there: When the last worker began to send, if none can send before that: until then it waits.
        """
        begins: list[tuple[Activity, float | None]] = [("receiving", self.told), ("working", self.began)]
        if all_there is not None and self.sending is not None:
            begins += [("waiting", self.sending), ("sending", min(all_there, self.arrived or now))]
        else:
            begins.append(("sending", self.sending))
        known = [(activity, time) for activity, time in [*begins, ("waiting", self.arrived)] if time is not None]
        ends = [*(time for _, time in known[1:]), now]
        return WorkerRound(
            worker=self.name,
            steps=self.steps,
            samples=self.samples,
            merged=merged,
            spans=tuple(
                (activity, start, end) for (activity, start), end in zip(known, ends, strict=True) if start < end
            ),
        )

    @property
    def samples_per_second(self) -> float | None:
        """Its speed while it trains, or ``None`` before its first step."""
        seconds, batch_size = self.step_time.seconds, self.step_time.batch_size
        return None if seconds is None or batch_size is None else batch_size / seconds

    @property
    def is_member(self) -> bool:
        """Whether it takes part in this round."""
        return self.state not in (WorkerState.WAITING, WorkerState.LOST, WorkerState.PAUSED)

    @property
    def is_training(self) -> bool:
        """Whether it has steps of this round before it."""
        return self.state in (WorkerState.STARTING, WorkerState.TRAINING)

    @property
    def has_ended(self) -> bool:
        """Whether it has taken its last step of this round."""
        return self.state in (WorkerState.SENDING, WorkerState.ARRIVED)

    def silent_at(self, options: RoundOptions) -> float:
        """The time from which rounds go on without it, if it stays silent until then."""
        seconds = self.step_time.seconds
        if seconds is None:
            return self.heard + options.first_step_limit
        allowed = _SILENT_STEPS * seconds + options.silent_after
        if self.state is not WorkerState.STARTING:
            return self.heard + allowed
        # It sends no message while it fetches weights. That may take as long as a transfer the other way, and at most
        # as long as a first step may.
        allowed += 2 * max(self.receiving.mean or 0.0, self.transfer.mean or 0.0)
        return min(self.heard + allowed, self.told + max(allowed, options.first_step_limit))

    def is_silent(self, options: RoundOptions, now: float) -> bool:
        """Whether it has something to do, and has said nothing for so long that rounds go on without it."""
        idle = self.state in (WorkerState.WAITING, WorkerState.ARRIVED, WorkerState.PAUSED)
        return not idle and now >= self.silent_at(options)

    def awaited_until(self, options: RoundOptions) -> float:
        """The time until which its remaining work in this round is waited for; 0 if it has none.

        The machine of a dead process closes its connection at once, which tells it from a silent one. So a dead process
        is not waited for as long as a silent one.
        """
        back = math.inf if self.gone is None else self.gone + RETURN_S
        if self.is_training:
            return min(self.silent_at(options), back)
        return back if self.state is WorkerState.SENDING and not self.left else 0.0

    def is_counted_on(self, options: RoundOptions, now: float) -> bool:
        """Whether it has steps of this round before it, and is neither silent nor gone."""
        return self.is_training and now < self.awaited_until(options)

    def pace(self, step_cap: int | None) -> Pace | None:
        """How it gets on; ``None`` where the round's end does not depend on it.

        A worker that began late has no pace where the round ends with the fastest worker's steps: its steps count as
        they come. It never has one before its first step, which may come too late for this round.
        """
        seconds, batch_size = self.step_time.seconds, self.step_time.batch_size
        if seconds is None or batch_size is None or (self.began_late and (step_cap is not None or not self.steps)):
            return None
        return Pace(
            batch_size=batch_size,
            step_seconds=seconds,
            began=self.reported,
            steps=self.steps,
            most=step_cap,
            committed=self.in_flight + 1,
        )


def means_of(workers: Sequence[WorkerProgress]) -> dict[str, float]:
    """The mean ``loss`` over a round, weighted by samples, and ``samples_per_second`` of all workers together.

    A mean that is not finite, as the loss of a training that has diverged, is left out: JSON has no such numbers.
    """
    measured = [(one.loss, one.samples) for one in workers if one.loss is not None and one.samples]
    rates = [one.samples_per_second for one in workers if one.samples and one.samples_per_second is not None]
    means: dict[str, float] = {}
    if measured:
        means["loss"] = sum(loss * samples for loss, samples in measured) / sum(samples for _, samples in measured)
    if rates:
        means["samples_per_second"] = sum(rates)
    return {name: value for name, value in means.items() if math.isfinite(value)}
