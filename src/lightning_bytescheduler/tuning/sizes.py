"""Credit and partition size: the valid points, and sizes that suit a first run on a link.

A point that can be tried is a credit with a partition size (:class:`TuningPoint`), or plain DDP.

For large models, the published tuner searched credits of 4 to 64 million parameters and partitions of 2 to 32 million
with an all-reduce, and credits of 1 to 16 million with parameter servers. A model of 256 million parameters counts as
such a large one here. The ranges of smaller models begin in proportion, as a small model on slow Ethernet is fastest
with partitions far below the published ones. The upper limit is the model itself: on a link with long round trips, the
credit that fills it may be the whole model.

Sizes are compared on a logarithmic scale, in octaves: doubling a size matters about equally wherever it starts.

The time of an all-reduce of ``s`` bytes is modelled as ``alpha + beta * s`` seconds (beta includes the factor
``2(n-1)/n``).
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

ALIGNMENT = 1024
"""Sizes are multiples of this many parameters. Slices of a buffer then begin at boundaries that suit vector
instructions, pages and the packing of quantised elements, whatever the element type."""

_MILLION = 1_000_000
_LARGE_MODEL = 256 * _MILLION
_CREDITS = {"allreduce": (4 * _MILLION, 64 * _MILLION), "ps": (1 * _MILLION, 16 * _MILLION)}
# The published range of partitions is for an all-reduce. Servers need smaller ones, in the same proportion as the
# credits: the published default for servers, 1 million, is below that range.
_PARTITIONS = {"allreduce": (2 * _MILLION, 32 * _MILLION), "ps": (_MILLION // 2, 8 * _MILLION)}
_LEAST_PARTITION = 32 * ALIGNMENT  # 128 KiB of fp32; below, starting a message costs more than its bytes


class TuningPoint(NamedTuple):
    """Sizes of the scheduler, or none: ``PLAIN_DDP``.

    Attributes:
        credit: Most parameters in flight; 0 for plain DDP.
        partition_size: Largest partition, in parameters, and never more than the credit; 0 for plain DDP.
    """

    credit: int
    partition_size: int

    @property
    def is_plain_ddp(self) -> bool:
        """Whether steps are plain DDP's."""
        return not self.credit

    def __str__(self) -> str:
        if self.is_plain_ddp:
            return "plain DDP"
        return f"credit {self.credit:,}, partition {self.partition_size:,}"


