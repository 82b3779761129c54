"""What one fit measures on one rank: counters, readable at any time, and spans on the timeline, if there is one."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, fields

from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask
from lightning_bytescheduler.timeline.timeline import COMMUNICATION, COMPUTE, QUEUE, REPLY, Timeline

__all__ = ["Record", "SchedulerStatistics"]

_LANE = "training thread"

BEFORE_GATHERS = 1 << 40
"""Subtracted from a position in the forward pass: more urgent than any position."""


def position_of(task: CommTask) -> int:
    """Return the position in the forward pass of a task's bucket."""
    return task.priority if task.priority > -BEFORE_GATHERS // 2 else task.priority + BEFORE_GATHERS


@dataclass(slots=True)
class SchedulerStatistics:
    """Running totals of one rank since the start of ``fit``.

    Attributes:
        steps: Optimizer steps.
        overlapped_steps: Steps with at least one update deferred past the step's end.
        updates: Parameter updates, deferred or not.
        deferred_updates: Parameter updates applied after ``optimizer.step`` had returned.
        bytes_sent: Bytes this rank sent for gradients, ``2(n-1)/n`` per byte reduced; compressed bytes for compressed
            gradients.
        bytes_uncompressed: What ``bytes_sent`` would be without compression.
        bytes_compressed: The part of ``bytes_uncompressed`` that travelled compressed.
        sub_tasks: Partitions sent.
        communication_s: Seconds during which at least one partition was in flight.
        exposed_s: Seconds the training waited for gradients, at gates and at the end of backward passes; log, metrics
            and timeline use this figure.
        gate_wait_s: The part of ``exposed_s`` spent at gates in the forward pass.
        deferred_step_s: Seconds spent in deferred optimizer steps.
        codec_s: Seconds spent encoding, summing and decoding gradients, on other threads than the training's.
        residual_squares: Squared norm of what compression left out on this rank, summed over steps, in units of
            gradients divided by the number of ranks.
    """

    steps: int = 0
    overlapped_steps: int = 0
    updates: int = 0
    deferred_updates: int = 0
    bytes_sent: float = 0.0
    bytes_uncompressed: float = 0.0
    bytes_compressed: float = 0.0
    sub_tasks: int = 0
    communication_s: float = 0.0
    exposed_s: float = 0.0
    gate_wait_s: float = 0.0
    deferred_step_s: float = 0.0
    codec_s: float = 0.0
    residual_squares: float = 0.0

    @property
    def compression_ratio(self) -> float:
        """How many times fewer bytes travel than uncompressed; 1 before the first step."""
        return self.bytes_uncompressed / self.bytes_sent if self.bytes_sent else 1.0

    @property
    def compressed_share(self) -> float:
        """Fraction of the gradients' bytes that travelled compressed; 0 before the first step."""
        return self.bytes_compressed / self.bytes_uncompressed if self.bytes_uncompressed else 0.0

    @property
    def residual_norm(self) -> float:
        """Norm of what compression left out, as the root mean square over steps; 0 before the first step."""
        return math.sqrt(max(self.residual_squares, 0.0) / self.steps) if self.steps else 0.0

    @property
    def deferred_share(self) -> float:
        """Fraction of all updates that were deferred; 0 before the first step."""
        return self.deferred_updates / self.updates if self.updates else 0.0

    @property
    def exposed_ms(self) -> float:
        """Mean milliseconds per step that the training waited for gradients; 0 before the first step."""
        return 1e3 * self.exposed_s / self.steps if self.steps else 0.0

    def copy(self) -> SchedulerStatistics:
        """Return a snapshot."""
        return SchedulerStatistics(**{f.name: getattr(self, f.name) for f in fields(self)})

    def since(self, earlier: SchedulerStatistics) -> SchedulerStatistics:
        """Return the difference to an earlier snapshot."""
        return SchedulerStatistics(**{f.name: getattr(self, f.name) - getattr(earlier, f.name) for f in fields(self)})


