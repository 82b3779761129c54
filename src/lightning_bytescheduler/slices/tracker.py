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

Nobody stands still at an epoch's end: while the last slices of the running epoch are in workers' hands, whoever asks
for the next epoch is given slices of that one. This changes none of the promises, which are of an epoch each: its
slices are counted in arrays of their own, and a grant is of one epoch for good. What comes back of the running epoch is
handed out before anything of the next one, to whoever asks next. No more than two epochs are open, so that no slice is
left behind by more than one; where both are given out, a worker waits.

Two workers never train on the same samples to be done sooner, as backup tasks do: what both had trained on by the time
one of them is first would be in the weights of both. A slice that a worker has begun which is slow, and alive, stays
with it, and costs nobody anything; what the dead and the cut off hold comes back.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import wraps
from threading import RLock
from typing import Any, TypeVar, cast

from lightning_bytescheduler.checks import is_whole, require_whole
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices.catalogue import DataOrder, SliceCatalogue
from lightning_bytescheduler.slices.messages import (
    Answer,
    AskLater,
    Assignment,
    BeginSlice,
    Call,
    EpochOver,
    FinishSlice,
    JoinAgain,
    Joined,
    JoinTracker,
    LeaveTracker,
    QuarantineSlice,
    Receipt,
    RenewLease,
    Reply,
    ReportProgress,
    RequestSlice,
    Verdict,
    WaitReason,
)
from lightning_bytescheduler.slices.options import TrackerOptions
from lightning_bytescheduler.slices.tracker_state import (
    EpochSlices,
    Grant,
    Holder,
    OpenEpochs,
    SavedTracker,
    TrackedWorker,
    WorkerRegistry,
    holder_to_relieve,
    pack,
    unpack,
)

_Method = TypeVar("_Method", bound=Callable[..., Any])


