r"""How long a training step takes on a modelled link: simulated event by event, and lower bounds.

**Played** (`simulate`). A worker computes forward and backward passes in turn. A bucket whose gradients are complete is
cut into pieces; pieces are launched by priority while credit lasts, pass the link one after the other
in the order of launch, arrive a latency later and return their credit. A layer's forward pass waits for its bucket.
When gradients are sent is a :class:`Schedule`: DDP's, or one that is compared with it.

Workers are alike, so that one stands for all, and the time a simulation takes does not depend on their number.
Deterministic. All events of a moment are handled before anything is launched at that moment.

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

**With a barrier** (`ddp_bound`), as DDP, where the forward pass starts when all gradients have arrived:
``T >= F + max over k of (r_k + C_k)``, by the same argument with ``q = F`` for all layers; attained by sending
gradients as they come. ``k = 1`` and ``k = L`` give ``F + max(B + c_1, b_L + C)``.

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
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

from lightning_bytescheduler.simulation.link import LinkModel
from lightning_bytescheduler.simulation.profiles import ModelProfile

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
    return _Simulation(profile, link, schedule).run()


class _Piece(NamedTuple):
    """A piece of a bucket. Of the waiting pieces, the least one is launched first."""

    urgency: int
    number: int
    bucket: int  # its priority
    size: int


class _Simulation:
    def __init__(self, profile: ModelProfile, link: LinkModel, schedule: Schedule) -> None:
        self._layers = profile.layers
        self._schedule = schedule
        self._link = link
        self._free_at = 0.0  # the link
        self._now = 0.0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()  # ties keep the order of scheduling, and callables are not compared
        # Communication.
        buckets = list(schedule.buckets(profile))
        self._opens_with = {layer: bucket.priority for bucket in buckets for layer in bucket.layers}
        self._pieces_of = {bucket.priority: schedule.pieces(bucket) for bucket in buckets}
        self._queue: list[_Piece] = []
        self._in_flight = 0  # bytes
        self._missing = {bucket: len(pieces) for bucket, pieces in self._pieces_of.items()}  # that have not arrived
        # Computing.
        self._waiting: int | None = None  # the layer whose forward pass cannot start
        self._ended = False

    def run(self) -> float:
        """Play until the forward pass after the backward pass has ended."""
        self._backward(len(self._layers) - 1)
        while not self._ended:
            self._now = self._events[0][0]
            while self._events and self._events[0][0] == self._now:
                heapq.heappop(self._events)[-1]()
            self._launch()
        return self._now

    def _at(self, time: float, happen: Callable[[], None]) -> None:
        heapq.heappush(self._events, (time, next(self._numbers), happen))

    # Computing.

    def _backward(self, layer: int) -> None:
        self._at(self._now + self._layers[layer].backward_seconds, lambda: self._end_backward(layer))

    def _end_backward(self, layer: int) -> None:
        urgency = 0 if self._schedule.credit_bytes is None else layer
        for size in self._pieces_of.get(layer, ()):
            heapq.heappush(self._queue, _Piece(urgency, next(self._numbers), layer, size))
        if layer:
            self._backward(layer - 1)
        else:
            self._forward(0)

    def _forward(self, layer: int) -> None:
        self._waiting = None
        if layer == len(self._layers):
            self._ended = True
        elif (self._schedule.barrier and self._missing) or self._opens_with.get(layer) in self._missing:
            self._waiting = layer
        else:
            self._at(self._now + self._layers[layer].forward_seconds, lambda: self._forward(layer + 1))

    # Communication.

    def _launch(self) -> None:
        """Launch what is allowed, after all that happens at this moment."""
        credit = self._schedule.credit_bytes
        while self._queue and (credit is None or self._in_flight < credit):
            piece = heapq.heappop(self._queue)
            self._in_flight += piece.size
            self._free_at = max(self._free_at, self._now) + piece.size * self._link.seconds_per_byte
            self._at(self._free_at + self._link.latency_seconds, partial(self._arrive, piece))

    def _arrive(self, piece: _Piece) -> None:
        self._in_flight -= piece.size
        self._missing[piece.bucket] -= 1
        if not self._missing[piece.bucket]:
            del self._missing[piece.bucket]
            if self._waiting is not None:
                self._forward(self._waiting)


# ── Bounds ──────────────────────────────────────────────────────────────────────────────────────────


def lower_bound(profile: ModelProfile, link: LinkModel) -> float:
    """Seconds that a step of exact synchronous training takes at least, with any overlap.

    Args:
        profile: The model.
        link: The network.
    """
    return max([profile.compute_seconds, *(arrived + tail for arrived, tail in _prefixes(profile, link))])


def ddp_bound(profile: ModelProfile, link: LinkModel) -> float:
    """Seconds that a step takes at least if it waits for all gradients, as DDP does.

    Args:
        profile: The model.
        link: The network.
    """
    arrived = max([profile.backward_seconds, *(arrived for arrived, _ in _prefixes(profile, link))])
    return arrived + profile.forward_seconds


def _prefixes(profile: ModelProfile, link: LinkModel) -> Iterator[tuple[float, float]]:
    """For each layer k with parameters: when layers 1 to k can have arrived, and the forward time from k on."""
    release, tail, size = profile.backward_seconds, profile.forward_seconds, 0
    for layer in profile.layers:
        size += layer.parameter_bytes
        if layer.parameter_bytes:
            yield release + size * link.seconds_per_byte + link.latency_seconds, tail
        release -= layer.backward_seconds
        tail -= layer.forward_seconds
