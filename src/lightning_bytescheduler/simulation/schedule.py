"""When gradients are sent: the orders that are compared."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.simulation.numbers import require_whole
from lightning_bytescheduler.simulation.profile import ModelProfile

__all__ = ["CLIPPING", "DDP_BUCKET_BYTES", "DDP_FIRST_BUCKET_BYTES", "ORDERS", "Bucket", "Schedule"]

DDP_BUCKET_BYTES = 25 * 1024 * 1024
DDP_FIRST_BUCKET_BYTES = 1024 * 1024
"""DDP's first bucket where no size was asked for: small, so that communication starts early."""

ORDERS = ("fifo", "priority")
"""As the gradients come, or what the next forward pass needs first."""

CLIPPING = ("gather_early", "gather_after_norm")
"""With norm clipping: whether all-gathers may precede the norm; see ``bounds.py``."""


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
        clipping: One of ``CLIPPING`` if the norm is clipped and gradients are reduce-scattered first.

    Raises:
        OptionError: Names the value that is not allowed.
    """

    order: str = "priority"
    bucket_bytes: int | None = None
    first_bucket_bytes: int | None = None
    partition_bytes: int | None = None
    credit_bytes: int | None = None
    barrier: bool = False
    clipping: str | None = None

    def __post_init__(self) -> None:
        if self.order not in ORDERS:
            raise OptionError("order", self.order, f"one of {', '.join(ORDERS)}")
        for option in ("bucket_bytes", "first_bucket_bytes", "partition_bytes", "credit_bytes"):
            value = getattr(self, option)
            if value is not None:
                require_whole(option, value, 1)
        if self.first_bucket_bytes is not None and self.bucket_bytes is None:
            raise OptionError("first_bucket_bytes", self.first_bucket_bytes, "left out where bucket_bytes is")
        if not isinstance(self.barrier, bool):
            raise OptionError("barrier", self.barrier, "True or False")
        if self.clipping is not None and self.clipping not in CLIPPING:
            raise OptionError("clipping", self.clipping, f"None or one of {', '.join(CLIPPING)}")

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
            bucket_bytes=DDP_BUCKET_BYTES,
            first_bucket_bytes=DDP_FIRST_BUCKET_BYTES,
            barrier=True,
        )

    @classmethod
    def fifo(cls, *, bucket_bytes: int | None = None) -> Schedule:
        """Buckets as they come, but each layer's forward pass waits for its own only."""
        return cls(order="fifo", bucket_bytes=bucket_bytes)

    @classmethod
    def priority(cls, *, bucket_bytes: int | None = None) -> Schedule:
        """Whole buckets, one at a time, of those that are ready the one that is needed first."""
        return cls(order="priority", bucket_bytes=bucket_bytes, credit_bytes=1)

    @classmethod
    def scheduled(
        cls,
        *,
        partition_bytes: int,
        credit_bytes: int | None = None,
        bucket_bytes: int | None = None,
        clipping: str | None = None,
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
