from __future__ import annotations

from typing import get_args

import msgspec
import pytest

from lightning_bytescheduler.diloco import messages
from lightning_bytescheduler.diloco.messages import (
    Acknowledge,
    EndRound,
    JoinRounds,
    LeaderAppointed,
    LeaveRounds,
    PassedRoundEnd,
    PauseRounds,
    PseudoGradientArrived,
    RoundEnded,
    RoundStarted,
    SendAfter,
    SendingPseudoGradient,
    StartRound,
    StepReport,
    TrainingOver,
    coalesced,
    decode,
    encode,
)
from lightning_bytescheduler.exceptions import OptionError

ALL = [
    JoinRounds(worker="a", session=7),
    JoinRounds(worker="a", session=7, round=3, steps=2, samples=64),
    StepReport(worker="a", round=1, steps=2, samples=64, batch_size=32, seconds=0.25, in_flight=1),
    StepReport(worker="a", round=1, steps=2, samples=64, batch_size=32, seconds=0.25, loss=-0.25),
    SendingPseudoGradient(worker="a", round=1, steps=2, samples=64),
    PseudoGradientArrived(worker="a", round=1),
    RoundStarted(worker="a", round=2),
    LeaveRounds(worker="a"),
    PauseRounds(worker="a"),
    LeaderAppointed(worker="a"),
    Acknowledge(round=1, reported=2),
    Acknowledge(round=1, reported=2),
    SendAfter(round=1, steps=9, reported=4),
    StartRound(round=2),
    StartRound(round=2, step_cap=100),
    TrainingOver(round=2),
    EndRound(worker="a", round=1, now=True, steps=7, epoch=True),
    PassedRoundEnd(worker="a", round=2, stop=True),
    RoundEnded(round=3, samples=8, metrics={"loss": 0.5}, validate=True),
]


@pytest.mark.parametrize("message", ALL, ids=lambda message: type(message).__name__)
def test_it_travels_as_json(message: messages.Message) -> None:
    text = encode(message)
    assert "\n" not in text
    assert decode(text) == message
    assert decode(text.encode()) == message


def test_all_kinds_are_here() -> None:
    kinds = set(get_args(messages.Message))
    assert {type(message) for message in ALL} == kinds


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        "[]",
        "{}",
        '{"kind": "Message"}',
        '{"kind": "LeaveRounds"}',
        '{"kind": "LeaveRounds", "worker": ""}',
        '{"kind": "LeaveRounds", "worker": 7}',
        '{"kind": "LeaveRounds", "worker": "a", "more": 1}',
        '{"kind": "TrainingOver", "round": -1}',
        '{"kind": "TrainingOver", "round": true}',
        '{"kind": "TrainingOver", "round": 1.5}',
        '{"kind": ["TrainingOver"], "round": 1}',
        '{"kind": "TrainingOver", "round": 1',
        '{"kind": "RoundEnded", "round": 1, "shares": {"a": "half"}}',
        '{"kind": "EndRound", "worker": "a", "round": 1, "stop": 1}',
        '{"kind": "StepReport", "worker": "a", "round": 1, "steps": 1, "samples": 1, "batch_size": 1, "seconds": 1, '
        '"loss": 1e999}',
    ],
)
def test_what_is_no_message_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="is not allowed"):
        decode(text)


def test_the_sender_and_the_field_are_named() -> None:
    with pytest.raises(
        OptionError, match=r"message of worker3=.* is not allowed: .*Expected `int` >= 0 - at `\$\.round`"
    ):
        decode('{"kind": "TrainingOver", "round": -1}', sender="worker3")


def test_a_number_that_is_none_is_refused() -> None:
    text = encode(StepReport(worker="a", round=1, steps=1, samples=1, batch_size=1, seconds=float("nan")))
    with pytest.raises(OptionError, match=r"at `\$\.seconds`"):
        decode(text)


def test_of_reports_that_piled_up_only_the_last_is_said_and_nothing_overtakes_what_is_told_once() -> None:
    one, two, three, of_next = (
        StepReport(worker="a", round=round, steps=n, samples=n, batch_size=1, seconds=0.1)
        for round, n in ((1, 1), (1, 2), (1, 3), (2, 1))
    )
    sending = SendingPseudoGradient(worker="a", round=1, steps=2, samples=2)
    assert coalesced([one, two, sending, three, of_next]) == [two, sending, three, of_next]
    assert coalesced([]) == []
    assert coalesced([one, msgspec.structs.replace(two, worker="b")])[0] == one
