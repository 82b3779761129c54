"""What the workers and the batch scheduler of a training in rounds tell each other.

Each message is a frozen struct of primitives, and travels as one JSON object whose ``kind`` is the name of its class:
:func:`encode` writes one, :func:`decode` reads it and checks the type and range of every field.

Any message may be lost, doubled or overtaken. What a worker reports is the sum since the round began, so that a later
report makes up for a lost one, and the answer to any report repeats what was decided. Only the loss of all later
messages, or of a pseudo-gradient, costs the worker its part in the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from lightning_bytescheduler.exceptions import OptionError

_T = TypeVar("_T")

MOST = 2**40
"""Steps or samples of one worker in one round: as what a worker says is bounded, so are sums over all."""

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Own: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MOST)]  # of one worker
_Number: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]


class AnyMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag=True):
    """Of the rounds, or of a coordinator."""


# ── From a worker ───────────────────────────────────────────────────────────


class JoinRounds(AnyMessage, frozen=True, kw_only=True):
    """I want to take part. The answer is ``StartRound``, at once or when the next round begins.

    A worker that joins in the middle of a round, as after a restart of the scheduler, says so. Its steps count if that
    round is still on, or begins next. The caller that hands this on ensures that the worker has the weights with which
    that round began; else it leaves ``round`` out.

    Attributes:
        worker: Who.
        session: Another number each time that the worker's process is started, so that a doubled message is told from a
            worker that has lost all it did.
        round: The round that the worker is in the middle of; 0 for none.
        steps: Taken in that round.
        samples: Processed in that round.
    """

    worker: _Name
    session: _Count = 0
    round: _Count = 0
    steps: _Own = 0
    samples: _Own = 0


class StepReport(AnyMessage, frozen=True, kw_only=True):
    """I have taken a step. The worker does not wait for the answer.

    Attributes:
        worker: Who.
        round: In which round.
        steps: Taken in this round.
        samples: Processed in this round.
        batch_size: Samples of the last step.
        seconds: That the last step took, by the worker's clock.
        in_flight: Steps reported before this one to which no answer has come yet.
        loss: Mean over all steps of this round, weighted by samples; ``None`` if none was measured.
    """

    worker: _Name
    round: _Count
    steps: _Own
    samples: _Own
    batch_size: _Own
    seconds: _Number
    in_flight: _Own = 0
    loss: float | None = None


class SendingPseudoGradient(AnyMessage, frozen=True, kw_only=True):
    """I have taken my last step of this round, and begin to send my pseudo-gradient.

    Attributes:
        worker: Who.
        round: In which round.
        steps: Taken in this round.
        samples: Processed in this round.
    """

    worker: _Name
    round: _Count
    steps: _Own
    samples: _Own


class PseudoGradientArrived(AnyMessage, frozen=True, kw_only=True):
    """All of the worker's pseudo-gradient has arrived. Sent by the part that merges."""

    worker: _Name
    round: _Count


class RoundStarted(AnyMessage, frozen=True, kw_only=True):
    """I have the weights with which this round begins, and train from now on."""

    worker: _Name
    round: _Count


class LeaveRounds(AnyMessage, frozen=True, kw_only=True):
    """I stop taking part (or: the transport has found that this worker is gone).

    A pseudo-gradient of the round that is on counts if it is there, or comes before the round is over.
    """

    worker: _Name


class EndRound(AnyMessage, frozen=True, kw_only=True):
    """This round is to end soon, or this is to happen at its end.

    Attributes:
        worker: Who asks.
        round: Which round.
        now: Whether no worker is to begin another step; where all take equally many, none that has taken ``steps``.
        steps: That the worker has taken in this round.
        epoch: Whether an epoch ends with the round.
        validate: Whether the weights are to be validated after it.
        stop: Whether training ends with it.
    """

    worker: _Name
    round: _Count
    now: bool = False
    steps: _Own = 0
    epoch: bool = False
    validate: bool = False
    stop: bool = False


class PassedRoundEnd(AnyMessage, frozen=True, kw_only=True):
    """I am through with what happened at the end of a round.

    Attributes:
        worker: Who.
        round: That ended.
        stop: Whether this worker stops training.
    """

    worker: _Name
    round: _Count
    stop: bool = False


