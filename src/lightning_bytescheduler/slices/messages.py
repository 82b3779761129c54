"""What workers and the slice tracker tell each other, and how it travels: one line of JSON for each message.

Messages are frozen and hold plain values only. What arrives is checked against their types: the right fields, whole
numbers where whole numbers belong, no empty names. Whether a number fits the slices that there are is the tracker's
matter.
"""

from __future__ import annotations

from enum import Enum
from typing import Annotated, Protocol, TypeAlias

import msgspec

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices.slice import Slice

Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]
Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
_Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind", forbid_unknown_fields=True):
    """A message; its kind is the name of its class."""


class JoinTracker(_Message, frozen=True):
    """A worker is there.

    Attributes:
        worker: Its name, the same after a restart: what it held is kept for that name.
        incarnation: Any text that no other process of that name uses. A process that joins again after ``JoinAgain``
            may repeat its own.
        keeps: How many slices it keeps that it has fetched. It is given these first in the next epochs.
        prefetch: Slices it may hold that it has not begun; None for the tracker's own option.
    """

    worker: Name
    incarnation: Name
    keeps: Natural = 0
    prefetch: _Positive | None = None


class Joined(_Message, frozen=True):
    """The worker may ask for slices.

    Grants from before the join are void. What the worker is to continue comes again as the answer to its requests, in
    the order in which it held it.

    Attributes:
        session: Goes into every other message.
        epoch: The newest epoch that slices are handed out of.
        lease: Seconds without a message after which the worker is taken for dead.
    """

    session: Natural
    epoch: Natural
    lease: _Seconds


class RequestSlice(_Message, frozen=True):
    """A worker wants one more slice. One request of a worker at a time; one that got no answer may be repeated.

    Attributes:
        session: The worker's.
        epoch: The epoch it trains; it may be given what is left of one before. The first request for the next one
            opens it, if all that is left of this one is in workers' hands.
        holding: Every grant that it was told of and has not finished: one that is missing here and that the worker
            never began is sent again, as its answer must have been lost.
        looks: It only asks how the epoch stands: as long as another worker holds a slice, it is given none.
    """

    session: Natural
    epoch: Natural
    holding: tuple[Natural, ...] = ()
    looks: bool = False


class Assignment(_Message, frozen=True):
    """A slice for the worker. It may fetch it at once, and trains on it after its first report was accepted.

    Attributes:
        grant: Identity of this handing-out; goes into messages about it.
        epoch: The epoch it belongs to.
        slice_index: The slice's index in the catalogue.
        slice: The slice itself.
        first: First sample to train on; those before it have been.
        revoked: Of the grants listed in the request, those that are not the worker's any more.
    """

    grant: Natural
    epoch: Natural
    slice_index: Natural
    slice: Slice
    first: Natural
    revoked: tuple[Natural, ...] = ()


class WaitReason(str, Enum):
    """Why there is no slice now."""

    LIMIT = "limit"
    """The worker holds as many slices ahead as it may: ask when it begins one."""
    HELD = "held"
    """Other workers hold the rest: ask again, as one may die, or have more to do than this one."""
    EPOCH = "epoch"
    """The epoch asked for cannot begin yet, as one is not over that is two before it."""
    OVER = "over"
    """Nothing is left of the epoch asked for, in nobody's hands either: ask for the next one."""


class AskLater(_Message, frozen=True):
    """No slice now.

    Attributes:
        reason: Why.
        revoked: As in ``Assignment``.
    """

    reason: WaitReason
    revoked: tuple[Natural, ...] = ()


class ReportProgress(_Message, frozen=True):
    """A worker has trained on a slice up to a sample, and goes on with it.

    The first one has the ``first`` of the assignment: only where that is accepted, the worker may train. One with all
    samples says that the slice is done. Those between may be lost. May come in any order, any number of times.

    Attributes:
        session: The worker's.
        grant: The assignment's.
        trained: Samples of the slice that are trained on, counted from the slice's first one.
    """

    session: Natural
    grant: Natural
    trained: Natural


class QuarantineSlice(_Message, frozen=True):
    """A slice cannot be read, also not when fetched again. May be repeated."""

    session: Natural
    key: Name
    reason: str


class RenewLease(_Message, frozen=True):
    """The worker lives. Every other message says so too."""

    session: Natural


class LeaveTracker(_Message, frozen=True):
    """The worker goes, and has trained on nothing beyond what it reported."""

    session: Natural


class Receipt(_Message, frozen=True):
    """What became of a message that hands nothing out.

    Attributes:
        accepted: Whether it counted. If not, the slice is not the worker's, or no more, as it is done, was given to
            another one or is quarantined: stop. What was not reported does not count.
    """

    accepted: bool


class JoinAgain(_Message, frozen=True):
    """The session is over, as its lease ran out or the tracker was restarted. All of its grants are void.

    Any message but a ``JoinTracker`` can be answered with it.
    """


Call: TypeAlias = JoinTracker | RequestSlice | ReportProgress | QuarantineSlice | RenewLease | LeaveTracker
"""What a worker says."""

Reply: TypeAlias = Joined | Assignment | AskLater | Receipt | JoinAgain
"""What the tracker answers."""

_DECODER = msgspec.json.Decoder(Call | Reply)


class TrackerClient(Protocol):
    """The tracker as its workers see it, whether it is in their process, in rank 0's, or in a service."""

    def answer(self, message: Call) -> Reply:
        """Answer a worker; never waits for others. A call may be repeated when its answer was lost.

        Raises:
            Exception: What the transport raises.
        """


def encode(message: Call | Reply) -> str:
    """Write a message.

    Raises:
        OptionError: If it cannot be written, as a name that is no text in Unicode.
    """
    try:
        return msgspec.json.encode(message).decode()
    except UnicodeEncodeError as error:
        raise OptionError("message", message, f"one of texts in Unicode ({error}); rename that file") from error


def decode(text: str | bytes) -> Call | Reply:
    """Read what :func:`encode` wrote.

    Raises:
        OptionError: If it is no such message.
    """
    try:
        message: Call | Reply = _DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise OptionError("message", text, f"a message of the slice tracker ({error})") from error
    return message
