"""Who trains on which slice: hands them out, takes them back, and counts each sample of an epoch once.

What holds for an epoch, whatever workers come, go and die, and whichever messages are lost, repeated or late:

- Nobody dies, and everybody begins before it trains: each sample is trained on exactly once.
- ``"at_least_once"``: each sample is trained on, but for quarantined slices. What a dead worker trained on beyond its
  last report is trained on twice.
- ``"at_most_once"``: no sample is trained on twice. A slice is handed out again only if its holder certainly trained on
  nothing that it did not report: its :class:`BeginSlice` was not accepted (and will not be, as the grant is void), or
  it left with :class:`LeaveTracker`, or it has not joined since the state was loaded that names it as the holder. The
  rest of any other slice is dropped from the epoch, and counted.

A state that is loaded takes the epoch back to when it was saved; the promises hold for the training that goes on from
there, with weights saved at the same moment.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from lightning_bytescheduler.checks import is_whole, require_whole
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices.catalogue import SliceCatalogue
from lightning_bytescheduler.slices.messages import (
    Answer,
    AskLater,
    Assignment,
    BeginSlice,
    EpochOver,
    FinishSlice,
    JoinAgain,
    Joined,
    JoinTracker,
    LeaveTracker,
    QuarantineSlice,
    Receipt,
    RenewLease,
    ReportProgress,
    RequestSlice,
    Verdict,
    WaitReason,
)
from lightning_bytescheduler.slices.options import TrackerOptions
from lightning_bytescheduler.slices.slice import SliceState
from lightning_bytescheduler.slices.tracked_workers import (
    Grant,
    Holder,
    TrackedWorker,
    WorkerRegistry,
    holder_to_relieve,
)
from lightning_bytescheduler.slices.tracker_state import EpochSlices, SavedEpoch, pack, unpack

__all__ = ["SliceTracker", "TrackerReport"]

_SOONEST, _LATEST = 0.05, 5.0  # seconds after which a worker that waits asks again


class SliceTracker:
    """The tracker: a state machine that is called, one call at a time, and never waits. It is a ``TrackerClient``.

    Args:
        catalogue: All slices.
        options: How they are handed out.
        clock: Seconds that never run backwards, as of ``time.monotonic``.
    """

    def __init__(
        self, catalogue: SliceCatalogue, options: TrackerOptions | None = None, *, clock: Callable[[], float]
    ) -> None:
        self.catalogue = catalogue
        self.options = TrackerOptions() if options is None else options
        self._clock = clock
        self._slices = EpochSlices(catalogue.samples, seed=self.options.seed, shuffle=self.options.shuffle)
        self._workers = WorkerRegistry()
        self._holders: dict[int, TrackedWorker] = {}  # of ASSIGNED slices
        self._next_grant = 1
        self._first_grant = 1  # of the running epoch
        self._returned = self._stolen = 0
        self._wanted = False

    # What workers call: see TrackerClient.

    def join(self, message: JoinTracker) -> Joined:
        """Make a worker known.

        A process that repeats its own join keeps its session. Another process of the same name takes the place of the
        former one, which must be dead. After a state was loaded, whoever joins continues what that name held.

        Raises:
            OptionError: If the name or incarnation is empty, or ``prefetch`` is not allowed.
        """
        for option, text in (("worker", message.worker), ("incarnation", message.incarnation)):
            if not isinstance(text, str) or not text:
                raise OptionError(option, text, "a text that is not empty")
        prefetch = self.options.prefetch if message.prefetch is None else require_whole("prefetch", message.prefetch, 1)
        now = self._clock()
        record = self._workers.named(message.worker)
        if record is not None and record.session is not None and record.incarnation != message.incarnation:
            self._take_back_all(record, begun_is_lost=True)
            self._workers.remove(record)
            record = None
        if record is None:
            deadline = now + self.options.lease
            record = TrackedWorker(message.worker, session=None, incarnation=None, deadline=deadline, prefetch=prefetch)
            self._workers.add(record)
        record.incarnation = message.incarnation
        record.prefetch = prefetch
        record.deadline = now + self.options.lease
        record.cached.add(self._known(message.cached), self._slices.ranks)
        session = self._workers.open_session(record) if record.session is None else record.session
        self.expire()
        return Joined(session=session, epoch=self._slices.epoch, lease=self.options.lease)

    def request(self, message: RequestSlice) -> Answer:
        """Hand out one more slice, or say why there is none."""
        record = self._renewed(message.session)  # first: who is late, but here, is not dead
        self.expire()
        if record is None:
            return JoinAgain()
        for index in self._known(message.evicted):
            record.cached.discard(index)
        record.cached.add(self._known(message.cached), self._slices.ranks)
        if message.epoch == self._slices.epoch + 1:
            self.start_epoch(message.epoch)
        revoked = tuple(number for number in message.holding if number not in record.grants)
        if message.epoch < self._slices.epoch:
            return EpochOver(epoch=message.epoch, revoked=revoked)
        if message.epoch > self._slices.epoch:
            return AskLater(reason=WaitReason.EPOCH, seconds=self._until_change(record), revoked=revoked)
        for number in message.holding:
            if number in record.grants:
                record.grants[number].told = True
        for grant in record.grants.values():
            if not grant.told:  # the answer that named it was lost, or it was held before a restart
                return self._assignment(grant, revoked)
        if self.over:
            return EpochOver(epoch=message.epoch, revoked=revoked)
        if message.looks and self._holders:
            return AskLater(reason=WaitReason.HELD, seconds=self._until_change(record), revoked=revoked)
        if len(record.ahead) >= record.prefetch:
            return AskLater(reason=WaitReason.LIMIT, seconds=self._until_change(record), revoked=revoked)
        chosen = self._choose(record)
        if chosen is None:
            self._wanted = True
            return AskLater(reason=WaitReason.HELD, seconds=self._until_change(record), revoked=revoked)
        return self._assignment(self._grant(record, chosen), revoked)

    def begin(self, message: BeginSlice) -> Receipt:
        """Say whether the worker may train on a slice."""
        record, grant, verdict = self._look_up(message.session, message.grant)
        if record is not None and grant is not None:
            grant.begun = grant.told = True
            record.speed.begin(self._clock())
        return Receipt(verdict=verdict)

    def progress(self, message: ReportProgress) -> Receipt:
        """Count samples as trained on.

        Raises:
            OptionError: If ``trained`` is no number of samples of that slice.
        """
        record, grant, verdict = self._look_up(message.session, message.grant)
        if record is not None and grant is not None:
            samples = int(self._slices.samples[grant.index])
            trained = message.trained
            if not is_whole(trained) or trained > samples:
                raise OptionError("trained", trained, f"from 0 to {samples}, the samples of that slice")
            now = self._clock()
            grant.begun = grant.told = True
            record.speed.begin(now)
            record.speed.report(self._slices.train(grant.index, trained), now)
        return Receipt(verdict=verdict)

    def done(self, message: FinishSlice) -> Receipt:
        """Count a slice as used."""
        record, grant, verdict = self._look_up(message.session, message.grant)
        if record is not None and grant is not None:
            now = self._clock()
            record.speed.begin(now)
            record.speed.report(self._slices.finish(grant.index), now)
            self._drop_grant(record, grant)
        return Receipt(verdict=verdict)

    def quarantine(self, message: QuarantineSlice) -> Receipt:
        """Leave a slice out of this epoch and the following ones.

        Raises:
            OptionError: If there is no such slice.
        """
        if self._renewed(message.session) is None:
            return Receipt(verdict=Verdict.JOIN_AGAIN)
        index = self._index(message.key)
        holder = self._holders.get(index)
        if holder is not None:
            self._take(holder, next(grant for grant in holder.grants.values() if grant.index == index))
        self._slices.quarantine(index, message.reason)
        return Receipt(verdict=Verdict.ACCEPTED)

    def renew(self, message: RenewLease) -> Receipt:
        """Renew a lease."""
        known = self._renewed(message.session) is not None
        return Receipt(verdict=Verdict.ACCEPTED if known else Verdict.JOIN_AGAIN)

    def leave(self, message: LeaveTracker) -> Receipt:
        """Take back what a worker holds, where it stands."""
        record = self._workers.of_session(message.session)
        if record is None:
            return Receipt(verdict=Verdict.JOIN_AGAIN)
        self._take_back_all(record, begun_is_lost=False)
        self._workers.remove(record)
        return Receipt(verdict=Verdict.ACCEPTED)

    # What the tracker's owner calls.

    def release(self, worker: str) -> bool:
        """Take back what a worker holds that is known to be dead; returns whether it was known."""
        record = self._workers.named(worker)
        if record is None:
            return False
        self._take_back_all(record, begun_is_lost=record.session is not None)
        self._workers.remove(record)
        return True

    def held(self, worker: str) -> int:
        """Slices that a worker holds; 0 for one that is not known."""
        record = self._workers.named(worker)
        return 0 if record is None else len(record.grants)

    def expire(self) -> tuple[str, ...]:
        """Release every worker whose lease is over; returns their names. Each request does this too."""
        names = []
        for record in self._workers.expired(self._clock()):
            self.release(record.name)
            names.append(record.name)
        return tuple(names)

    def start_epoch(self, epoch: int, *, abandon: bool = False) -> bool:
        """Make all slices available again, for the epoch after the running one; returns whether that one runs now.

        Args:
            epoch: The epoch that is to run; if it does, nothing changes.
            abandon: Drop what is left of the running epoch, in workers' hands too; otherwise it must be over.
        """
        if epoch == self._slices.epoch:
            return True
        if epoch != self._slices.epoch + 1 or not (self.over or abandon):
            return False
        if abandon:
            self._slices.abandon()
        for record in self._workers:
            record.grants.clear()
            record.taken.clear()
            record.speed.pause()
        self._holders.clear()
        self._first_grant = self._next_grant
        self._returned = self._stolen = 0
        self._wanted = False
        self._slices.start(epoch)
        return True

    def lift_quarantine(self, key: str) -> bool:
        """Hand a slice out again from the next epoch on; returns whether it was quarantined.

        Raises:
            OptionError: If there is no such slice.
        """
        return self._slices.quarantined.pop(self._index(key), None) is not None

    @property
    def epoch(self) -> int:
        """The running epoch, from 0."""
        return self._slices.epoch

    @property
    def over(self) -> bool:
        """Whether nothing is left of the running epoch."""
        return self._slices.unfinished == 0

    @property
    def wanted(self) -> bool:
        """Whether somebody has asked for a slice and found that others hold all that are left."""
        return self._wanted and not self.over

    def state_of(self, key: str) -> SliceState:
        """Where a slice stands.

        Raises:
            OptionError: If there is no such slice.
        """
        return self._slices.state(self._index(key))

    def report(self) -> TrackerReport:
        """How far the running epoch is."""
        slices = self._slices
        return TrackerReport(
            epoch=slices.epoch,
            over=self.over,
            samples=self.catalogue.total_samples,
            trained=slices.trained,
            dropped=slices.dropped,
            unfinished=slices.unfinished,
            quarantined={self.catalogue.key(index): reason for index, reason in slices.quarantined.items()},
            workers=len(self._workers),
            returned=self._returned,
            stolen=self._stolen,
        )

    def state_dict(self) -> dict[str, Any]:
        """Everything that a restart needs: plain values and tensors, for ``torch.load(weights_only=True)``."""
        workers = {
            record.name: [(grant.index, grant.begun) for grant in record.grants.values()] for record in self._workers
        }
        slices = self._slices
        saved = SavedEpoch(
            epoch=slices.epoch,
            states=slices.states,
            positions=slices.positions,
            quarantined=slices.quarantined,
            cursor=slices.cursor,
            places=slices.returned,
            workers=workers,
            returned=self._returned,
            stolen=self._stolen,
            next_grant=self._next_grant,
            next_session=self._workers.next_session,
        )
        return pack(saved, self.catalogue, self.options)

    def load_state_dict(self, state: Mapping[str, Any], *, workers: Iterable[str] | None = None) -> None:
        """Go on where a state was saved. All sessions end: workers join again.

        Args:
            state: From :meth:`state_dict`.
            workers: Who will join and continue what that name held; what others held is available at once. If it is
                None, each name is waited for as long as a lease.

        Raises:
            TrackerStateError: If the state is of other slices or another order, or damaged. Nothing changed then.
        """
        saved = unpack(state, self.catalogue, self.options)
        self._slices.restore(
            epoch=saved.epoch,
            states=saved.states,
            positions=saved.positions,
            quarantined=saved.quarantined,
            cursor=saved.cursor,
            returned=saved.places,
        )
        self._returned, self._stolen = saved.returned, saved.stolen
        self._next_grant = self._first_grant = max(self._next_grant, saved.next_grant)
        next_session = max(self._workers.next_session, saved.next_session)
        self._workers = WorkerRegistry()
        self._workers.next_session = next_session
        self._holders.clear()
        deadline = self._clock() + self.options.lease
        stay = None if workers is None else frozenset(workers)
        for name, held in saved.workers.items():
            record = TrackedWorker(
                name, session=None, incarnation=None, deadline=deadline, prefetch=self.options.prefetch
            )
            self._workers.add(record)
            for index, begun in held:
                self._grant(record, index).begun = begun
            if stay is not None and name not in stay:
                self.release(name)

    # Inside.

    def _index(self, key: str) -> int:
        index = self.catalogue.find(key)
        if index is None:
            raise OptionError("key", key, "the key of a slice of this catalogue")
        return index

    def _known(self, keys: Iterable[str]) -> Iterable[int]:
        """Indices of those keys that are of this catalogue: a cache may hold slices of other data too."""
        return (index for index in map(self.catalogue.find, keys) if index is not None)

    def _renewed(self, session: int) -> TrackedWorker | None:
        record = self._workers.of_session(session)
        if record is not None:
            record.deadline = self._clock() + self.options.lease
        return record

    def _look_up(self, session: int, number: int) -> tuple[TrackedWorker | None, Grant | None, Verdict]:
        record = self._renewed(session)
        if record is None:
            return None, None, Verdict.JOIN_AGAIN
        grant = record.grants.get(number)
        if grant is not None:
            return record, grant, Verdict.ACCEPTED
        if number < self._first_grant:
            return record, None, Verdict.EPOCH_OVER
        return record, None, Verdict.TAKEN if number in record.taken else Verdict.FINISHED

    def _choose(self, record: TrackedWorker) -> int | None:
        """Assign a slice: one that came back, or one the worker has locally, or the next, or a slower worker's."""
        slices = self._slices
        index = slices.take_returned()
        if index is not None:
            return index
        for cached in record.cached.offers(slices.epoch, slices.ranks):
            if slices.take(cached):
                return cached
        index = slices.take_next()
        return self._steal(record) if index is None else index

    def _steal(self, record: TrackedWorker) -> int | None:
        now = self._clock()
        # Who has not joined since a state was loaded is about to continue exactly what it held.
        others = [other for other in self._workers if other is not record and other.session is not None]
        found = holder_to_relieve(self._as_holder(record, now), [self._as_holder(other, now) for other in others])
        if found is None:
            return None
        victim = others[found]
        grant = victim.ahead[-1]
        self._take(victim, grant)
        self._stolen += 1
        return grant.index

    def _as_holder(self, record: TrackedWorker, now: float) -> Holder:
        ahead = record.ahead
        return Holder(
            left=sum(self._slices.left(grant.index) for grant in record.grants.values()),
            last=self._slices.left(ahead[-1].index) if ahead else 0,
            speed=record.speed.samples_per_second(now),
        )

    def _grant(self, record: TrackedWorker, index: int) -> Grant:
        self._wanted = False
        grant = Grant(number=self._next_grant, index=index)
        self._next_grant += 1
        record.grants[grant.number] = grant
        self._holders[index] = record
        return grant

    def _drop_grant(self, record: TrackedWorker, grant: Grant) -> None:
        del record.grants[grant.number]
        del self._holders[grant.index]
        if not record.training:
            record.speed.pause()

    def _take(self, record: TrackedWorker, grant: Grant) -> None:
        self._drop_grant(record, grant)
        record.taken.add(grant.number)

    def _take_back_all(self, record: TrackedWorker, *, begun_is_lost: bool) -> None:
        lost = begun_is_lost and self.options.delivery == "at_most_once"
        for grant in list(record.grants.values()):
            self._drop_grant(record, grant)
            if lost and grant.begun:
                self._slices.drop_rest(grant.index)
            elif self._slices.give_back(grant.index):
                self._returned += 1

    def _assignment(self, grant: Grant, revoked: tuple[int, ...]) -> Assignment:
        return Assignment(
            grant=grant.number,
            epoch=self._slices.epoch,
            slice_index=grant.index,
            slice=self.catalogue[grant.index],
            first=int(self._slices.positions[grant.index]),
            lease=self.options.lease,
            revoked=revoked,
        )

    def _until_change(self, record: TrackedWorker) -> float:
        """Seconds until something may be had: another worker's lease ends, or this one or another is done."""
        now = self._clock()
        soonest = _LATEST
        for other in self._workers:
            if other is not record:
                soonest = min(soonest, other.deadline - now)
            speed = other.speed.samples_per_second(now)
            if speed is not None:
                for grant in other.grants.values():
                    if grant.begun:
                        soonest = min(soonest, self._slices.left(grant.index) / speed)
        return max(soonest, _SOONEST)


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackerReport:
    """Counts of the running epoch.

    Attributes:
        epoch: The epoch.
        over: Whether nothing is left of it.
        samples: Samples of all slices.
        trained: Of these, samples known to be trained on, each counted once.
        dropped: Of these, samples that the epoch will not train on: quarantined, abandoned, or at most once.
        unfinished: Slices that are neither used nor quarantined.
        quarantined: Reason by key, of all slices that are left out.
        workers: Workers known.
        returned: Slices that came back from workers that died or left.
        stolen: Slices taken from a slower worker that had not begun them.
    """

    epoch: int
    over: bool
    samples: int
    trained: int
    dropped: int
    unfinished: int
    quarantined: dict[str, str]
    workers: int
    returned: int
    stolen: int
