"""What the workers and the batch scheduler of a training in rounds tell each other.

Each message is a frozen struct of primitives, and travels as one JSON object whose ``kind`` is the name of its class:
:func:`encode` writes one, :func:`decode` reads it and checks the type and range of every field.

Any message may be lost, doubled or overtaken. A worker reports sums since the round began, so that a later report
makes up for a lost one, and the answer to any report repeats what was decided. Only the loss of all later
messages, or of a pseudo-gradient, costs the worker its part in the round.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, TypeAlias, TypeVar

import msgspec

from lightning_bytescheduler.exceptions import OptionError

_T = TypeVar("_T")

MOST = 2**40
"""Most steps or samples of one worker in one round. This bounds sums over all workers, too."""

_Count: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=2**62)]
_Own: TypeAlias = Annotated[int, msgspec.Meta(ge=0, le=MOST)]  # of one worker
_Number: TypeAlias = Annotated[float, msgspec.Meta(ge=0, le=1e9)]
_Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]


class AnyMessage(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True, tag_field="kind", tag=True):
    """A message of the rounds, or of a coordinator."""


# ── From a worker ───────────────────────────────────────────────────────────


class JoinRounds(AnyMessage, frozen=True, kw_only=True):
    """I want to take part. The answer is ``StartRound``, at once or when the next round begins.

    A worker that joins in the middle of a round, as after a restart of the scheduler, says so. Its steps count if that
    round is still on, or begins next. The caller that hands this on ensures that the worker has the weights with which
    that round began; else it leaves ``round`` out.

    Attributes:
        worker: The worker's name.
        session: A new number at each start of the worker's process, so that a doubled message can be told from a worker
            that has lost its work.
        round: The round that the worker is in the middle of; 0 for none.
        steps: Steps taken in that round.
        samples: Samples processed in that round.
    """

    worker: _Name
    session: _Count = 0
    round: _Count = 0
    steps: _Own = 0
    samples: _Own = 0


class StepReport(AnyMessage, frozen=True, kw_only=True):
    """I have taken a step. The worker does not wait for the answer.

    Attributes:
        worker: The worker's name.
        round: The round that the step belongs to.
        steps: Steps taken in this round.
        samples: Samples processed in this round.
        batch_size: Samples of the last step.
        seconds: Duration of the last step, by the worker's clock.
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
        worker: The worker's name.
        round: The round that ends for the worker.
        steps: Steps taken in this round.
        samples: Samples processed in this round.
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
    """This round is to end soon, or some action is to follow its end.

    Attributes:
        worker: Who asks.
        round: Which round.
        now: Whether workers are to begin no other step; if all take equally many, none after ``steps`` steps.
        steps: Steps that the worker has taken in this round.
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
    """I have finished what was to happen at the end of a round.

    Attributes:
        worker: The worker's name.
        round: The round that ended.
        stop: Whether this worker stops training.
    """

    worker: _Name
    round: _Count
    stop: bool = False


class PauseRounds(AnyMessage, frozen=True, kw_only=True):
    """I do something else, such as validating, and take no part until I join again. I live, and keep my session.

    A pseudo-gradient of the round that is on counts, and is waited for.
    """

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
    """This worker validates, logs and saves for all from now on.

    Attributes:
        worker: Its name.
    """

    worker: _Name


FromWorker: TypeAlias = (
    JoinRounds
    | StepReport
    | SendingPseudoGradient
    | PseudoGradientArrived
    | RoundStarted
    | LeaveRounds
    | PauseRounds
    | EndRound
    | PassedRoundEnd
)
"""Messages to the rounds."""
ToWorker: TypeAlias = Acknowledge | SendAfter | StartRound | TrainingOver | RoundEnded | LeaderAppointed
"""Messages from the rounds."""
Message: TypeAlias = FromWorker | ToWorker


_DECODER: msgspec.json.Decoder[Message] = msgspec.json.Decoder(Message)


def encode(message: AnyMessage) -> str:
    """Write a message as one line of JSON."""
    return msgspec.json.encode(message).decode()


def decode(text: str | bytes, *, sender: str = "an unknown sender") -> Message:
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
        decoder: Decoder of the protocol's messages.
        text: The message.
        sender: Who sent it, for the error.
        of: The protocol in words, for the error.
        shown: How many characters of the message the error shows; ``None`` for all.

    Raises:
        OptionError: If it is no such message; names the sender and the field.
    """
    try:
        return decoder.decode(text)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise OptionError(f"message of {sender}", text[:shown], f"one of {of} ({error})") from error


def coalesced(said: Sequence[_T]) -> list[_T]:
    """Return the messages without superseded reports: of reports of a round that follow one another, the last stays."""
    return [
        message
        for message, then in zip(said, [*said, None][1:], strict=True)
        if not (
            isinstance(message, StepReport)
            and isinstance(then, StepReport)
            and (message.worker, message.round) == (then.worker, then.round)
        )
    ]
