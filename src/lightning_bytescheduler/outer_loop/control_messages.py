"""What a job's workers and the host of its rounds tell each other beside the messages of ``diloco.messages``."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass, field
from typing import TypeAlias

from lightning_bytescheduler.diloco.messages import Message, from_json, to_json

__all__ = ["Boundary", "Closed", "Control", "EndRound", "Passed", "RoundStatus", "StepMetrics", "decode", "encode"]


@dataclass(frozen=True, slots=True, kw_only=True)
class EndRound:
    """To the host: this round is to end soon, or what is to happen at its end.

    Attributes:
        worker: Who asks.
        round: Which round.
        now: Whether no worker is to begin another step; where all take equally many, none that has taken ``steps``.
        steps: That the worker has taken in this round.
        epoch: Whether an epoch ends with the round.
        validate: Whether the weights are to be validated after it.
        stop: Whether training ends with it.
    """

    worker: str
    round: int
    now: bool = False
    steps: int = 0
    epoch: bool = False
    validate: bool = False
    stop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Passed:
    """To the host: I am through with what happened at the end of a round.

    Attributes:
        worker: Who.
        round: That ended.
        stop: Whether this worker stops training.
    """

    worker: str
    round: int
    stop: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class StepMetrics:
    """To the host: what a step came to.

    Attributes:
        worker: Who.
        round: In which round.
        samples: Of the step.
        seconds: That it took.
        loss: Its loss, or ``None``.
    """

    worker: str
    round: int
    samples: int
    seconds: float
    loss: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Boundary:
    """To a worker: a round is over.

    Attributes:
        round: Which.
        samples: That all workers together have processed in it.
        shares: Each worker's share of them.
        metrics: Means over the round and all workers, by name.
        epoch: See :class:`EndRound`.
        validate: See :class:`EndRound`.
        stop: See :class:`EndRound`.
    """

    round: int
    samples: int = 0
    shares: dict[str, float] = field(default_factory=dict)
    metrics: dict[str, float] = field(default_factory=dict)
    epoch: bool = False
    validate: bool = False
    stop: bool = False

    @property
    def halts(self) -> bool:
        """Whether all workers stand still here until each one has said that it has passed."""
        return self.epoch or self.validate or self.stop


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundStatus:
    """To a worker: how far the round is.

    Attributes:
        round: Which.
        left: What is to go, in samples or steps.
    """

    round: int
    left: int


@dataclass(frozen=True, slots=True)
class Closed:
    """To oneself: no more messages are to be waited for."""


Control: TypeAlias = EndRound | Passed | StepMetrics | Boundary | RoundStatus | Closed
_KINDS = {kind.__name__: kind for kind in (EndRound, Passed, StepMetrics, Boundary, RoundStatus, Closed)}


def encode(message: Message | Control) -> str:
    """Write a message as one line of JSON."""
    if type(message).__name__ in _KINDS:
        return json.dumps({"kind": type(message).__name__, **asdict(message)})
    return to_json(message)  # type: ignore[arg-type]


def decode(text: bytes) -> Message | Control:
    """Read what :func:`encode` wrote."""
    values = json.loads(text)
    kind = _KINDS.get(values.get("kind"))
    if kind is None:
        return from_json(text)
    del values["kind"]
    message: Control = kind(**values)
    return message
