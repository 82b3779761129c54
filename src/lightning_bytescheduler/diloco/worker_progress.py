"""What the batch scheduler knows of one worker."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import get_args

from lightning_bytescheduler.diloco.messages import Report
from lightning_bytescheduler.diloco.projection import Pace
from lightning_bytescheduler.diloco.round_options import RoundOptions
from lightning_bytescheduler.diloco.round_record import Activity, WorkerRecord
from lightning_bytescheduler.diloco.step_time import StepTime

__all__ = ["WorkerProgress", "WorkerState"]

_SILENT_STEPS = 3


class WorkerState(Enum):
    """Where a worker is. It goes down this list once a round."""

    WAITING = "waiting"
    """Joins in with the next round."""
    STARTING = "starting"
    """Was told to start, and fetches the weights."""
    TRAINING = "training"
    SENDING = "sending"
    ARRIVED = "arrived"
    """Its update is there; it waits for the others."""
    LOST = "lost"
    """Missed the end of a round. If it is heard of again, it joins in with the next round."""


@dataclass(slots=True, kw_only=True)
class WorkerProgress:
    """One worker in one round. Times are in seconds of the scheduler's clock.

    Attributes:
        name: Of the worker.
        session: Which start of its process this is.
        state: Where it is.
        heard: When it was last heard of.
        step_time: Survives the round.
        steps: Taken in this round.
        samples: Processed in this round.
        tokens: Processed in this round.
        in_flight: Steps that it has taken, about, before an answer reaches it; survives the round.
        counter: Steps after which it was told to send its update.
        told: When it was told to start.
        began: When it began to train.
        reported: When the step began that it is taking.
        sending: When it began to send.
        arrived: When its update was there.
    """

    name: str
    heard: float
    session: int = 0
    state: WorkerState = WorkerState.WAITING
    step_time: StepTime = field(default_factory=StepTime)
    steps: int = 0
    samples: int = 0
    tokens: int = 0
    in_flight: int = 0
    counter: int | None = None
    told: float = 0.0
    began: float | None = None
    reported: float = 0.0
    sending: float | None = None
    arrived: float | None = None

    def tell_to_start(self, now: float) -> None:
        """Begin a round anew."""
        self.state = WorkerState.STARTING
        self.steps = self.samples = self.tokens = 0
        self.counter = self.began = self.sending = self.arrived = None
        self.told = self.reported = self.heard = now

    def start(self, now: float) -> None:
        """It has the weights, and trains from now on."""
        self.state = WorkerState.TRAINING
        self.began = self.reported = now

    def note(self, report: Report, now: float) -> None:
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
        """Its update is there."""
        self.state = WorkerState.ARRIVED
        self.arrived = now

    def record(self, now: float, *, merged: bool) -> WorkerRecord:
        """Say what it did in the round that ends now."""
        times = (self.told, self.began, self.sending, self.arrived)
        known = [time for time in times if time is not None]
        return WorkerRecord(
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
        return self.heard + _SILENT_STEPS * seconds + options.silent_after

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
