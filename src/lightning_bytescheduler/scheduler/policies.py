"""Scheduling policies: in which order gradients travel, and in what pieces. ByteScheduler's, its rivals', or a user's.

A policy is asked on the rank that decides for all (collectives), or on every worker for itself (push and pull, whose
messages match by number). It sees each bucket's size and place in the forward pass, and from the second overlapped step
on when its gradient existed and was needed in recent steps. It answers with an :class:`Arrangement`: a priority, and
the sizes of the pieces where these are not equal parts of the partition size.

- ``"bytescheduler"``: equal parts by first use, under a credit window (Peng et al., SOSP 2019).
- ``"fifo"``: whole buckets, as they come, all at once: what frameworks do by themselves, but across the step boundary.
- ``"p3"``: fixed slices by first use, one at a time (Jayarajan et al., "Priority-based Parameter Propagation for
  Distributed DNN Training", MLSys 2019).
- ``"tictac"``: whole buckets, one at a time, in an order made from the observed graph and times (Hashemi et al.,
  "TicTac: Accelerating Distributed Deep Learning with Communication Scheduling", MLSys 2019).
- ``"us-byte"``: unequal blocks by first use (Gao et al., "US-Byte: An Efficient Communication Framework for Scheduling
  Unequal-Sized Tensor Blocks in Distributed Deep Learning", IEEE TPDS 2024).
- a function of a :class:`BucketFacts` that returns a whole number: a smaller one travels first.
"""

from __future__ import annotations

import heapq
import importlib
import math
from collections.abc import Callable, Collection, Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from lightning_bytescheduler.checks import did_you_mean, is_whole
from lightning_bytescheduler.exceptions import OptionError

__all__ = [
    "POLICIES",
    "Arrangement",
    "BucketFacts",
    "LinkCost",
    "SchedulingPolicy",
    "best_equal_part",
    "policy_of",
    "tac_order",
    "unequal_blocks",
]

_Key = TypeVar("_Key", bound=Hashable)

P3_SLICE = 50_000
"""Parameters of a slice: what P3's authors found best (section 5.7 and figure 12 there)."""

MOST_URGENT = 1 << 38
"""Priorities of users are between minus this and this."""

_ALIGNMENT = 1024  # parameters: where vector instructions and the packing of quantised elements want a slice to begin
_LEAST_BLOCK = 32 * _ALIGNMENT  # below, starting a message costs more than its bytes


@dataclass(frozen=True, kw_only=True, slots=True)
class BucketFacts:
    """What a policy knows of a bucket of gradients.

    Attributes:
        index: In the order in which the backward pass completes buckets, from 0.
        size: In parameters.
        position: When the forward pass first uses one of its parameters: a smaller number is earlier.
        ready: When its gradient exists, in seconds after the step's last gradient exists, so 0 or less: the median of
            recent steps. ``None`` until a whole step was seen.
        needed: When training reaches for it, counted from the same moment, without what it waits.
    """

    index: int
    size: int
    position: int
    ready: float | None = None
    needed: float | None = None


@dataclass(frozen=True, slots=True)
class Arrangement:
    """What a policy wants of a bucket.

    Attributes:
        priority: A lower number travels first; among equals, what came first.
        cut: Sizes of its pieces in parameters, in order of offset; ``None`` for equal parts of the partition size.
    """

    priority: int
    cut: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class LinkCost:
    """What a message costs: ``start_up + per_parameter * size`` seconds."""

    start_up: float
    per_parameter: float


class SchedulingPolicy:
    """How buckets are ordered and cut; here ByteScheduler's: by first use, in equal parts of the partition size.

    Attributes:
        name: What the option calls it.
        takes: Options for sizes that mean something with it.
        is_tuned: Whether sizes may be tuned.
        one_at_a_time: Whether the next piece is sent when the last one has arrived, whatever the credit.
        observes: Whether the link and the times of steps matter to it.
    """

    name = "bytescheduler"
    takes: Collection[str] = ("partition_size", "credit")
    is_tuned = True
    one_at_a_time = False
    observes = False

    def own_partition_size(self, parameters: int) -> int | None:
        """The partition size where the user gave none, and then the credit, too; ``None`` leaves both to the link.

        Args:
            parameters: Of the model.
        """
        return None

    def in_words(self, partition_size: int, credit: int) -> str:
        """A sentence about how gradients travel, with the sizes in force."""
        return (
            f"They are cut into partitions of {partition_size:,} parameters, and {credit:,} parameters (the credit) "
            "travel at once."
        )

    def arrange(self, buckets: Sequence[BucketFacts], link: LinkCost | None) -> Mapping[int, Arrangement]:
        """Arrange buckets.

        Args:
            buckets: All of a step, with their times, or those whose times are not known.
            link: What messages cost, if that is known.

        Returns:
            By index of the bucket.
        """
        return {bucket.index: self.arranged(bucket) for bucket in buckets}

    def arranged(self, bucket: BucketFacts) -> Arrangement:
        """Arrange one bucket by itself."""
        return Arrangement(bucket.position)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SchedulingPolicy) and self.name == other.name

    def __hash__(self) -> int:
        return hash(self.name)

    def __repr__(self) -> str:
        return f"<policy {self.name!r}>"


