"""Plays a training step on a modelled link, event by event.

A worker computes forward and backward passes in turn. A bucket whose gradients are complete is cut into
pieces; pieces are launched in the schedule's order while credit lasts, pass the link one after the other in
the order of launch, arrive a latency later and return their credit. A layer's forward pass waits for its bucket.
With servers a piece passes two stages, each with half of the latency. With clipping, each piece
passes twice: reduce-scattered, then gathered.

Workers are alike, so that one stands for all, and the time a simulation takes does not depend on their number.
Deterministic. What happens at one moment is all seen before anything is launched at that moment.

Limits: compute is not slowed by communication, and updates take no time.

When gradients are sent is a :class:`Schedule`: DDP's, or one of the orders that are compared with it.
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Callable, Iterator
from dataclasses import dataclass

from lightning_bytescheduler.checks import require_bool, require_one_of, require_whole
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.simulation.bounds import norm_seconds, require_all_reduce
from lightning_bytescheduler.simulation.link import LinkModel
from lightning_bytescheduler.simulation.profiles import ModelProfile

_DDP_BUCKET_BYTES = 25 * 1024 * 1024
_DDP_FIRST_BUCKET_BYTES = 1024 * 1024
"""DDP's first bucket where no size was asked for: small, so that communication starts early."""

ORDERS = ("fifo", "priority")
"""As the gradients come, or what the next forward pass needs first."""

_REDUCE, _GATHER = 0, 1  # which of a piece's two passages, with clipping; reductions go first
_FACT, _DECISION = 0, 1  # at one moment, what happened goes before what is decided on it


@dataclass(frozen=True, slots=True)
class Bucket:
    """What becomes ready, and opens the forward pass of its layers, as a whole.

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
    """How gradients are grouped, cut and ordered. Made by the class methods, or field by field.

    Attributes:
        order: One of ``ORDERS``.
        bucket_bytes: Gradients are gathered, in the order of the backward pass, until a bucket is at least this
            large; a layer is never split. ``None`` leaves each layer on its own.
        first_bucket_bytes: The same for the first bucket; ``None`` makes it like the others.
        partition_bytes: Largest piece sent at once; ``None`` sends buckets whole.
        credit_bytes: A piece is sent only while what is in flight is less than this, so at least one always
            may; ``None`` sends everything as soon as it is ready.
        barrier: The forward pass waits for everything.
        clipping: Whether the norm is clipped: gradients are reduce-scattered, and gathered before the norm is known.

    Raises:
        OptionError: Names the value that is not allowed.
    """

    order: str = "priority"
    bucket_bytes: int | None = None
    first_bucket_bytes: int | None = None
    partition_bytes: int | None = None
    credit_bytes: int | None = None
    barrier: bool = False
    clipping: bool = False

    def __post_init__(self) -> None:
        require_one_of("order", self.order, ORDERS)
        for option in ("bucket_bytes", "first_bucket_bytes", "partition_bytes", "credit_bytes"):
            value = getattr(self, option)
            if value is not None:
                require_whole(option, value, 1)
        if self.first_bucket_bytes is not None and self.bucket_bytes is None:
            raise OptionError("first_bucket_bytes", self.first_bucket_bytes, "left out where bucket_bytes is")
        require_bool("barrier", self.barrier)
        require_bool("clipping", self.clipping)

    @classmethod
    def ddp(cls, *, bucket_bytes: int | None = None) -> Schedule:
        """DDP: buckets as they come, and a forward pass that waits for all of them.

        Args:
            bucket_bytes: ``bucket_cap_mb``, in bytes. By default 25 MiB after a first bucket of 1 MiB; like
                DDP, without a smaller first one where a size is given.
        """
        if bucket_bytes is not None:
            return cls(order="fifo", bucket_bytes=bucket_bytes, barrier=True)
        return cls(
            order="fifo",
            bucket_bytes=_DDP_BUCKET_BYTES,
            first_bucket_bytes=_DDP_FIRST_BUCKET_BYTES,
            barrier=True,
        )

    @classmethod
    def scheduled(
        cls,
        *,
        partition_bytes: int,
        credit_bytes: int | None = None,
        bucket_bytes: int | None = None,
        clipping: bool = False,
    ) -> Schedule:
        """ByteScheduler: partitions by priority under a credit window.

        Args:
            partition_bytes: Largest piece sent at once.
            credit_bytes: Window; by default one piece at a time.
            bucket_bytes: See the class.
            clipping: See the class.
        """
        return cls(
            order="priority",
            bucket_bytes=bucket_bytes,
            partition_bytes=partition_bytes,
            credit_bytes=1 if credit_bytes is None else credit_bytes,
            clipping=clipping,
        )

    def buckets(self, profile: ModelProfile) -> tuple[Bucket, ...]:
        """Gather a model's layers, in the order of the backward pass. Layers without parameters are in none."""
        return tuple(self._buckets(profile))

    def _buckets(self, profile: ModelProfile) -> Iterator[Bucket]:
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


