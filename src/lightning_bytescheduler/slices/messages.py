"""Messages between workers and the slice tracker, each one line of JSON.

Messages are frozen and hold only plain values. Incoming ones are checked against their types: the right fields, whole
numbers where required, no empty names. The tracker checks whether numbers fit its slices.
"""

from __future__ import annotations

from collections.abc import Iterable
from enum import Enum
from typing import Annotated, Protocol, TypeAlias

import msgspec

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices.slice import Runs, Slice

Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]
Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
_Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]
_Seconds: TypeAlias = Annotated[float, msgspec.Meta(ge=0)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind", forbid_unknown_fields=True):
    """A message; its kind is the name of its class."""


class TrainedRun(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Neighbouring samples of a slice that were trained on in an epoch."""

    epoch: Natural
    slice_index: Natural
    start: Natural
    stop: _Positive


def touching(runs: Iterable[TrainedRun]) -> tuple[TrainedRun, ...]:
    """Return the same samples in order, with runs that touch as one; what is there twice stays so."""
    found: list[TrainedRun] = []
    for run in sorted(runs, key=msgspec.structs.astuple):
        last = found[-1] if found else None
        if last is not None and (last.epoch, last.slice_index, last.stop) == (run.epoch, run.slice_index, run.start):
            found[-1] = TrainedRun(run.epoch, run.slice_index, last.start, run.stop)
        else:
            found.append(run)
    return tuple(found)


def by_slice(runs: Iterable[TrainedRun]) -> dict[tuple[int, int], Runs]:
    """Return where the runs of each slice start and stop, in order, by epoch and slice."""
    found: dict[tuple[int, int], Runs] = {}
    for run in runs:
        found.setdefault((run.epoch, run.slice_index), []).append((run.start, run.stop))
    return {place: sorted(own) for place, own in found.items()}


class HeldSlice(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A slice that a worker holds by its own account, and whether it has begun it."""

    epoch: Natural
    slice_index: Natural
    begun: bool


class JoinTracker(_Message, frozen=True):
    """A worker joins.

    Attributes:
        worker: Name of the worker, the same after a restart: what it held is kept for that name.
        incarnation: Any text that no other process of that name uses. A process that joins again after ``JoinAgain``
            may repeat its own.
        keeps: Number of fetched slices that it keeps. It is given these first in the next epochs.
        prefetch: Slices it may hold that it has not begun; ``None`` for the tracker's own option.
        holds: What it held before, and would go on with.
    """

    worker: Name
    incarnation: Name
    keeps: Natural = 0
    prefetch: _Positive | None = None
    holds: tuple[HeldSlice, ...] = ()


class Assignment(_Message, frozen=True):
    """A slice for the worker, which may fetch it at once and train on it after its first report is accepted.

    Attributes:
        todo: What is to be trained on: where each run of samples starts and stops, in order.
        revoked: Those of the request's grants that are not the worker's now.
    """

    grant: Natural
    epoch: Natural
    slice_index: Natural
    slice: Slice
    todo: tuple[tuple[Natural, _Positive], ...]
    revoked: tuple[Natural, ...] = ()


class Joined(_Message, frozen=True):
    """The worker may ask for slices.

    Earlier grants are void. What else the worker is to continue comes again in answer to its requests, in the order in
    which it held it.

    Attributes:
        lease: Seconds without a message after which the worker counts as dead.
        held: What it said that it holds, and is still its own, with new grants. The rest is done, or another's.
    """

    session: Natural
    epoch: Natural
    lease: _Seconds
    held: tuple[Assignment, ...] = ()


class RequestSlice(_Message, frozen=True):
    """A worker requests one more slice, one request at a time; a request without an answer may be repeated.

    Attributes:
        epoch: The epoch it trains; it may be given the rest of an earlier one. The first request for the next epoch
            opens it, if workers hold all that is left of this one.
        holding: Every known grant that is not finished; or that is not in the weights, where merged samples count. A
            missing one that the worker never began is sent again, as its answer must have been lost.
        looks: Only ask about the epoch's state: while another worker holds a slice, none is given.
    """

    session: Natural
    epoch: Natural
    holding: tuple[Natural, ...] = ()
    looks: bool = False


class WaitReason(str, Enum):
    """Why there is no slice now."""

    LIMIT = "limit"
    """The worker holds as many slices ahead as it may: ask when it begins one."""
    HELD = "held"
    """Other workers hold the rest: ask again, as one may die, or have more to do than this one."""
    SOON = "soon"
    """The tracker was restarted, and waits for other workers to say what they hold: ask again, there may be one."""
    EPOCH = "epoch"
    """The epoch asked for cannot begin yet, as the one two before it is not over."""
    MERGING = "merging"
    """All of the epoch asked for is trained on, and some of it is in no weights yet: it may come back."""
    OVER = "over"
    """Nothing is left of the epoch asked for, with any worker: ask for the next one."""


class AskLater(_Message, frozen=True):
    """No slice now."""

    reason: WaitReason
    revoked: tuple[Natural, ...] = ()


class ReportProgress(_Message, frozen=True):
    """A worker has trained on so many samples of a slice, with those that were not for it to do, and continues with it.

    The first report comes before its first sample: the worker may train only if it is accepted. A report with all
    samples ends the slice, unless the tracker counts what is merged. Reports in between may be lost, repeated or
    reordered.
    """

    session: Natural
    grant: Natural
    trained: Natural


class QuarantineSlice(_Message, frozen=True):
    """A slice cannot be read, also when fetched again. May be repeated."""

    session: Natural
    key: Name
    reason: str


class RenewLease(_Message, frozen=True):
    """The worker lives. Every other message implies this too."""

    session: Natural


class LeaveTracker(_Message, frozen=True):
    """The worker leaves, and has trained on nothing beyond its reports."""

    session: Natural


class Receipt(_Message, frozen=True):
    """The result of a message that hands nothing out.

    Attributes:
        accepted: Whether it counted. If not, stop: the slice is not the worker's now, as it is done, was given to
            another one or is quarantined. What was not reported does not count.
    """

    accepted: bool


class JoinAgain(_Message, frozen=True):
    """The session is over, as its lease ran out or the tracker was restarted. All of its grants are void.

    Any message but a ``JoinTracker`` may get this answer.
    """


Call: TypeAlias = JoinTracker | RequestSlice | ReportProgress | QuarantineSlice | RenewLease | LeaveTracker
"""Messages of workers."""

Reply: TypeAlias = Joined | Assignment | AskLater | Receipt | JoinAgain
"""Answers of the tracker."""

_DECODER = msgspec.json.Decoder(Call | Reply)


class TrackerClient(Protocol):
    """The tracker as its workers see it: in their process, in rank 0's, or in a service."""

    def answer(self, message: Call) -> Reply:
        """Answer a worker without waiting for others. A call may be repeated if its answer was lost.

        Raises:
            Exception: Errors of the transport.
        """


def encode(message: Call | Reply) -> str:
    """Encode a message.

    Raises:
        OptionError: If it cannot be encoded, as with a name that is not valid Unicode.
    """
    try:
        return msgspec.json.encode(message).decode()
    except UnicodeEncodeError as error:
        raise OptionError("message", message, f"one of texts in Unicode ({error}); rename that file") from error


def decode(text: str | bytes) -> Call | Reply:
    """Decode the result of :func:`encode`.

    Raises:
        OptionError: If it is not such a message.
    """
    try:
        message: Call | Reply = _DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise OptionError("message", text, f"a message of the slice tracker ({error})") from error
    return message
