"""A scheduling policy in force: what it wants of each bucket, from what this rank has observed of recent steps.

When gradients exist and when training reaches for them is measured as for ``compression="auto"``
(``scheduler/lateness.py``). Policies that do not observe are asked bucket by bucket.

Why the ranks agree: nothing is agreed on. Which part is next and how a task is cut is said by rank 0 with each decision
(``collectives/launch_order.py``); what other ranks' policies say is not looked at. A rank that follows neither measures
nor plans. Whoever sends without an order of all ranks, messages being matched by their number, arranges for itself.

Threads: the training's, and whoever touches a parameter. One lock guards what they share. Plans are made with it held,
which is arithmetic; a function of the user's is called without.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace

from lightning_bytescheduler.ddp.reduction import GradientBucket
from lightning_bytescheduler.scheduler.lateness import StepTimes
from lightning_bytescheduler.scheduler.policies import Arrangement, BucketFacts, LinkCost, SchedulingPolicy

__all__ = ["BucketArranger"]

_FIRST_PLANS = 4  # steps after each of which what was observed is looked at anew; later, after every so many:
_PLANNED_EVERY = 64


class BucketArranger:
    """Says of each bucket with which priority it travels, and how it is cut.

    Args:
        policy: Asked.
        link: What a message costs, if that is known.
        plans: Whether what is observed counts here: on the rank that decides.
        clock: Seconds; the core's clock.
    """

    def __init__(
        self,
        policy: SchedulingPolicy,
        link: LinkCost | None,
        *,
        plans: bool,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._policy = policy
        self._link = link
        self._observes = plans and policy.observes
        self._clock = clock
        self._lock = threading.Lock()
        self._times = StepTimes()
        self._seen: dict[int, BucketFacts] = {}
        self._plan: Mapping[int, Arrangement] = {}
        self._kind = ""
        self._steps = 0

    def begin_step(self, kind: str) -> None:
        """A backward pass has its first bucket.

        Args:
            kind: Of the step: moments of one kind say nothing about another.
        """
        if not self._observes:
            return
        with self._lock:
            if kind != self._kind:
                self._kind, self._steps, self._plan = kind, 0, {}
                self._seen.clear()
            self._steps += 1
            if self._steps <= _FIRST_PLANS or self._steps % _PLANNED_EVERY == 0:
                self._make_plan()
            self._times.begin(kind)

    def _make_plan(self) -> None:
        times = self._times
        if not times.complete or times.buckets.keys() != self._seen.keys():
            return
        facts = []
        for index, known in self._seen.items():
            ready, needed = times.offsets(index)
            facts.append(replace(known, ready=ready, needed=needed))
        self._plan = self._policy.arrange(facts, self._link)

    def arrange(self, bucket: GradientBucket, *, last: bool) -> None:
        """Set priority and cut of a bucket whose gradient exists on this rank and was not handed over.

        Args:
            bucket: Its priority is the position of its first use in the forward pass.
            last: Whether it is the backward pass's last.
        """
        size = bucket.buffer.numel()
        facts = BucketFacts(index=bucket.index, size=size, position=bucket.priority)
        if not self._observes:
            wanted = self._policy.arranged(facts)
        else:
            with self._lock:
                now, nbytes = self._clock(), size * bucket.buffer.element_size()
                self._times.ready(bucket.index, nbytes, bucket.priority, now, last=last)
                known = self._seen.get(bucket.index)
                self._seen[bucket.index] = facts
                planned = None if known is None or known.size != size else self._plan.get(bucket.index)
            wanted = self._policy.arranged(facts) if planned is None else planned
        bucket.priority = wanted.priority
        # Real and imaginary parts of complex gradients are sent side by side.
        bucket.cut = None if bucket.buffer.is_complex() else wanted.cut

    def needed(self, bucket: int) -> None:
        """Somebody reaches for what depends on a bucket's gradient; on any thread."""
        if self._observes:
            with self._lock:
                self._times.needed(bucket, self._clock())

    def waiting(self) -> None:
        """Training waits for a gradient from now on."""
        if self._observes:
            with self._lock:
                self._times.waiting(self._clock())

    def waiting_ends(self) -> None:
        """It has got it."""
        if self._observes:
            with self._lock:
                self._times.waiting_ends(self._clock())
