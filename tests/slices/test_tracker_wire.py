"""Messages of the tracker come back from their text as they were."""

from __future__ import annotations

import pytest

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices.messages import (
    Assignment,
    Begin,
    Call,
    Done,
    EpochOver,
    Join,
    JoinAgain,
    Joined,
    Leave,
    Progress,
    Quarantine,
    Receipt,
    Renew,
    Reply,
    Request,
    Verdict,
    Wait,
    WaitReason,
    decode,
    encode,
)
from lightning_bytescheduler.slices.slice import Slice

PIECE = Slice(key="a\n\u00e4", url="memory://a", start=3, size=8, samples=2, checksum=None)
MESSAGES: list[Call | Reply] = [
    Join(worker="worker-1", incarnation="x", cached=("a", "b"), prefetch=None),
    Joined(session=3, epoch=1, lease=2.5),
    Request(session=3, epoch=1, holding=(1, 2), cached=(), evicted=("a",), looks=True),
    Begin(session=3, grant=1),
    Progress(session=3, grant=1, trained=7),
    Done(session=3, grant=1),
    Quarantine(session=3, key="a", reason="held"),
    Renew(session=3),
    Leave(session=3),
    Assignment(grant=1, epoch=0, slice_index=4, slice=PIECE, first=1, lease=0.1, revoked=(9,)),
    Wait(reason=WaitReason.HELD, seconds=0.25, revoked=()),
    EpochOver(epoch=2, revoked=(1,)),
    JoinAgain(),
    *(Receipt(verdict=verdict) for verdict in Verdict),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda message: type(message).__name__)
def test_it_comes_back(message: Call | Reply) -> None:
    text = encode(message)
    assert "\n" not in text
    assert decode(text.encode()) == message


@pytest.mark.parametrize("text", ["", "1", "[]", "{}", '{"kind": "Wait"}', '{"kind": "Receipt", "verdict": "no"}'])
def test_what_is_none_is_named(text: str) -> None:
    with pytest.raises(OptionError, match="a message of the slice tracker"):
        decode(text)
