"""What a link can do, and the sizes that make a first run good on it.

An all-reduce of ``s`` bytes is taken to cost ``alpha + beta * s`` seconds (beta holds the factor ``2(n-1)/n``).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from lightning_bytescheduler.checks import (
    ARCHITECTURES,
    is_finite,
    require_one_of,
    require_positive,
    require_seconds,
    require_whole,
)
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["LinkEstimate", "SchedulerSizes", "default_sizes", "is_slow"]

_MIN_PARTITION_BYTES = 128 * 1024
_MAX_PARTITION_BYTES = 32 * 1024 * 1024  # the published 8,000,000 parameters of fp32
_MAX_BUCKET_BYTES = 25 * 1024 * 1024  # DDP's own default
_ALPHAS_PER_PARTITION = 3  # more than hides start-up behind the partition before; more would overtake later
# Over long ways several partitions hide the start-up of each other, and what is under way already is not overtaken:
# with 20 and 50 ms there and back steps were shortest with this much under way, in eight parts or so.
_ALPHAS_IN_CREDIT_WHEN_FAR = 1.35  # of alphas that the probe finds, and betas, which are too small there
_SECONDS_IN_CREDIT_WHEN_FAR = 0.01
_PARTITIONS_IN_CREDIT_WHEN_FAR = 8
_MOST_PARTITIONS_IN_CREDIT_WHEN_FAR = 32
# Each partition wakes half a dozen threads on each rank and takes a millisecond of processor time. Where the processor
# is what computes, a link measured at rest does not show that: so much is sent at once, and so much kept under way.
_LEAST_PARTITION_SECONDS_WHEN_BUSY = 0.004
_LEAST_CREDIT_SECONDS_WHEN_BUSY = 0.015
_COPIED_PER_SECOND = 250e6  # bytes that travel on loopback, where others compute besides, in a bad moment
_MUCH_SECONDS = 0.02  # for all gradients; less is soon over, whatever a step takes
_PARTITIONS_PER_MODEL = 16
_SERVERS_PARTITION = 1_000_000  # published for parameter servers
# A part holds its credit from push to pull. With the published 4 one direction of the links was idle half of the time,
# and steps took 1.4 times as long (4 workers, 4 servers, 300 Mbit/s). More than 16 help where that is less than an
# eighth of the model, so that what is urgent still overtakes.
_SERVERS_PARTITIONS_IN_CREDIT, _SERVERS_MOST_IN_CREDIT = 16, 24
_SERVERS_CREDITS_PER_MODEL = 8
_SERVERS_LARGEST_CREDIT = 16_000_000  # published
_SERVERS_PARTITIONS_PER_MODEL = 128
# Filling and draining take as long as one part does. What is shorter costs more processor time than that brings.
_SERVERS_PARTITION_SECONDS = 0.0075  # of an all-reduce
_BUCKETS_PER_MODEL = 64
_MOST_PARTITIONS_IN_CREDIT = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class LinkEstimate:
    """Cost of an all-reduce over all ranks.

    Attributes:
        alpha: Start-up time in seconds.
        beta: Seconds per byte of the reduced tensor.

    Raises:
        OptionError: If ``alpha`` is not a finite number from 0 on, or ``beta`` not a finite number above 0.
    """

    alpha: float
    beta: float

    def __post_init__(self) -> None:
        require_seconds("alpha", self.alpha)
        require_positive("beta", self.beta, of="seconds per byte")

    @classmethod
    def fit(cls, samples: Sequence[tuple[int, float]]) -> LinkEstimate:
        """Fit the line through the smallest and the largest of the measured sizes.

        Where one of them was measured several times, its least time counts: noise only ever adds.

        Args:
            samples: Pairs of bytes and seconds, at least two different sizes.

        Raises:
            OptionError: If there are fewer than two different sizes, or a pair is negative or not finite.
        """
        if not all(is_finite(value) and value >= 0 for sample in samples for value in sample):
            raise OptionError("samples", list(samples), "pairs of bytes and seconds, finite and not negative")
        small = min(samples, default=(0, 0.0))
        large = min(samples, key=lambda sample: (-sample[0], sample[1]), default=(0, 0.0))
        if small[0] == large[0]:
            raise OptionError("samples", list(samples), "measured at two different sizes at least")
        beta = max((large[1] - small[1]) / (large[0] - small[0]), 1e-12)
        return cls(alpha=max(small[1] - beta * small[0], 1e-6), beta=beta)

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
    """Whether it is known before the first step that there is much to hide.

    Args:
        link: The measured link.
        nbytes: Of all gradients.
        busy_processor: Whether the model computes on the processor. Bytes that come nearly as fast as a processor
            copies them are work for it, and what they take cannot be told from the link; slower ones it waits for.
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

    A partition is as small as the link's start-up cost allows, so that urgent gradients overtake soon, and no larger
    than a sixteenth of the model, unless that is less than 128 KiB. Where the processor is busy it takes the link 4 ms
    at least, or is the whole model: what takes a fast link a moment is not worth being cut. Buckets are the units that
    gate a layer's forward: about 64 per model, never smaller than a partition. The credit lets as many be in flight as
    hide start-up, launch decisions and waking behind data, two to four: what waits can still be overtaken.

    Args:
        parameters: Trainable parameters of the model.
        bytes_per_parameter: Size of one gradient element.
        link: The measured link.
        busy_processor: Whether the model computes on the processor, for whose turns communication then waits.
        in_shards: Whether a partition is two operations, a reduce-scatter and an all-gather: it is twice as large then.
        architecture: ``"ps"`` for parameter servers: partitions are then of the published 1,000,000 parameters, but no
            larger than a 128th of the model or what is all-reduced in 7.5 ms. The credit is an eighth of the model,
            but sixteen of them at least, and 24 at most.
        far: Whether messages are so long under way that several partitions hide the start-up of each other: an eighth
            of what does that each, and as many in flight.

    Raises:
        OptionError: If ``parameters`` is negative, ``bytes_per_parameter`` less than 1, either not whole, or
            ``architecture`` not known.
    """
    require_whole("parameters", parameters, 0)
    require_whole("bytes_per_parameter", bytes_per_parameter, 1)
    if require_one_of("architecture", architecture, ARCHITECTURES) == "ps":
        return _sizes_for_servers(parameters, bytes_per_parameter, link)
    model_bytes = max(parameters * bytes_per_parameter, 1)
    starting = (2 if in_shards else 1) * link.alpha
    under_way = (_ALPHAS_IN_CREDIT_WHEN_FAR * starting + _SECONDS_IN_CREDIT_WHEN_FAR) / link.beta
    hiding, most_in_credit = under_way / _PARTITIONS_IN_CREDIT_WHEN_FAR, _MOST_PARTITIONS_IN_CREDIT_WHEN_FAR
    if not far:
        hiding, most_in_credit = _ALPHAS_PER_PARTITION * starting / link.beta, _MOST_PARTITIONS_IN_CREDIT
    waking = _LEAST_PARTITION_SECONDS_WHEN_BUSY / link.beta if busy_processor else 0.0
    meanwhile = _LEAST_CREDIT_SECONDS_WHEN_BUSY / link.beta if busy_processor else 0.0
    partition = max(
        min(hiding, model_bytes / _PARTITIONS_PER_MODEL), _MIN_PARTITION_BYTES, min(waking, float(model_bytes))
    )
    partition = min(partition, _MAX_PARTITION_BYTES)
    # A bucket costs a hook, a gate and an optimizer call.
    bucket = max(min(model_bytes / _BUCKETS_PER_MODEL, _MAX_BUCKET_BYTES), partition)
    partition_size = max(int(partition) // bytes_per_parameter, 1)
    # Partitions that travel while one is decided on and starts up, or threads wait for the processor.
    others = under_way - partition if far else hiding
    behind = max(math.ceil(others / partition), math.ceil(meanwhile / partition) - 1)
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
