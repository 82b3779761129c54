"""The tracker of slices: hands them out, takes them back, and counts each sample of an epoch once.

Guarantees for an epoch, even if workers join, leave or die, and if messages are lost, repeated or late:

- Without deaths, if every worker begins a slice before it trains: each sample is trained on exactly once.
- With deaths: each sample is trained on, except in quarantined slices. What a dead worker trained on beyond its last
  report is trained on twice.

A loaded state takes the epoch back to the moment of saving. The guarantees hold for a training that continues from
there, with weights saved at the same moment.

*With a coordinator* (``counts_merged=True``) a sample counts once its update is part of the weights, and each sample is
in the weights of an epoch exactly once, whichever worker dies. An update names its samples. It is taken only if none of
them is in the weights, in another update, or begun by another worker. Samples of an update that is not taken, or that a
dead worker had not sent, are handed out again. So a slice is its holder's until it is in the weights. A worker's
reports only say how far it is.

No worker idles at an epoch's end: while workers hold the last slices of the current epoch, a worker that asks for the
next epoch gets slices of that one. The guarantees are per epoch and unaffected: each epoch's slices are counted in
separate arrays, and a grant belongs to one epoch. Slices of the current epoch that come back are handed out first, to
the next worker that asks. At most two epochs with samples left to train on are open, so that no slice is more than one
epoch late; if both are handed out, workers wait.

There are no backup tasks: if two workers trained on the same samples, these would be in the weights of both. A slow
worker keeps the slice that it has begun, and a slice that is its only one, while it lives. Slices of workers come back
that the tracker's owner says are dead.

Workers and the tracker exchange *messages*, each one line of JSON: frozen, with plain values, and checked against their
types when they are decoded. The tracker checks that numbers fit its slices.

An epoch's state is arrays of 9 bytes a slice, and runs of samples for each slice that is done in part. The saved form
has plain values and tensors, for ``torch.load(weights_only=True)``, and is checked when it is loaded.
"""

from __future__ import annotations

import math
import secrets
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from functools import wraps
from threading import RLock
from typing import Annotated, Any, Protocol, TypeAlias, TypeVar, cast

import msgspec
import numpy as np
import numpy.typing as npt
import torch

from lightning_bytescheduler.checks import is_whole
from lightning_bytescheduler.exceptions import OptionError, TrackerStateError
from lightning_bytescheduler.slices.catalogue import DataOrder, SliceCatalogue, slice_order
from lightning_bytescheduler.slices.slice import Runs, SliceState, joined, samples_of, without

_MOST_EPOCHS = 2  # from the first with samples left to train on, so that no slice is more than one epoch late
_VERSION = 6
_NUMBERS = 1 << 48  # random first numbers of sessions and grants, so that two lives of a tracker use different ones
_Saved = TypeVar("_Saved")
_Method = TypeVar("_Method", bound=Callable[..., Any])


Name: TypeAlias = Annotated[str, msgspec.Meta(min_length=1)]
Natural: TypeAlias = Annotated[int, msgspec.Meta(ge=0)]
_Positive: TypeAlias = Annotated[int, msgspec.Meta(ge=1)]


class _Message(msgspec.Struct, frozen=True, kw_only=True, tag=True, tag_field="kind", forbid_unknown_fields=True):
    """A message; its kind is the name of its class."""


