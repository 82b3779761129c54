"""The stages that a part goes through by way of a parameter server, for timelines."""

from __future__ import annotations

import time
from collections.abc import Iterator

__all__ = ["NodePassage", "Passage"]


class Passage:
    """Of a part by way of a parameter server: which stages it went through, and when; in seconds of the core's clock.

    Args:
        server: Who adds it up.
        pushed: Bytes that go there; 0 where the server is in this process.
        pulled: Bytes that come back, at most.

    Attributes:
        server: As given.
        pushed: As given.
        pulled: Bytes that have come back.
        push: From when to when the part was on its way; nothing if it was not.
        began: When a sum that is formed in this process was begun.
        came: When the sum was there; 0 where nothing was done after that.
    """

    __slots__ = ("began", "came", "pulled", "push", "pushed", "server")

    def __init__(self, server: int, *, pushed: int, pulled: int) -> None:
        self.server = server
        self.pushed = pushed
        self.pulled = pulled
        self.push: tuple[float, float] | None = None
        self.began = time.perf_counter()
        self.came = 0.0

    @property
    def where(self) -> dict[str, int]:
        """Who has it elsewhere, for timelines."""
        return {"server": self.server}

    def sent(self, start: float, end: float) -> None:
        """The push has left, from ``start`` to ``end``."""
        self.push = start, end

    def stages(self, finished: float) -> Iterator[tuple[str, float, float, int]]:
        """(name, start, end, bytes) of each; for a part that was there at ``finished``.

        A pull begins when the push has left, and so has in it what the server waits for other workers.
        """
        came = self.came or finished
        if not self.pushed:
            yield "sum", self.began, came, 0
            return
        start, end = self.push or (self.began, came)
        end = min(end, came)  # who sends may be told later than who receives
        yield "push", min(start, end), end, self.pushed
        yield "pull", end, came, self.pulled


class NodePassage(Passage):
    """Of a part that the ranks of a node add up before one of them, the pusher, pushes the sum.

    Args:
        moved: Bytes that travel within the node before the push; and after the pull, if nothing else is said.
        server: See :class:`Passage`; of the pusher.
        pushed: See :class:`Passage`; of the pusher.
        pulled: See :class:`Passage`; of the pusher.
        pusher: Who that is, on the other ranks.

    Attributes:
        reduced: When the node's sum was there; on a rank that does not push, when its own part had left.
        returned: Bytes that travel within the node after the pull.
    """

    __slots__ = ("_moved", "_pusher", "reduced", "returned")

    def __init__(
        self, *, moved: int, server: int = -1, pushed: int = 0, pulled: int = 0, pusher: int | None = None
    ) -> None:
        super().__init__(server, pushed=pushed, pulled=pulled)
        self._moved = self.returned = moved
        self._pusher = pusher
        self.reduced = 0.0

    @property
    def where(self) -> dict[str, int]:
        """See :class:`Passage`."""
        return super().where if self._pusher is None else {"pusher": self._pusher}

    def stages(self, finished: float) -> Iterator[tuple[str, float, float, int]]:
        """See :class:`Passage`. A broadcast begins, where nothing is pushed, when the own part has left."""
        reduced = min(self.reduced or self.began, finished)
        yield "local reduce", self.began, reduced, self._moved
        if self._pusher is None:
            self.began = reduced
            yield from super().stages(finished)
        yield "local broadcast", (self.came or finished) if self._pusher is None else reduced, finished, self.returned
