"""The epochs that a tracker hands slices out of: the running one, and the next while the last slices are held."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

from lightning_bytescheduler.slices.catalogue import SliceCatalogue
from lightning_bytescheduler.slices.options import TrackerOptions
from lightning_bytescheduler.slices.tracked_workers import Grant, TrackedWorker
from lightning_bytescheduler.slices.tracker_state import EpochSlices, SavedEpoch

__all__ = ["OpenEpoch", "OpenEpochs"]

_MOST = 2  # so that no slice is left behind by more than one epoch


@dataclass(eq=False, slots=True)
class OpenEpoch:
    """An epoch that slices are handed out of.

    Attributes:
        slices: Where they stand.
        first_grant: Number of the first grant that may be of it.
        holders: Of its ASSIGNED slices.
        returned: Slices that came back from workers that died or left.
        stolen: Slices taken from a slower worker that had not begun them.
    """

    slices: EpochSlices
    first_grant: int
    holders: dict[int, TrackedWorker] = field(default_factory=dict)
    returned: int = 0
    stolen: int = 0

    def held_by(self, index: int) -> tuple[TrackedWorker, Grant] | None:
        """Who holds a slice, and how."""
        holder = self.holders.get(index)
        if holder is None:
            return None
        of = (self.slices.epoch, index)
        return holder, next(grant for grant in holder.grants.values() if (grant.epoch, grant.index) == of)

    def saved(self, workers: Iterable[TrackedWorker]) -> SavedEpoch:
        """As it is to be saved."""
        slices = self.slices
        return SavedEpoch(
            epoch=slices.epoch,
            states=slices.states,
            positions=slices.positions,
            cursor=slices.cursor,
            places=slices.returned,
            workers={record.name: record.held_of(slices.epoch) for record in workers},
            returned=self.returned,
            stolen=self.stolen,
        )


class OpenEpochs:
    """One epoch, or two that follow each other.

    Args:
        catalogue: All slices.
        options: Their order.
        next_grant: Number of the next grant.

    Attributes:
        quarantined: Reason by slice; what is in it as an epoch begins is left out of it.
    """

    def __init__(self, catalogue: SliceCatalogue, options: TrackerOptions, *, next_grant: Callable[[], int]) -> None:
        self.quarantined: dict[int, str] = {}
        self._catalogue = catalogue
        self._options = options
        self._next_grant = next_grant
        self._open = [self._begun(0)]

    def __iter__(self) -> Iterator[OpenEpoch]:
        return iter(self._open)

    @property
    def running(self) -> OpenEpoch:
        """The first one of which something may be left."""
        return self._open[0]

    @property
    def newest(self) -> OpenEpoch:
        """The next one if it is open, or the running one."""
        return self._open[-1]

    @property
    def over(self) -> bool:
        """Whether nothing is left of the running one."""
        return self.running.slices.unfinished == 0

    def of(self, grant: Grant) -> OpenEpoch:
        """The one that a grant is of, which is not over as long as somebody has it."""
        return self._open[grant.epoch - self.running.slices.epoch]

    def up_to(self, epoch: int) -> Sequence[OpenEpoch]:
        """Those up to an epoch, itself included."""
        return [one for one in self._open if one.slices.epoch <= epoch]

    def open_for(self, epoch: int) -> bool:
        """Open an epoch, if it is the next one and all that is left before it is in workers' hands."""
        newest = self.newest.slices
        if epoch != newest.epoch + 1 or len(self._open) == _MOST or newest.available:
            return False
        self._open.append(self._begun(epoch))
        return True

    def roll(self) -> bool:
        """Let the next one be the running one, if it is open and nothing is left of that; returns whether it is now."""
        if len(self._open) == 1 or not self.over:
            return False
        del self._open[0]
        return True

    def restore(self, epochs: Iterable[SavedEpoch], quarantined: dict[int, str]) -> None:
        """Take up what was saved, but for who holds what; the values must have been checked."""
        self.quarantined = dict(quarantined)
        self._open = []
        for saved in epochs:
            one = self._begun(saved.epoch)
            one.slices.restore(
                states=saved.states, positions=saved.positions, cursor=saved.cursor, returned=saved.places
            )
            one.returned, one.stolen = saved.returned, saved.stolen
            self._open.append(one)

    def _begun(self, epoch: int) -> OpenEpoch:
        slices = EpochSlices(
            self._catalogue.samples,
            epoch=epoch,
            seed=self._options.seed,
            shuffle=self._options.shuffle,
            left_out=self.quarantined,
        )
        return OpenEpoch(slices=slices, first_grant=self._next_grant())
