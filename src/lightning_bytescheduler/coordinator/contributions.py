"""Whose updates are part of which sum: the book that says what a round's mean is made of.

The sum of a round and this book change together, so that the record of a round and the weights of what was merged are
those of the sum, whatever the batch scheduler knows of a worker that has left meanwhile. Late updates are booked in the
next round that synchronises their fragment.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

import msgspec

from lightning_bytescheduler.diloco.round_record import RoundRecord, WorkerRound

__all__ = ["Contribution", "Contributions", "Seen", "corrected"]


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
