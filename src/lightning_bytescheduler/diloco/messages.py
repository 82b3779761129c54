"""What workers, the batch scheduler and the parameter server tell each other (seed 004).

Small, frozen, primitives only, so that any transport carries them: ``to_json`` and ``from_json`` are one way to do it.

Any message may be lost, doubled or overtaken. What a worker reports is the sum since the round began, so that a later
report makes up for a lost one, and the answer to any report repeats what was decided. Only the loss of all later
messages, or of an update, costs the worker its part in the round.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, fields
from typing import TypeAlias

from lightning_bytescheduler.exceptions import OptionError

__all__ = [
    "PARAMETER_SERVER",
    "Acknowledge",
    "CollectUpdates",
    "Done",
    "Envelope",
    "Join",
    "Leave",
    "MergeUpdates",
    "Message",
    "Report",
    "ScheduleUpdate",
    "SendingUpdate",
    "StartRound",
    "UpdateArrived",
    "UpdateNow",
    "UpdateReceived",
    "Wait",
    "WorkerMessage",
    "from_json",
    "to_json",
]

PARAMETER_SERVER = ""
"""The recipient of what is for the parameter server; no worker may have this name."""


@dataclass(frozen=True, slots=True)
class _Checked:
    """Refuses what is not of the declared type or is below 0; what arrives from elsewhere may be anything."""

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if field.name == "workers" and isinstance(value, list):
                object.__setattr__(self, "workers", tuple(value))
                value = tuple(value)
            if not _ALLOWED[str(field.type)](value):
                raise OptionError(field.name, value, f"of type {field.type}, and neither negative nor empty")


# ── From a worker ───────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True, slots=True)
class Join(_Checked):
    """I want to take part. The answer is ``Wait``, or ``StartRound`` at once.

    Attributes:
        worker: Who.
        session: Another number each time that the worker's process is started anew, so that a doubled message is told
            from a worker that has lost all it did.
    """

    worker: str
    session: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Report(_Checked):
    """I have taken a step. Nobody waits for the answer.

    Attributes:
        worker: Who.
        round: In which round.
        steps: Taken in this round.
        samples: Processed in this round.
        batch_size: Samples of the last step.
        seconds: That the last step took, by the worker's clock.
        in_flight: Steps reported before this one to which no answer has come yet.
    """

    worker: str
    round: int
    steps: int
    samples: int
    batch_size: int
    seconds: float
    in_flight: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class SendingUpdate(_Checked):
    """I have taken my last step of this round, and begin to send my pseudo-gradient.

    Attributes:
        worker: Who.
        round: In which round.
        steps: Taken in this round.
        samples: Processed in this round.
        tokens: Processed in this round; 0 where nobody counts them.
    """

    worker: str
    round: int
    steps: int
    samples: int
    tokens: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateArrived(_Checked):
    """All of the worker's pseudo-gradient is there (said by whoever merges)."""

    worker: str
    round: int


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateReceived(_Checked):
    """I have the weights with which this round begins, and train from now on."""

    worker: str
    round: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Leave(_Checked):
    """I stop taking part (or: the transport has found that this worker is gone)."""

    worker: str


# ── To a worker ───────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True, slots=True)
class Acknowledge(_Checked):
    """Work on. ``step`` is the latest that was reported in ``round``."""

    round: int
    step: int


@dataclass(frozen=True, kw_only=True, slots=True)
class ScheduleUpdate(_Checked):
    """Send your update once you have taken ``counter`` steps in this round; at once if you have.

    ``step`` is the latest that was reported, as in ``Acknowledge``.
    """

    round: int
    counter: int
    step: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class UpdateNow(_Checked):
    """Send your update after the step in progress."""

    round: int


@dataclass(frozen=True, kw_only=True, slots=True)
class Wait(_Checked):
    """Take no more steps: you join in with ``round``, and will be told when it starts."""

    round: int


@dataclass(frozen=True, kw_only=True, slots=True)
class StartRound(_Checked):
    """Take the current global weights, say ``UpdateReceived`` and train.

    Attributes:
        round: The round that starts.
        step_cap: Send your update after this many steps, whatever else you hear; ``None`` for no limit.
    """

    round: int
    step_cap: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Done(_Checked):
    """The training is over; ``round`` was the last round."""

    round: int


# ── To the parameter server ───────────────────────────────────────────────────────────


@dataclass(frozen=True, kw_only=True, slots=True)
class CollectUpdates(_Checked):
    """Updates will come.

    Attributes:
        round: Of this round.
        workers: From these.
        timeout: Within this many seconds; what comes later is not merged.
    """

    round: int
    workers: tuple[str, ...]
    timeout: float


@dataclass(frozen=True, kw_only=True, slots=True)
class MergeUpdates(_Checked):
    """Take the outer step with the updates of ``workers``. If there are none, the weights stay as they are."""

    round: int
    workers: tuple[str, ...]


WorkerMessage: TypeAlias = Join | Report | SendingUpdate | UpdateArrived | UpdateReceived | Leave
Message: TypeAlias = (
    WorkerMessage | Acknowledge | ScheduleUpdate | UpdateNow | Wait | StartRound | Done | CollectUpdates | MergeUpdates
)


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message and whom it is for: a worker's name, or ``PARAMETER_SERVER``."""

    to: str
    message: Message


def to_json(message: Message) -> str:
    """Write a message as one line of JSON."""
    return json.dumps({"kind": type(message).__name__, **asdict(message)}, allow_nan=False)


def from_json(text: str | bytes) -> Message:
    """Read what ``to_json`` wrote.

    Raises:
        OptionError: If it is not a message, or one of its values is not allowed.
    """
    try:
        values = json.loads(text)
        kind = _KINDS[values.pop("kind")]
        return kind(**values)
    except OptionError:
        raise
    except (ValueError, KeyError, TypeError, AttributeError) as error:
        raise OptionError("message", text, f"a message that to_json wrote ({error})") from error


def _is_count(value: object) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and value >= 0


def _is_number(value: object) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value) and value >= 0


def _is_name(value: object) -> bool:
    return isinstance(value, str) and value != PARAMETER_SERVER


_KINDS: dict[str, type[Message]] = {
    kind.__name__: kind
    for kind in (
        Join,
        Report,
        SendingUpdate,
        UpdateArrived,
        UpdateReceived,
        Leave,
        Acknowledge,
        ScheduleUpdate,
        UpdateNow,
        Wait,
        StartRound,
        Done,
        CollectUpdates,
        MergeUpdates,
    )
}
# By the text of the annotation: this module postpones their evaluation.
_ALLOWED: dict[str, Callable[[object], bool]] = {
    "str": _is_name,
    "int": _is_count,
    "int | None": lambda value: value is None or _is_count(value),
    "float": _is_number,
    "tuple[str, ...]": lambda value: isinstance(value, tuple) and all(map(_is_name, value)),
}