class _Fifo(SchedulingPolicy):
    """As frameworks do: each gradient whole, as soon as it exists, whatever else is under way."""

    name = "fifo"
    takes = ()
    is_tuned = False

    def own_partition_size(self, parameters: int) -> int | None:
        """Nothing is cut, and all may be under way."""
        return parameters

    def in_words(self, partition_size: int, credit: int) -> str:
        """See :class:`SchedulingPolicy`."""
        return "Buckets travel whole, as they come (policy='fifo')."

    def arranged(self, bucket: BucketFacts) -> Arrangement:
        """In the order of the backward pass."""
        return Arrangement(bucket.index)


class _P3(SchedulingPolicy):
    """P3 (Jayarajan et al., MLSys 2019, sections 4.1 and 4.2): fixed slices, by priority, one at a time.

    The layer that the forward pass uses first goes first; the sender takes the most urgent slice, and the next when
    that has arrived. Slices have :data:`P3_SLICE` parameters at most, or ``partition_size``.
    """

    name = "p3"
    takes = ("partition_size",)
    is_tuned = False
    one_at_a_time = True

    def own_partition_size(self, parameters: int) -> int | None:
        """A slice, whatever model and link."""
        return P3_SLICE

    def in_words(self, partition_size: int, credit: int) -> str:
        """See :class:`SchedulingPolicy`."""
        return f"Slices of {partition_size:,} parameters travel one at a time (policy='p3')."


class _TicTac(SchedulingPolicy):
    """TicTac's TAC (Hashemi et al., MLSys 2019, section 4.2): whole tensors in an order made from graph and times.

    The graph is the forward pass as it was observed: a process runs one operation after the other, so each stretch of
    computation needs all buckets that were touched before it. Times are those between touches. Until a step has been
    observed the order is that of first use. One transfer is under way at a time, which keeps the order on the wire.
    """

    name = "tictac"
    takes = ()
    is_tuned = False
    one_at_a_time = True
    observes = True

    def own_partition_size(self, parameters: int) -> int | None:
        """Nothing is cut."""
        return parameters

    def in_words(self, partition_size: int, credit: int) -> str:
        """See :class:`SchedulingPolicy`."""
        return "Buckets travel whole, one at a time, in the order in which they are seen to be used (policy='tictac')."

    def arrange(self, buckets: Sequence[BucketFacts], link: LinkCost | None) -> Mapping[int, Arrangement]:
        """By TAC, if times are known."""
        times = {bucket.index: bucket.needed for bucket in buckets if bucket.needed is not None}
        if link is None or len(times) < len(buckets):
            return super().arrange(buckets, link)
        used = sorted(buckets, key=lambda bucket: (times[bucket.index], bucket.position))
        transfers = {bucket.index: link.start_up + link.per_parameter * bucket.size for bucket in used}
        computations = []
        for count, bucket in enumerate(used, 1):
            after = times[used[count].index] if count < len(used) else times[bucket.index]
            computations.append((after - times[bucket.index], [each.index for each in used[:count]]))
        order = tac_order(transfers, computations)
        return {index: Arrangement(place) for place, index in enumerate(order)}