PLAIN_DDP = TuningPoint(credit=0, partition_size=0)
"""Behave as DDP does: messages of its size, no partitions, a barrier at the end of the step."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSpace:
    """Bounds of credit and partition size, both inclusive, in parameters.

    Attributes:
        credits: Least and largest credit; equal if it is not tuned.
        partitions: Least and largest partition size; equal if it is not tuned.
    """

    credits: tuple[int, int]
    partitions: tuple[int, int]

    @classmethod
    def for_model(
        cls,
        parameters: int,
        start: TuningPoint,
        *,
        largest_bucket: int | None = None,
        architecture: str = "allreduce",
        tunes_credit: bool = True,
        tunes_partitions: bool = True,
    ) -> SearchSpace:
        """The space for a model. It contains the sizes that the link suggests.

        The published ranges are from fast networks. On a slow link, starting a message costs little compared with its
        bytes, so smaller partitions are better.

        Args:
            parameters: Number of trained parameters.
            start: Sizes that the link suggests. A size that is not tuned keeps this value.
            largest_bucket: Largest unit that is partitioned, in parameters; larger partitions change nothing.
            architecture: ``"allreduce"``, or ``"ps"`` for parameter servers.
            tunes_credit: Whether the credit is tuned.
            tunes_partitions: Whether the partition size is tuned. A small model has only one.
        """
        credit, partition = start
        (least, most), (low, high) = _CREDITS[architecture], _PARTITIONS[architecture]
        scale = min(parameters / _LARGE_MODEL, 1.0)
        whole = _aligned(parameters, up=True)
        high = min(_aligned(high), whole, _aligned(largest_bucket or parameters, up=True))
        low = min(max(_aligned(low * scale), _LEAST_PARTITION), high)
        if not tunes_partitions or low == high:
            low = high = partition
        least = max(_aligned(least * scale), low)
        most = max(min(_aligned(most), whole), least)
        low, high = min(low, partition), max(high, partition)
        if not tunes_credit:
            return cls(credits=(credit, credit), partitions=(low, min(high, credit)))
        return cls(credits=(min(least, credit), max(most, credit)), partitions=(low, high))

    @property
    def tunes_credit(self) -> bool:
        """Whether there is more than one credit."""
        return self.credits[0] < self.credits[1]

    @property
    def tunes_partitions(self) -> bool:
        """Whether there is more than one partition size."""
        return self.partitions[0] < self.partitions[1]

    def points(self, *, octaves: float = 0.25) -> tuple[TuningPoint, ...]:
        """All points of a grid, including both ends of each range.

        Args:
            octaves: Distance of neighbours, in doublings.
        """
        credits = list(_steps(*self.credits, octaves))
        return tuple(
            TuningPoint(credit, partition)
            for partition in _steps(*self.partitions, octaves)
            for credit in credits
            if partition <= credit
        )


def distance(one: TuningPoint, other: TuningPoint) -> float:
    """Distance of two points with sizes: the doublings of the size that differs more."""
    return max(abs(math.log2(a / b)) for a, b in zip(one, other, strict=True))


def _steps(low: int, high: int, octaves: float) -> Iterator[int]:
    """Sizes from low to high in equal factors, rounded to the alignment; both ends are exact."""
    count = max(math.ceil(math.log2(high / low) / octaves), 1)
    inner = (_aligned(low * (high / low) ** (index / count)) for index in range(1, count))
    yield from sorted({low, high, *(size for size in inner if low < size < high)})


def _aligned(size: float, *, up: bool = False) -> int:
    units = math.ceil(size / ALIGNMENT) if up else round(size / ALIGNMENT)
    return max(units, 1) * ALIGNMENT


# ── Sizes of a first run ──────────────────────────────────────────────────────────────────────

_MIN_PARTITION_BYTES = 128 * 1024
_MAX_PARTITION_BYTES = 32 * 1024 * 1024  # the published 8,000,000 parameters of fp32
_MAX_BUCKET_BYTES = 25 * 1024 * 1024  # DDP's own default
_ALPHAS_PER_PARTITION = 3  # this hides the start-up behind the partition before; with more, urgent ones overtake later
# On links with a long delay several partitions hide each other's start-up, and a partition that is in flight cannot be
# overtaken. Steps are shortest with this much in flight, in about eight partitions.
_ALPHAS_IN_CREDIT_WHEN_FAR = 1.35  # of the probe's alphas; its betas are too small there
_SECONDS_IN_CREDIT_WHEN_FAR = 0.01
_PARTITIONS_IN_CREDIT_WHEN_FAR = 8
_MOST_PARTITIONS_IN_CREDIT_WHEN_FAR = 32
# Each partition wakes several threads on each rank and takes about a millisecond of processor time. If the processor
# computes the model, a link measured at rest does not show that. So partitions and credit have these least sizes.
_LEAST_PARTITION_SECONDS_WHEN_BUSY = 0.004
_LEAST_CREDIT_SECONDS_WHEN_BUSY = 0.015
_COPIED_PER_SECOND = 250e6  # bytes over loopback beside other computation, in a bad moment
_MUCH_SECONDS = 0.02  # for all gradients; less hardly matters, however long a step is
_PARTITIONS_PER_MODEL = 16
_SERVERS_PARTITION = 1_000_000  # published for parameter servers
# A partition holds its credit from push to pull. With the published 4 partitions, each direction of the links is idle
# for much of the time. More than 16 help, up to an eighth of the model; with still more, urgent ones would overtake too
# late.
_SERVERS_PARTITIONS_IN_CREDIT, _SERVERS_MOST_IN_CREDIT = 16, 24
_SERVERS_CREDITS_PER_MODEL = 8
_SERVERS_LARGEST_CREDIT = 16_000_000  # published
_SERVERS_PARTITIONS_PER_MODEL = 128
# Filling and draining take as long as one partition. Shorter partitions cost more processor time than that saves.
_SERVERS_PARTITION_SECONDS = 0.0075  # of an all-reduce
_BUCKETS_PER_MODEL = 64
_MOST_PARTITIONS_IN_CREDIT = 4
_LEAST_BETA = 1e-12  # where a difference of sizes cannot be measured


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkEstimate:
    """Cost of an all-reduce over all ranks.

    Attributes:
        alpha: Start-up time in seconds.
        beta: Seconds per byte of the reduced tensor.
    """

    alpha: float
    beta: float

    @classmethod
    def fit(cls, small: tuple[int, float], large: tuple[int, float]) -> LinkEstimate:
        """The line through two measured all-reduces, each as its bytes and seconds."""
        beta = max((large[1] - small[1]) / (large[0] - small[0]), _LEAST_BETA)
        return cls(alpha=max(small[1] - beta * small[0], 1e-6), beta=beta)

    @property
    def at_rate(self) -> str:
        """For example `` at 100 MB/s``; empty if more bytes took no longer, as with a tiny model."""
        return f" at {1e-6 / self.beta:.0f} MB/s" if self.beta > _LEAST_BETA else ""

    def seconds(self, size: float) -> float:
        """Predicted time of an all-reduce of ``size`` bytes."""
        return self.alpha + self.beta * size


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulerSizes:
    """Sizes of a scheduler for one model on one link.

    Attributes:
        partition_size: In parameters.
        credit: In parameters.
        bucket_bytes: Size at which DDP closes a bucket.
    """

    partition_size: int
    credit: int
    bucket_bytes: int


def is_slow(link: LinkEstimate, *, nbytes: int, busy_processor: bool) -> bool:
    """Whether it is known before the first step that much communication could be hidden.

    Args:
        link: The measured link.
        nbytes: Bytes of all gradients.
        busy_processor: Whether the model computes on the processor. If bytes arrive nearly as fast as it copies them,
            receiving keeps the processor busy, and the link's speed does not say for how long. If they arrive more
            slowly, the processor waits for them.
    """
    waits = link.beta > 1 / _COPIED_PER_SECOND or not busy_processor
    return waits and link.seconds(nbytes) > _MUCH_SECONDS


def default_sizes(
    *,
    parameters: int,
    bytes_per_parameter: int,
    link: LinkEstimate,
    busy_processor: bool = False,
    in_shards: bool = False,
    architecture: str = "allreduce",
    far: bool = False,
) -> SchedulerSizes:
    """Sizes for a first run, before anything was tuned.

    A partition is as small as the link's start-up cost allows, so that urgent gradients overtake soon. It is no larger
    than a sixteenth of the model, unless that is less than 128 KiB. If the processor is busy, a partition takes the
    link at least 4 ms or is the whole model, as cutting is not worth its cost on a fast link. Buckets are the units
    that gate a layer's forward pass: about 64 per model, never smaller than a partition. The credit lets enough
    partitions be in flight to hide start-up, launch decisions and waking behind data: two to four, so that waiting ones
    can still be overtaken.

    Args:
        parameters: Trainable parameters of the model.
        bytes_per_parameter: Size of one gradient element.
        link: The measured link.
        busy_processor: Whether the model computes on the processor, so that communication has to wait for it.
        in_shards: Whether a partition is two operations, a reduce-scatter and an all-gather. It is then twice as large.
        architecture: ``"ps"`` for parameter servers. Partitions then have the published 1,000,000 parameters, but no
            more than a 128th of the model or what is all-reduced in 7.5 ms. The credit is an eighth of the model, but
            at least 16 partitions and at most 24.
        far: Whether messages are in flight so long that several partitions hide each other's start-up. A partition is
            then an eighth of what has to be in flight to hide its start-up, and the credit is about all of that.
    """
    if architecture == "ps":
        return _sizes_for_servers(parameters, bytes_per_parameter, link)
    model_bytes = max(parameters * bytes_per_parameter, 1)
    starting = (2 if in_shards else 1) * link.alpha
    under_way = (_ALPHAS_IN_CREDIT_WHEN_FAR * starting + _SECONDS_IN_CREDIT_WHEN_FAR) / link.beta
    hiding, most_in_credit = under_way / _PARTITIONS_IN_CREDIT_WHEN_FAR, _MOST_PARTITIONS_IN_CREDIT_WHEN_FAR
    if not far:
        hiding, most_in_credit = _ALPHAS_PER_PARTITION * starting / link.beta, _MOST_PARTITIONS_IN_CREDIT
    waking = _LEAST_PARTITION_SECONDS_WHEN_BUSY / link.beta if busy_processor else 0.0
    awake = _LEAST_CREDIT_SECONDS_WHEN_BUSY / link.beta if busy_processor else 0.0
    partition = max(
        min(hiding, model_bytes / _PARTITIONS_PER_MODEL), _MIN_PARTITION_BYTES, min(waking, float(model_bytes))
    )
    partition = min(partition, _MAX_PARTITION_BYTES)
    # A bucket costs a hook, a gate and an optimizer call.
    bucket = max(min(model_bytes / _BUCKETS_PER_MODEL, _MAX_BUCKET_BYTES), partition)
    partition_size = max(int(partition) // bytes_per_parameter, 1)
    # Partitions that are in flight while the next is chosen and starts up, or while threads wait for the processor.
    others = under_way - partition if far else hiding
    behind = max(math.ceil(others / partition), math.ceil(awake / partition) - 1)
    return SchedulerSizes(
        partition_size=partition_size,
        credit=min(1 + max(behind, 1), most_in_credit) * partition_size,
        bucket_bytes=int(bucket),
    )


def _sizes_for_servers(parameters: int, bytes_per_parameter: int, link: LinkEstimate) -> SchedulerSizes:
    least = _MIN_PARTITION_BYTES // bytes_per_parameter
    soon_there = int(_SERVERS_PARTITION_SECONDS / link.beta) // bytes_per_parameter
    partition = max(min(_SERVERS_PARTITION, parameters // _SERVERS_PARTITIONS_PER_MODEL, soon_there), least)
    model_bytes = parameters * bytes_per_parameter
    bucket = max(min(model_bytes // _BUCKETS_PER_MODEL, _MAX_BUCKET_BYTES), partition * bytes_per_parameter)
    under_way = min(parameters // _SERVERS_CREDITS_PER_MODEL, _SERVERS_LARGEST_CREDIT) // partition
    credit = min(max(under_way, _SERVERS_PARTITIONS_IN_CREDIT), _SERVERS_MOST_IN_CREDIT) * partition
    return SchedulerSizes(partition_size=partition, credit=credit, bucket_bytes=bucket)