class Record:
    """Takes what is measured; for any thread.

    Args:
        timeline: Takes spans; ``None`` for none.

    Attributes:
        training_thread: Id of the thread that trains.
    """

    def __init__(self, timeline: Timeline | None = None, *, clock: Callable[[], float] = time.perf_counter) -> None:
        self.statistics = SchedulerStatistics()
        self.timeline = timeline
        self.clock = clock
        self.training_thread = threading.get_ident()
        self._busy_until = 0.0

    def span(self, name: str, category: str, start: float, *, step: int) -> float:
        """Record a span of this thread from ``start`` until now; returns its end."""
        end = self.clock()
        if self.timeline is not None:
            here = threading.current_thread()
            lane = _LANE if here.ident == self.training_thread else here.name
            self.timeline.span(name, category, start, end, lane=lane, args={"step": step})
        return end

    def waited(self, name: str, category: str, start: float, *, step: int) -> float:
        """Count the seconds from ``start`` until now as waiting for gradients; returns them.

        Counters, log, metrics and timeline all use this figure.
        """
        seconds = self.span(name, category, start, step=step) - start
        self.statistics.exposed_s += seconds
        return seconds

    def backward(self, start: float, *, step: int, kind: str) -> None:
        """Record the backward pass that ends now, of a step of a kind; empty if no gradient was handed over."""
        if self.timeline is not None:
            args = {"step": step, **({"kind": kind} if kind else {})}
            self.timeline.span("backward", COMPUTE, start, self.clock(), lane=_LANE, args=args)

    def copied(self, stage: str, bucket: int, start: float, *, step: int) -> None:
        """Record a copy of a bucket or its part, from ``start`` until now."""
        if self.timeline is not None:
            args = {"step": step, "task": bucket}
            self.timeline.overlapping(f"bucket {bucket}", stage, start, self.clock(), lane=stage.upper(), args=args)

    def arrived(self, sub: SubCommTask) -> None:
        """Record a partition that has arrived; called by the scheduler's core."""
        plain_bytes = sub.size * sub.parent.wire_bytes
        wire_bytes = plain_bytes if sub.encoded_bytes is None else sub.encoded_bytes
        statistics = self.statistics
        statistics.sub_tasks += 1
        statistics.bytes_sent += wire_bytes
        statistics.bytes_uncompressed += plain_bytes
        if sub.encoded_bytes is not None:
            statistics.bytes_compressed += plain_bytes
        statistics.communication_s += max(0.0, sub.finished_at - max(sub.started_at, self._busy_until))
        self._busy_until = max(self._busy_until, sub.finished_at)
        if self.timeline is None:
            return
        args = {
            "bytes": wire_bytes,
            "priority": position_of(sub.parent),
            "step": sub.parent.key.step,
            "task": sub.parent.key.bucket,
            "partition": sub.index,
        }
        if sub.encoded_bytes is not None:
            args["uncompressed_bytes"] = plain_bytes
        name, record = sub.parent.name, self.timeline.overlapping
        record(name, QUEUE, sub.ready_at, sub.started_at, lane="QUEUE", args=args)
        record(name, COMMUNICATION, sub.started_at, sub.finished_at, lane="COMMUNICATION", args=args)
        if sub.passage is not None:
            for stage, start, end, nbytes in sub.passage.stages(sub.finished_at):
                told = {**args, **sub.passage.where, "bytes": nbytes}
                record(name, stage, start, end, lane=stage.upper(), args=told)

    def replied(self, worker: int, number: int, nbytes: int, start: float, end: float) -> None:
        """Record a sum that a parameter server has sent; called on the thread that sends it."""
        if self.timeline is not None:
            args = {"bytes": nbytes, "operation": number}
            self.timeline.span(f"to rank {worker}", REPLY, start, end, lane="REPLY", args=args)