class _UsByte(SchedulingPolicy):
    """Blocks of unequal sizes, by first use, in US-Byte's two phases (Gao et al., TPDS 2024).

    While the backward pass runs, a block ends when the next more urgent gradient exists; after it, what is left of each
    bucket is one block, in the order of use: nothing more urgent can come, and each block costs a start-up. See
    :func:`unequal_blocks`. The model with its two phases is the paper's. Its low-complexity search for the order within
    the first phase is not repeated: the order is that of first use, which is optimal where cuts cost nothing
    (``simulation/bounds.py``).

    Until a step has been observed, blocks are equal.
    """

    name = "us-byte"
    is_tuned = False
    observes = True

    def in_words(self, partition_size: int, credit: int) -> str:
        """See :class:`SchedulingPolicy`."""
        return (
            "They are cut where more urgent ones are seen to come while they travel, and "
            f"{credit:,} parameters (the credit) travel at once (policy='us-byte')."
        )

    def arrange(self, buckets: Sequence[BucketFacts], link: LinkCost | None) -> Mapping[int, Arrangement]:
        """In unequal blocks, if times are known."""
        if link is None or any(bucket.ready is None for bucket in buckets):
            return super().arrange(buckets, link)
        blocks = unequal_blocks(buckets, link)
        return {bucket.index: Arrangement(bucket.position, blocks[bucket.index]) for bucket in buckets}


class _Users(SchedulingPolicy):
    """Equal parts, in the order that a function of the user's gives.

    Args:
        function: Returns a bucket's priority.
        name: Of the function, the same on all ranks.
    """

    def __init__(self, function: Callable[[BucketFacts], int], name: str) -> None:
        self.name = name
        self._function = function

    def in_words(self, partition_size: int, credit: int) -> str:
        """See :class:`SchedulingPolicy`."""
        return f"{super().in_words(partition_size, credit)} Their order is that of {self.name}."

    def arranged(self, bucket: BucketFacts) -> Arrangement:
        """Ask the function.

        Raises:
            OptionError: If it does not return a whole number, or one that is out of range.
        """
        priority = self._function(bucket)
        if not is_whole(priority, -MOST_URGENT) or priority > MOST_URGENT:
            raise OptionError(
                "policy",
                self.name,
                f"a function that returns a whole number between -2^38 and 2^38; for {bucket} it returned {priority!r}",
            )
        return Arrangement(priority)


_OWN: Mapping[str, SchedulingPolicy] = {
    policy.name: policy for policy in (SchedulingPolicy(), _Fifo(), _P3(), _TicTac(), _UsByte())
}

POLICIES = tuple(_OWN)
"""Names of the policies that come with this package; the first is the default."""


def policy_of(policy: str | Callable[[BucketFacts], int] | SchedulingPolicy) -> SchedulingPolicy:
    """The policy that the option names.

    Args:
        policy: One of :data:`POLICIES`; a function; or where to import one from: ``"module:function"``.

    Raises:
        OptionError: If it is none of these, or cannot be imported.
    """
    if isinstance(policy, SchedulingPolicy):
        return policy
    if callable(policy):
        return _Users(policy, _name_of(policy))
    if isinstance(policy, str) and policy in _OWN:
        return _OWN[policy]
    if isinstance(policy, str) and ":" in policy:
        return _Users(_imported(policy), policy)
    names = ", ".join(map(repr, POLICIES))
    raise OptionError(
        "policy", policy, f"one of {names}, a function, or 'module:function'", did_you_mean(policy, POLICIES)
    )


def _name_of(function: Callable[..., object]) -> str:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    return f"{getattr(function, '__module__', None) or type(function).__module__}:{name}"


def _imported(place: str) -> Callable[[BucketFacts], int]:
    module, _, path = place.partition(":")
    try:
        found: Any = importlib.import_module(module)
        for name in path.split("."):
            found = getattr(found, name)
    except (ImportError, AttributeError, ValueError) as error:
        raise OptionError("policy", place, f"a function that can be imported ({error})") from error
    if not callable(found):
        raise OptionError("policy", place, f"a function, and that is of type {type(found).__name__}")
    function: Callable[[BucketFacts], int] = found
    return function