class PauseRounds(AnyMessage, frozen=True, kw_only=True):
    """I do something else, such as validating: I live, and am not to be counted on until ``ResumeRounds``."""

    worker: _Name


class ResumeRounds(AnyMessage, frozen=True, kw_only=True):
    """I am back from a pause, and join in as soon as I can."""

    worker: _Name


# ── To a worker ───────────────────────────────────────────────────────────


class Acknowledge(AnyMessage, frozen=True, kw_only=True):
    """Work on.

    Attributes:
        round: Which round.
        reported: The latest step that was reported in it.
    """

    round: _Count
    reported: _Count


class SendAfter(AnyMessage, frozen=True, kw_only=True):
    """Send your pseudo-gradient after so many steps of this round; after the step in progress if you have taken them.

    ``reported`` is the latest step that was reported, as in ``Acknowledge``.
    """

    round: _Count
    steps: _Count
    reported: _Count = 0


class StartRound(AnyMessage, frozen=True, kw_only=True):
    """Take the current global weights, say ``RoundStarted`` and train.

    Attributes:
        round: The round that starts.
        step_cap: Send your pseudo-gradient after this many steps, whatever else you hear; ``None`` for no limit.
    """

    round: _Count
    step_cap: _Count | None = None


class RoundEnded(AnyMessage, frozen=True, kw_only=True):
    """A round is over.

    Attributes:
        round: Which.
        samples: That all workers together have processed in it.
        metrics: Means over the round and all workers, by name; finite.
        epoch: See :class:`EndRound`.
        validate: See :class:`EndRound`.
        stop: See :class:`EndRound`.
        halts: Whether all workers stand still here until each one has said that it has passed.
    """

    round: _Count
    samples: _Count = 0
    metrics: dict[str, float] = {}  # copied for each message
    epoch: bool = False
    validate: bool = False
    stop: bool = False
    halts: bool = False


class TrainingOver(AnyMessage, frozen=True, kw_only=True):
    """The training is over; ``round`` was the last round."""

    round: _Count


class LeaderAppointed(AnyMessage, frozen=True, kw_only=True):
    """Who validates, logs and saves for all from now on.

    Attributes:
        worker: Its name.
    """

    worker: _Name


ToScheduler: TypeAlias = (
    JoinRounds
    | StepReport
    | SendingPseudoGradient
    | PseudoGradientArrived
    | RoundStarted
    | LeaveRounds
    | PauseRounds
    | ResumeRounds
)
"""What the batch scheduler hears."""
FromScheduler: TypeAlias = Acknowledge | SendAfter | StartRound | TrainingOver
"""What the batch scheduler says."""
FromWorker: TypeAlias = ToScheduler | EndRound | PassedRoundEnd
"""What the rounds hear."""
ToWorker: TypeAlias = FromScheduler | RoundEnded | LeaderAppointed
"""What the rounds say."""
Message: TypeAlias = FromWorker | ToWorker


_DECODER: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def encode(message: AnyMessage) -> str:
    """Write a message as one line of JSON."""
    return msgspec.json.encode(message).decode()


def decode(text: str | bytes, *, sender: str = "a sender unknown") -> Message:
    """Read what :func:`encode` wrote.

    Args:
        text: The message.
        sender: Who sent it, for the error.

    Raises:
        OptionError: If it is not a message, is cut short, or one of its values is not allowed; names the sender and
            the field.
    """
    return decoded(_DECODER, text, sender=sender, of="the training's rounds")


def decoded(
    decoder: msgspec.json.Decoder[_T], text: str | bytes, *, sender: str, of: str, shown: int | None = None
) -> _T:
    """Read a message of some protocol.

    Args:
        decoder: Of its messages.
        text: The message.
        sender: Who sent it, for the error.
        of: The protocol in words, for the error.
        shown: Letters of the message that the error has; ``None`` for all.

    Raises:
        OptionError: If it is none; names the sender and the field.
    """
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise OptionError(f"message of {sender}", text[:shown], f"one of {of} ({error})") from error


def coalesced(said: Sequence[_T]) -> list[_T]:
    """The same without reports that a later one makes up for: of reports that follow one another, all but the last."""
    return [
        message
        for message, then in zip(said, [*said, None][1:], strict=True)
        if not (
            isinstance(message, StepReport)
            and isinstance(then, StepReport)
            and (message.worker, message.round) == (then.worker, then.round)
        )
    ]
