from __future__ import annotations

import threading


class Part:
    """A sub-task that notes what threads waiting for operations tell it."""

    name = "part"
    size = 4

    def __init__(self, lane: int = 0) -> None:
        self.lane = lane
        self.ended = threading.Event()
        self.error: BaseException | None = None

    def notify_finish(self) -> None:
        self.ended.set()

    def fail(self, error: BaseException) -> None:
        self.error = error
        self.ended.set()
