"""The worker's side of a round: counts steps, and knows when it is time to send the pseudo-gradient.

Used by one thread, or under the caller's lock. Messages of an older round, and doubled ones, change nothing.
"""

from __future__ import annotations

from lightning_bytescheduler.checks import require_seconds, require_whole
from lightning_bytescheduler.diloco.messages import (
    Acknowledge,
    Message,
    RoundStarted,
    SendAfter,
    SendingPseudoGradient,
    StartRound,
    StepReport,
)


class RoundCounter:
    """Where one worker is in its round.

    Args:
        worker: The worker's name, which is in all its messages.

    Attributes:
        round: The round it is in; 0 before the first.
        steps: Taken in this round, or since its pseudo-gradient was sent.
        samples: Processed in these steps.
        next_round: The round to start, as soon as its weights are there; ``None`` if none was announced.
        closes: Whether this round has no step, and only sends what earlier rounds have left of a fragment.
    """

    def __init__(self, worker: str) -> None:
        self.worker = worker
        self.round = 0
        self.steps = 0
        self.samples = 0
        self._losses, self._measured = 0.0, 0  # sum over the samples whose loss is known, and their number
        self.next_round: int | None = None
        self.closes = False
        self._next_cap: int | None = None
        self._last_step: int | None = None
        self._acknowledged = 0
        self._sent = False

    def carried_into(self, round: int, sent: SendingPseudoGradient | None = None) -> RoundCounter:
        """Return a new counter that begins ``round`` with these steps, and those of ``sent``, which did not count."""
        counter = RoundCounter(self.worker)
        counter.round, counter.steps, counter.samples = round, self.steps, self.samples
        counter._losses, counter._measured = self._losses, self._measured
        if sent is not None:
            counter.steps, counter.samples = self.steps + sent.steps, self.samples + sent.samples
        return counter

    @property
    def due(self) -> bool:
        """Whether the pseudo-gradient is to be sent before another step is taken."""
        return self._last_step is not None and self.steps >= self._last_step

    @property
    def steps_left(self) -> int | None:
        """Steps until the pseudo-gradient is sent, or ``None`` while that is unknown."""
        return None if self._last_step is None else max(self._last_step - self.steps, 0)

    def receive(self, message: Message) -> None:
        """Handle a message of the scheduler."""
        if isinstance(message, StartRound):
            # A message may have been under way for long, and name a round that has begun.
            if message.round > max(self.round, self.next_round or 0):
                self.next_round, self._next_cap = message.round, message.step_cap
        elif self._sent:
            pass  # the message is about a round that this worker is through with
        elif isinstance(message, (Acknowledge, SendAfter)) and message.round == self.round:
            self._acknowledged = max(self._acknowledged, message.reported)
            if isinstance(message, SendAfter):
                # Both the scheduler and the cap may have set a last step. The earlier one holds.
                self._last_step = message.steps if self._last_step is None else min(self._last_step, message.steps)

    def start(self) -> RoundStarted:
        """Begin the announced round, as its weights are there. Returns the message to send.

        Steps that were taken since the pseudo-gradient was sent belong to this round.

        Raises:
            RuntimeError: If no round was announced.
        """
        if self.next_round is None:
            raise RuntimeError("Cannot start a round: the scheduler has announced none.")
        if not self._sent:
            self.clear()  # its steps, if any, were part of a round that is over, and are lost
        self._acknowledged = self.steps  # steps taken while sending could not be answered
        self.round, self._last_step, self.closes = self.next_round, self._next_cap, self._next_cap == 0
        self.next_round = self._next_cap = None
        self._sent = False
        return RoundStarted(worker=self.worker, round=self.round)

    def step(self, *, batch_size: int, seconds: float, loss: float | None = None) -> StepReport:
        """Count a step. Returns the message to send; its answer need not be awaited.

        Args:
            batch_size: Its samples.
            seconds: Its duration, from the end of the step before.
            loss: Its loss, if it was measured.

        Raises:
            OptionError: Names the value that is not allowed.
        """
        in_flight = max(self.steps - self._acknowledged, 0)
        self.samples += require_whole("batch_size", batch_size, 1)
        self.steps += 1
        if loss is not None:
            self._losses, self._measured = self._losses + loss * batch_size, self._measured + batch_size
        return StepReport(
            worker=self.worker,
            round=self.round + self._sent,
            steps=self.steps,
            samples=self.samples,
            batch_size=batch_size,
            seconds=require_seconds("seconds", seconds),
            in_flight=in_flight,
            loss=self._losses / self._measured if self._measured else None,
        )

    def send(self) -> SendingPseudoGradient:
        """Record that the pseudo-gradient is being sent. Returns the message to send.

        Where sending overlaps with training, the steps that follow count for the next round.
        """
        message = SendingPseudoGradient(worker=self.worker, round=self.round, steps=self.steps, samples=self.samples)
        self.clear()
        self._last_step = None
        self._sent = True
        return message

    def clear(self) -> None:
        """Forget the steps of this round."""
        self.steps = self.samples = self._acknowledged = 0
        self._losses, self._measured = 0.0, 0