def _alone(method: _Method) -> _Method:
    """One call at a time. Nothing is called back meanwhile, so the lock can be taken while holding any other."""

    @wraps(method)
    def call(self: SliceTracker, /, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return cast(_Method, call)


class SliceTracker:
    """The tracker: a state machine that is called and never waits. It is a ``TrackerClient``.

    What answers one kind of message may be called by one thread alone; all else by any.

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
        self._workers = WorkerRegistry()
        self._next_grant = 1
        self._epochs = OpenEpochs(catalogue, self.options)
        self._wanted = False
        self._lock = RLock()
        self._answers: dict[type[Call], Callable[[Any], Reply]] = {
            JoinTracker: self.join,
            RequestSlice: self.request,
            BeginSlice: self.begin,
            ReportProgress: self.progress,
            FinishSlice: self.done,
            QuarantineSlice: self.quarantine,
            RenewLease: self.renew,
            LeaveTracker: self.leave,
        }

    @_alone
    def answer(self, message: Call) -> Reply:
        """Answer a worker.

        Raises:
            OptionError: If it is no message of a worker, or does not fit the slices there are.
        """
        answer = self._answers.get(type(message))
        if answer is None:
            raise OptionError("message", type(message).__name__, "one that workers send")
        return answer(message)

    # What answers each kind of message.

    def join(self, message: JoinTracker) -> Joined:
        """Make a worker known.

        A process that repeats its own join keeps its session. Another process of the same name takes the place of the
        former one, which must be dead. After a state was loaded, whoever joins continues what that name held.

        Raises:
            OptionError: If ``prefetch`` is not allowed.
        """
        prefetch = self.options.prefetch if message.prefetch is None else require_whole("prefetch", message.prefetch, 1)
        now = self._clock()
        record = self._workers.named(message.worker)
        if record is not None and record.session is not None and record.incarnation != message.incarnation:
            self._take_back_all(record, begun_is_lost=True)
            self._workers.remove(record)
            record = None
        if record is None:
            record = TrackedWorker(message.worker, now + self.options.lease, prefetch)
            self._workers.add(record)
        record.incarnation = message.incarnation
        record.prefetch, record.keeps = prefetch, message.keeps
        record.deadline = now + self.options.lease
        session = self._workers.open_session(record) if record.session is None else record.session
        self.expire()
        return Joined(session=session, epoch=self._epochs.newest.epoch, lease=self.options.lease)

    def request(self, message: RequestSlice) -> Answer:
        """Hand out one more slice, or say why there is none.

        Raises:
            OptionError: If all slices are quarantined, so that there will never be one.
        """
        record = self._renewed(message.session)  # first: who is late, but here, is not dead
        self.expire()
        if record is None:
            return JoinAgain()
        if len(self._epochs.quarantined) == len(self.catalogue):  # epochs would be over as soon as they begin
            raise OptionError("train", f"{len(self.catalogue)} slices", "one that can be read: all are quarantined")
        revoked = tuple(number for number in message.holding if number not in record.grants)
        for number in message.holding:
            if number in record.grants:
                record.grants[number].told = True
        if self._epochs.open_for(message.epoch):
            self._roll()
        asked = self._epochs.up_to(message.epoch)
        if not asked:
            return EpochOver(epoch=message.epoch, revoked=revoked)
        for grant in record.grants.values():
            if not grant.told and grant.epoch <= message.epoch:
                return self._assignment(grant, revoked)  # its answer was lost, or it was held before a restart
        beyond = message.epoch > self._epochs.newest.epoch
        if not beyond and not any(one.unfinished for one in asked):
            return EpochOver(epoch=message.epoch, revoked=revoked)
        if message.looks and any(one.holders for one in asked):
            return AskLater(reason=WaitReason.HELD, revoked=revoked)
        if len(record.ahead) >= record.prefetch:
            return AskLater(reason=WaitReason.LIMIT, revoked=revoked)
        chosen = self._choose(record, asked)
        if chosen is None:
            self._wanted = True
            reason = WaitReason.EPOCH if beyond else WaitReason.HELD
            return AskLater(reason=reason, revoked=revoked)
        return self._assignment(self._grant(record, *chosen), revoked)

    def begin(self, message: BeginSlice) -> Receipt:
        """Say whether the worker may train on a slice."""
        return self._train(message.session, message.grant, lambda record, grant: None)

    def progress(self, message: ReportProgress) -> Receipt:
        """Count samples as trained on.

        Raises:
            OptionError: If ``trained`` is no number of samples of that slice.
        """

        def count(record: TrackedWorker, grant: Grant) -> None:
            slices, trained = self._epochs.of(grant), message.trained
            samples = int(slices.samples[grant.index])
            if not is_whole(trained) or trained > samples:
                raise OptionError("trained", trained, f"from 0 to {samples}, the samples of that slice")
            record.speed.report(slices.train(grant.index, trained), self._clock())

        return self._train(message.session, message.grant, count)

    def done(self, message: FinishSlice) -> Receipt:
        """Count a slice as used."""

        def finish(record: TrackedWorker, grant: Grant) -> None:
            record.speed.report(self._epochs.of(grant).finish(grant.index), self._clock())
            self._drop_grant(record, grant)
            self._roll()

        return self._train(message.session, message.grant, finish)

    def quarantine(self, message: QuarantineSlice) -> Receipt:
        """Leave a slice out of the epochs that are open and the following ones.

        Raises:
            OptionError: If there is no such slice.
        """
        if self._renewed(message.session) is None:
            return Receipt(verdict=Verdict.JOIN_AGAIN)
        index = self._index(message.key)
        self._epochs.quarantined.setdefault(index, message.reason)
        for one in self._epochs:
            held = one.held_by(index)
            if held is not None:
                self._drop_grant(*held)
            one.leave_out(index)
        self._roll()
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

    @_alone
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

    @_alone
    def expire(self) -> tuple[str, ...]:
        """Release every worker whose lease is over; returns their names. Each request does this too."""
        names = []
        for record in self._workers.expired(self._clock()):
            self.release(record.name)
            names.append(record.name)
        return tuple(names)

    @_alone
    def start_epoch(self, epoch: int) -> bool:
        """Make all slices available again, for the epoch after the running one; returns whether that one runs now.

        Args:
            epoch: The epoch that is to run; if it does, nothing changes. The one before must be over.
        """
        if epoch == self.epoch:
            return True
        if epoch != self.epoch + 1 or not self.over:
            return False
        self._epochs.open_for(epoch)
        self._roll()
        return True

    @property
    def epoch(self) -> int:
        """The running epoch, from 0: the first of which something may be left."""
        return self._epochs.running.epoch

    @property
    def over(self) -> bool:
        """Whether nothing is left of the running epoch."""
        return self._epochs.over

    @property
    def wanted(self) -> bool:
        """Whether somebody has asked for a slice and found that others hold all that are left."""
        return self._wanted and not self.over

    @_alone
    def report(self) -> TrackerReport:
        """How far the running epoch is."""
        running = self._epochs.running
        return TrackerReport(
            epoch=running.epoch,
            over=self.over,
            samples=self.catalogue.total_samples,
            trained=running.trained,
            dropped=running.dropped,
            unfinished=running.unfinished,
            quarantined={self.catalogue.key(index): reason for index, reason in self._epochs.quarantined.items()},
            workers=len(self._workers),
            returned=running.returned,
            stolen=running.stolen,
            ahead=sum(one.trained for one in self._epochs if one is not running),
        )

    @_alone
    def state_dict(self) -> dict[str, Any]:
        """Everything that a restart needs: plain values and tensors, for ``torch.load(weights_only=True)``."""
        return pack(
            SavedTracker(
                order=self._order,
                epochs=[one.saved(self._workers) for one in self._epochs],
                quarantined=dict(self._epochs.quarantined),
                next_grant=self._next_grant,
                next_session=self._workers.next_session,
            )
        )

    @_alone
    def load_state_dict(self, state: Mapping[str, Any], *, workers: Iterable[str] | None = None) -> None:
        """Go on where a state was saved. All sessions end: workers join again.

        Args:
            state: From :meth:`state_dict`.
            workers: Who will join and continue what that name held; what others held is available at once. If it is
                None, each name is waited for as long as a lease.

        Raises:
            TrackerStateError: If the state is of other slices or another order, or damaged. Nothing changed then.
        """
        saved = unpack(state, self._order, self.catalogue.samples)
        self._next_grant = max(self._next_grant, saved.next_grant)
        self._epochs.restore(saved)
        next_session = max(self._workers.next_session, saved.next_session)
        self._workers = WorkerRegistry()
        self._workers.next_session = next_session
        deadline = self._clock() + self.options.lease
        stay = None if workers is None else frozenset(workers)
        for name in saved.epochs[0].workers:
            record = TrackedWorker(name, deadline, self.options.prefetch)
            self._workers.add(record)
            for one, found in zip(self._epochs, saved.epochs, strict=True):
                for index, begun in found.workers[name]:
                    self._grant(record, one, index).begun = begun
        for name in saved.epochs[0].workers:
            if stay is not None and name not in stay:
                self.release(name)

    # Inside.

    @property
    def _order(self) -> DataOrder:
        return self.catalogue.order(seed=self.options.seed, shuffle=self.options.shuffle)

    def _index(self, key: str) -> int:
        index = self.catalogue.find(key)
        if index is None:
            raise OptionError("key", key, "the key of a slice of this catalogue")
        return index

    def _roll(self) -> None:
        """Go on to the next epoch, if it is open and nothing is left of the running one."""
        if self._epochs.roll():
            self._wanted = False

    def _renewed(self, session: int) -> TrackedWorker | None:
        record = self._workers.of_session(session)
        if record is not None:
            record.deadline = self._clock() + self.options.lease
        return record

    def _train(self, session: int, number: int, count: Callable[[TrackedWorker, Grant], None]) -> Receipt:
        """A worker trains on a slice, if it is its."""
        record = self._renewed(session)
        grant = None if record is None else record.grants.get(number)
        if record is None or grant is None:
            return Receipt(verdict=Verdict.JOIN_AGAIN if record is None else Verdict.VOID)
        grant.begun = grant.told = True
        record.speed.begin(self._clock())
        count(record, grant)
        return Receipt(verdict=Verdict.ACCEPTED)

    def _choose(self, record: TrackedWorker, asked: Sequence[EpochSlices]) -> tuple[EpochSlices, int] | None:
        """Assign a slice of the first epoch that has one to give, or else a slower worker's.

        In an epoch: one that came back, or one that the worker keeps from before, or the next.
        """
        for one in asked:
            if not one.available:
                continue
            index = one.take_returned()
            if index is None:
                index = next((kept for kept in record.offers(one.epoch, one.ranks) if one.take(kept)), None)
            if index is None:
                index = one.take_next()
            if index is not None:
                return one, index
        return self._steal(record, asked[-1].epoch)

    def _steal(self, record: TrackedWorker, epoch: int) -> tuple[EpochSlices, int] | None:
        """Take a slice, of this epoch or one before."""
        now = self._clock()
        # Who has not joined since a state was loaded is about to continue exactly what it held.
        others = [other for other in self._workers if other is not record and other.session is not None]
        found = holder_to_relieve(
            self._as_holder(record, now, epoch), [self._as_holder(other, now, epoch) for other in others]
        )
        if found is None:
            return None
        victim = others[found]
        grant = [grant for grant in victim.ahead if grant.epoch <= epoch][-1]
        self._drop_grant(victim, grant)
        one = self._epochs.of(grant)
        one.stolen += 1
        return one, grant.index

    def _left(self, grant: Grant) -> int:
        return self._epochs.of(grant).left(grant.index)

    def _as_holder(self, record: TrackedWorker, now: float, epoch: int) -> Holder:
        ahead = [grant for grant in record.ahead if grant.epoch <= epoch]
        return Holder(
            left=sum(self._left(grant) for grant in record.grants.values()),
            last=self._left(ahead[-1]) if ahead else 0,
            speed=record.speed.samples_per_second(now),
        )

    def _grant(self, record: TrackedWorker, one: EpochSlices, index: int) -> Grant:
        self._wanted = False
        grant = Grant(number=self._next_grant, epoch=one.epoch, index=index)
        self._next_grant += 1
        record.grants[grant.number] = grant
        record.keep(index)
        one.holders[index] = record
        return grant

    def _drop_grant(self, record: TrackedWorker, grant: Grant) -> None:
        del record.grants[grant.number]
        del self._epochs.of(grant).holders[grant.index]
        if not record.training:
            record.speed.pause()

    def _take_back_all(self, record: TrackedWorker, *, begun_is_lost: bool) -> None:
        lost = begun_is_lost and self.options.delivery == "at_most_once"
        for grant in list(record.grants.values()):
            self._drop_grant(record, grant)
            one = self._epochs.of(grant)
            if lost and grant.begun:
                one.drop_rest(grant.index)
            else:
                one.give_back(grant.index)
        self._roll()

    def _assignment(self, grant: Grant, revoked: tuple[int, ...]) -> Assignment:
        return Assignment(
            grant=grant.number,
            epoch=grant.epoch,
            slice_index=grant.index,
            slice=self.catalogue[grant.index],
            first=int(self._epochs.of(grant).positions[grant.index]),
            revoked=revoked,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackerReport:
    """Counts of the running epoch.

    Attributes:
        epoch: The epoch.
        over: Whether nothing is left of it.
        samples: Samples of all slices.
        trained: Of these, samples known to be trained on, each counted once.
        dropped: Of these, samples that the epoch will not train on: quarantined, or at most once.
        unfinished: Slices that are neither used nor quarantined.
        quarantined: Reason by key, of all slices that are left out.
        workers: Workers known.
        returned: Slices that came back from workers that died or left, since the tracker was made.
        stolen: Slices taken from a slower worker that had not begun them, since the tracker was made.
        ahead: Samples of the next epoch that are trained on already.
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
    ahead: int
