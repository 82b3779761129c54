"""What is tried: a credit and a partition size, or steps as plain DDP takes them."""

from __future__ import annotations

from dataclasses import dataclass

from lightning_bytescheduler.exceptions import OptionError

__all__ = ["PLAIN_DDP", "TuningPoint"]


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
            if isinstance(value, bool) or not isinstance(value, int) or value < 1:
                raise OptionError(
                    option, value, "a positive whole number of parameters, or None together with the other"
                )
        if (self.partition_size or 0) > (self.credit or 0):
            raise OptionError("partition_size", self.partition_size, f"no more than the credit, {self.credit}")

    @property
    def is_plain_ddp(self) -> bool:
        """Whether steps are taken as DDP takes them."""
        return self.credit is None

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
