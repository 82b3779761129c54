"""A batch scheduler that gets its messages one by one."""

from __future__ import annotations

from typing import Any

from lightning_bytescheduler.diloco.messages import (
    JoinRounds,
    Message,
    PseudoGradientArrived,
    RoundStarted,
    SendingPseudoGradient,
    StepReport,
)
from lightning_bytescheduler.diloco.round_end import RoundOptions, SampleTarget
from lightning_bytescheduler.diloco.round_record import RoundRecord
from lightning_bytescheduler.diloco.rounds import Rounds

MERGED = ""
"""Stands for a worker's name: its entries are ended rounds, with the workers that were merged."""


class Bench:
    """A scheduler, and a clock of steps of one second."""

    def __init__(self, target=None, **options: Any) -> None:
        self.records: list[RoundRecord] = []
        self.scheduler = Rounds(
            SampleTarget(100) if target is None else target,
            RoundOptions(**{"grace": 5.0, **options}),
            post=self._hear,
            end=self._end,
        )
        self._told: dict[str, list[Any]] = {}
        self.now = 0.0

    @property
    def samples(self) -> int:
        """Samples that have become part of the weights."""
        return sum(record.samples for record in self.records)

    def say(self, message) -> dict[str, list[Any]]:
        """Returns the scheduler's messages, by the worker that they are for."""
        self._told = {}
        self.scheduler.handle(message, now=self.now)
        return self._told

    def tick(self) -> dict[str, list[Any]]:
        self._told = {}
        self.scheduler.tick(now=self.now)
        return self._told

    def _hear(self, name: str, message: Message) -> None:
        self._told.setdefault(name, []).append(message)

    def _end(self, record: RoundRecord) -> None:
        self.records.append(record)
        self._told.setdefault(MERGED, []).append((record.round, record.merged))
        self.scheduler.go_on()

    def pass_time(self) -> None:
        """Move the clock to when something changes by itself."""
        assert self.scheduler.next_tick is not None
        self.now = self.scheduler.next_tick

    def start(self, *names: str) -> None:
        for name in names:
            self.say(JoinRounds(worker=name))
        for name in names:
            self.say(RoundStarted(worker=name, round=self.scheduler.round))

    def steps(self, steps: int, *names: str, first: int = 1, batch_size: int = 1) -> dict[str, list[Any]]:
        """Report ``steps`` steps of each worker, from number ``first`` on. Returns the answer to the last report."""
        answer: dict[str, list[Any]] = {}
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

    def arrive(self, *names: str) -> dict[str, list[Any]]:
        answer: dict[str, list[Any]] = {}
        for name in names:
            progress = self.scheduler.workers[name]
            number = self.scheduler.round
            self.say(SendingPseudoGradient(worker=name, round=number, steps=progress.steps, samples=progress.samples))
            answer = self.say(PseudoGradientArrived(worker=name, round=number))
        return answer
