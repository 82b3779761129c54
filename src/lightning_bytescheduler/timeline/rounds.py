"""What the timeline of a worker that trains in rounds says: where its time went, and what it sent."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_bytescheduler.timeline.timeline import CODEC, COMMUNICATION, INNER, STEP, STILL, WAIT
from lightning_bytescheduler.timeline.trace import Interval, Span, Trace, intersection, length, union

__all__ = ["RoundsSummary", "in_rounds", "rounds_summary"]


@dataclass(frozen=True, slots=True, kw_only=True)
class RoundsSummary:
    """Where the time of one worker went; all times in seconds.

    Attributes:
        worker: Whose it is.
        rounds: In which steps were taken.
        steps: Taken.
        training: In steps.
        waiting: Of the training thread, for other workers and for the network.
        outer: In which pseudo-gradients were formed, and outer steps taken.
        still: In validations and the like.
        coding: In which parts were encoded, added up or decoded, on any thread.
        network: In which anything was on the network.
        hidden: Part of that while steps were taken.
        pushed: Bytes of pseudo-gradients.
        pulled: Bytes of means.
    """

    worker: str
    rounds: int
    steps: int
    training: float
    waiting: float
    outer: float
    still: float
    coding: float
    network: float
    hidden: float
    pushed: int
    pulled: int


def in_rounds(trace: Trace) -> bool:
    """Whether it is a worker's that trains in rounds."""
    return any(span.category == INNER for span in trace.spans)


def worker_of(trace: Trace) -> str:
    """Whose it is."""
    named = (str(span.args["worker"]) for span in trace.spans if span.args.get("worker"))
    return next(named, f"rank {trace.rank}")


def round_of(span: Span) -> int:
    """The round that a span belongs to; 0 before the first one."""
    number = span.args.get("round")
    return number if isinstance(number, int) else 0


def rounds_summary(trace: Trace) -> RoundsSummary:
    """Add up where the time went."""

    def covered(category: str) -> list[Interval]:
        return union((span.start, span.end) for span in trace.select(category) if round_of(span))

    def sent(name: str) -> int:
        spans = trace.select(COMMUNICATION, name)
        return int(sum(span.args.get("bytes", 0) for span in spans if round_of(span)))

    training, network = covered(INNER), covered(COMMUNICATION)
    steps = trace.select(INNER)
    return RoundsSummary(
        worker=worker_of(trace),
        rounds=len({round_of(span) for span in steps}),
        steps=len(steps),
        training=length(training),
        waiting=length(covered(WAIT)),
        outer=length(covered(STEP)),
        still=length(covered(STILL)),
        coding=length(covered(CODEC)),
        network=length(network),
        hidden=length(intersection(network, training)),
        pushed=sent("push"),
        pulled=sent("pull"),
    )
