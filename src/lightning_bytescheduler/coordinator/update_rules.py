"""Which sum an update goes into, and with which weight: the rules, apart from the run that they are applied in."""

from __future__ import annotations

import msgspec

from lightning_bytescheduler.coordinator.membership import Member
from lightning_bytescheduler.coordinator.options import CoordinatorOptions
from lightning_bytescheduler.diloco.batch_scheduler import BatchScheduler
from lightning_bytescheduler.diloco.fragments import FragmentOptions
from lightning_bytescheduler.diloco.late_updates import late_weight, round_of_late, staleness
from lightning_bytescheduler.diloco.round_record import LateUpdate
from lightning_bytescheduler.diloco.weighted_mean import pseudo_gradient_weight
from lightning_bytescheduler.exceptions import OptionError

__all__ = ["Offer", "UpdateRules"]


class Offer(msgspec.Struct, frozen=True, kw_only=True):
    """An update that a worker wants to send.

    Attributes:
        member: Whose.
        round: In which it was made.
        fragment: That it is of.
        steps: Taken in that round.
        samples: Processed since the fragment was last sent.
        tokens: The same in tokens.
        round_samples: Processed in that round.
    """

    member: Member
    round: int
    fragment: int
    steps: int
    samples: int
    tokens: int
    round_samples: int


class UpdateRules:
    """The rules of a run.

    Args:
        options: Of the coordinator.
    """

    def __init__(self, options: CoordinatorOptions) -> None:
        self._late = options.rounds.late
        self._weighting = options.run.weighting
        self._count = options.run.fragments
        self._fragments = FragmentOptions(fragments=options.run.fragments)

    def fragment_of(self, round: int) -> int:
        """The fragment that a round synchronises."""
        return self._fragments.fragment_of(round)

    def place_of(self, offer: Offer, scheduler: BatchScheduler, *, merging: int | None) -> int | None:
        """The round whose sum an update goes into as things are now; ``None`` for none, as it is late.

        Args:
            offer: The update.
            scheduler: Of the rounds.
            merging: The round that is being merged, to whose sum nothing is added any more.

        Raises:
            OptionError: If there is no such round or fragment yet, or the worker has no part in it.
        """
        if not 1 <= offer.round <= scheduler.round:
            raise OptionError("round", offer.round, f"a round that has begun; the last one is {scheduler.round}")
        expected = self.fragment_of(offer.round)
        if offer.fragment != expected:
            raise OptionError("fragment", offer.fragment, f"{expected}, which round {offer.round} synchronises")
        if offer.round == scheduler.round and scheduler.is_open and merging != offer.round:
            if not scheduler.expects(offer.member.name, offer.round):
                raise OptionError("round", offer.round, f"one that {offer.member.name} takes part in")
            return offer.round
        if self._late == "drop" or scheduler.finished:
            return None
        return self.round_of_late(offer, scheduler.round)

    def round_of_late(self, offer: Offer, current: int) -> int:
        """The round that a late update would be part of, if it counts.

        Args:
            offer: The update.
            current: The round that is on.
        """
        return round_of_late(offer.round, current=current, fragments=self._count)

    def weight_of(self, offer: Offer, into: int | None = None) -> int:
        """The weight of an update.

        Args:
            offer: The update.
            into: The round that it is to be part of, if that is a later one than its own.

        Raises:
            OptionError: If tokens are to count and none were.
        """
        weight = pseudo_gradient_weight(self._weighting, samples=offer.samples, tokens=offer.tokens)
        if into is None or into == offer.round:
            return weight
        late = staleness(offer.round, into=into, fragments=self._count)
        return late_weight(self._late, weight, staleness=late)

    def late_update(self, offer: Offer, into: int, weight: int) -> LateUpdate:
        """What a round's record says of a late update.

        Args:
            offer: The update.
            into: The round that it is part of.
            weight: With which it counts.
        """
        return LateUpdate(
            worker=offer.member.name,
            round=offer.round,
            staleness=staleness(offer.round, into=into, fragments=self._count),
            samples=offer.round_samples,
            weight=weight,
        )