class TrainedRun(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Neighbouring samples of a slice that were trained on in an epoch."""

    epoch: Natural
    slice_index: Natural
    start: Natural
    stop: _Positive


def touching(runs: Iterable[TrainedRun]) -> tuple[TrainedRun, ...]:
    """Return the same samples in order, and join runs that touch; a repeated sample stays repeated."""
    found: list[TrainedRun] = []
    for run in sorted(runs, key=msgspec.structs.astuple):
        last = found[-1] if found else None
        if last is not None and (last.epoch, last.slice_index, last.stop) == (run.epoch, run.slice_index, run.start):
            found[-1] = TrainedRun(run.epoch, run.slice_index, last.start, run.stop)
        else:
            found.append(run)
    return tuple(found)


def by_slice(runs: Iterable[TrainedRun]) -> dict[tuple[int, int], Runs]:
    """Return where the runs of each slice start and stop, in order, by epoch and slice."""
    found: dict[tuple[int, int], Runs] = {}
    for run in runs:
        found.setdefault((run.epoch, run.slice_index), []).append((run.start, run.stop))
    return {place: sorted(own) for place, own in found.items()}


class HeldSlice(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """A slice that a worker says it holds, and whether it has begun the slice."""

    epoch: Natural
    slice_index: Natural
    begun: bool


class JoinTracker(_Message, frozen=True):
    """A worker joins.

    Attributes:
        worker: Name of the worker, the same after a restart: what it held is kept for that name.
        incarnation: Any text that no other process of that name uses. A process that joins again after ``JoinAgain``
            may repeat its own.
        holds: What it held before, and would go on with.
    """

    worker: Name
    incarnation: Name
    holds: tuple[HeldSlice, ...] = ()


class Assignment(_Message, frozen=True):
    """A slice for the worker, which may fetch it at once and train on it after its first report is accepted.

    Attributes:
        todo: The samples to train on: where each run starts and stops, in order.
        revoked: Grants named in the request that are not the worker's now.
    """

    grant: Natural
    epoch: Natural
    slice_index: Natural
    key: Name
    samples: _Positive
    todo: tuple[tuple[Natural, _Positive], ...]
    revoked: tuple[Natural, ...] = ()


class Joined(_Message, frozen=True):
    """The worker may ask for slices.

    Earlier grants are void. Further slices that the worker is to continue come again as answers to its requests, in
    their old order.

    Attributes:
        run: Identifies the tracker, as another one has other epochs; the same after a restart from a saved state.
        held: Slices that it said it holds and that are still its own, with new grants. Others are done or another's.
    """

    session: Natural
    run: Name
    epoch: Natural
    held: tuple[Assignment, ...] = ()


class RequestSlice(_Message, frozen=True):
    """A worker requests one more slice, one request at a time; a request without an answer may be repeated.

    Attributes:
        epoch: The epoch it trains on; it may be given a slice of an earlier one. The first request for the next epoch
            opens it, if workers hold all that is left of this one.
        holding: Every known grant that is not finished; where merged samples count, that is not in the weights. A
            missing grant that the worker never began is sent again, as the answer must have been lost.
        looks: Only ask about the epoch's state: none is given while another worker holds a slice.
    """

    session: Natural
    epoch: Natural
    holding: tuple[Natural, ...] = ()
    looks: bool = False


class WaitReason(str, Enum):
    """Why there is no slice now.

    Attributes:
        HELD: Other workers hold the rest: ask again, as one may die, or have more to do than this one.
        SOON: The tracker was restarted and waits for other workers to say what they hold: ask again, one may be left.
        EPOCH: The epoch asked for cannot begin yet, as the one two before it is not over.
        MERGING: All of the epoch asked for is trained on, but some is not in the weights yet and may come back.
        OVER: Nothing is left of the epoch asked for, and no worker holds any of it: ask for the next one.
    """

    HELD = "held"
    SOON = "soon"
    EPOCH = "epoch"
    MERGING = "merging"
    OVER = "over"


class AskLater(_Message, frozen=True):
    """No slice now."""

    reason: WaitReason
    revoked: tuple[Natural, ...] = ()


class ReportProgress(_Message, frozen=True):
    """A worker goes on with a slice. ``trained`` of its samples are done, with those that others trained on before.

    The first report comes before the first sample: the worker may train only if the report is accepted. A report with
    all samples ends the slice, unless the tracker counts what is merged. Reports in between may be lost, repeated or
    reordered.
    """

    session: Natural
    grant: Natural
    trained: Natural


class QuarantineSlice(_Message, frozen=True):
    """A slice cannot be read, even when fetched again. May be repeated."""

    session: Natural
    key: Name
    reason: str


class Receipt(_Message, frozen=True):
    """The result of a message that hands nothing out.

    Attributes:
        accepted: Whether the message counted. If not, stop: the slice is not the worker's now, as it is done, was given
            to another worker or is quarantined. Samples that were not reported do not count.
    """

    accepted: bool


class JoinAgain(_Message, frozen=True):
    """The session is over, as its worker was taken for dead or the tracker was restarted. All of its grants are void.

    Any message but a ``JoinTracker`` may get this answer.
    """


Call: TypeAlias = JoinTracker | RequestSlice | ReportProgress | QuarantineSlice
"""Messages of workers."""

Reply: TypeAlias = Joined | Assignment | AskLater | Receipt | JoinAgain
"""Answers of the tracker."""

_DECODER = msgspec.json.Decoder(Call | Reply)


class TrackerClient(Protocol):
    """The workers' view of the tracker, which is in their process, in rank 0's, or in a service."""

    def answer(self, message: Call) -> Reply:
        """Answer a worker without waiting for others. A call may be repeated if its answer was lost.

        Raises:
            Exception: Errors of the transport.
        """


def encode(message: Call | Reply) -> str:
    """Encode a message.

    Raises:
        OptionError: If it cannot be encoded, as with a name that is not valid Unicode.
    """
    try:
        return msgspec.json.encode(message).decode()
    except UnicodeEncodeError as error:
        raise OptionError("message", message, f"one of texts in Unicode ({error}); rename that file") from error


def decode(text: str | bytes) -> Call | Reply:
    """Decode the result of :func:`encode`.

    Raises:
        OptionError: If it is not such a message.
    """
    try:
        message: Call | Reply = _DECODER.decode(text)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise OptionError("message", text, f"a message of the slice tracker ({error})") from error
    return message


def _alone(method: _Method) -> _Method:
    """Run one call at a time. The tracker calls no other code, so its lock may be taken under any other lock."""

    @wraps(method)
    def call(self: SliceTracker, /, *args: Any, **kwargs: Any) -> Any:
        with self._lock:
            return method(self, *args, **kwargs)

    return cast(_Method, call)


class SliceTracker:
    """The tracker: a state machine that never waits. It is a ``TrackerClient``.

    The methods for single kinds of messages are for one thread only; all others are for any thread.

    Who has died is for its owner to say, with :meth:`release`.

    Args:
        catalogue: All slices.
        seed: Seed of the order of slices, from 0 to 2**64 - 1.
        shuffle: False keeps the catalogue's order.
        clock: Returns monotonic seconds, as ``time.monotonic``.
        counts_merged: Whether samples count when :meth:`settle` says that they are in the weights, and not when a
            worker reports them.
    """

    def __init__(
        self,
        catalogue: SliceCatalogue,
        *,
        seed: int = 0,
        shuffle: bool = True,
        clock: Callable[[], float],
        counts_merged: bool = False,
    ) -> None:
        self.catalogue = catalogue
        self._counts_merged = counts_merged
        self._order = catalogue.order(seed=seed, shuffle=shuffle)
        self._clock = clock
        self._run = secrets.token_hex(8)
        self._workers: dict[str, TrackedWorker] = {}
        self._sessions: dict[int, TrackedWorker] = {}  # workers that have joined
        self._patient_until = -math.inf  # waits until then for workers that have not joined since a state was loaded
        self._next_grant = self._next_session = 1
        self._quarantined: dict[int, str] = {}  # reasons; left out of epochs that begin later
        self._epochs = [self._begun(0, ())]  # the current one, and the next if it is open
        self._lock = RLock()
        self._answers: dict[type[Call], Callable[[Any], Reply]] = {
            JoinTracker: self.join,
            RequestSlice: self.request,
            ReportProgress: self.progress,
            QuarantineSlice: self.quarantine,
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
        which must be dead. After a state was loaded, a joining worker continues the slices that its name held.
        """
        record = self._workers.get(message.worker)
        if record is not None and record.session is not None and record.incarnation != message.incarnation:
            self._remove(record)
            record = None
        if record is None:
            record = self._workers[message.worker] = TrackedWorker(message.worker)
        record.incarnation = message.incarnation
        if record.session is None:
            record.session = self._next_session
            self._sessions[record.session] = record
            self._next_session += 1
        claimed = [self._claimed(record, self._open(one.epoch), one) for one in message.holds]
        return Joined(
            session=record.session,
            run=self._run,
            epoch=self._epochs[-1].epoch,
            held=tuple(self._assignment(grant) for grant in claimed if grant is not None),
        )

    def request(self, message: RequestSlice) -> Assignment | AskLater | JoinAgain:
        """Hand out one more slice, or say why there is none.

        Raises:
            OptionError: If all slices are quarantined, so that there will never be one.
        """
        record = self._sessions.get(message.session)
        if record is None:
            return JoinAgain()
        if len(self._quarantined) == len(self.catalogue):  # otherwise epochs would end as soon as they begin
            raise OptionError("train", f"{len(self.catalogue)} slices", "one that can be read: all are quarantined")
        revoked = tuple(number for number in message.holding if number not in record.grants)
        for number, grant in record.grants.items():
            if number in message.holding:
                grant.told = True
            elif self._counts_merged and grant.epoch.todo(grant.index):
                grant.told = False  # its worker does not know it now
        newest = self._epochs[-1]
        first = next((one.epoch for one in self._epochs if one.is_untrained), message.epoch)
        is_next = message.epoch == newest.epoch + 1 and not newest.is_available
        if is_next and message.epoch - first < _MOST_EPOCHS:
            newest = self._begun(message.epoch, self._quarantined)
            self._epochs.append(newest)
            self._roll()
        asked = [one for one in self._epochs if one.epoch <= message.epoch]
        for grant in record.grants.values():
            if not grant.told and grant.epoch.epoch <= message.epoch:
                return self._assignment(grant, revoked)  # the answer was lost, or the grant is from before a restart
        if self._clock() < self._patient_until and any(one.session is None for one in self._workers.values()):
            return AskLater(reason=WaitReason.SOON, revoked=revoked)
        beyond = message.epoch > newest.epoch
        if not beyond and not any(one.is_untrained for one in asked):
            reason = WaitReason.MERGING if any(one.unfinished for one in asked) else WaitReason.OVER
        elif message.looks and any(one.holders for one in asked):
            reason = WaitReason.HELD
        elif (found := self._choose(record, asked)) is not None:
            return self._assignment(self._grant(record, *found), revoked)
        else:
            reason = WaitReason.EPOCH if beyond else WaitReason.HELD
        return AskLater(reason=reason, revoked=revoked)

    def progress(self, message: ReportProgress) -> Receipt | JoinAgain:
        """Count samples as trained, if the slice is the worker's, and say whether it may train on it.

        Raises:
            OptionError: If ``trained`` is not a number of samples of that slice.
        """
        record = self._sessions.get(message.session)
        if record is None:
            return JoinAgain()
        grant, trained = record.grants.get(message.grant), message.trained
        if grant is None:
            return Receipt(accepted=False)
        if not is_whole(trained) or trained > grant.samples:
            raise OptionError("trained", trained, f"from 0 to {grant.samples}, the samples of that slice")
        grant.begun = grant.told = True
        grant.trained = trained if self._counts_merged else max(grant.trained, trained)
        if not self._counts_merged and trained:
            grant.epoch.finish(grant.index, [(0, trained)])
            if trained == grant.samples:
                self._drop(grant)
                self._roll()
        return Receipt(accepted=True)

    def quarantine(self, message: QuarantineSlice) -> Receipt | JoinAgain:
        """Leave a slice out of open and later epochs.

        Raises:
            OptionError: If there is no such slice.
        """
        if message.session not in self._sessions:
            return JoinAgain()
        index = self.catalogue.find(message.key)
        if index is None:
            raise OptionError("key", message.key, "the key of a slice of this catalogue")
        self._quarantined.setdefault(index, message.reason)
        for one in self._epochs:
            if index in one.holders:
                self._drop(one.holders[index])
            one.leave_out(index)
        self._roll()
        return Receipt(accepted=True)

    # Called by the tracker's owner.

    @_alone
    def fits(self, worker: str, runs: Iterable[TrainedRun]) -> bool:
        """Whether an update may become part of the weights: its sender was allowed to train on each sample.

        Args:
            worker: Its sender.
            runs: The update's samples, each once. Those of quarantined slices do not matter.
        """
        for (epoch, index), own in by_slice(runs).items():
            one = self._open(epoch)
            if one is None or index >= len(one.samples) or any(start >= stop for start, stop in own):
                return False
            whole = joined(own)
            if samples_of(whole) < samples_of(own) or whole[-1][1] > one.samples[index]:
                return False
            if one.states[index] == SliceState.QUARANTINED:
                continue
            if without(whole, one.covered(index)) != whole:
                return False
            grant = one.holders.get(index)
            if grant and grant.begun and grant.worker.name != worker and without(whole, grant.todo) != whole:
                return False
        return True

    @_alone
    def book(self, worker: str, runs: Iterable[TrainedRun]) -> None:
        """Book the samples of an update that :meth:`fits` and will be merged, so that they are not handed out."""
        for (epoch, index), own in by_slice(runs).items():
            one = self._epochs[epoch - self.epoch]
            grant = one.holders.get(index)
            if grant is not None and not grant.begun and grant.worker.name != worker:
                self._take_away(grant)
            one.book(index, own)

    @_alone
    def settle(self, runs: Iterable[TrainedRun], *, merged: bool) -> None:
        """Settle booked samples: they are part of the weights, or their worker has to send their update again.

        Args:
            runs: The samples of an update that was booked.
            merged: Whether they are part of the weights.
        """
        for (epoch, index), own in by_slice(runs).items():
            one = self._open(epoch)
            if one is None:
                continue
            one.settle(index, own, merged=merged)
            grant = one.holders.get(index)
            if grant is None:
                one.offer_again(index)
            elif one.states[index] >= SliceState.USED:
                self._drop(grant)
            elif not without(grant.todo, one.covered(index)):
                self._take_away(grant)  # the rest of the slice is another worker's, or is granted anew
        self._roll()

    @_alone
    def release(self, worker: str) -> None:
        """Take back the slices of a worker that is dead or has left. Unknown names are left alone."""
        if (record := self._workers.get(worker)) is not None:
            self._remove(record)

    def held(self, worker: str) -> int:
        """Return the number of slices that a worker holds; 0 while it is awaited after a state was loaded."""
        record = self._workers.get(worker)
        if record is None or (record.session is None and self._clock() < self._patient_until):
            return 0
        return len(record.grants)

    @property
    def epoch(self) -> int:
        """The current epoch, from 0: the first with something left."""
        return self._epochs[0].epoch

    @property
    def over(self) -> bool:
        """Whether nothing is left of the current epoch."""
        return self._epochs[0].unfinished == 0

    @_alone
    def report(self) -> TrackerReport:
        """Return counts of the current epoch."""
        running = self._epochs[0]
        return TrackerReport(
            epoch=running.epoch,
            samples=self.catalogue.total_samples,
            trained=running.trained,
            dropped=running.dropped,
            unfinished=running.unfinished,
            quarantined={self.catalogue[index].key: reason for index, reason in self._quarantined.items()},
            ahead=sum(one.trained for one in self._epochs[1:]),
        )

    @_alone
    def state_dict(self) -> dict[str, Any]:
        """Return all that a restart needs: plain values and tensors, for ``torch.load(weights_only=True)``."""
        return {
            "version": _VERSION,
            "run": self._run,
            "order": msgspec.structs.asdict(self._order),
            "epochs": [msgspec.structs.asdict(one.saved()) for one in self._epochs],
            "workers": {
                record.name: [(one.epoch.epoch, one.index, one.begun) for one in record.grants.values()]
                for record in self._workers.values()
            },
            "quarantined": dict(self._quarantined),
        }

    @_alone
    def load_state_dict(
        self, state: Mapping[str, Any], *, workers: Iterable[str] | None = None, patience: float = 0.0
    ) -> None:
        """Resume where a state was saved, or with the next epoch if none of that one was left. All workers join again.

        Args:
            state: From :meth:`state_dict`.
            workers: Workers that will join and continue what their names held; slices of others are available at once.
                With ``None``, each name is awaited until it is released.
            patience: Seconds for which nothing is handed out until all of them have joined, as they may hold more by
                now than the state says.

        Raises:
            TrackerStateError: If the state is of other slices or another order, or of other types. Nothing has changed
                then.
        """
        saved = read_state(state, SavedTracker, version=_VERSION, what="The state")
        difference = self._order.difference(saved.order)
        if difference is not None:
            raise TrackerStateError(
                f"The state is of other slices or another order: {difference}. Resume on the slices and options it was "
                "saved with, or start anew."
            )
        samples = self.catalogue.samples
        if not all(one.fits(samples) for one in saved.epochs) or any(one >= len(samples) for one in saved.quarantined):
            raise TrackerStateError("The state is damaged. Resume from another one, or start anew.")
        # A worker may still have numbers from the tracker's former life, which must not mean something else now.
        self._next_grant, self._next_session = secrets.randbelow(_NUMBERS) + 1, secrets.randbelow(_NUMBERS) + 1
        self._run, self._sessions, self._quarantined = saved.run, {}, saved.quarantined
        self._patient_until = self._clock() + patience
        self._epochs = [self._begun(found.epoch, saved.quarantined) for found in saved.epochs]
        for one, found in zip(self._epochs, saved.epochs, strict=True):
            one.restore(found)
        self._workers = {name: TrackedWorker(name) for name in saved.workers}
        for name, holds in saved.workers.items():
            for held in holds:
                if (grant := self._claimed(self._workers[name], self._open(held.epoch), held)) is not None:
                    grant.told = False
        if workers is not None:
            for name in self._workers.keys() - set(workers):
                self.release(name)
        if self.over:
            self._epochs = [self._begun(self.epoch + 1, self._quarantined)]

    # Internal.

    def _begun(self, epoch: int, left_out: Iterable[int]) -> EpochSlices:
        return EpochSlices(self.catalogue.samples, self._order, epoch=epoch, left_out=left_out)

    def _open(self, epoch: int) -> EpochSlices | None:
        place = epoch - self.epoch
        return self._epochs[place] if 0 <= place < len(self._epochs) else None

    def _claimed(self, record: TrackedWorker, one: EpochSlices | None, held: HeldSlice) -> Grant | None:
        """Let a worker go on with a slice that is its own or is available."""
        if one is None or held.slice_index >= len(one.samples):
            return None
        grant = one.holders.get(held.slice_index)
        if one.take(held.slice_index):
            grant = self._grant(record, one, held.slice_index)
        if grant is None or grant.worker is not record:
            return None
        grant.begun, grant.told = held.begun, True
        return grant

    def _take_away(self, grant: Grant) -> None:
        self._drop(grant)
        grant.epoch.offer_again(grant.index)

    def _roll(self) -> None:
        """Go on to the next epoch, if it is open and nothing is left of the current one."""
        while len(self._epochs) > 1 and self.over:
            del self._epochs[0]

    def _choose(self, record: TrackedWorker, asked: Sequence[EpochSlices]) -> tuple[EpochSlices, int] | None:
        """Assign the next slice of the first epoch that has one, or one of a worker with more to do."""
        for one in asked:
            if (index := one.take_next()) is not None:
                return one, index
        return self._steal(record, asked[-1].epoch)

    def _steal(self, record: TrackedWorker, epoch: int) -> tuple[EpochSlices, int] | None:
        """Take the last slice that the worker with most to do has not begun, of this or an earlier epoch.

        With it, the taker must still have less to do than that worker, so that no slice goes back and forth.
        """
        most, found = 0, None
        # Not from workers that have not joined since a state was loaded: they will continue exactly what they held.
        for other in self._sessions.values():
            ahead = [grant for grant in other.ahead if grant.epoch.epoch <= epoch]
            if other is not record and ahead and other.left > most and record.left + ahead[-1].left < other.left:
                most, found = other.left, ahead[-1]
        if found is None:
            return None
        self._drop(found)
        return found.epoch, found.index

    def _grant(self, record: TrackedWorker, one: EpochSlices, index: int) -> Grant:
        todo = one.todo(index)
        samples = int(one.samples[index])
        grant = Grant(
            number=self._next_grant,
            worker=record,
            epoch=one,
            index=index,
            samples=samples,
            todo=todo,
            trained=samples - samples_of(todo),
        )
        self._next_grant += 1
        record.grants[grant.number] = one.holders[index] = grant
        return grant

    def _drop(self, grant: Grant) -> None:
        del grant.worker.grants[grant.number]
        del grant.epoch.holders[grant.index]

    def _remove(self, record: TrackedWorker) -> None:
        for grant in list(record.grants.values()):
            self._take_away(grant)
        del self._workers[record.name]
        if record.session is not None:
            del self._sessions[record.session]
        self._roll()

    def _assignment(self, grant: Grant, revoked: tuple[int, ...] = ()) -> Assignment:
        return Assignment(
            grant=grant.number,
            epoch=grant.epoch.epoch,
            slice_index=grant.index,
            key=self.catalogue[grant.index].key,
            samples=grant.samples,
            todo=tuple(grant.epoch.todo(grant.index)),
            revoked=revoked,
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class TrackerReport:
    """Counts of the current epoch.

    Attributes:
        epoch: Number of the epoch.
        samples: Samples of all slices.
        trained: Samples known to be trained on, each counted once.
        dropped: Samples that the epoch will not train on, of quarantined slices.
        unfinished: Slices that are neither used nor quarantined.
        quarantined: Reason by key, of all slices that are left out.
        ahead: Samples of the next epoch that are already trained on.
    """

    epoch: int
    samples: int
    trained: int
    dropped: int
    unfinished: int
    quarantined: dict[str, str]
    ahead: int


@dataclass(eq=False, slots=True)
class TrackedWorker:
    """A worker; after a restart of the tracker, its saved grants.

    Attributes:
        session: ``None`` until the worker joins, after a state was loaded.
        grants: Grants by number, in the order in which they were made.
    """

    name: str
    session: int | None = None
    incarnation: str | None = None
    grants: dict[int, Grant] = field(default_factory=dict)

    @property
    def ahead(self) -> list[Grant]:
        """Grants it has not begun."""
        return [grant for grant in self.grants.values() if not grant.begun]

    @property
    def left(self) -> int:
        """Samples that it still has to train on."""
        return sum(grant.left for grant in self.grants.values())


@dataclass(eq=False, kw_only=True, slots=True)
class Grant:
    """A slice held by a worker.

    Attributes:
        todo: The samples to train on when the grant was made.
        trained: Samples of the slice that are trained on, by its holder's reports.
    """

    number: int
    worker: TrackedWorker
    epoch: EpochSlices
    index: int
    samples: int
    todo: Runs
    trained: int
    begun: bool = False
    told: bool = False

    @property
    def left(self) -> int:
        """Samples of it that its holder still has to train on."""
        return self.samples - self.trained


class EpochSlices:
    """States and order of the slices in an epoch, and their samples that are done.

    Slices are named by their index in the catalogue. Samples that count are *done*; those that are in an update on its
    way to the weights are *booked*. An available slice has samples that are neither; an assigned slice is held, or all
    its samples are booked. At any time, ``trained + dropped`` and the samples of AVAILABLE and ASSIGNED slices that are
    not done add up to all samples.

    Args:
        epoch: Number of the epoch, from 0.
        left_out: Quarantined slices.

    Attributes:
        holders: Grants by slice.
    """

    def __init__(
        self, samples: npt.NDArray[np.int64], order: DataOrder, *, epoch: int, left_out: Iterable[int]
    ) -> None:
        self.samples = samples
        self.epoch = epoch
        self._order = slice_order(len(samples), seed=order.seed, epoch=epoch, shuffle=order.shuffle)
        self.ranks: npt.NDArray[np.int32] = np.empty_like(self._order)
        self.ranks[self._order] = np.arange(len(self._order), dtype=np.int32)
        self.states: npt.NDArray[np.uint8] = np.full(len(samples), SliceState.AVAILABLE, np.uint8)
        self.states[list(left_out)] = SliceState.QUARANTINED
        self._done: dict[int, Runs] = {}  # of slices that are done in part; a used slice is done whole
        self._booked: dict[int, Runs] = {}
        self.cursor = 0  # place in the order before which nothing is available
        self.holders: dict[int, Grant] = {}

    def saved(self) -> SavedEpoch:
        """Return the epoch's saved form, in which nothing is booked."""
        used = torch.from_numpy(self.states == SliceState.USED)
        return SavedEpoch(epoch=self.epoch, used=used, done={index: list(runs) for index, runs in self._done.items()})

    def restore(self, saved: SavedEpoch) -> None:
        """Restore this epoch, which is new."""
        self.states[saved.used.cpu().numpy()] = SliceState.USED
        self._done = saved.done

    @property
    def trained(self) -> int:
        """Samples that count in this epoch, each once."""
        return int(self.samples[self.states == SliceState.USED].sum()) + sum(map(samples_of, self._done.values()))

    @property
    def dropped(self) -> int:
        """Samples of quarantined slices that the epoch will not train on."""
        out = np.flatnonzero(self.states == SliceState.QUARANTINED)
        return int(self.samples[out].sum()) - sum(samples_of(self._done.get(index, ())) for index in out.tolist())

    @property
    def unfinished(self) -> int:
        """Slices that are neither used nor quarantined."""
        return int(np.count_nonzero(self.states < SliceState.USED))

    @property
    def is_available(self) -> bool:
        """Whether a slice is available."""
        return bool((self.states == SliceState.AVAILABLE).any())

    @property
    def is_untrained(self) -> bool:
        """Whether something is left to train on."""
        return self.is_available or any(grant.left for grant in self.holders.values())

    def covered(self, index: int) -> Runs:
        """Return the samples of a slice that are done or booked."""
        if self.states[index] == SliceState.USED:
            return [(0, int(self.samples[index]))]
        return joined([*self._done.get(index, ()), *self._booked.get(index, ())])

    def todo(self, index: int) -> Runs:
        """Return the samples of a slice that are neither done nor booked."""
        return without([(0, int(self.samples[index]))], self.covered(index))

    def take(self, index: int) -> bool:
        """Assign a slice, if it is available; returns whether it was."""
        if self.states[index] != SliceState.AVAILABLE:
            return False
        self.states[index] = SliceState.ASSIGNED
        return True

    def take_next(self) -> int | None:
        """Assign the next slice in the epoch's order; ``None`` if none is available there."""
        while self.cursor < len(self._order):
            index = int(self._order[self.cursor])
            self.cursor += 1
            if self.take(index):
                return index
        return None

    def offer_again(self, index: int) -> None:
        """Make an unheld slice available, if samples of it are left to train on."""
        if self.states[index] == SliceState.ASSIGNED and self.todo(index):
            self.states[index] = SliceState.AVAILABLE
            self.cursor = min(self.cursor, int(self.ranks[index]))

    def book(self, index: int, runs: Runs) -> None:
        """Book samples, which are in an update on its way; does nothing for a quarantined slice."""
        if self.states[index] != SliceState.QUARANTINED:
            self._booked[index] = joined([*self._booked.get(index, ()), *runs])
            if not self.todo(index):
                self.take(index)

    def settle(self, index: int, runs: Runs, *, merged: bool) -> None:
        """Mark booked samples as done, or as not booked."""
        if index in self._booked:  # otherwise its slice was quarantined before
            self._booked[index] = without(self._booked[index], runs)
            if not self._booked[index]:
                del self._booked[index]
            if merged:
                self.finish(index, runs)

    def finish(self, index: int, runs: Runs) -> None:
        """Mark samples as done. Those done before count once; a slice that is done whole becomes used."""
        done = joined([*self._done.pop(index, ()), *runs])
        if done == [(0, self.samples[index])]:
            self.states[index] = SliceState.USED
        else:
            self._done[index] = done

    def leave_out(self, index: int) -> None:
        """Leave out a quarantined slice; does nothing if it is used or left out already."""
        if self.states[index] < SliceState.USED:
            self._booked.pop(index, None)
            self.states[index] = SliceState.QUARANTINED


class SavedEpoch(msgspec.Struct, kw_only=True):
    """The saved form of an epoch: a byte a slice, and the samples done of slices that are done in part.

    Attributes:
        used: Whether all of a slice is done.
        done: Runs of done samples by slice, for slices that are done in part.
    """

    epoch: Natural
    used: torch.Tensor
    done: dict[Natural, list[tuple[Natural, Natural]]]

    def fits(self, samples: npt.NDArray[np.int64]) -> bool:
        """Whether it can be of slices with so many samples each."""
        return (
            self.used.dtype is torch.bool
            and self.used.shape == samples.shape
            and all(index < len(samples) for index in self.done)
            and all(runs == joined(runs) for runs in self.done.values())
            and all(start < stop <= samples[index] for index, runs in self.done.items() for start, stop in runs)
        )


class SavedTracker(msgspec.Struct, kw_only=True):
    """The saved form of a tracker.

    Attributes:
        run: See :class:`Joined`.
        epochs: The current epoch, and those after it that are open.
        workers: By name, what each holds, in order.
    """

    run: Name
    order: DataOrder
    epochs: Annotated[list[SavedEpoch], msgspec.Meta(min_length=1)]
    workers: dict[Name, list[HeldSlice]]
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
