"""Messages of the tracker come back from their text as they were."""

from __future__ import annotations

import json
from typing import Any

import pytest

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices.tracker import (
    AskLater,
    Assignment,
    Call,
    HeldSlice,
    JoinAgain,
    Joined,
    JoinTracker,
    QuarantineSlice,
    Receipt,
    Reply,
    ReportProgress,
    RequestSlice,
    WaitReason,
    decode,
    encode,
)

MESSAGES: list[Call | Reply] = [
    JoinTracker(worker="worker-1", incarnation="x"),
    JoinTracker(worker="worker-1", incarnation="x", holds=(HeldSlice(epoch=1, slice_index=4, begun=True),)),
    Joined(session=3, run="a", epoch=1),
    RequestSlice(session=3, epoch=1, holding=(1, 2), looks=True),
    ReportProgress(session=3, grant=1, trained=7),
    QuarantineSlice(session=3, key="a", reason="held"),
    Assignment(grant=1, epoch=0, slice_index=4, key="a\n\u00e4", samples=2, todo=((1, 2),), revoked=(9,)),
    AskLater(reason=WaitReason.HELD, revoked=(1,)),
    JoinAgain(),
    *(Receipt(accepted=accepted) for accepted in (True, False)),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_it_comes_back(message: Call | Reply) -> None:
    text = encode(message)
    assert "\n" not in text
    assert decode(text.encode()) == message


@pytest.mark.parametrize("text", ["", "1", "[]", "{}", '{"kind": "AskLater"}', '{"kind": "Receipt", "accepted": "no"}'])
def test_what_is_none_is_named(text: str) -> None:
    with pytest.raises(OptionError, match="a message of the slice tracker"):
        decode(text)


WRONG = [
    ("JoinTracker", {"worker": 1}),
    ("JoinTracker", {"worker": ""}),
    ("JoinTracker", {"more": 1}),
    ("Joined", {"run": ""}),
    ("RequestSlice", {"epoch": 0.5}),
    ("RequestSlice", {"holding": ["1"]}),
    ("RequestSlice", {"looks": 1}),
    ("ReportProgress", {"grant": "1"}),
    ("ReportProgress", {"session": -1}),
    ("ReportProgress", {"trained": True}),
    ("ReportProgress", {"trained": -1}),
    ("QuarantineSlice", {"reason": None}),
    ("QuarantineSlice", {"key": 3}),
    ("Assignment", {"key": None}),
    ("Assignment", {"samples": 0}),
    ("Assignment", {"run": "long"}),
    ("AskLater", {"reason": "why"}),
]


@pytest.mark.parametrize(("kind", "damage"), WRONG, ids=str)
def test_what_is_of_another_type_or_range_is_refused(kind: str, damage: dict[str, Any]) -> None:
    message = next(message for message in MESSAGES if type(message).__name__ == kind)
    damaged = {**json.loads(encode(message)), **damage}
    with pytest.raises(OptionError, match="a message of the slice tracker"):
        decode(json.dumps(damaged))


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(OptionError, match="a message of the slice tracker"):
        decode(b'{"kind": "QuarantineSlice", "session": 3, "key": "\xff", "reason": "held"}')
    with pytest.raises(OptionError, match="rename that file"):
        encode(QuarantineSlice(session=3, key="\udcff", reason="held"))
