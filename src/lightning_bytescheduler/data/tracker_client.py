"""What a worker calls, whether the tracker is in its process, in rank 0's, or in a service."""

from __future__ import annotations

from typing import Protocol

from lightning_bytescheduler.data.tracker_messages import (
    Answer,
    Begin,
    Done,
    Join,
    Joined,
    Leave,
    Progress,
    Quarantine,
    Receipt,
    Renew,
    Request,
)

__all__ = ["TrackerClient"]


class TrackerClient(Protocol):
    """The tracker as its workers see it. Every call may be repeated when its answer was lost.

    Any call can raise what its transport raises; none waits for other workers.
    """

    def join(self, message: Join) -> Joined:
        """Make the worker known, or known again."""

    def request(self, message: Request) -> Answer:
        """Ask for one more slice."""

    def begin(self, message: Begin) -> Receipt:
        """Ask whether an assigned slice is still the worker's, before its first sample is trained on."""

    def progress(self, message: Progress) -> Receipt:
        """Report what was trained on; the answer need not be waited for."""

    def done(self, message: Done) -> Receipt:
        """Report a slice as trained on; the answer need not be waited for."""

    def quarantine(self, message: Quarantine) -> Receipt:
        """Report a slice that cannot be read."""

    def renew(self, message: Renew) -> Receipt:
        """Keep the lease while nothing else is to be said, as in validation."""

    def leave(self, message: Leave) -> Receipt:
        """Give back what is held, exactly where it stands."""