def tac_order(transfers: Mapping[_Key, float], computations: Iterable[tuple[float, Iterable[_Key]]]) -> list[_Key]:
    """TicTac's timing-aware order of transfers (Hashemi et al., 2019, algorithm 3 and equation 6).

    Again and again the best transfer that is left is taken. Of two, the first is better if ``min(P1, M2)`` is larger
    than ``min(P2, M1)``: ``M`` is how long a transfer takes, and ``P`` how much computation waits for it alone. Of
    equals, the one that with the least further transfers lets something else compute.

    Args:
        transfers: Seconds of each.
        computations: Of each operation its seconds, and all transfers that it needs, directly or not.

    Returns:
        All transfers, the most urgent first.
    """
    keys = list(transfers)
    bit = {key: 1 << number for number, key in enumerate(keys)}
    operations = [(seconds, sum({bit[key] for key in needs})) for seconds, needs in computations]
    left, order = (1 << len(keys)) - 1, []
    remaining = dict.fromkeys(keys)
    while remaining:
        alone: dict[int, float] = {}  # by bit: computation that waits for that transfer only
        shared: dict[int, float] = {}  # by set of transfers that an operation waits for: seconds of these
        for seconds, needs in operations:
            waits_for = needs & left
            if waits_for & (waits_for - 1):
                if waits_for not in shared:
                    shared[waits_for] = sum(transfers[key] for key in remaining if bit[key] & waits_for)
            elif waits_for:
                alone[waits_for] = alone.get(waits_for, 0.0) + seconds
        further = dict.fromkeys(keys, math.inf)
        unassigned = left
        for waits_for, seconds in sorted(shared.items(), key=lambda item: item[1]):
            new = waits_for & unassigned
            unassigned &= ~new
            if new:
                further.update((key, seconds) for key in remaining if bit[key] & new)
        best = None
        for key in remaining:
            if best is None or _is_better(key, best, transfers, alone, bit, further):
                best = key
        if best is not None:
            del remaining[best]
            left &= ~bit[best]
            order.append(best)
    return order


def _is_better(
    one: _Key,
    other: _Key,
    transfers: Mapping[_Key, float],
    alone: Mapping[int, float],
    bit: Mapping[_Key, int],
    further: Mapping[_Key, float],
) -> bool:
    gain = min(alone.get(bit[one], 0.0), transfers[other])
    loss = min(alone.get(bit[other], 0.0), transfers[one])
    return gain > loss if gain != loss else further[one] < further[other]


def unequal_blocks(buckets: Sequence[BucketFacts], link: LinkCost) -> dict[int, tuple[int, ...]]:
    """Cut buckets where something more urgent comes while they travel, and nowhere else.

    The link is played through a step: it always carries the most urgent of what exists. A block that starts at ``t``
    ends when the next more urgent gradient exists, at ``r``: it has ``(r - t - start_up) / per_parameter`` parameters.
    If none comes before all of the bucket has travelled, the block is the rest of it. A block is never so small that
    starting it takes longer than its bytes.

    Args:
        buckets: Of one step, with the times at which they are ready.
        link: What messages cost.

    Returns:
        Sizes of the blocks in parameters, by index of the bucket; each sums to the bucket's.
    """
    coming = sorted(buckets, key=lambda bucket: (bucket.ready or 0.0, bucket.index))
    per_parameter = max(link.per_parameter, 1e-15)
    least = max(_LEAST_BLOCK, _aligned(link.start_up / per_parameter))
    blocks: dict[int, list[int]] = {bucket.index: [] for bucket in buckets}
    waiting: list[tuple[int, int, int]] = []  # position, index, parameters left
    now, at = -math.inf, 0
    while waiting or at < len(coming):
        if not waiting:
            now = max(now, coming[at].ready or 0.0)
        while at < len(coming) and (coming[at].ready or 0.0) <= now:
            heapq.heappush(waiting, (coming[at].position, coming[at].index, coming[at].size))
            at += 1
        position, index, left = heapq.heappop(waiting)
        end = now + link.start_up + per_parameter * left
        urgent = next((each.ready or 0.0 for each in coming[at:] if each.position < position), math.inf)
        block = left
        if urgent < end:
            fits = _aligned((urgent - now - link.start_up) / per_parameter)
            block = max(fits, least)
            block = left if left - block < least else block  # a small rest goes with it
        blocks[index].append(block)
        now += link.start_up + per_parameter * block
        if block < left:
            heapq.heappush(waiting, (position, index, left - block))
    return {index: tuple(sizes) for index, sizes in blocks.items()}


def _aligned(size: float) -> int:
    """Rounded up: a block that ended before something more urgent exists would have another one behind it."""
    return max(math.ceil(size / _ALIGNMENT), 0) * _ALIGNMENT


def best_equal_part(parameters: int, link: LinkCost) -> int:
    """The size of equal parts where start-ups and waiting for a part under way cost the least together, in parameters.

    Parts of ``p`` cost ``start_up * parameters / p`` for being started, and what is most urgent waits for one that is
    on the link, ``per_parameter * p``. The sum is least where both are equal.
    """
    return max(round(math.sqrt(link.start_up * parameters / max(link.per_parameter, 1e-15))), 1)