@dataclass(frozen=True, slots=True)
class Launch:
    """A piece that was handed to the network.

    Attributes:
        seconds: When, from the start of the backward pass.
        layer: The first layer of its bucket.
        size: In bytes.
        gather: Whether it is the all-gather that follows a reduce-scatter.
    """

    seconds: float
    layer: int
    size: int
    gather: bool


@dataclass(frozen=True, slots=True)
class SimulatedRun:
    """What was seen.

    Attributes:
        steps: Seconds of each step, from the start of its backward pass to the start of the next.
        launches: What the last step sent, in the order of launch.
    """

    steps: tuple[float, ...]
    launches: tuple[Launch, ...]

    @property
    def step_seconds(self) -> float:
        """Seconds of the last step."""
        return self.steps[-1]


def simulate(profile: ModelProfile, link: LinkModel, schedule: Schedule, *, steps: int = 3) -> SimulatedRun:
    """Play some steps.

    All steps take the same time, because nothing of a step is left in flight when its successor's forward pass
    ends; more than one shows just that.

    Args:
        profile: The model.
        link: The network.
        schedule: When gradients are sent.
        steps: How many steps to play.

    Raises:
        OptionError: If ``steps`` is not a positive whole number.
        UnsupportedError: If norm clipping meets a link that pushes and pulls.
    """
    require_whole("steps", steps, 1)
    if schedule.clipping:
        require_all_reduce(link)
    return _Simulation(profile, link, schedule).run(steps)


@dataclass(frozen=True, slots=True)
class _Piece:
    bucket: Bucket
    size: int
    passage: int


class _Stage:
    """A part of the network that one piece after the other passes."""

    def __init__(self) -> None:
        self._free_at = 0.0

    def passed(self, now: float, seconds: float) -> float:
        """When a piece that comes now has passed."""
        self._free_at = max(self._free_at, now) + seconds
        return self._free_at


