r"""How long a training step takes on a modelled link: simulated piece by piece, and lower bounds.

**Played** (`simulate`). A worker computes forward and backward passes in turn. A bucket whose gradients are complete is
cut into pieces; pieces are launched by priority while credit lasts, pass the link one after the other
in the order of launch, arrive a latency later and return their credit. A layer's forward pass waits for its bucket.
When gradients are sent is a :class:`Schedule`: DDP's, or one that is compared with it.

Workers are alike, so that one stands for all, and the time a simulation takes does not depend on their number.
Deterministic. All that happens at a moment comes before what is launched then. Gradients are sent while the backward
pass goes on and after it, whatever the forward pass does, so the link is played first.

Limits: compute is not slowed by communication, and updates take no time.

**At least.** Bounds that no order and no partition of the same bytes can beat.

Notation. Layers 1 to L in the order of the forward pass; ``f_j`` and ``b_j`` their forward and backward times,
``F`` and ``B`` the sums; ``c_j`` how long layer j's gradients occupy the link, ``C_k = c_1 + ... + c_k``,
``C = C_L``. A step is counted from the start of a backward pass to the start of the next. Layer j's gradient
is complete at ``r_j = b_j + ... + b_L``; after its weights have arrived, ``q_j = f_j + ... + f_L`` of forward
pass is still to be done. Both shrink as j grows. All of a step's communication ends within the step, because
each layer's forward pass needs that layer's.

**Exact synchronous training with overlap** (`lower_bound`). Take any k. The gradients of layers 1 to k are not
complete before ``r_k``; from there on they occupy the link for ``C_k``; whichever of these layers comes last,
at least ``q_k`` of forward pass comes after it. Hence

    T >= max over k of (r_k + C_k + q_k).

``k = 1`` is ``B + c_1 + F`` and ``k = L`` is ``b_L + C + f_L``, the two terms that are usually named; a large
layer in the middle makes another k the largest. The bound is attained: the step is a single machine (the link)
with jobs of release ``r_j`` and tail ``q_j``, for which sending the first layer that is ready, preemptively, is
optimal (Jackson 1955, Horn 1974), with the value ``max over sets S of (min r + sum c + min q)``; of all
sets with the last layer k, the largest sum is that of layers 1 to k. Partitions of ``p`` instead of preemption
cost at most one partition more: the one on the link when something more urgent becomes ready.

**With norm clipping** gradients are reduce-scattered (``c_j/2``), the norm is computed from the shards, and an
all-gather (``c_j/2``) sends each layer's result to all workers. That may happen before the norm is known, as the factor
is applied where the gradient arrives. Only the reduce-scatters have to end before the forward pass begins. So the bound
has one more term, about ``b_L + C/2 + c_1/2 + F``. It is the largest only where ``C/2 > B`` and ``F > C/2``, so where a
forward pass takes longer than the backward pass. That is not so for real models, and clipping is taken to cost nothing.

**Costs of messages.** After its last byte has left, a message takes the link's latency to arrive; of several in flight
only the last one's shows, so each bound grows by one latency.
"""

from __future__ import annotations

import heapq
import itertools
import math
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

from lightning_bytescheduler.predicting.link import LinkModel
from lightning_bytescheduler.predicting.profiles import ModelProfile

_DDP_BUCKET_BYTES = 25 * 1024 * 1024
_DDP_FIRST_BUCKET_BYTES = 1024 * 1024
"""DDP's first bucket where no size was asked for: small, so that communication starts early."""


class Bucket(NamedTuple):
    """Layers that become ready, and open their forward pass, together.

    Attributes:
        layers: Indices of its layers, in the order of the backward pass.
        size: In bytes.
    """

    layers: tuple[int, ...]
    size: int

    @property
    def priority(self) -> int:
        """The layer that the forward pass needs first; it is also the one whose gradient comes last."""
        return self.layers[-1]


