from __future__ import annotations

import threading


class Part:
    """What threads that wait for operations tell a sub-task."""

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
