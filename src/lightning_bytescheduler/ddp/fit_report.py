"""Reports one fit on one rank: what was decided and why, what came of it, and how long it took.

``strategy.plan`` is the decision (:class:`OverlapPlan`), ``strategy.statistics`` are the counters
(:class:`SchedulerStatistics`), and :class:`Record` takes both counters and the timeline's spans. The log line, the
metrics and the timeline use these figures.
"""

from __future__ import annotations

import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, fields
from typing import Any, Literal

from lightning_bytescheduler.checks import some_of
from lightning_bytescheduler.collectives.push_pull import Placement
from lightning_bytescheduler.scheduler.task import CommTask, SubCommTask
from lightning_bytescheduler.timeline.timeline import COMMUNICATION, COMPUTE, QUEUE, Timeline

_WORTH_A_LINE = 0.1  # of all steps: fewer overlapped ones were trials, which have their own lines

ONE_RANK = "1 rank: nothing to schedule"
"""Reason for the steps of a training on one process."""

_BY_SAMPLES = "each rank's gradient counts by its samples of the step"
_HELD = (
    "updated in the step, as other code can read the memory: an alias, NumPy, another process, a mapped file "
    "(p.data = p.data.clone() before the fit, and keeping no alias, keeps the overlap)"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class OverlapPlan:
    """The plan of a fit, made from the model, its optimizers, precision and clipping; the same on every rank.

    The first step of a fit is always synchronised, as DDP rebuilds its buckets after it.

    Attributes:
        steps: ``"overlapped"`` if updates cross the step boundary, ``"synchronised"`` if each step waits for all
            gradients.
        reasons: Why steps are synchronised, each with how to avoid it; empty if they overlap.
        gradients: ``"all-reduce"`` (push and pull with parameter servers), or ``"reduce-scatter"`` if every update
            needs the norm of all gradients: each rank reduces a shard, norms are exchanged, and gradients are gathered
            during the next forward pass.
        norm_needed_by: What needs this norm, in words.
        gated_at_start: Names of parameters that are updated before ``training_step`` begins or in the step itself, as
            their reads cannot be seen.
        as_ddp: Whether steps are taken as DDP's at present: with ``mode="ddp"``, if they cannot overlap, if little
            could be hidden, or if a trial found that faster.
        pace: Why steps are as DDP's or overlap, with what was measured so far, in a few words.
        waits: Why steps waited for all gradients although they overlap, with the number of steps so far on this rank:
            code that reads weights or gradients between two steps, by the hook that it runs in, or a cause that came
            after the start of the fit, such as another optimizer, or code that keeps its state. The weights are exact.
        read_unseen: Names of parameters whose unseen reads began after the first step, on this rank, with the step in
            which that was found. In that step the reader had, or may have had, the previous step's weights; later steps
            wait.
        opened_for: What needed all updates at once so far on this rank, as it reads weights unseen or must not meet
            gates, for example ``torch.jit.trace`` or ``compiled MyModule.attend``, with the number of times.
        held_elsewhere: Names of parameters whose memory other code can read, now or at the last step: a kept alias, a
            NumPy array, another process. They are updated in the step itself. Memory of their own (``p.data =
            p.data.clone()`` before the fit) keeps the overlap.
        batch_shares: Samples of a batch on each rank at present, if batches are balanced.
        weighting: ``"samples"`` if gradients are weighted by samples, ``"ranks"`` if weights are equal.
        compressed: The codec by name of the parameter; empty without compression.
        compression_ratio: How many times fewer bytes travel for all gradients.
        placement: With parameter servers: bytes that this rank has pushed to each so far, and each one's intended
            share.
        deferred_share: Fraction of the updates so far on this rank that crossed the step boundary (0 to 1); ``None``
            before the first.
    """

    steps: Literal["overlapped", "synchronised"]
    reasons: tuple[str, ...] = ()
    gradients: Literal["all-reduce", "reduce-scatter"] = "all-reduce"
    norm_needed_by: tuple[str, ...] = ()
    gated_at_start: tuple[str, ...] = ()
    as_ddp: bool = False
    pace: str = ""
    waits: Mapping[str, int] = field(default_factory=dict)
    read_unseen: Mapping[str, int] = field(default_factory=dict)
    opened_for: Mapping[str, int] = field(default_factory=dict)
    held_elsewhere: tuple[str, ...] = ()
    batch_shares: tuple[int, ...] = ()
    weighting: str = "ranks"
    compressed: Mapping[str, str] = field(default_factory=dict)
    compression_ratio: float = 1.0
    placement: Placement | None = None
    deferred_share: float | None = None

    @property
    def overlapped(self) -> bool:
        """Whether updates cross the step boundary."""
        return self.steps == "overlapped"

    def summary(self) -> str:
        """Return one line for the log."""
        return f"{'; '.join(self._facts())}."

    def _facts(self) -> list[str]:
        if self.reasons == (ONE_RANK,):
            return [ONE_RANK]
        because = f", because {self.pace}" if self.pace else ""
        if not self.overlapped:
            how = ", and taken as DDP takes them" if self.as_ddp and not self.compressed else ""
            first, *others = (f"because {reason}" for reason in self.reasons)
            facts = [f"steps are synchronised{how}, {first}", *others]
        elif self.as_ddp:
            how = "synchronised" if self.compressed else "taken as DDP takes them"
            facts = [f"steps are {how}{because}"]
        else:
            facts = [f"steps overlap{because}: gradients travel under the backward and the next forward pass"]
            if self.norm_needed_by:
                facts.append(f"reduce-scatter, norm, all-gather for {' and '.join(self.norm_needed_by)}")
            if self.gated_at_start:
                facts.append(f"{some_of(self.gated_at_start)} updated early, as reads of them cannot be seen")
            if self.held_elsewhere:
                facts.append(f"{some_of(self.held_elsewhere)} {_HELD}")
        if self.weighting == "samples":
            facts.append(_BY_SAMPLES)
        if self.compressed:
            counts = Counter(self.compressed.values())
            what = " and ".join(f"{count} tensors in {codec}" for codec, count in counts.most_common())
            facts.append(f"compressed with error feedback: {what}, {self.compression_ratio:.3g} times fewer bytes")
        return facts

    def __repr__(self) -> str:
        lines = self._facts()
        if self.batch_shares:
            lines.append(f"batches of {sum(self.batch_shares)} samples, by rank {self.batch_shares}")
        if self.placement is not None and self.placement.grouping:
            lines.append(self.placement.grouping)
        if self.placement is not None and any(self.placement.bytes_per_server):
            lines += str(self.placement).splitlines()
        if self.overlapped and self.deferred_share is not None and (self.deferred_share or not self.as_ddp):
            lines.append(f"so far {self.deferred_share:.0%} of the updates crossed the step boundary")
        lines += [f"{_count(steps)} waited for all gradients, because {why}" for why, steps in self.waits.items()]
        lines += [f"read unseen, and late, in step {step}: {name!r}" for name, step in self.read_unseen.items()]
        lines += [f"all updated at once for {what}, {times} times" for what, times in self.opened_for.items()]
        body = "\n".join(f"  {line}" for line in lines)
        return f"OverlapPlan(\n{body}\n)"


def _count(steps: int) -> str:
    return f"{steps} step" if steps == 1 else f"{steps} steps"


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
        sub_tasks: Partitions sent.
        communication_s: Seconds during which at least one partition was in flight.
        exposed_s: Seconds the training waited for gradients, at gates and at the end of backward passes; log, metrics
            and timeline use this figure.
        gate_wait_s: The part of ``exposed_s`` spent at gates in the forward pass.
        deferred_step_s: Seconds spent in deferred optimizer steps.
        codec_s: Seconds spent encoding, summing and decoding gradients, on other threads than the training's.
    """

    steps: int = 0
    overlapped_steps: int = 0
    updates: int = 0
    deferred_updates: int = 0
    bytes_sent: float = 0.0
    bytes_uncompressed: float = 0.0
    sub_tasks: int = 0
    communication_s: float = 0.0
    exposed_s: float = 0.0
    gate_wait_s: float = 0.0
    deferred_step_s: float = 0.0
    codec_s: float = 0.0

    @property
    def compression_ratio(self) -> float:
        """How many times fewer bytes travel than uncompressed; 1 before the first step."""
        return self.bytes_uncompressed / self.bytes_sent if self.bytes_sent else 1.0

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

    def span(self, name: str, category: str, start: float, **args: Any) -> float:
        """Record a span of this thread from ``start`` until now; returns its end."""
        end = self.clock()
        if self.timeline is not None:
            here = threading.current_thread()
            lane = _LANE if here.ident == self.training_thread else here.name
            self.timeline.span(name, category, start, end, lane=lane, args=args)
        return end

    def waited(self, name: str, category: str, start: float, *, step: int) -> float:
        """Count the seconds from ``start`` until now as waiting for gradients; returns them.

        Counters, log, metrics and timeline all use this figure.
        """
        seconds = self.span(name, category, start, step=step) - start
        self.statistics.exposed_s += seconds
        return seconds

    def backward(self, start: float, *, step: int, kind: str) -> None:
        """Record the backward pass that ends now. ``kind`` is its step's; empty if no gradient was handed over."""
        self.span("backward", COMPUTE, start, step=step, **({"kind": kind} if kind else {}))

    def arrived(self, sub: SubCommTask) -> None:
        """Record a partition that has arrived; called by the scheduler's core."""
        plain_bytes = sub.size * sub.parent.wire_bytes
        wire_bytes = plain_bytes if sub.encoded_bytes is None else sub.encoded_bytes
        statistics = self.statistics
        statistics.sub_tasks += 1
        statistics.bytes_sent += wire_bytes
        statistics.bytes_uncompressed += plain_bytes
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
        name, record = sub.parent.name, self.timeline.span
        record(name, QUEUE, sub.ready_at, sub.started_at, lane="QUEUE", args=args)
        record(name, COMMUNICATION, sub.started_at, sub.finished_at, lane="COMMUNICATION", args=args)


def summary_of(statistics: SchedulerStatistics, finding: str) -> str | None:
    """Return one line for the end of a fit; ``None`` if hardly any step overlapped.

    Args:
        statistics: Counters of the fit.
        finding: What was found to be fastest, if measured.
    """
    steps, overlapped = statistics.steps, statistics.overlapped_steps
    if not overlapped or overlapped < _WORTH_A_LINE * steps:
        return None
    line = f"{steps} steps, {overlapped} of them overlapped; training waited {statistics.exposed_ms:.1f} ms a step for "
    return f"{line}gradients; {finding}." if finding else f"{line}gradients."


def milliseconds(seconds: float) -> str:
    """Return seconds in milliseconds, as in messages."""
    return f"{1e3 * seconds:.0f}" if seconds >= 0.1 else f"{1e3 * seconds:.1f}"
