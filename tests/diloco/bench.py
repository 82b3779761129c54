"""A batch scheduler that is talked to message by message."""

from __future__ import annotations

from typing import Any

from lightning_bytescheduler.diloco.batch_scheduler import BatchScheduler
from lightning_bytescheduler.diloco.messages import (
    Envelope,
    JoinRounds,
    Message,
    PseudoGradientArrived,
    RoundStarted,
    SendingPseudoGradient,
    StepReport,
)
from lightning_bytescheduler.diloco.round_end import RoundOptions, SampleTarget
from lightning_bytescheduler.diloco.round_record import RoundRecord


class Bench:
    """A scheduler, and a clock of steps of one second."""

    def __init__(self, target=None, **options: Any) -> None:
        self.records: list[RoundRecord] = []
        self.scheduler = BatchScheduler(
            SampleTarget(100) if target is None else target,
            RoundOptions(**{"grace": 5.0, **options}),
            observer=self.records.append,
        )
        self.now = 0.0

    def say(self, message) -> dict[str, list[Message]]:
        return self.by_recipient(self.scheduler.handle(message, now=self.now))

    def tick(self) -> dict[str, list[Message]]:
        return self.by_recipient(self.scheduler.tick(now=self.now))

    def pass_time(self) -> None:
        """Until something changes by itself."""
        assert self.scheduler.next_tick is not None
        self.now = self.scheduler.next_tick

    def by_recipient(self, envelopes: tuple[Envelope, ...]) -> dict[str, list[Message]]:
        return {to: [e.message for e in envelopes if e.to == to] for to in {e.to for e in envelopes}}

    def start(self, *names: str) -> None:
        for name in names:
            self.say(JoinRounds(worker=name))
        for name in names:
            self.say(RoundStarted(worker=name, round=self.scheduler.round))

    def steps(self, steps: int, *names: str, first: int = 1, batch_size: int = 1) -> dict[str, list[Message]]:
        """So many steps of each, from the first on. Returns what the last report brought about."""
        answer: dict[str, list[Message]] = {}
        for step in range(first, first + steps):
            self.now += 1.0
            for name in names:
                answer = self.say(self.report(name, step, batch_size))
        return answer

    def report(self, name: str, step: int, batch_size: int = 1, round: int | None = None) -> StepReport:
        number = self.scheduler.round if round is None else round
        return StepReport(
            worker=name, round=number, steps=step, samples=step * batch_size, batch_size=batch_size, seconds=1.0
        )

    def arrive(self, *names: str) -> dict[str, list[Message]]:
        answer: dict[str, list[Message]] = {}
        for name in names:
            progress = self.scheduler.workers[name]
            number = self.scheduler.round
            self.say(SendingPseudoGradient(worker=name, round=number, steps=progress.steps, samples=progress.samples))
            answer = self.say(PseudoGradientArrived(worker=name, round=number))
        return answer
