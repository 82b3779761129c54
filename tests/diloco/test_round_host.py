"""The host of a job's rounds: what a worker asks for happens at the end of a round, on all workers."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from lightning_bytescheduler.diloco import FixedSteps, RoundOptions, RoundRecord, SampleTarget
from lightning_bytescheduler.diloco.mailbox import (
    Boundary,
    EndRound,
    Passed,
    StepMetrics,
    _without_overtaken,
    decode,
    encode,
)
from lightning_bytescheduler.diloco.messages import (
    Done,
    Join,
    Report,
    ScheduleUpdate,
    SendingUpdate,
    StartRound,
    UpdateArrived,
    UpdateNow,
    UpdateReceived,
)
from lightning_bytescheduler.diloco.round_host import RoundHost

OPTIONS = RoundOptions(quorum=0.0, grace=100.0, silent_after=100.0)
WORKERS = ("a", "b")


class Mail:
    """Keeps what each worker was told, and waits for it."""

    def __init__(self) -> None:
        self.told: dict[str, list[Any]] = {name: [] for name in WORKERS}
        self.changed = threading.Condition()

    def post(self, name: str, message: Any) -> None:
        with self.changed:
            self.told[name].append(message)
            self.changed.notify_all()

    def wait(self, name: str, wanted: Callable[[Any], bool]) -> Any:
        with self.changed:
            assert self.changed.wait_for(lambda: any(map(wanted, self.told[name])), 5.0), self.told
            return next(message for message in self.told[name] if wanted(message))


def hosted(target: Any, **options: Any) -> tuple[RoundHost, Mail, list[RoundRecord], list[BaseException]]:
    mail, records, errors = Mail(), [], []  # type: Mail, list[RoundRecord], list[BaseException]
    host = RoundHost(
        target,
        OPTIONS,
        workers=WORKERS,
        post=mail.post,
        on_round=records.append,
        on_silence=lambda silent: None,
        on_error=errors.append,
        **options,
    )
    host.start()
    return host, mail, records, errors


def start(host: RoundHost, mail: Mail, round: int) -> None:
    for name in WORKERS:
        mail.wait(name, lambda message: isinstance(message, StartRound) and message.round == round)
        host.handle(UpdateReceived(worker=name, round=round))


def end(host: RoundHost, round: int, samples: int = 4) -> None:
    for name in WORKERS:
        host.handle(SendingUpdate(worker=name, round=round, steps=2, samples=samples))
    for name in WORKERS:
        host.handle(UpdateArrived(worker=name, round=round))


def join(host: RoundHost) -> None:
    for name in WORKERS:
        host.handle(Join(worker=name))


def test_rounds_follow_one_another_until_somebody_asks() -> None:
    host, mail, records, errors = hosted(FixedSteps(2))
    join(host)
    start(host, mail, 1)
    host.handle(StepMetrics(worker="a", round=1, samples=4, seconds=0.5, loss=2.0))
    host.handle(StepMetrics(worker="b", round=1, samples=4, seconds=1.0, loss=4.0))
    end(host, 1)
    first = mail.wait("a", lambda message: isinstance(message, Boundary))
    assert not first.halts
    assert first.samples == 8
    assert first.shares == {"a": 0.5, "b": 0.5}
    assert first.metrics == {"loss": 3.0, "samples_per_second": 12.0}
    start(host, mail, 2)
    host.handle(EndRound(worker="a", round=2, now=True, steps=1, epoch=True))
    for name in WORKERS:  # whoever is behind goes on until it has taken as many
        assert mail.wait(name, lambda message: isinstance(message, ScheduleUpdate) and message.round == 2).counter == 1
    host.handle(Report(worker="b", round=2, steps=1, samples=4, batch_size=4, seconds=0.1))
    end(host, 2)
    second = mail.wait("b", lambda message: isinstance(message, Boundary) and message.round == 2)
    assert second.epoch
    assert not second.stop
    assert not any(isinstance(message, StartRound) and message.round == 3 for message in mail.told["a"])
    for name in WORKERS:
        host.handle(Passed(worker=name, round=2))
    start(host, mail, 3)
    assert host.stop(5.0)
    assert [record.round for record in records] == [1, 2]
    assert not errors


def test_one_that_stops_after_a_halt_stops_all() -> None:
    host, mail, _, errors = hosted(SampleTarget(1000))
    join(host)
    start(host, mail, 1)
    host.handle(EndRound(worker="a", round=1, now=True, steps=1, validate=True))
    for name in WORKERS:  # however many steps it has taken
        assert mail.wait(name, lambda message: isinstance(message, UpdateNow)).round == 1
    end(host, 1)
    assert mail.wait("a", lambda message: isinstance(message, Boundary)).validate
    host.handle(Passed(worker="a", round=1))
    host.handle(Passed(worker="b", round=1, stop=True))
    for name in WORKERS:
        mail.wait(name, lambda message: isinstance(message, Done))
    assert host.stop(5.0)
    assert not errors


def test_a_host_that_fails_says_so() -> None:
    host, _, _, errors = hosted(FixedSteps(2))
    host.handle(object())  # type: ignore[arg-type]
    host.stop(5.0)
    assert len(errors) == 1


def test_messages_survive_the_wire() -> None:
    for message in (
        Boundary(round=3, samples=8, shares={"a": 1.0}, metrics={"loss": 0.5}, validate=True),
        EndRound(worker="a", round=1, now=True, steps=7),
        Passed(worker="a", round=2, stop=True),
        Report(worker="b", round=2, steps=1, samples=4, batch_size=4, seconds=0.1),
    ):
        assert decode(encode(message).encode()) == message


def test_only_the_last_of_reports_that_piled_up_is_posted() -> None:
    reports = [Report(worker="a", round=1, steps=n, samples=n, batch_size=1, seconds=0.1) for n in (1, 2, 3)]
    metrics = StepMetrics(worker="a", round=1, samples=1, seconds=0.1)
    sending = SendingUpdate(worker="a", round=1, steps=2, samples=2)
    letters = [("host", message) for message in (reports[0], metrics, reports[1], metrics, sending, reports[2])]
    assert [message for _, message in _without_overtaken(letters)] == [
        metrics,
        reports[1],
        metrics,
        sending,
        reports[2],
    ]