@dataclass(frozen=True, kw_only=True, slots=True)
class Schedule:
    """How gradients are grouped, cut and ordered.

    Attributes:
        bucket_bytes: Gradients are gathered, in the order of the backward pass, until a bucket is at least this
            large; a layer is never split. ``None`` leaves each layer on its own.
        first_bucket_bytes: The same for the first bucket; ``None`` makes it like the others.
        partition_bytes: Largest piece sent at once; ``None`` sends buckets whole.
        credit_bytes: A piece is sent only while less than this is in flight, so one piece always may be. Of the waiting
            pieces, the one that the forward pass needs first is sent first. ``None`` sends pieces as they come.
        barrier: The forward pass waits for everything.
    """

    bucket_bytes: int | None = None
    first_bucket_bytes: int | None = None
    partition_bytes: int | None = None
    credit_bytes: int | None = None
    barrier: bool = False

    @classmethod
    def ddp(cls, *, bucket_bytes: int | None = None) -> Schedule:
        """DDP: buckets as they come, and a forward pass that waits for all of them.

        Args:
            bucket_bytes: ``bucket_cap_mb``, in bytes. By default 25 MiB after a first bucket of 1 MiB; like
                DDP, without a smaller first one where a size is given.
        """
        if bucket_bytes is not None:
            return cls(bucket_bytes=bucket_bytes, barrier=True)
        return cls(bucket_bytes=_DDP_BUCKET_BYTES, first_bucket_bytes=_DDP_FIRST_BUCKET_BYTES, barrier=True)

    def buckets(self, profile: ModelProfile) -> Iterator[Bucket]:
        """Gather a model's layers, in the order of the backward pass. Layers without parameters are in none."""
        limit = self.first_bucket_bytes or self.bucket_bytes or 1
        layers: list[int] = []
        size = 0
        for index in reversed(range(len(profile.layers))):
            if profile.layers[index].parameter_bytes == 0:
                continue
            layers.append(index)
            size += profile.layers[index].parameter_bytes
            if size >= limit:
                yield Bucket(tuple(layers), size)
                layers, size, limit = [], 0, self.bucket_bytes or 1
        if layers:
            yield Bucket(tuple(layers), size)

    def pieces(self, bucket: Bucket) -> list[int]:
        """Cut a bucket; returns the sizes of its pieces, equal ones but for the last."""
        largest = self.partition_bytes or bucket.size
        return [min(largest, bucket.size - start) for start in range(0, bucket.size, largest)]


def simulate(profile: ModelProfile, link: LinkModel, schedule: Schedule) -> float:
    """Play a step; returns its seconds, from the start of its backward pass to the start of the next.

    All steps take the same time, because nothing of a step is left in flight when the next forward pass ends.

    Args:
        profile: The model.
        link: The network.
        schedule: When gradients are sent.
    """
    buckets = {bucket.priority: bucket for bucket in schedule.buckets(profile)}
    now, complete = 0.0, deque[tuple[float, Bucket]]()
    for index in reversed(range(len(profile.layers))):
        now += profile.layers[index].backward_seconds
        if index in buckets:
            complete.append((now, buckets[index]))
    arrived = _arrivals(complete, link, schedule)
    if schedule.barrier:
        now = max([now, *arrived.values()])
    opens_at = {layer: arrived[bucket.priority] for bucket in buckets.values() for layer in bucket.layers}
    for index, layer in enumerate(profile.layers):
        now = max(now, opens_at.get(index, 0.0)) + layer.forward_seconds
    return now


def _arrivals(complete: deque[tuple[float, Bucket]], link: LinkModel, schedule: Schedule) -> dict[int, float]:
    """When each bucket's last piece arrives, by the bucket's priority; ``complete`` says when each may be sent."""
    credit = math.inf if schedule.credit_bytes is None else schedule.credit_bytes
    arrived: dict[int, float] = {}
    waiting: list[tuple[int, int, int, int]] = []  # urgency, number, bucket and size; the least one is launched first
    flying = deque[tuple[float, int]]()  # arrivals and sizes
    numbers, in_flight = itertools.count(), 0
    now = free_at = 0.0
    while complete or waiting:
        if not waiting:
            now = max(now, complete[0][0])
        # All that happens at this moment comes before a launch.
        while complete and complete[0][0] <= now:
            bucket = complete.popleft()[1]
            urgency = 0 if schedule.credit_bytes is None else bucket.priority
            for size in schedule.pieces(bucket):
                heapq.heappush(waiting, (urgency, next(numbers), bucket.priority, size))
        while flying and flying[0][0] <= now:
            in_flight -= flying.popleft()[1]
        if in_flight >= credit:
            now = flying[0][0]
            continue
        *_, priority, size = heapq.heappop(waiting)
        free_at = max(free_at, now) + size * link.seconds_per_byte
        arrived[priority] = free_at + link.latency_seconds
        flying.append((arrived[priority], size))
        in_flight += size
    return arrived


# ── Bounds ──────────────────────────────────────────────────────────────────────────────────────────


def lower_bound(profile: ModelProfile, link: LinkModel) -> float:
    """Seconds that a step of exact synchronous training takes at least, with any overlap.

    Args:
        profile: The model.
        link: The network.
    """
    return max([profile.compute_seconds, *(arrived + tail for arrived, tail in prefixes(profile, link))])


def prefixes(profile: ModelProfile, link: LinkModel) -> Iterator[tuple[float, float]]:
    """For each layer k with parameters: when layers 1 to k can have arrived, and the forward time from k on."""
    release, tail, size = profile.backward_seconds, profile.forward_seconds, 0
    for layer in profile.layers:
        size += layer.parameter_bytes
        if layer.parameter_bytes:
            yield release + size * link.seconds_per_byte + link.latency_seconds, tail
        release -= layer.backward_seconds
        tail -= layer.forward_seconds
