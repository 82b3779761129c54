"""The tracker as its workers call it, whether it is in their process, in rank 0's, or in a service."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping
from threading import Lock
from typing import Any, Protocol, TypeVar, cast

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
)
from lightning_bytescheduler.slices.tracker import SliceTracker, TrackerReport

__all__ = ["LocalTracker", "RemoteTracker", "TrackerClient", "calls_of"]

_T = TypeVar("_T")


class TrackerClient(Protocol):
    """The tracker as its workers see it. Every call may be repeated when its answer was lost.

    Any call can raise what its transport raises; none waits for other workers.
    """

    def join(self, message: JoinTracker) -> Joined:
        """Make the worker known, or known again."""

    def request(self, message: RequestSlice) -> Answer:
        """Ask for one more slice."""

    def begin(self, message: BeginSlice) -> Receipt:
        """Ask whether an assigned slice is still the worker's, before its first sample is trained on."""

    def progress(self, message: ReportProgress) -> Receipt:
        """Report what was trained on; the answer need not be waited for."""

    def done(self, message: FinishSlice) -> Receipt:
        """Report a slice as trained on; the answer need not be waited for."""

    def quarantine(self, message: QuarantineSlice) -> Receipt:
        """Report a slice that cannot be read."""

    def renew(self, message: RenewLease) -> Receipt:
        """Keep the lease while nothing else is to be said, as in validation."""

    def leave(self, message: LeaveTracker) -> Receipt:
        """Give back what is held, exactly where it stands."""


def calls_of(tracker: TrackerClient) -> Mapping[type[Call], Callable[[Any], Reply]]:
    """What answers each kind of message that workers send."""
    return {
        JoinTracker: tracker.join,
        RequestSlice: tracker.request,
        BeginSlice: tracker.begin,
        ReportProgress: tracker.progress,
        FinishSlice: tracker.done,
        QuarantineSlice: tracker.quarantine,
        RenewLease: tracker.renew,
        LeaveTracker: tracker.leave,
    }


class RemoteTracker(ABC):
    """A ``TrackerClient`` whose calls travel, each in the same way."""

    def join(self, message: JoinTracker) -> Joined:
        """See :class:`TrackerClient`."""
        return self._ask(message, (Joined,))

    def request(self, message: RequestSlice) -> Answer:
        """See :class:`TrackerClient`."""
        return cast(Answer, self._ask(message, (Assignment, AskLater, EpochOver, JoinAgain)))

    def begin(self, message: BeginSlice) -> Receipt:
        """See :class:`TrackerClient`."""
        return self._tell(message)

    def progress(self, message: ReportProgress) -> Receipt:
        """See :class:`TrackerClient`."""
        return self._tell(message)

    def done(self, message: FinishSlice) -> Receipt:
        """See :class:`TrackerClient`."""
        return self._tell(message)

    def quarantine(self, message: QuarantineSlice) -> Receipt:
        """See :class:`TrackerClient`."""
        return self._tell(message)

    def renew(self, message: RenewLease) -> Receipt:
        """See :class:`TrackerClient`."""
        return self._tell(message)

    def leave(self, message: LeaveTracker) -> Receipt:
        """See :class:`TrackerClient`."""
        return self._tell(message)

    def _tell(self, message: Call) -> Receipt:
        return self._ask(message, (Receipt,))

    @abstractmethod
    def _ask(self, message: Call, kinds: tuple[type[_T], ...]) -> _T:
        """Call, and wait for an answer of one of these kinds."""


class LocalTracker:
    """A ``TrackerClient`` for workers in this process, and what a server of other processes' messages calls.

    One lock, held for one call; nothing is called back with it held, so it can be taken while holding any other.

    Args:
        tracker: Not to be called in any other way from now on.
    """

    def __init__(self, tracker: SliceTracker) -> None:
        self._tracker = tracker
        self._lock = Lock()

    def join(self, message: JoinTracker) -> Joined:
        """See :class:`TrackerClient`."""
        with self._lock:
            return self._tracker.join(message)

    def request(self, message: RequestSlice) -> Answer:
        """See :class:`TrackerClient`."""
        with self._lock:
            return self._tracker.request(message)

    def begin(self, message: BeginSlice) -> Receipt:
        """See :class:`TrackerClient`."""
        with self._lock:
            return self._tracker.begin(message)

    def progress(self, message: ReportProgress) -> Receipt:
        """See :class:`TrackerClient`."""
        with self._lock:
            return self._tracker.progress(message)

    def done(self, message: FinishSlice) -> Receipt:
        """See :class:`TrackerClient`."""
        with self._lock:
            return self._tracker.done(message)

    def quarantine(self, message: QuarantineSlice) -> Receipt:
        """See :class:`TrackerClient`."""
        with self._lock:
            return self._tracker.quarantine(message)

    def renew(self, message: RenewLease) -> Receipt:
        """See :class:`TrackerClient`."""
        with self._lock:
            return self._tracker.renew(message)

    def leave(self, message: LeaveTracker) -> Receipt:
        """See :class:`TrackerClient`."""
        with self._lock:
            return self._tracker.leave(message)

    def release(self, worker: str) -> bool:
        """See :meth:`SliceTracker.release`."""
        with self._lock:
            return self._tracker.release(worker)

    def expire(self) -> tuple[str, ...]:
        """See :meth:`SliceTracker.expire`."""
        with self._lock:
            return self._tracker.expire()

    def start_epoch(self, epoch: int, *, abandon: bool = False) -> bool:
        """See :meth:`SliceTracker.start_epoch`."""
        with self._lock:
            return self._tracker.start_epoch(epoch, abandon=abandon)

    def report(self) -> TrackerReport:
        """See :meth:`SliceTracker.report`."""
        with self._lock:
            return self._tracker.report()

    def state_dict(self) -> dict[str, Any]:
        """See :meth:`SliceTracker.state_dict`."""
        with self._lock:
            return self._tracker.state_dict()

    def load_state_dict(self, state: Mapping[str, Any], *, workers: Iterable[str] | None = None) -> None:
        """See :meth:`SliceTracker.load_state_dict`."""
        with self._lock:
            self._tracker.load_state_dict(state, workers=workers)
