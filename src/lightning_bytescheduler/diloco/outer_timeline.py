"""The timeline of a worker's rounds: what its training thread did, and what was sent and received beside it.

The training thread has a lane in which it takes steps, waits, takes outer steps, or stands still. What is encoded and
decoded for the network has another, and what travels a third, in two directions: *push* is a worker's own
pseudo-gradient, *pull* is the mean. It is written as ``timeline/`` has it, and costs nothing where none is asked for.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from lightning_bytescheduler.timeline.timeline import CODEC, COMMUNICATION, INNER, QUEUE, STEP, STILL, WAIT, Timeline

_TRAINING = "training thread"
_UNSUITABLE = re.compile(r"[^\w.-]+")


def beside(path: str | os.PathLike[str], name: str) -> str:
    """A file beside ``path`` with ``name`` before its suffix."""
    chosen = Path(path)
    return str(chosen.with_name(f"{chosen.stem}.{_UNSUITABLE.sub('_', name)}{chosen.suffix}"))


class OuterTimeline:
    """Records one worker's rounds. :meth:`trained`, :meth:`stood` and :meth:`doing` are the training thread's.

    Args:
        path: Of the file; ``None`` records nothing.
        rank: The global rank, see ``Timeline``.
        worker: Whose it is.

    Raises:
        OSError: If the file cannot be written; the message names it.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, rank: int = 0, worker: str = "") -> None:
        self._timeline = None if path is None else Timeline(path, rank=rank)
        self._worker = worker
        self._free = time.perf_counter()  # end of what the training thread did last
        self._round = 0

    @staticmethod
    def now() -> float:
        """The time, in seconds of the clock that all spans are in."""
        return time.perf_counter()

    def trained(self, round: int) -> None:
        """A step of the training ends now; it began when the thread was through with what it did before."""
        self._round = round
        self._until_now("inner step", INNER)

    def stood(self, name: str) -> None:
        """Something that is no training ends now, such as a validation."""
        self._until_now(name, STILL)

    @contextmanager
    def doing(self, name: str, category: str = STEP) -> Iterator[None]:
        """Do something on the training thread."""
        start = self.now()
        try:
            yield
        finally:
            self._on_training(name, category, start)

    def waiting(self, name: str, start: float) -> None:
        """The training thread has waited since ``start``, until now."""
        self._on_training(name, WAIT, start)

    def queued(self, name: str, start: float, end: float, *, part: int) -> None:
        """A part waited for its turn."""
        if self._timeline is not None:
            args = {"round": self._round, "partition": part}
            self._timeline.overlapping(name, QUEUE, start, end, lane="QUEUE", args=args)

    def travelled(self, name: str, start: float, end: float, *, fragment: str, part: int, nbytes: float) -> None:
        """Something was on the network.

        Args:
            name: ``"push"`` or ``"pull"``.
            start: When it began.
            end: When it was there.
            fragment: Of which fragment.
            part: Which part of it.
            nbytes: Bytes that this worker sent and received for it.
        """
        if self._timeline is not None:
            args = {"bytes": round(nbytes), "round": self._round, "task": fragment, "partition": part}
            self._timeline.overlapping(name, COMMUNICATION, start, end, lane="COMMUNICATION", args=args)

    def coded(self, name: str, start: float, *, lane: str, part: int = 0) -> None:
        """Something was encoded, added up or decoded until now; the spans of a lane are of one thread."""
        if self._timeline is not None:
            args = {"round": self._round, "partition": part}
            self._timeline.span(name, CODEC, start, self.now(), lane=lane, args=args)

    def close(self) -> None:
        """Write the file to its end."""
        if self._timeline is not None:
            self._timeline.close()

    def _until_now(self, name: str, category: str) -> None:
        self._on_training(name, category, self._free)

    def _on_training(self, name: str, category: str, start: float) -> None:
        end = self._free = self.now()
        if self._timeline is not None:
            args = {"round": self._round, "worker": self._worker}
            self._timeline.span(name, category, start, end, lane=_TRAINING, args=args)
