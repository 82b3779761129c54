"""Which sizes may be tried.

The published tuner searched, for large models, credits of 4 to 64 million parameters and partitions of 2 to 32
million with an all-reduce, and credits of 1 to 16 million with parameter servers. A model of 256 million
parameters is taken for such a large one, and smaller models get ranges that begin in proportion: on 500 Mbit/s
Ethernet, a model of 6 million parameters is fastest with partitions of 65,536 under a credit of 262,144. Upwards the
model itself is the limit, because on a link with long round trips the window that fills it may hold all of it.

Sizes are compared on a logarithmic scale, in octaves: doubling a size matters about as much wherever one starts.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.tuning.checks import require_positive, require_whole
from lightning_bytescheduler.tuning.point import TuningPoint

__all__ = ["ALIGNMENT", "ARCHITECTURES", "SearchSpace"]

ARCHITECTURES = ("all_reduce", "push_pull")
"""How gradients are reduced."""

ALIGNMENT = 1024
"""Sizes are multiples of this many parameters, so that a slice of a buffer begins where vector instructions, pages and
the packing of quantised elements want it, whatever the element."""

_MILLION = 1_000_000
_LARGE_MODEL = 256 * _MILLION
_CREDITS = {"all_reduce": (4 * _MILLION, 64 * _MILLION), "push_pull": (1 * _MILLION, 16 * _MILLION)}
# The published range of partitions is the all-reduce's. Servers want them smaller by as much as the credits are, as the
# published default of 1 million says, which the published range leaves out.
_PARTITIONS = {"all_reduce": (2 * _MILLION, 32 * _MILLION), "push_pull": (_MILLION // 2, 8 * _MILLION)}
_LEAST_PARTITION = 32 * ALIGNMENT  # 128 KiB of fp32; below, starting a message costs more than its bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class SearchSpace:
    """Bounds of credit and partition size, both inclusive, in parameters.

    Attributes:
        credits: Least and largest credit.
        partitions: Least and largest partition size; equal where it is not tuned.

    Raises:
        OptionError: If bounds are not positive whole numbers in order, or no partition fits the largest credit.
    """

    credits: tuple[int, int]
    partitions: tuple[int, int]

    def __post_init__(self) -> None:
        for option in ("credits", "partitions"):
            low, high = getattr(self, option)
            require_whole(option, low, 1)
            require_whole(option, high, low)
        if self.partitions[0] > self.credits[1]:
            raise OptionError("partitions", self.partitions, f"some within the largest credit, {self.credits[1]}")

    @classmethod
    def for_model(
        cls,
        parameters: int,
        *,
        architecture: str = "all_reduce",
        partition_size: int | None = None,
        largest_bucket: int | None = None,
    ) -> SearchSpace:
        """The space for a model.

        Args:
            parameters: How many of them are trained.
            architecture: One of ``ARCHITECTURES``.
            partition_size: The partition size to keep where only the credit is tuned, in parameters.
            largest_bucket: Largest unit that is partitioned, in parameters; larger partitions change nothing.

        Raises:
            OptionError: Names the argument that is not allowed.
        """
        require_whole("parameters", parameters, 1)
        if architecture not in ARCHITECTURES:
            raise OptionError("architecture", architecture, f"one of {', '.join(ARCHITECTURES)}")
        scale = min(parameters / _LARGE_MODEL, 1.0)
        whole = _aligned(parameters, up=True)

        low, high = _PARTITIONS[architecture]
        high = min(_aligned(high), whole)
        if largest_bucket is not None:
            high = min(high, _aligned(require_whole("largest_bucket", largest_bucket, 1), up=True))
        low = min(max(_aligned(low * scale), _LEAST_PARTITION), high)
        if partition_size is not None:
            low = high = require_whole("partition_size", partition_size, 1)

        least, most = _CREDITS[architecture]
        least = max(_aligned(least * scale), low)
        most = max(min(_aligned(most), whole), least)
        return cls(credits=(least, most), partitions=(low, high))

    def including(self, point: TuningPoint) -> SearchSpace:
        """This space, made large enough for a point that measurements of the link suggest.

        The published ranges come from fast networks. Where links are slow, starting a message costs so little beside
        its bytes that smaller partitions than theirs are better.

        Raises:
            OptionError: If the point is plain DDP.
        """
        credit, partition = point.sizes
        partitions = self.partitions
        if self.tunes_partitions:
            partitions = (min(partitions[0], partition), max(partitions[1], partition))
        return SearchSpace(credits=(min(self.credits[0], credit), max(self.credits[1], credit)), partitions=partitions)

    @property
    def tunes_partitions(self) -> bool:
        """Whether there is more than one partition size."""
        return self.partitions[0] < self.partitions[1]

    def __contains__(self, point: object) -> bool:
        if not isinstance(point, TuningPoint) or point.is_plain_ddp:
            return False
        credit, partition = point.sizes
        return (
            self.credits[0] <= credit <= self.credits[1]
            and self.partitions[0] <= partition <= self.partitions[1]
            and (credit % ALIGNMENT == 0 or credit in self.credits)
            and (partition % ALIGNMENT == 0 or partition in self.partitions)
        )

    def points(self, *, octaves: float = 0.25) -> tuple[TuningPoint, ...]:
        """All points of a grid, with both ends of each range.

        Args:
            octaves: Distance of neighbours, in doublings.

        Raises:
            OptionError: If ``octaves`` is not a finite number above 0.
        """
        require_positive("octaves", octaves)
        credits = list(_steps(*self.credits, octaves))
        return tuple(
            TuningPoint(credit=credit, partition_size=partition)
            for partition in _steps(*self.partitions, octaves)
            for credit in credits
            if partition <= credit
        )


def _steps(low: int, high: int, octaves: float) -> Iterator[int]:
    """From low to high in equal factors, rounded to the alignment; the ends are what they are."""
    count = max(math.ceil(math.log2(high / low) / octaves), 1)
    inner = (_aligned(low * (high / low) ** (index / count)) for index in range(1, count))
    yield from sorted({low, high, *(size for size in inner if low < size < high)})


def _aligned(size: float, *, up: bool = False) -> int:
    units = math.ceil(size / ALIGNMENT) if up else round(size / ALIGNMENT)
    return max(units, 1) * ALIGNMENT
