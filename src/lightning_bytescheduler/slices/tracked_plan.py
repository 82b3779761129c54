"""The batches of a worker that takes slices from a tracker as it needs them: what is asked, begun and reported.

What the tracker is promised holds: a slice's begin was accepted before a batch with its first sample is handed out.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from lightning_bytescheduler.checks import require_whole
from lightning_bytescheduler.exceptions import CoordinatorError, OptionError
from lightning_bytescheduler.slices.batches import ReadReport, SampleRun, SliceBatch
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
    ReportProgress,
    RequestSlice,
    TrackerClient,
    Verdict,
    WaitReason,
)
from lightning_bytescheduler.slices.slice import Slice

_T = TypeVar("_T")
_AGAIN = 0.25  # seconds until the tracker is asked again that has nothing for now
_RENEWALS = 4  # in the time of a lease, while there is nothing else to say


@dataclass(eq=False, slots=True)
class _Held:
    """A slice of this worker: what the tracker was told is ``trained``, what readers were given is ``handed``."""

    grant: int
    epoch: int
    slice_index: int
    slice: Slice
    trained: int
    handed: int
    begun: bool = False


class TrackerPlan:
    """The batches of a worker that trains at its own speed. For one thread.

    Asks the tracker for slices one at a time, some ahead of need; begins each before its first sample is handed out,
    and reports what was trained on.

    A pass ends, with a smaller batch if need be, when nothing of its epoch is to be had *for now*: the others may
    hold what is left. The one after it is of the next epoch, which the tracker opens then. So each pass has slices
    of one epoch, and of the epoch before only what has come back from others; no batch has samples of both. None waits
    while a batch that it handed out may be untrained, since that may be what others wait for; so one that has just
    begun waits if the next epoch cannot be opened yet. With ``waits=False`` a pass goes on to no other epoch, and
    whoever has all workers end their epochs together calls ``awaits_others`` and ``end_epoch``.

    Args:
        client: The tracker.
        worker: Name of this worker, the same after a restart.
        incarnation: A text that no other process of that name uses.
        batch_size: Samples of a batch.
        ahead: Slices to hold that are not begun, so that they can be fetched.
        slices: Those of the data, in the tracker's order.
        keeps: How many slices are kept that were fetched.
        waits: Whether a pass that has just begun goes on to the next epoch by itself, or waits for it.
        clock: Seconds that never run backwards.

    Raises:
        OptionError: If the batch size is not allowed; from ``poll``, if the tracker has other slices.

    Attributes:
        batch_size: Samples of the batches from the next one on; may be changed at any time.
        epoch: The epoch of the data that is asked for; batches say theirs.
    """

    def __init__(
        self,
        client: TrackerClient,
        *,
        worker: str,
        incarnation: str,
        batch_size: int,
        ahead: int = 2,
        slices: Sequence[Slice],
        keeps: int = 0,
        waits: bool = True,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self.batch_size = require_whole("batch_size", batch_size, 1)
        self.epoch = 0
        self._client = client
        self._worker, self._incarnation = worker, incarnation
        self._ahead = ahead
        self._slices = slices
        self._keeps = keeps
        self._waits = waits
        self._clock = clock
        self._has_given = False  # in this pass
        self._session: int | None = None
        self._lease = 0.0
        self._heard = 0.0  # when the tracker last heard of this worker
        self._held: dict[int, _Held] = {}
        self._ask_at = 0.0
        self._is_over = False
        self._is_given_out = False  # nothing of this epoch is to be had for now
        self._out: dict[int, list[tuple[int, int]]] = {}  # by number of the batch: grants, and where it leaves them
        self._reached: dict[int, int] = {}  # what was trained on, by grant, and the tracker is not told
        self._handed = self._received = 0

    def begin_pass(self) -> None:
        """What was handed out before is handed out again, as far as nobody has trained on it."""
        self.report()
        self._out.clear()
        self._received = self._handed
        for held in self._held.values():
            held.handed = held.trained
        self._has_given = False
        if self._waits and self._is_given_out and not self._held:
            self._go_on()

    def poll(self) -> SliceBatch | float | None:
        """The next batch; or the seconds after which to ask again; or ``None``, as the pass is over."""
        while (batch := self._next()) is None:
            if self._has_given or not self._waits:
                return None
            if not self._is_given_out:
                return max(self._ask_at - self._clock(), 0.0)
            self._go_on()
        self._has_given = True
        return batch

    # ------------------------------------------------------------------ what the training reports

    def received(self, report: ReadReport) -> None:
        """Readers have answered for the next batch that was handed out."""
        number, self._received = self._received, self._received + 1
        if report.is_empty:  # nobody can train on it
            self._out.pop(number, None)
        if report.corrupt:
            self.quarantine(report.corrupt)

    def quarantine(self, corrupt: Iterable[tuple[str, str]]) -> None:
        """Report slices that readers have found to be corrupt.

        Args:
            corrupt: Key and reason of each.
        """
        self.report()
        for key, reason in corrupt:
            self._drop(held.grant for held in list(self._held.values()) if held.slice.key == key)
            if self._session is not None:
                self._heed(self._tell(QuarantineSlice(session=self._session, key=key, reason=reason)))

    def trained(self) -> None:
        """The first batch that was handed out and not trained on has been; nothing if there is none."""
        number = next(iter(self._out), None)
        if number is not None:
            self._reached.update(self._out.pop(number))

    def report(self) -> None:
        """Tell the tracker what was trained on since the last time: of each slice where the last batch leaves it."""
        reached, self._reached = self._reached, {}
        for grant, trained in reached.items():
            held = self._held.get(grant)
            if held is None or self._session is None:
                continue  # taken away in the meantime
            held.trained = trained
            if trained == held.slice.samples:
                del self._held[grant]
                self._heed(self._tell(FinishSlice(session=self._session, grant=grant)))
            else:
                progress = ReportProgress(session=self._session, grant=grant, trained=trained)
                self._heed(self._tell(progress), grant)

    def keep_alive(self) -> None:
        """Renew the lease, if nothing was said for a good part of it; for when nothing is trained, as in validation."""
        if self._session is not None and self._clock() - self._heard > self._lease / _RENEWALS:
            self._heed(self._tell(RenewLease(session=self._session)))

    def awaits_others(self) -> bool:
        """Whether other workers hold all that is left of the epoch, so that there is nothing to train on here."""
        return not self._look() and not self._held

    def end_epoch(self) -> None:
        """Go on to the next epoch, if nothing is left of this one."""
        if self._look():
            self._go_on()

    def leave(self) -> None:
        """Give back what is held, where it stands. A pass after this joins again."""
        self.report()
        if self._session is not None:
            session, self._session = self._session, None
            self._forget()
            self._client.answer(LeaveTracker(session=session))

    # ------------------------------------------------------------------ inside

    def _next(self) -> SliceBatch | None:
        runs: list[SampleRun] = []
        parts: list[tuple[int, int]] = []
        missing = self.batch_size
        session, epoch = None, self.epoch
        while missing and (held := self._current()) is not None:
            if runs and (self._session != session or held.epoch != epoch):
                break  # another epoch, or joined again
            session, epoch = self._session, held.epoch
            taken = min(missing, held.slice.samples - held.handed)
            runs.append(SampleRun(slice_index=held.slice_index, start=held.handed, stop=held.handed + taken))
            held.handed += taken
            parts.append((held.grant, held.handed))
            missing -= taken
        if not runs:
            return None
        while len(self._waiting()) < self._ahead and self._clock() >= self._ask_at and self._ask():
            pass
        self._out[self._handed] = parts
        self._handed += 1
        return SliceBatch(epoch, tuple(runs), tuple(held.slice_index for held in self._waiting()))

    def _current(self) -> _Held | None:
        """A slice with samples to hand out, begun; None if there is none for now."""
        while True:
            # What others may wait for comes first: a slice that came back from them is of the epoch before.
            for held in sorted(self._held.values(), key=lambda held: (not held.begun, held.epoch)):
                if held.grant in self._held and held.handed < held.slice.samples and self._begin(held):
                    return held
            if not self._ask():
                return None

    def _waiting(self) -> list[_Held]:
        return [held for held in sorted(self._held.values(), key=lambda held: held.epoch) if not held.begun]

    def _begin(self, held: _Held) -> bool:
        if not held.begun and self._session is not None:
            receipt = self._tell(BeginSlice(session=self._session, grant=held.grant))
            self._heed(receipt, held.grant)
            held.begun = receipt.accepted
        return held.begun

    def _look(self) -> bool:
        """Ask whether the epoch is over, and be given a slice only if nobody holds one."""
        self.report()
        while not self._held and self._ask(looks=True):
            pass
        return self._is_over

    def _go_on(self) -> None:
        self.epoch += 1
        self._is_over = self._is_given_out = False
        self._ask_at = 0.0

    def _ask(self, *, looks: bool = False) -> bool:
        """Ask for one more slice; whether there is something new to look at."""
        session = self._session
        if session is None:
            session = self._join()
        elif self._is_over:
            return False
        request = RequestSlice(session=session, epoch=self.epoch, holding=tuple(self._held), looks=looks)
        answer = cast(Answer, self._call(request, Assignment, AskLater, EpochOver, JoinAgain))
        self._heard = self._clock()
        if isinstance(answer, JoinAgain):
            self._session = None
            self._forget()
            return True
        self._drop(answer.revoked)
        if isinstance(answer, Assignment):
            self._require_same_slice(answer)
            first = answer.first
            held = _Held(answer.grant, answer.epoch, answer.slice_index, answer.slice, trained=first, handed=first)
            self._held[held.grant] = held
            self._is_given_out = False
            return True
        if isinstance(answer, EpochOver):
            self._is_over = self._is_given_out = True
        else:
            self._is_given_out = answer.reason is WaitReason.HELD
            self._ask_at = self._clock() + _AGAIN
        return False

    def _join(self) -> int:
        join = JoinTracker(
            worker=self._worker,
            incarnation=self._incarnation,
            keeps=self._keeps,
            prefetch=max(self._ahead, 1),
        )
        joined = self._call(join, Joined)
        self._session, self._lease, self._heard = joined.session, joined.lease, self._clock()
        self.epoch, self._is_over, self._is_given_out, self._ask_at = joined.epoch, False, False, 0.0
        return joined.session

    def _require_same_slice(self, answer: Assignment) -> None:
        index = answer.slice_index
        here = self._slices[index].key if index < len(self._slices) else None
        if here != answer.slice.key:
            raise OptionError(
                "slices", here, f"the tracker's at every worker, where slice {index} is {answer.slice.key!r}"
            )

    def _tell(self, message: Call) -> Receipt:
        return self._call(message, Receipt)

    def _call(self, message: Call, *kinds: type[_T]) -> _T:
        reply = self._client.answer(message)
        if not isinstance(reply, kinds):
            raise CoordinatorError(f"The tracker answers {type(reply).__name__} to {type(message).__name__}.")
        return reply

    def _heed(self, receipt: Receipt, grant: int | None = None) -> None:
        self._heard = self._clock()
        if receipt.verdict is Verdict.JOIN_AGAIN:
            self._session = None
            self._forget()
        elif grant is not None and not receipt.accepted:
            self._drop((grant,))

    def _drop(self, grants: Iterable[int]) -> None:
        for grant in grants:
            self._held.pop(grant, None)

    def _forget(self) -> None:
        self._held.clear()
        self._out = {number: [] for number in self._out}  # still to come from readers, and nothing to report about