class _Simulation:
    def __init__(self, profile: ModelProfile, link: LinkModel, schedule: Schedule) -> None:
        self._layers = profile.layers
        self._link = link
        self._schedule = schedule
        self._buckets = schedule.buckets(profile)
        self._ready_with = {bucket.priority: bucket for bucket in self._buckets}
        self._opens_with = {layer: bucket.priority for bucket in self._buckets for layer in bucket.layers}
        self._pieces_of = {bucket.priority: schedule.pieces(bucket) for bucket in self._buckets}
        self._stages = [_Stage() for _ in range(link.stages)]
        self._now = 0.0
        self._events: list[tuple[float, int, int, Callable[[], None]]] = []
        self._event_number = 0
        # Communication.
        self._queue: list[tuple[int, int, int, _Piece]] = []
        self._queued = 0
        self._deciding = False
        self._in_flight_bytes = 0
        self._in_flight = 0
        self._missing: dict[int, int] = {}  # by priority of a bucket, its pieces that have not arrived
        self._reductions_missing = 0
        self._norm_known = True
        # Computing.
        self._waiting: int | None = None  # the layer whose forward pass cannot start
        self._wanted = 0
        self._backward_starts: list[float] = []
        self._launches: list[Launch] = []

    def run(self, steps: int) -> SimulatedRun:
        """Play until the backward pass after the last step begins."""
        self._wanted = steps + 1
        self._forward(0)
        while len(self._backward_starts) < self._wanted:
            self._now, _, _, happen = heapq.heappop(self._events)
            happen()
        starts = self._backward_starts
        return SimulatedRun(
            steps=tuple(after - before for before, after in itertools.pairwise(starts)),
            launches=tuple(self._launches),
        )

    def _at(self, time: float, happen: Callable[[], None], kind: int = _FACT) -> None:
        self._event_number += 1  # keeps what was said first first, and callables out of the comparison
        heapq.heappush(self._events, (time, kind, self._event_number, happen))

    # Computing.

    def _forward(self, layer: int) -> None:
        if layer == len(self._layers):
            self._backward_starts.append(self._now)
            if len(self._backward_starts) < self._wanted:
                self._begin_backward()
        elif self._is_open(layer):
            self._waiting = None
            self._at(self._now + self._layers[layer].forward_seconds, lambda: self._forward(layer + 1))
        else:
            self._waiting = layer

    def _is_open(self, layer: int) -> bool:
        if self._schedule.barrier and self._missing:
            return False
        return self._norm_known and self._opens_with.get(layer) not in self._missing

    def _begin_backward(self) -> None:
        self._launches.clear()
        self._missing = {bucket.priority: len(self._pieces_of[bucket.priority]) for bucket in self._buckets}
        if self._schedule.clipping:
            self._reductions_missing = sum(self._missing.values())
            self._norm_known = not self._reductions_missing
        self._backward(len(self._layers) - 1)

    def _backward(self, layer: int) -> None:
        self._at(self._now + self._layers[layer].backward_seconds, lambda: self._end_backward(layer))

    def _end_backward(self, layer: int) -> None:
        bucket = self._ready_with.get(layer)
        if bucket is not None:
            for size in self._pieces_of[layer]:
                self._enqueue(_Piece(bucket, size, _REDUCE))
        if layer:
            self._backward(layer - 1)
        else:
            self._forward(0)

    # Communication.

    def _enqueue(self, piece: _Piece) -> None:
        urgency = piece.bucket.priority if self._schedule.order == "priority" else 0
        self._queued += 1
        heapq.heappush(self._queue, (piece.passage, urgency, self._queued, piece))
        self._decide()

    def _decide(self) -> None:
        """Launch what may be, once all that happens at this moment has happened."""
        if not self._deciding:
            self._deciding = True
            self._at(self._now, self._launch, _DECISION)

    def _launch(self) -> None:
        self._deciding = False
        while self._queue and self._may_launch():
            piece = heapq.heappop(self._queue)[-1]
            self._in_flight += 1
            self._in_flight_bytes += piece.size
            self._launches.append(
                Launch(
                    self._now - self._backward_starts[-1],
                    piece.bucket.priority,
                    piece.size,
                    piece.passage == _GATHER,
                )
            )
            self._pass(piece, iter(self._stages))

    def _may_launch(self) -> bool:
        credit, messages = self._schedule.credit_bytes, self._link.messages_in_flight
        return (credit is None or self._in_flight_bytes < credit) and (messages is None or self._in_flight < messages)

    def _pass(self, piece: _Piece, stages: Iterator[_Stage]) -> None:
        stage = next(stages, None)
        if stage is None:
            self._arrive(piece)
            return
        share = 0.5 if self._schedule.clipping else 1.0
        on_link = self._link.seconds_per_byte / (1 - self._link.idle)
        seconds = self._link.overhead_seconds + share * piece.size * on_link
        latency = share * self._link.latency_seconds / len(self._stages)
        self._at(stage.passed(self._now, seconds) + latency, lambda: self._pass(piece, stages))

    def _arrive(self, piece: _Piece) -> None:
        self._in_flight -= 1
        self._in_flight_bytes -= piece.size
        self._decide()
        if self._schedule.clipping and piece.passage == _REDUCE:
            self._reduced(piece)
            return
        bucket = piece.bucket.priority
        self._missing[bucket] -= 1
        if not self._missing[bucket]:
            del self._missing[bucket]
            self._reconsider()

    def _reduced(self, piece: _Piece) -> None:
        """A piece was reduce-scattered: it can be gathered."""
        self._enqueue(_Piece(piece.bucket, piece.size, _GATHER))
        self._reductions_missing -= 1
        if not self._reductions_missing:
            self._at(self._now + norm_seconds(self._link), self._know_norm)

    def _know_norm(self) -> None:
        self._norm_known = True
        self._reconsider()

    def _reconsider(self) -> None:
        if self._waiting is not None:
            self._forward(self._waiting)
