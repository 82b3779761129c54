"""What can be tried, a credit and a partition size or steps as plain DDP takes them, and which sizes may be.

The published tuner searched, for large models, credits of 4 to 64 million parameters and partitions of 2 to 32
million with an all-reduce, and credits of 1 to 16 million with parameter servers. A model of 256 million
parameters is taken for such a large one, and smaller models get ranges that begin in proportion: on 500 Mbit/s
Ethernet, a model of 6 million parameters is fastest with partitions of 65,536 under a credit of 262,144. Upwards the
model itself is the limit, because on a link with long round trips the window that fills it may hold all of it.

Sizes are compared on a logarithmic scale, in octaves: doubling a size matters about as much wherever one starts.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass

from lightning_bytescheduler.checks import ARCHITECTURES, is_whole, require_one_of, require_positive, require_whole
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["ALIGNMENT", "PLAIN_DDP", "SearchSpace", "TuningPoint"]

ALIGNMENT = 1024
"""Sizes are multiples of this many parameters, so that a slice of a buffer begins where vector instructions, pages and
the packing of quantised elements want it, whatever the element."""

_MILLION = 1_000_000
_LARGE_MODEL = 256 * _MILLION
_CREDITS = {"allreduce": (4 * _MILLION, 64 * _MILLION), "ps": (1 * _MILLION, 16 * _MILLION)}
# The published range of partitions is the all-reduce's. Servers want them smaller by as much as the credits are, as the
# published default of 1 million says, which the published range leaves out.
_PARTITIONS = {"allreduce": (2 * _MILLION, 32 * _MILLION), "ps": (_MILLION // 2, 8 * _MILLION)}
_LEAST_PARTITION = 32 * ALIGNMENT  # 128 KiB of fp32; below, starting a message costs more than its bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class TuningPoint:
    """Sizes of the scheduler, or none: ``PLAIN_DDP``.

    Attributes:
        credit: What may be in flight, in parameters.
        partition_size: Largest piece sent at once, in parameters; never more than the credit.

    Raises:
        OptionError: If one is given without the other, is not a positive whole number, or the partition is larger
            than the credit.
    """

    credit: int | None
    partition_size: int | None

    def __post_init__(self) -> None:
        if self.credit is None and self.partition_size is None:
            return
        for option in ("credit", "partition_size"):
            value = getattr(self, option)
            if not is_whole(value, 1):
                raise OptionError(
                    option, value, "a positive whole number of parameters, or None together with the other"
                )
        if (self.partition_size or 0) > (self.credit or 0):
            raise OptionError("partition_size", self.partition_size, f"no more than the credit, {self.credit}")

    @property
    def is_plain_ddp(self) -> bool:
        """Whether steps are taken as DDP takes them."""
        return self.credit is None

    @classmethod
    def of(cls, numbers: Sequence[int]) -> TuningPoint:
        """From ``numbers``."""
        credit, partition_size = numbers
        return cls(credit=credit or None, partition_size=partition_size or None)

    @property
    def numbers(self) -> tuple[int, int]:
        """For a message: credit and partition size, 0 where there is none."""
        return self.credit or 0, self.partition_size or 0

    @property
    def sizes(self) -> tuple[int, int]:
        """Credit and partition size.

        Raises:
            OptionError: If this is plain DDP, which has none.
        """
        if self.credit is None or self.partition_size is None:
            raise OptionError("point", self, "one with sizes; plain DDP has none")
        return self.credit, self.partition_size

    def __str__(self) -> str:
        if self.is_plain_ddp:
            return "plain DDP"
        return f"credit {self.credit:,}, partition {self.partition_size:,}"


PLAIN_DDP = TuningPoint(credit=None, partition_size=None)
"""Behave as DDP does: messages of its size, no partitions, a barrier at the end of the step."""


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
        architecture: str = "allreduce",
        partition_size: int | None = None,
        largest_bucket: int | None = None,
    ) -> SearchSpace:
        """The space for a model.

        Args:
            parameters: How many of them are trained.
            architecture: ``"allreduce"``, or ``"ps"`` for parameter servers.
            partition_size: The partition size to keep where only the credit is tuned, in parameters.
            largest_bucket: Largest unit that is partitioned, in parameters; larger partitions change nothing.

        Raises:
            OptionError: Names the argument that is not allowed.
        """
        require_whole("parameters", parameters, 1)
        require_one_of("architecture", architecture, ARCHITECTURES)
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

    def goes_on_in(self, other: SearchSpace, *, given: Collection[str]) -> bool:
        """Whether a search that was made in another space may go on in that one, where this is the space of now.

        Sizes that nobody chose follow a probe of the link, which never gives the same figures twice. So does the space
        around them, and a search that went on in the same space only would never go on. What was chosen by hand is kept
        to.

        Args:
            other: Where it was made.
            given: Of ``"credits"`` and ``"partitions"``, what was chosen by hand. Where that is not tuned, both have to
                agree.
        """
        for name in ("credits", "partitions"):
            (low, high), theirs = getattr(self, name), getattr(other, name)
            is_tuned = low < high
            if is_tuned != (theirs[0] < theirs[1]) or (name in given and not is_tuned and (low, high) != theirs):
                return False
        return True

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
