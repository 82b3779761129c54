"""Whose updates are part of which sum: the book that says what a round's mean is made of.

The sum of a round and this book change together, so that the record of a round and the weights of what was merged are
those of the sum, whatever the batch scheduler knows of a worker that has left meanwhile. Late updates are booked in the
next round that synchronises their fragment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from lightning_bytescheduler.coordinator.membership import Member
from lightning_bytescheduler.coordinator.options import CoordinatorOptions
from lightning_bytescheduler.diloco.batch_scheduler import BatchScheduler
from lightning_bytescheduler.diloco.fragments import FragmentOptions
from lightning_bytescheduler.diloco.round_end import late_weight, round_of_late, staleness
from lightning_bytescheduler.diloco.round_record import LateUpdate, RoundRecord, WorkerRound
from lightning_bytescheduler.diloco.weighted_mean import pseudo_gradient_weight
from lightning_bytescheduler.exceptions import OptionError


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


class Contribution(msgspec.Struct, frozen=True, kw_only=True):
    """An update that is part of a sum.

    Attributes:
        worker: Whose.
        round: In which it was made.
        steps: Taken in that round.
        samples: Processed in that round.
        weight: With which it counts.
    """

    worker: str
    round: int
    steps: int
    samples: int
    weight: int


class Seen(NamedTuple):
    """What became of an update that is known.

    Attributes:
        weight: With which it was booked; 0 if it only was remembered.
        is_late: Whether it is part of a later round than its own.
    """

    weight: int
    is_late: bool


class Contributions:
    """Booked updates of rounds that have not been merged, and of the last ones that have, to know them again."""

    def __init__(self, *, remembered: int = 8) -> None:
        self._remembered = remembered
        self._by_sum: dict[int, list[Contribution]] = {}
        self._seen: dict[tuple[str, int, int], Seen] = {}  # by worker, incarnation and round

    def seen(self, worker: str, incarnation: int, round: int) -> Seen | None:
        """What became of a worker's update of a round, or ``None`` if there was none."""
        return self._seen.get((worker, incarnation, round))

    def book(self, contribution: Contribution, *, incarnation: int, into: int) -> None:
        """Take note of an update.

        Args:
            contribution: The update; with weight 0 it is only remembered.
            incarnation: Of the worker's process.
            into: The round whose sum it goes into.
        """
        self._seen[contribution.worker, incarnation, contribution.round] = Seen(
            contribution.weight, is_late=bool(contribution.weight) and into != contribution.round
        )
        if contribution.weight:
            self._by_sum.setdefault(into, []).append(contribution)

    def of(self, round: int) -> tuple[Contribution, ...]:
        """What is in the sum of a round."""
        return tuple(self._by_sum.get(round, ()))

    def take(self, round: int) -> tuple[Contribution, ...]:
        """The same, at its end; it is forgotten."""
        taken = tuple(self._by_sum.pop(round, ()))
        self._seen = {key: seen for key, seen in self._seen.items() if key[2] > round - self._remembered}
        return taken


def corrected(record: RoundRecord, merged: Mapping[str, Contribution]) -> RoundRecord:
    """A round's record as the sum has it: also who has left since its update came, and without whose never did.

    Args:
        record: By the batch scheduler.
        merged: What was merged of this round, by worker.
    """
    workers = []
    for worker in record.workers:
        found = merged.get(worker.worker)
        samples = worker.samples if found is None else found.samples
        workers.append(msgspec.structs.replace(worker, merged=found is not None, samples=samples))
    known = {worker.worker for worker in workers}
    workers += [
        WorkerRound(worker=name, steps=one.steps, samples=one.samples, merged=True, spans=())
        for name, one in merged.items()
        if name not in known
    ]
    return msgspec.structs.replace(record, workers=tuple(workers))
