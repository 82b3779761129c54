"""The tracker of slices: hands them out, takes them back, and counts each sample of an epoch once.

Guarantees for an epoch, whatever workers join, leave and die, and whichever messages are lost, repeated or late:

- Without deaths, if every worker begins a slice before it trains: each sample is trained on exactly once.
- With deaths: each sample is trained on, except in quarantined slices. What a dead worker trained on beyond its last
  report is trained on twice.

A loaded state takes the epoch back to when it was saved. The guarantees hold for the training that continues from
there, with weights saved at the same moment.

*With a coordinator* (``counts_merged=True``) a sample counts when the update that was made of it is part of the
weights, and each sample is in the weights of an epoch exactly once, whichever worker dies. An update names its samples.
It is taken only if none of them is in the weights, in another update, or begun by another worker. What an update holds
that is not taken, or a dead worker had not sent, is handed out again. So a slice is its holder's until it is in the
weights. What a worker reports only says how far it is.

No worker idles at an epoch's end: while workers hold the last slices of the current epoch, a worker that asks for the
next epoch gets slices of that one. The guarantees are per epoch and unaffected: each epoch's slices are counted in
separate arrays, and a grant belongs to one epoch. Slices of the current epoch that come back are handed out first, to
the next worker that asks. At most two epochs are open, so that no slice is more than one epoch late; if both are handed
out, a worker waits.

There are no backup tasks: if two workers trained on the same samples, these would be in the weights of both. A slow
worker keeps the slice that it has begun, and a slice that is its only one, while it lives. Slices of dead and
disconnected workers come back.

The state of an epoch is in arrays of 9 bytes a slice, and runs of samples for each that is done in part. What is saved
has plain values and tensors, for ``torch.load(weights_only=True)``, and is checked when it is loaded.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import wraps
from threading import RLock
from typing import Annotated, Any, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from lightning_bytescheduler.checks import is_whole, require_whole
from lightning_bytescheduler.exceptions import OptionError, TrackerStateError
from lightning_bytescheduler.slices.catalogue import DataOrder, SliceCatalogue, slice_order
from lightning_bytescheduler.slices.messages import (
    AskLater,
    Assignment,
    Call,
    JoinAgain,
    Joined,
    JoinTracker,
    LeaveTracker,
    Name,
    Natural,
    QuarantineSlice,
    Receipt,
    RenewLease,
    Reply,
    ReportProgress,
    RequestSlice,
    TrainedRun,
    WaitReason,
    by_slice,
)
from lightning_bytescheduler.slices.options import TrackerOptions
from lightning_bytescheduler.slices.slice import Runs, SliceState, joined, samples_of, without

_MOST_EPOCHS = 2  # from the first with something left to train on, so that no slice is more than one epoch late
_VERSION = 5
_NUMBERS = 1 << 48  # of sessions and grants: those of two lives of a tracker do not meet
_Saved = TypeVar("_Saved")
_Method = TypeVar("_Method", bound=Callable[..., Any])


def _alone(method: _Method) -> _Method:
    """Run one call at a time. Nothing is called back, so the lock can be taken while holding any other."""

    @wraps(method)
    def call(self: SliceTracker, /, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return cast(_Method, call)


class SliceTracker:
    """The tracker: a state machine that never waits. It is a ``TrackerClient``.

    The methods for single kinds of messages may be called by one thread only; all others by any.

    Args:
        catalogue: All slices.
        options: How they are handed out.
        clock: Returns monotonic seconds, as ``time.monotonic``.
        counts_merged: Whether samples count when :meth:`settle` says that they are in the weights, and not when a
            worker reports them.
    """

    def __init__(
        self,
        catalogue: SliceCatalogue,
        options: TrackerOptions | None = None,
        *,
        clock: Callable[[], float],
        counts_merged: bool = False,
    ) -> None:
        self.catalogue = catalogue
        self._counts_merged = counts_merged
        self.options = TrackerOptions() if options is None else options
        self._clock = clock
        self._workers: dict[str, TrackedWorker] = {}
        self._sessions: dict[int, TrackedWorker] = {}  # workers that have joined
        self._patient_until = -math.inf  # with workers that have not joined since a state was loaded
        self._first_deadline = math.inf  # a lower bound of all lease ends, as messages only postpone them
        self._next_grant = self._next_session = 1
        self._quarantined: dict[int, str] = {}  # reasons; left out of epochs that begin later
        self._epochs = [self._begun(0)]  # the current one, and the next if it is open
        self._wanted = False
        self._lock = RLock()
        self._answers: dict[type[Call], Callable[[Any], Reply]] = {
            JoinTracker: self.join,
            RequestSlice: self.request,
            ReportProgress: self.progress,
            QuarantineSlice: self.quarantine,
            RenewLease: self.renew,
            LeaveTracker: self.leave,
        }

    @_alone
    def answer(self, message: Call) -> Reply:
        """Answer a worker.

        Raises:
            OptionError: If it is not a worker's message, or does not fit the slices.
        """
        answer = self._answers.get(type(message))
        if answer is None:
            raise OptionError("message", type(message).__name__, "one that workers send")
        return answer(message)

    # Answers to each kind of message.

    def join(self, message: JoinTracker) -> Joined:
        """Register a worker.

        A process that repeats its own join keeps its session. Another process of the same name replaces the former one,
        which must be dead. After a state was loaded, a joining worker continues what its name held.

        Raises:
            OptionError: If ``prefetch`` is not allowed.
        """
        prefetch = self.options.prefetch if message.prefetch is None else require_whole("prefetch", message.prefetch, 1)
        record = self._workers.get(message.worker)
        if record is not None and record.session is not None and record.incarnation != message.incarnation:
            self._remove(record)
            record = None
        if record is None:
            record = self._add(message.worker)
        record.incarnation = message.incarnation
        record.prefetch, record.keeps = prefetch, message.keeps
        record.deadline = self._clock() + self.options.lease
        if record.session is None:
            record.session = self._next_session
            self._sessions[record.session] = record
            self._next_session += 1
        self.expire()
        claimed = [self._claimed(record, one.epoch, one.slice_index, one.begun) for one in message.holds]
        return Joined(
            session=record.session,
            epoch=self._epochs[-1].epoch,
            lease=self.options.lease,
            held=tuple(self._assignment(grant) for grant in claimed if grant is not None),
        )

    def request(self, message: RequestSlice) -> Assignment | AskLater | JoinAgain:
        """Hand out one more slice, or say why there is none.

        Raises:
            OptionError: If all slices are quarantined, so that there will never be one.
        """
        record = self._renewed(message.session)  # first, as a late worker that asks is not dead
        self.expire()
        if record is None:
            return JoinAgain()
        if len(self._quarantined) == len(self.catalogue):  # otherwise epochs would end as soon as they begin
            raise OptionError("train", f"{len(self.catalogue)} slices", "one that can be read: all are quarantined")
        revoked = tuple(number for number in message.holding if number not in record.grants)
        for number in message.holding:
            if number in record.grants:
                record.grants[number].told = True
        if self._counts_merged:
            for number in record.grants.keys() - set(message.holding):
                grant = record.grants[number]
                if self._epoch_of(grant).todo(grant.index):
                    grant.told = False  # its worker does not know it any more
        newest = self._epochs[-1]
        is_next = message.epoch == newest.epoch + 1 and not newest.available
        first = next((one.epoch for one in self._epochs if one.untrained), message.epoch)
        if is_next and message.epoch - first < _MOST_EPOCHS:
            newest = self._begun(message.epoch)
            self._epochs.append(newest)
            self._roll()
        asked = [one for one in self._epochs if one.epoch <= message.epoch]
        for grant in record.grants.values():
            if not grant.told and grant.epoch <= message.epoch:
                return self._assignment(grant, revoked)  # its answer was lost, or it was held before a restart
        if self._clock() < self._patient_until and any(one.session is None for one in self._workers.values()):
            return AskLater(reason=WaitReason.SOON, revoked=revoked)
        beyond = message.epoch > newest.epoch
        chosen = None
        if not beyond and not any(one.untrained for one in asked):
            reason = WaitReason.MERGING if any(one.unfinished for one in asked) else WaitReason.OVER
        elif message.looks and any(one.holders for one in asked):
            reason = WaitReason.HELD
        elif len(record.ahead) >= record.prefetch:
            reason = WaitReason.LIMIT
        else:
            chosen = self._choose(record, asked)
            self._wanted = chosen is None
            reason = WaitReason.EPOCH if beyond else WaitReason.HELD
        if chosen is None:
            return AskLater(reason=reason, revoked=revoked)
        return self._assignment(self._grant(record, *chosen), revoked)

    def progress(self, message: ReportProgress) -> Receipt | JoinAgain:
        """Count samples as trained, if the slice is the worker's, and say whether it may train on it.

        Raises:
            OptionError: If ``trained`` is not a number of samples of that slice.
        """
        record = self._renewed(message.session)
        if record is None:
            return JoinAgain()
        grant, trained = record.grants.get(message.grant), message.trained
        if grant is None:
            return Receipt(accepted=False)
        slices = self._epoch_of(grant)
        samples = int(slices.samples[grant.index])
        if not is_whole(trained) or trained > samples:
            raise OptionError("trained", trained, f"from 0 to {samples}, the samples of that slice")
        grant.begun = grant.told = True
        if self._counts_merged:
            grant.trained = trained
            slices.note_trained(grant.index, trained == samples)
            return Receipt(accepted=True)
        grant.trained = max(grant.trained, trained)
        slices.train(grant.index, trained)
        if trained == samples:
            self._drop_grant(record, grant)
            self._roll()
        return Receipt(accepted=True)

    def quarantine(self, message: QuarantineSlice) -> Receipt | JoinAgain:
        """Leave a slice out of open and later epochs.

        Raises:
            OptionError: If there is no such slice.
        """
        if self._renewed(message.session) is None:
            return JoinAgain()
        index = self.catalogue.find(message.key)
        if index is None:
            raise OptionError("key", message.key, "the key of a slice of this catalogue")
        self._quarantined.setdefault(index, message.reason)
        for one in self._epochs:
            if index in one.holders:
                self._drop_grant(*one.holders[index])
            one.leave_out(index)
        self._roll()
        return Receipt(accepted=True)

    def renew(self, message: RenewLease) -> Receipt | JoinAgain:
        """Renew a lease."""
        return JoinAgain() if self._renewed(message.session) is None else Receipt(accepted=True)

    def leave(self, message: LeaveTracker) -> Receipt | JoinAgain:
        """Take back a leaving worker's slices at their positions."""
        record = self._sessions.get(message.session)
        if record is None:
            return JoinAgain()
        self._remove(record)
        return Receipt(accepted=True)

    # Called by the tracker's owner.

    @_alone
    def fits(self, workers: Collection[str], runs: Iterable[TrainedRun]) -> bool:
        """Whether an update may become part of the weights: each of its samples is for its sender to train on.

        Args:
            workers: Names under which its sender takes slices.
            runs: The samples that the update was made of, each once. Those of quarantined slices do not matter.
        """
        for (epoch, index), own in by_slice(runs).items():
            one = self._open(epoch)
            if one is None or index >= len(one.samples):
                return False
            last = 0
            for start, stop in own:
                if not last <= start < stop:
                    return False
                last = stop
            if last > one.samples[index]:
                return False
            if one.states[index] == SliceState.QUARANTINED:
                continue
            own = joined(own)
            if without(own, one.covered(index)) != own:
                return False
            if index in one.holders:
                holder, grant = one.holders[index]
                if grant.begun and holder.name not in workers and without(own, grant.todo) != own:
                    return False
        return True

    @_alone
    def book(self, workers: Collection[str], runs: Iterable[TrainedRun]) -> None:
        """An update that :meth:`fits` is to become part of the weights: its samples are handed out no more."""
        for (epoch, index), own in by_slice(runs).items():
            one = self._epochs[epoch - self.epoch]
            if index in one.holders and one.holders[index][0].name not in workers and not one.holders[index][1].begun:
                self._take_away(one, index)
            one.book(index, own)

    @_alone
    def settle(self, runs: Iterable[TrainedRun], *, merged: bool) -> None:
        """Booked samples are part of the weights, or their worker still has what it made of them, and sends it again.

        Args:
            runs: The samples of an update that was booked.
            merged: Whether they are part of the weights.
        """
        for (epoch, index), own in by_slice(runs).items():
            one = self._open(epoch)
            if one is None:
                continue
            one.settle(index, own, merged=merged)
            if index in one.holders:
                holder, grant = one.holders[index]
                if one.states[index] >= SliceState.USED:
                    self._drop_grant(holder, grant)
                elif not without(grant.todo, one.covered(index)):
                    self._take_away(one, index)  # what is left of the slice is another's, or comes anew
            else:
                one.offer_again(index)
        self._roll()

    @_alone
    def release(self, worker: str) -> bool:
        """Take back the slices of a dead worker; returns whether it was known."""
        record = self._workers.get(worker)
        if record is not None:
            self._remove(record)
        return record is not None

    def held(self, worker: str) -> int:
        """Return the number of slices that a worker holds; 0 for an unknown one."""
        record = self._workers.get(worker)
        return 0 if record is None else len(record.grants)

    @_alone
    def expire(self) -> tuple[str, ...]:
        """Release every worker whose lease is over; returns their names. Each request does this too."""
        now = self._clock()
        if now < self._first_deadline:
            return ()
        names = tuple(name for name, record in self._workers.items() if record.deadline <= now)
        for name in names:
            self.release(name)
        self._first_deadline = min((record.deadline for record in self._workers.values()), default=math.inf)
        return names

    @property
    def epoch(self) -> int:
        """The current epoch, from 0: the first with something left."""
        return self._epochs[0].epoch

    @property
    def over(self) -> bool:
        """Whether nothing is left of the current epoch."""
        return self._epochs[0].unfinished == 0

    @property
    def wanted(self) -> bool:
        """Whether a worker has asked for a slice while others hold all that are left."""
        return self._wanted and not self.over

    @_alone
    def report(self) -> TrackerReport:
        """Return counts of the current epoch."""
        running = self._epochs[0]
        return TrackerReport(
            epoch=running.epoch,
            over=self.over,
            samples=self.catalogue.total_samples,
            trained=running.trained,
            dropped=running.dropped,
            unfinished=running.unfinished,
            quarantined={self.catalogue[index].key: reason for index, reason in self._quarantined.items()},
            workers=len(self._workers),
            returned=running.returned,
            stolen=running.stolen,
            ahead=sum(one.trained for one in self._epochs[1:]),
        )

    @_alone
    def state_dict(self) -> dict[str, Any]:
        """Return all that a restart needs: plain values and tensors, for ``torch.load(weights_only=True)``."""
        return {
            "version": _VERSION,
            "order": msgspec.structs.asdict(self._order),
            "epochs": [msgspec.structs.asdict(one.saved(self._workers.values())) for one in self._epochs],
            "quarantined": dict(self._quarantined),
        }

    @_alone
    def load_state_dict(
        self, state: Mapping[str, Any], *, workers: Iterable[str] | None = None, patience: float = 0.0
    ) -> None:
        """Resume where a state was saved; if nothing was left of the epoch, with the next. All workers join again.

        Args:
            state: From :meth:`state_dict`.
            workers: Workers that will join and continue what their names held; slices of others are available at once.
                With ``None``, each name is awaited for one lease.
            patience: Seconds for which nothing is handed out before all of them have joined: they may hold more by now
                than the state says.

        Raises:
            TrackerStateError: If the state is of other slices or another order, or damaged. Nothing has changed then.
        """
        saved = unpack(state, self._order, self.catalogue.samples)
        # A worker may still have numbers of another life, which must not mean something else in this one.
        self._next_grant, self._next_session = secrets.randbelow(_NUMBERS) + 1, secrets.randbelow(_NUMBERS) + 1
        self._workers, self._sessions = {}, {}
        self._patient_until = self._clock() + patience
        self._quarantined = dict(saved.quarantined)
        self._epochs = [self._begun(found.epoch) for found in saved.epochs]
        for name in saved.epochs[0].workers:
            self._add(name)
        for one, found in zip(self._epochs, saved.epochs, strict=True):
            one.restore(found)
            for name, held in found.workers.items():
                for index, begun in held:
                    self._grant(self._workers[name], one, index).begun = begun
        if workers is not None:
            for name in self._workers.keys() - set(workers):
                self.release(name)
        if self.over:
            self._epochs = [self._begun(self.epoch + 1)]

    # Internal.

    @property
    def _order(self) -> DataOrder:
        return self.catalogue.order(seed=self.options.seed, shuffle=self.options.shuffle)

    def _begun(self, epoch: int) -> EpochSlices:
        return EpochSlices(self.catalogue.samples, self.options, epoch=epoch, left_out=self._quarantined)

    def _epoch_of(self, grant: Grant) -> EpochSlices:
        """Return a grant's epoch, which is open while the slice is held."""
        return self._epochs[grant.epoch - self.epoch]

    def _open(self, epoch: int) -> EpochSlices | None:
        place = epoch - self.epoch
        return self._epochs[place] if 0 <= place < len(self._epochs) else None

    def _claimed(self, record: TrackedWorker, epoch: int, index: int, begun: bool) -> Grant | None:
        """Let a worker that joins again go on with a slice, if that is its own or is left to anybody."""
        one = self._open(epoch)
        if one is None or index >= len(one.samples):
            return None
        if one.take(index):
            grant = self._grant(record, one, index)
        elif index in one.holders and one.holders[index][0] is record:
            grant = one.holders[index][1]
        else:
            return None
        grant.begun, grant.told = begun, True
        return grant

    def _take_away(self, one: EpochSlices, index: int) -> None:
        self._drop_grant(*one.holders[index])
        one.give_back(index)

    def _roll(self) -> None:
        """Go on to the next epoch, if it is open and nothing is left of the current one."""
        while len(self._epochs) > 1 and self.over:
            del self._epochs[0]
            self._wanted = False

    def _add(self, name: str) -> TrackedWorker:
        record = self._workers[name] = TrackedWorker(name, self._clock() + self.options.lease)
        self._first_deadline = min(self._first_deadline, record.deadline)
        return record

    def _renewed(self, session: int) -> TrackedWorker | None:
        record = self._sessions.get(session)
        if record is not None:
            record.deadline = self._clock() + self.options.lease
        return record

    def _choose(self, record: TrackedWorker, asked: Sequence[EpochSlices]) -> tuple[EpochSlices, int] | None:
        """Assign a slice of the first epoch that has one, or one of a worker with more to do.

        Within an epoch: one that the worker has kept, or the next in order.
        """
        for one in asked:
            if not one.available:
                continue
            index = next((kept for kept in record.offers(one.epoch, one.ranks) if one.take(kept)), None)
            if index is None:
                index = one.take_next()
            if index is not None:
                return one, index
        return self._steal(record, asked[-1].epoch)

    def _steal(self, record: TrackedWorker, epoch: int) -> tuple[EpochSlices, int] | None:
        """Take the last slice that a worker has not begun, of this or an earlier epoch; of the one with most to do.

        The taker must still have less to do than that worker, so that no slice goes back and forth.
        """

        def left(worker: TrackedWorker) -> int:
            return sum(int(self._epoch_of(one).samples[one.index]) - one.trained for one in worker.grants.values())

        # A worker that has not joined since a state was loaded is about to continue exactly what it held.
        own, most, found = left(record), 0, None
        for other in self._sessions.values():
            ahead = [grant for grant in other.ahead if grant.epoch <= epoch]
            if other is record or not ahead or (to_do := left(other)) <= most:
                continue
            one = self._epoch_of(ahead[-1])
            if own + int(one.samples[ahead[-1].index]) - ahead[-1].trained < to_do:
                most, found = to_do, (one, other, ahead[-1])
        if found is None:
            return None
        one, victim, grant = found
        self._drop_grant(victim, grant)
        one.stolen += 1
        return one, grant.index

    def _grant(self, record: TrackedWorker, one: EpochSlices, index: int) -> Grant:
        todo = one.todo(index)
        trained = int(one.samples[index]) - samples_of(todo)
        grant = Grant(number=self._next_grant, epoch=one.epoch, index=index, todo=todo, trained=trained)
        self._next_grant += 1
        record.grants[grant.number] = grant
        record.keep(index)
        one.holders[index] = record, grant
        return grant

    def _drop_grant(self, record: TrackedWorker, grant: Grant) -> None:
        del record.grants[grant.number]
        del self._epoch_of(grant).holders[grant.index]

    def _remove(self, record: TrackedWorker) -> None:
        for grant in list(record.grants.values()):
            self._take_away(self._epoch_of(grant), grant.index)
        del self._workers[record.name]
        if record.session is not None:
            del self._sessions[record.session]
        self._roll()

    def _assignment(self, grant: Grant, revoked: tuple[int, ...] = ()) -> Assignment:
        return Assignment(
            grant=grant.number,
            epoch=grant.epoch,
            slice_index=grant.index,
            slice=self.catalogue[grant.index],
            todo=tuple(self._epoch_of(grant).todo(grant.index)),
            revoked=revoked,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackerReport:
    """Counts of the current epoch.

    Attributes:
        epoch: Number of the epoch.
        over: Whether nothing is left of it.
        samples: Samples of all slices.
        trained: Samples known to be trained on, each counted once.
        dropped: Samples that the epoch will not train on, of quarantined slices.
        unfinished: Slices that are neither used nor quarantined.
        quarantined: Reason by key, of all slices that are left out.
        workers: Number of known workers.
        returned: Slices that came back from workers that died or left, since the tracker was made.
        stolen: Slices taken from a worker with more to do that had not begun them, since the tracker was made.
        ahead: Samples of the next epoch that are already trained on.
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


@dataclass(eq=False, slots=True)
class TrackedWorker:
    """A worker, or after a restart of the tracker, its saved grants.

    Attributes:
        deadline: When it counts as dead without a further message, on the tracker's clock.
        session: ``None`` until the worker has joined after a state was loaded.
        grants: Grants by number, in the order in which they were made.
    """

    name: str
    deadline: float
    session: int | None = None
    incarnation: str | None = None
    grants: dict[int, Grant] = field(default_factory=dict)
    prefetch: int = 1
    keeps: int = 0
    _kept: dict[int, None] = field(default_factory=dict)  # the last slices that it was given
    _offers: list[int] = field(default_factory=list)  # slices still to be offered
    _offers_of: int = -1  # their epoch

    @property
    def ahead(self) -> list[Grant]:
        """Grants it has not begun."""
        return [grant for grant in self.grants.values() if not grant.begun]

    def keep(self, index: int) -> None:
        """Record a slice that it is given, which it fetches and keeps."""
        self._kept.pop(index, None)
        self._kept[index] = None
        if len(self._kept) > self.keeps:
            del self._kept[next(iter(self._kept))]

    def offers(self, epoch: int, ranks: npt.NDArray[np.int32]) -> Iterator[int]:
        """Yield slices that it keeps, in the epoch's order; each is offered once an epoch to limit the work."""
        if epoch != self._offers_of:
            self._offers, self._offers_of = sorted(self._kept, key=lambda index: -int(ranks[index])), epoch
        while self._offers:
            yield self._offers.pop()


@dataclass(kw_only=True, slots=True)
class Grant:
    """A slice held by a worker.

    Attributes:
        todo: What it was to train on when it got it.
        trained: Samples of the slice that are trained on, as far as its holder has said.
    """

    number: int
    epoch: int
    index: int
    todo: Runs
    trained: int
    begun: bool = False
    told: bool = False


class EpochSlices:
    """States and order of the slices in an epoch, and what of them is done.

    Slices are named by their index in the catalogue. Samples that count are *done*; those that are in an update on its
    way to the weights are *booked*. An available slice has samples that are neither. At any time ``trained + dropped``
    plus what is not done of AVAILABLE and ASSIGNED slices is the number of all samples.

    Args:
        epoch: Number of the epoch, from 0.

    Attributes:
        trained: Samples that count in this epoch, each once.
        returned: Slices that came back from workers that died or left, since the tracker was made.
        stolen: Slices taken from a worker with more to do that had not begun them, since the tracker was made.
    """

    def __init__(
        self, samples: npt.NDArray[np.int64], options: TrackerOptions, *, epoch: int, left_out: Iterable[int] = ()
    ) -> None:
        self.samples = samples
        self.epoch = epoch
        self._order = slice_order(len(samples), seed=options.seed, epoch=epoch, shuffle=options.shuffle)
        self.ranks: npt.NDArray[np.int32] = np.empty_like(self._order)
        self.ranks[self._order] = np.arange(len(self._order), dtype=np.int32)
        self.states: npt.NDArray[np.uint8] = np.full(len(samples), SliceState.AVAILABLE, np.uint8)
        self.states[list(left_out)] = SliceState.QUARANTINED
        self._done: dict[int, Runs] = {}  # of slices that are done in part; all is done of a used one
        self._booked: dict[int, Runs] = {}
        self._finishing: set[int] = set()  # all is trained on, and not all is done
        self.cursor = 0  # place in the order before which nothing is available
        self.holders: dict[int, tuple[TrackedWorker, Grant]] = {}
        self.returned = self.stolen = 0
        self._count()

    def restore(self, saved: SavedEpoch) -> None:
        """Restore this epoch from checked values."""
        self.states[:] = saved.states.numpy()
        self._done = {index: list(runs) for index, runs in saved.done.items()}
        self._count()

    def _count(self) -> None:
        in_part = {index: samples_of(runs) for index, runs in self._done.items()}
        out = self.states == SliceState.QUARANTINED
        self.trained = int(self.samples[self.states == SliceState.USED].sum()) + sum(in_part.values())
        self.dropped = int(self.samples[out].sum()) - sum(done for index, done in in_part.items() if out[index])
        self.unfinished = int(np.count_nonzero(self.states < SliceState.USED))
        self.available = int(np.count_nonzero(self.states == SliceState.AVAILABLE))

    def saved(self, workers: Iterable[TrackedWorker]) -> SavedEpoch:
        """Return the epoch's saved form, in which nothing is booked."""
        states = self.states.copy()
        states[[index for index in self._finishing if index not in self.holders]] = SliceState.AVAILABLE
        return SavedEpoch(
            epoch=self.epoch,
            states=torch.from_numpy(states),
            done={index: list(runs) for index, runs in self._done.items()},
            workers={
                record.name: [(one.index, one.begun) for one in record.grants.values() if one.epoch == self.epoch]
                for record in workers
            },
        )

    @property
    def untrained(self) -> int:
        """Slices of which something is left to train on."""
        return self.unfinished - len(self._finishing)

    def covered(self, index: int) -> Runs:
        """Return the samples of a slice that are done or booked."""
        if self.states[index] == SliceState.USED:
            return [(0, int(self.samples[index]))]
        return joined([*self._done.get(index, ()), *self._booked.get(index, ())])

    def todo(self, index: int) -> Runs:
        """Return the samples of a slice that are neither."""
        return without([(0, int(self.samples[index]))], self.covered(index))

    def take(self, index: int) -> bool:
        """Assign a slice, if it is available; returns whether it was."""
        if self.states[index] != SliceState.AVAILABLE:
            return False
        self.states[index] = SliceState.ASSIGNED
        self.available -= 1
        return True

    def take_next(self) -> int | None:
        """Assign the next slice in the epoch's order; ``None`` if none is available there."""
        while self.cursor < len(self._order):
            index = int(self._order[self.cursor])
            self.cursor += 1
            if self.take(index):
                return index
        return None

    def train(self, index: int, position: int) -> None:
        """Count an assigned slice up to a position; at its end it is used. An earlier position changes nothing."""
        self._finish(index, [(0, position)] if position else [])

    def note_trained(self, index: int, is_all: bool) -> None:
        """Take note of whether all of an assigned slice is trained on."""
        if is_all:
            self._finishing.add(index)
        else:
            self._finishing.discard(index)

    def book(self, index: int, runs: Runs) -> None:
        """Samples of a slice are in an update on its way; does nothing for a quarantined one."""
        if self.states[index] == SliceState.QUARANTINED:
            return
        self._booked[index] = joined([*self._booked.get(index, ()), *runs])
        if self.states[index] == SliceState.AVAILABLE and not self.todo(index):
            self.take(index)
            self._finishing.add(index)

    def settle(self, index: int, runs: Runs, *, merged: bool) -> None:
        """Booked samples are done, or not booked any more."""
        if index not in self._booked:
            return  # its slice was quarantined before
        self._booked[index] = without(self._booked[index], runs)
        if not self._booked[index]:
            del self._booked[index]
        if merged:
            self._finish(index, runs)

    def offer_again(self, index: int) -> None:
        """Make a slice available that no worker holds, if something of it is left to train on."""
        if self.states[index] == SliceState.ASSIGNED and self.todo(index):
            self._finishing.discard(index)
            self.states[index] = SliceState.AVAILABLE
            self.available += 1
            self.cursor = min(self.cursor, int(self.ranks[index]))

    def give_back(self, index: int) -> None:
        """Take an assigned slice back from its holder."""
        self.returned += 1
        self._finishing.add(index)
        self.offer_again(index)

    def leave_out(self, index: int) -> None:
        """Leave out a quarantined slice; changes nothing if its part in the epoch has ended."""
        if self.states[index] < SliceState.USED:
            self.available -= int(self.states[index] == SliceState.AVAILABLE)
            self._booked.pop(index, None)
            self.dropped += int(self.samples[index]) - samples_of(self._done.get(index, ()))
            self._end(index, SliceState.QUARANTINED)

    def _finish(self, index: int, runs: Runs) -> None:
        before = self._done.get(index, [])
        done = joined([*before, *runs])
        self.trained += samples_of(done) - samples_of(before)
        if done:
            self._done[index] = done
        if done == [(0, self.samples[index])]:
            del self._done[index]
            self._end(index, SliceState.USED)

    def _end(self, index: int, state: SliceState) -> None:
        self._finishing.discard(index)
        self.states[index] = state
        self.unfinished -= 1


class SavedEpoch(msgspec.Struct, kw_only=True):
    """The saved form of an epoch: a byte a slice, and what is done of some.

    Attributes:
        done: Runs of samples by slice, of those that are done in part. Of a used one all is done.
        workers: By name, what each holds of it, in order: the slice, and whether it was begun.
    """

    epoch: Natural
    states: torch.Tensor
    done: dict[Natural, list[tuple[Natural, Natural]]]
    workers: dict[Name, list[tuple[Natural, bool]]]

    def __post_init__(self) -> None:
        self.states = self.states.cpu()


class SavedTracker(msgspec.Struct, kw_only=True):
    """The saved form of a tracker.

    Attributes:
        epochs: The current epoch, and those after it that are open; each names the same workers.
    """

    order: DataOrder
    epochs: Annotated[list[SavedEpoch], msgspec.Meta(min_length=1)]
    quarantined: dict[Natural, str]


def read_state(state: object, kind: type[_Saved], *, version: int, what: str) -> _Saved:
    """Return a saved state, typed and checked.

    Raises:
        TrackerStateError: If it is of another version, or damaged.
    """
    found = state.get("version") if isinstance(state, Mapping) else None
    if not is_whole(found) or found != version:
        raise TrackerStateError(
            f"{what} is of version {found!r}, and this release reads version {version}: "
            "resume with the release that saved it."
        )
    try:
        return msgspec.convert(state, kind, str_keys=True)  # as JSON has them
    except msgspec.ValidationError as error:
        raise TrackerStateError(f"{what} is damaged: {error}.") from error


def unpack(state: Mapping[str, Any], order: DataOrder, samples: npt.NDArray[np.int64]) -> SavedTracker:
    """Return the saved tracker.

    Raises:
        TrackerStateError: If the state does not belong to these slices and this order, or is damaged.
    """
    saved = read_state(state, SavedTracker, version=_VERSION, what="The state")
    difference = order.difference(saved.order)
    if difference is not None:
        raise TrackerStateError(
            f"The state is of other slices or another order: {difference}. Resume on the slices and options it was "
            "saved with, or start anew."
        )
    if any(index >= len(samples) for index in saved.quarantined):
        raise _damaged("quarantined", "names slices that are not there")
    first = saved.epochs[0]
    for place, epoch in enumerate(saved.epochs):
        _require_whole(epoch, samples)
        if epoch.epoch != first.epoch + place or epoch.workers.keys() != first.workers.keys():
            raise _damaged("epochs", "do not follow each other, or name different workers")
    return saved


def _require_whole(saved: SavedEpoch, samples: npt.NDArray[np.int64]) -> None:
    if saved.states.dtype != torch.uint8 or saved.states.shape != samples.shape:
        raise _damaged("states", "is not a column of torch.uint8, one for each slice")
    states = saved.states.numpy()
    if int(states.max()) > max(SliceState):
        raise _damaged("states", "holds a value that is no state")
    for index, runs in saved.done.items():
        if index >= len(samples) or joined(runs) != runs or any(start >= stop for start, stop in runs):
            raise _damaged("done", "has runs that are out of order, or of no slice")
        # a slice that is done whole must be used, and has no runs
        is_used = states[index] == SliceState.USED
        if is_used or samples_of(runs) >= samples[index] or (runs and runs[-1][1] > samples[index]):
            raise _damaged("done", "has a run outside its slice, or all of it")
    held = sorted(index for pairs in saved.workers.values() for index, _ in pairs)
    if held != np.nonzero(states == SliceState.ASSIGNED)[0].tolist():
        raise _damaged("workers", "does not hold each assigned slice once")


def _damaged(name: str, how: str) -> TrackerStateError:
    return TrackerStateError(f"The state is damaged: its {name!r} {how}.")
