"""Scheduling policies: in which order gradients travel, and in what pieces; ByteScheduler's and its rivals'.

- ``"bytescheduler"``: equal parts by first use, under a credit window (Peng et al., SOSP 2019).
- ``"fifo"``: whole buckets, as they come, all at once: what frameworks do by themselves, but across the step boundary.
- ``"p3"``: fixed slices by first use, one at a time: the sender takes the most urgent slice, and the next when that has
  arrived (Jayarajan et al., "Priority-based Parameter Propagation for Distributed DNN Training", MLSys 2019, sections
  4.1 and 4.2).
"""

from __future__ import annotations

from dataclasses import dataclass

from lightning_bytescheduler.checks import require_one_of

__all__ = ["POLICIES", "SchedulingPolicy", "policy_of"]

P3_SLICE = 50_000
"""Parameters of a slice: what P3's authors found best (section 5.7 and figure 12 there)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class SchedulingPolicy:
    """How buckets are ordered and cut.

    Attributes:
        name: What the option calls it.
        takes: Options for sizes that mean something with it.
        in_words: A sentence about how gradients travel, with places for the sizes in force.
        by_first_use: Whether what the forward pass uses first goes first, or what exists first.
        one_at_a_time: Whether the next piece is sent when the last one has arrived, whatever the credit.
    """

    name: str
    takes: tuple[str, ...]
    in_words: str
    by_first_use: bool = True
    one_at_a_time: bool = False

    @property
    def is_tuned(self) -> bool:
        """Whether sizes may be tuned."""
        return "credit" in self.takes

    def own_partition_size(self, parameters: int) -> int | None:
        """The partition size where the user gave none, and then the credit, too; ``None`` leaves both to the link.

        Args:
            parameters: Of the model.
        """
        if self.is_tuned:
            return None
        return P3_SLICE if self.one_at_a_time else parameters


_ALL = (
    SchedulingPolicy(
        name="bytescheduler",
        takes=("partition_size", "credit"),
        in_words="They are cut into partitions of {partition_size:,} parameters, and {credit:,} parameters "
        "(the credit) travel at once.",
    ),
    SchedulingPolicy(
        name="fifo", takes=(), in_words="Buckets travel whole, as they come (policy='fifo').", by_first_use=False
    ),
    SchedulingPolicy(
        name="p3",
        takes=("partition_size",),
        in_words="Slices of {partition_size:,} parameters travel one at a time (policy='p3').",
        one_at_a_time=True,
    ),
)

POLICIES = tuple(policy.name for policy in _ALL)
"""Names of the policies; the first is the default."""


def policy_of(name: str) -> SchedulingPolicy:
    """The policy of that name.

    Raises:
        OptionError: If there is none.
    """
    require_one_of("policy", name, POLICIES)
    return _ALL[POLICIES.index(name)]
