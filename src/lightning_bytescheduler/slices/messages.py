"""How what workers and the slice tracker tell each other travels: one line of JSON for each message.

What workers and the slice tracker tell each other: frozen, of primitives only, so any transport can carry it.
"""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, fields
from enum import Enum
from typing import Any, TypeAlias

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices.slice import Slice

__all__ = [
    "Answer",
    "Assignment",
    "Begin",
    "Call",
    "Done",
    "EpochOver",
    "Join",
    "JoinAgain",
    "Joined",
    "Leave",
    "Progress",
    "Quarantine",
    "Receipt",
    "Renew",
    "Reply",
    "Request",
    "Verdict",
    "Wait",
    "WaitReason",
    "decode",
    "encode",
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Join:
    """A worker is there.

    Attributes:
        worker: Its name, the same after a restart: what it held is kept for that name.
        incarnation: Any text that no other process of that name uses. A process that joins again after
            :class:`JoinAgain` may repeat its own.
        cached: Keys of the slices it has locally: all of them.
        prefetch: Slices it may hold that it has not begun; None for the tracker's own option.
    """

    worker: str
    incarnation: str
    cached: tuple[str, ...] = ()
    prefetch: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Joined:
    """The worker may ask for slices.

    Grants from before the join are void. What the worker is to continue comes again as the answer to its requests, in
    the order in which it held it.

    Attributes:
        session: Goes into every other message.
        epoch: The running epoch.
        lease: Seconds without a message after which the worker is taken for dead.
    """

    session: int
    epoch: int
    lease: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Request:
    """A worker wants one more slice. One request of a worker at a time; one that got no answer may be repeated.

    Attributes:
        session: The worker's.
        epoch: The epoch it trains. The first request for the next one starts it, if this one is over.
        holding: Every grant that it was told of and has not finished: one that is missing here and that the worker
            never began is sent again, as its answer must have been lost.
        cached: Keys of slices it has got locally since it last said so. Repeating all is as good, only slower.
        evicted: Keys of slices it has locally no longer.
        looks: It only asks how the epoch stands: as long as another worker holds a slice, it is given none.
    """

    session: int
    epoch: int
    holding: tuple[int, ...] = ()
    cached: tuple[str, ...] = ()
    evicted: tuple[str, ...] = ()
    looks: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Assignment:
    """A slice for the worker. It may fetch it at once, and trains on it after its :class:`Begin` was accepted.

    Attributes:
        grant: Identity of this handing-out; goes into messages about it.
        epoch: The epoch it belongs to.
        slice_index: The slice's index in the catalogue.
        slice: The slice itself.
        first: First sample to train on; those before it have been.
        lease: Seconds from now without a message after which it is given to another worker.
        revoked: Of the grants listed in the request, those that are not the worker's any more.
    """

    grant: int
    epoch: int
    slice_index: int
    slice: Slice
    first: int
    lease: float
    revoked: tuple[int, ...] = ()


class WaitReason(str, Enum):
    """Why there is no slice now."""

    LIMIT = "limit"
    """The worker holds as many slices ahead as it may: ask when it begins one."""
    HELD = "held"
    """Other workers hold the rest: ask again, as one may die or be overtaken."""
    EPOCH = "epoch"
    """The epoch before the one asked for is not over."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait:
    """No slice now.

    Attributes:
        reason: Why.
        seconds: When to ask again, from now.
        revoked: As in :class:`Assignment`.
    """

    reason: WaitReason
    seconds: float
    revoked: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class EpochOver:
    """Nothing is left of the epoch that was asked for, in nobody's hands either.

    Attributes:
        epoch: That epoch.
        revoked: As in :class:`Assignment`.
    """

    epoch: int
    revoked: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class JoinAgain:
    """The session is over, as its lease ran out or the tracker was restarted. All of its grants are void."""


Answer: TypeAlias = Assignment | Wait | EpochOver | JoinAgain
"""What a request can be answered with."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Begin:
    """A worker is about to train on a slice's first sample, and does so only if this is accepted."""

    session: int
    grant: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Progress:
    """A worker has trained on a slice up to a sample. May be sent without waiting, in any order, any number of times.

    Attributes:
        session: The worker's.
        grant: The assignment's.
        trained: Samples of the slice that are trained on, counted from the slice's first one.
    """

    session: int
    grant: int
    trained: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Done:
    """A worker has trained on all of a slice. May be repeated."""

    session: int
    grant: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Quarantine:
    """A slice cannot be read, also not when fetched again. May be repeated."""

    session: int
    key: str
    reason: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Renew:
    """The worker lives. Every other message says so too."""

    session: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave:
    """The worker goes, and has trained on nothing beyond what it reported."""

    session: int


class Verdict(str, Enum):
    """What became of a message."""

    ACCEPTED = "accepted"
    FINISHED = "finished"
    """The slice is done already. A repeated ``Done`` gets this: nothing is wrong. A ``Begin`` must not train."""
    TAKEN = "taken"
    """The slice was given to another worker, or quarantined: stop. What was not reported does not count."""
    EPOCH_OVER = "epoch_over"
    """The grant is of an epoch that is over: stop."""
    JOIN_AGAIN = "join_again"
    """The session is over, see :class:`JoinAgain`: stop, and join again."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Receipt:
    """What became of a message that hands nothing out."""

    verdict: Verdict

    @property
    def accepted(self) -> bool:
        """Whether the message counted."""
        return self.verdict is Verdict.ACCEPTED


Call: TypeAlias = Join | Request | Begin | Progress | Done | Quarantine | Renew | Leave
Reply: TypeAlias = Joined | Answer | Receipt

_KINDS: dict[str, type[Any]] = {
    kind.__name__: kind
    for kind in (
        Join,
        Request,
        Begin,
        Progress,
        Done,
        Quarantine,
        Renew,
        Leave,
        Joined,
        Assignment,
        Wait,
        EpochOver,
        JoinAgain,
        Receipt,
    )
}
_READ = {"verdict": Verdict, "reason": WaitReason}


def encode(message: Call | Reply) -> str:
    """Write a message."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)}, allow_nan=False)


def decode(text: str | bytes) -> Call | Reply:
    """Read what :func:`encode` wrote.

    Raises:
        OptionError: If it is no such message.
    """
    try:
        values = json.loads(text)
        kind = _KINDS[values.pop("kind")]
        for field in fields(kind):
            value = values.get(field.name)
            if isinstance(value, list):
                values[field.name] = tuple(value)
            elif field.name == "slice":
                values[field.name] = Slice(**value)
            elif field.name in _READ and kind is not Quarantine:  # whose reason is a text
                values[field.name] = _READ[field.name](value)
        message: Call | Reply = kind(**values)
        return message
    except OptionError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError("message", text, f"a message of the slice tracker ({error})") from error
