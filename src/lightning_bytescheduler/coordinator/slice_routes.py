"""The run's slice tracker, for members only: a member reports for itself, and its slices return when it leaves."""

from __future__ import annotations

import time
from collections.abc import Iterable, Mapping, Sequence

from lightning_bytescheduler.coordinator.membership import Member
from lightning_bytescheduler.diloco.round_end import RoundOptions
from lightning_bytescheduler.diloco.round_roster import WorkerProgress
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.slices.source import open_source
from lightning_bytescheduler.slices.tracker import (
    Call,
    JoinAgain,
    Joined,
    JoinTracker,
    Reply,
    SliceTracker,
    decode,
)


class SliceRoutes:
    """A tracker whose workers are members of the run. For one thread.

    Args:
        urls: URLs of the training data, as ``SliceDataModule(train=...)`` takes them.

    Attributes:
        tracker: Of the slices; it knows members by their names.

    Raises:
        OptionError: If the data cannot be found; names what is wrong with it.
    """

    def __init__(self, urls: Sequence[str]) -> None:
        source = open_source(urls, option="train")
        self.tracker = SliceTracker(source.catalogue, clock=time.monotonic, counts_merged=True)
        self._sessions: dict[str, int] = {}  # of the tracker, by the member's digest

    def answer(self, member: Member, text: str | bytes) -> Reply:
        """Answer a message of a member, which has the same name at the tracker as in the run.

        Raises:
            OptionError: If it is not a message that workers send, or names another worker.
        """
        message = decode(text)
        if not isinstance(message, Call):
            raise OptionError("message", type(message).__name__, "one that workers send")
        if isinstance(message, JoinTracker):
            return self._join(member, message)
        if self._sessions.get(member.digest) != message.session:
            return JoinAgain()
        return self.tracker.answer(message)

    def _join(self, member: Member, message: JoinTracker) -> Joined:
        if message.worker != member.name:
            raise OptionError("worker", message.worker, f"{member.name!r}, the name of this worker")
        joined = self.tracker.join(message)
        self._sessions[member.digest] = joined.session
        return joined

    def release(self, member: Member) -> None:
        """Take back the slices that a member holds."""
        self.tracker.release(member.name)
        self._sessions.pop(member.digest, None)

    def take_back(
        self, members: Iterable[Member], workers: Mapping[str, WorkerProgress], rounds: RoundOptions, now: float
    ) -> None:
        """Give the slices of members that are cut off or stand still to others.

        A connected member may resume at any moment, so it gets twice the time.

        Args:
            members: All members.
            workers: Those of them that take part in rounds, by name.
            rounds: The options that say how long a member may be silent.
            now: In seconds.
        """
        for member in members:
            silent = member.silent
            if not silent and member.name in workers:
                silent = workers[member.name].is_silent(rounds, now - rounds.silent_after)
            if silent and self.tracker.held(member.name):
                self.release(member)
