"""The batches of a worker of several ranks that train together: its first rank has them made, and cuts them.

Each rank gets a part of every batch, as long as its share of the batch sizes, so that all take equally many steps.
What the first rank says at the beginning of a pass, where nobody is in a step, is a collective of the training threads.
Parts are posted by the thread that makes the batches, before the first rank can take its own: nobody waits for them in
a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import Protocol, TypeAlias

import msgspec

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices.batches import SLICES_AHEAD, SampleRun, SliceBatch, cut_batches
from lightning_bytescheduler.slices.lock_step import LockStepShares

__all__ = ["GOES_ON", "WAITS", "CorruptSlices", "LeadingRank", "Part", "PassOver", "WorkerRanks", "cut_batch", "read"]

WAITS, GOES_ON = "waits", "goes on"  # what is said besides the number of a pass that has a batch


class WorkerRanks(Protocol):
    """One rank's way to the others of its worker.

    Attributes:
        rank: This one, from 0, which leads.
        count: How many there are.
        timeout: Longest wait for the first rank, in seconds.
    """

    rank: int
    count: int
    timeout: float

    def tell(self, text: str = "") -> str:
        """The first rank's text, on all ranks: of the training threads, which all make the same calls."""

    def listen(self, heed: Callable[[str], object], on_error: Callable[[BaseException], object]) -> None:
        """Have what is posted to this rank heeded, in order, on a thread; once."""

    def post(self, rank: int, text: str) -> None:
        """Post a text to a rank, which need not listen yet. For one thread of a rank."""

    def check(self) -> None:
        """Raise what another rank has failed with, if any."""


class _Letter(msgspec.Struct, frozen=True, tag=True, tag_field="kind", forbid_unknown_fields=True):
    pass


class Part(_Letter, frozen=True):
    """One rank's part of a batch: the pass, and what a ``SliceBatch`` has."""

    number: int
    epoch: int
    runs: list[tuple[int, int, int]]
    ahead: list[int]

    @property
    def batch(self) -> SliceBatch:
        """As readers are asked for it."""
        runs = tuple(SampleRun(slice_index=index, start=start, stop=stop) for index, start, stop in self.runs)
        return SliceBatch(self.epoch, runs, tuple(self.ahead))


class PassOver(_Letter, frozen=True):
    """A pass has no more batches."""

    number: int


class CorruptSlices(_Letter, frozen=True):
    """What a rank's readers have found: reasons by key."""

    found: dict[str, str]


_Any: TypeAlias = Part | PassOver | CorruptSlices
_DECODER: msgspec.json.Decoder[_Any] = msgspec.json.Decoder(_Any)


def read(text: str) -> _Any:
    """What was posted.

    Raises:
        OptionError: If it is damaged.
    """
    try:
        return _DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise OptionError("text", text, f"one that a rank has posted ({error})") from error


def cut_batch(batch: SliceBatch, batch_sizes: Sequence[int]) -> list[SliceBatch]:
    """The part of each rank, none of them empty.

    Args:
        batch: Of all ranks together, no larger than their batch sizes.
        batch_sizes: Of each rank; parts are in proportion. With fewer samples than ranks, some are in several parts.
    """
    samples = sum(run.stop - run.start for run in batch.runs)
    if samples >= len(batch_sizes):
        sizes = LockStepShares.of(samples, batch_sizes, shortage="pad").samples
        parts = list(cut_batches(batch.epoch, batch.runs, sizes))
    else:
        each = [
            SampleRun(slice_index=run.slice_index, start=sample, stop=sample + 1)
            for run in batch.runs
            for sample in range(run.start, run.stop)
        ]
        parts = [SliceBatch(batch.epoch, (each[rank % samples],)) for rank in range(len(batch_sizes))]
    # What the other ranks have of this batch may be this one's in the next.
    return [part._replace(ahead=tuple(dict.fromkeys((*part.ahead, *batch.ahead)))[:SLICES_AHEAD]) for part in parts]


class LeadingRank:
    """What the first rank tells the others.

    Args:
        ranks: The way to them.
        batch_sizes: Of each rank.
    """

    def __init__(self, ranks: WorkerRanks, batch_sizes: Sequence[int]) -> None:
        self._ranks = ranks
        self._batch_sizes = tuple(batch_sizes)

    def listen(self, quarantine: Callable[[Iterable[tuple[str, str]]], None]) -> None:
        """Hear of corrupt slices: of keys and reasons, on a thread."""

        def heed(text: str) -> None:
            letter = read(text)
            if isinstance(letter, CorruptSlices):
                quarantine(letter.found.items())

        self._ranks.listen(heed, lambda error: None)  # what ends it ends the training too, which says so

    def say(self, text: str) -> None:
        """Say what is done next; on the training thread."""
        self._ranks.tell(text)

    def hand_out(self, number: int, batch: SliceBatch | None) -> SliceBatch | None:
        """Post the other ranks' parts; on the thread that makes the batches. Returns this rank's.

        Args:
            number: Of the pass.
            batch: Of all ranks together; ``None`` if the pass is over.
        """
        if batch is None:
            for rank in range(1, self._ranks.count):
                self._post(rank, PassOver(number))
            return None
        own, *others = cut_batch(batch, self._batch_sizes)
        for rank, part in enumerate(others, start=1):
            runs = [(run.slice_index, run.start, run.stop) for run in part.runs]
            self._post(rank, Part(number, part.epoch, runs, list(part.ahead)))
        return own

    def _post(self, rank: int, letter: _Letter) -> None:
        self._ranks.post(rank, msgspec.json.encode(letter).decode())
