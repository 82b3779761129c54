"""The rounds of a run, as their host has them: worker 0 of those launched together, or a coordinator.

It wraps the batch scheduler. What that says goes to the workers, but for the end of a round: there the host says
whether what follows is held until it lets the workers go on, as where a mean is to be there before, or all stand still.
So a worker hears of a round's end before it hears of the next round's start. Beside the scheduler's own decisions, one
worker may end a round for all; where all take equally many steps in a round, those that are behind it go on until they
have taken as many.

No clock, no threads, no transport. For one thread, or under one lock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable

from lightning_bytescheduler.diloco.batch_scheduler import BatchScheduler
from lightning_bytescheduler.diloco.coordinator_protocol import PauseRounds, ResumeRounds
from lightning_bytescheduler.diloco.messages import (
    PARAMETER_SERVER,
    Envelope,
    MergePseudoGradients,
    Message,
    RoundStarted,
    RoundStatus,
    SendAfter,
    SendNow,
    StepMetrics,
    StepReport,
    TrainingOver,
    WorkerMessage,
)
from lightning_bytescheduler.diloco.round_end import FixedSteps, RoundOptions, RoundTarget
from lightning_bytescheduler.diloco.round_record import RoundMetrics, RoundRecord

_STATUS_EVERY_S = 0.5


class Rounds:
    """See the module.

    Args:
        target: What ends a round.
        options: Of the batch scheduler.
        post: Sends a message to a worker, without waiting.
        end: Called with each end of a round; returns whether what follows is held until :meth:`go_on`.
        observer: Called with each round that has ended, before that.

    Attributes:
        scheduler: The batch scheduler.
        metrics: Of the round that is on.
    """

    def __init__(
        self,
        target: RoundTarget,
        options: RoundOptions,
        *,
        post: Callable[[str, Message], None],
        end: Callable[[MergePseudoGradients], bool],
        observer: Callable[[RoundRecord], None],
    ) -> None:
        self.scheduler = BatchScheduler(target, options, observer=observer)
        self.metrics = RoundMetrics()
        self._target = target
        self._post = post
        self._end = end
        self._ending: SendNow | SendAfter | None = None  # what all were told when one asked for a round's end
        self._told: dict[str, float] = {}
        self._status, self._status_at = RoundStatus(round=0, left=0), 0.0  # one for all: it takes a look at all
        self._held: list[Envelope] | None = None

    def handle(self, message: WorkerMessage | PauseRounds | ResumeRounds, *, now: float) -> None:
        """Take in what a worker says."""
        self._deliver(self.scheduler.handle(message, now=now))
        if isinstance(message, (StepReport, RoundStarted)):
            self._answer(message.worker, message.round, now)

    def measured(self, message: StepMetrics) -> None:
        """Take in what a worker has measured."""
        self.metrics.add(message.worker, batch_size=message.batch_size, seconds=message.seconds, loss=message.loss)

    def tick(self, *, now: float) -> None:
        """Take note that time has passed."""
        self._deliver(self.scheduler.tick(now=now))

    def end_now(self, steps: int) -> None:
        """End the round that is on for all, which one worker asks for.

        Args:
            steps: That it has taken.
        """
        round = self.scheduler.round
        if self._held is None and (self._ending is None or self._ending.round != round):
            equal = isinstance(self._target, FixedSteps)
            self._ending = SendAfter(round=round, steps=steps) if equal else SendNow(round=round)
            for name in self.scheduler.workers:
                self._post(name, self._ending)

    def go_on(self, *, over: int | None = None) -> None:
        """Say what was held, or that training is over after a round."""
        held, self._held = self._held or [], None
        if over is not None:
            held = [Envelope(name, TrainingOver(round=over)) for name in self.scheduler.workers]
        self._deliver(held)

    def forget(self, name: str) -> None:
        """A worker has left."""
        self._told.pop(name, None)

    def _answer(self, name: str, round: int, now: float) -> None:
        if self._held is not None:
            return
        if self._ending is not None and round == self._ending.round:
            self._post(name, self._ending)  # the first may have come before it had started
        elif now - self._told.get(name, -_STATUS_EVERY_S) >= _STATUS_EVERY_S:
            self._told[name] = now
            if self._status.round != self.scheduler.round or now - self._status_at >= _STATUS_EVERY_S:
                self._status_at = now
                self._status = RoundStatus(round=self.scheduler.round, left=max(self.scheduler.left, 0))
            self._post(name, self._status)

    def _deliver(self, envelopes: Iterable[Envelope]) -> None:
        for envelope in envelopes:
            if self._held is not None:
                self._held.append(envelope)
            elif envelope.to != PARAMETER_SERVER:
                self._post(envelope.to, envelope.message)
            elif isinstance(envelope.message, MergePseudoGradients):
                self._ending, self._held = None, []
                if not self._end(envelope.message):
                    self._held = None
