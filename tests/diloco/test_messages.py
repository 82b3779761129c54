from __future__ import annotations

import pytest

from lightning_bytescheduler.diloco import messages
from lightning_bytescheduler.diloco.messages import (
    Acknowledge,
    CollectUpdates,
    Done,
    Join,
    Leave,
    MergeUpdates,
    Report,
    ScheduleUpdate,
    SendingUpdate,
    StartRound,
    UpdateArrived,
    UpdateNow,
    UpdateReceived,
    Wait,
    from_json,
    to_json,
)
from lightning_bytescheduler.exceptions import OptionError

ALL = [
    Join(worker="a", session=7),
    Report(worker="a", round=1, steps=2, samples=64, batch_size=32, seconds=0.25, in_flight=1),
    SendingUpdate(worker="a", round=1, steps=2, samples=64, tokens=640),
    UpdateArrived(worker="a", round=1),
    UpdateReceived(worker="a", round=2),
    Leave(worker="a"),
    Acknowledge(round=1, step=2),
    ScheduleUpdate(round=1, counter=9, step=4),
    UpdateNow(round=1),
    Wait(round=2),
    StartRound(round=2),
    StartRound(round=2, step_cap=100),
    Done(round=2),
    CollectUpdates(round=1, workers=("a", "b"), timeout=60.0),
    MergeUpdates(round=1, workers=()),
]


@pytest.mark.parametrize("message", ALL, ids=lambda message: type(message).__name__)
def test_it_travels_as_json(message: messages.Message) -> None:
    text = to_json(message)
    assert "\n" not in text
    assert from_json(text) == message
    assert from_json(text.encode()) == message


def test_all_kinds_are_here() -> None:
    assert {type(message).__name__ for message in ALL} == set(messages._KINDS)
    assert set(messages._KINDS) < set(messages.__all__)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "7",
        "[]",
        "{}",
        '{"kind": "Message"}',
        '{"kind": "Leave"}',
        '{"kind": "Leave", "worker": ""}',
        '{"kind": "Leave", "worker": 7}',
        '{"kind": "Leave", "worker": "a", "more": 1}',
        '{"kind": "Done", "round": -1}',
        '{"kind": "Done", "round": true}',
        '{"kind": "Done", "round": 1.5}',
        '{"kind": "MergeUpdates", "round": 1, "workers": "ab"}',
        '{"kind": "MergeUpdates", "round": 1, "workers": [""]}',
        '{"kind": "CollectUpdates", "round": 1, "workers": ["a"], "timeout": Infinity}',
        '{"kind": ["Done"], "round": 1}',
    ],
)
def test_what_is_no_message_is_refused(text: str) -> None:
    with pytest.raises(OptionError, match="is not allowed"):
        from_json(text)


def test_numbers_are_checked_where_they_are_made() -> None:
    with pytest.raises(OptionError, match=r"seconds=nan is not allowed"):
        Report(worker="a", round=1, steps=1, samples=1, batch_size=1, seconds=float("nan"))
