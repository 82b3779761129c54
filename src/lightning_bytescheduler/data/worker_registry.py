"""The workers a tracker knows, by name and by session, and whose lease runs out."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from lightning_bytescheduler.data.worker_record import WorkerRecord

__all__ = ["WorkerRegistry"]


class WorkerRegistry:
    """Workers and their leases.

    Any message renews a worker's lease, so that is an assignment only; the queue of deadlines keeps one entry per
    worker, which is corrected when it comes up.

    Attributes:
        next_session: Number of the next session; none is used twice.
    """

    def __init__(self) -> None:
        self.next_session = 1
        self._by_name: dict[str, WorkerRecord] = {}
        self._by_session: dict[int, WorkerRecord] = {}
        self._deadlines: list[tuple[float, int, WorkerRecord]] = []
        self._entries = 0  # breaks ties between deadlines

    def __len__(self) -> int:
        return len(self._by_name)

    def __iter__(self) -> Iterator[WorkerRecord]:
        return iter(self._by_name.values())

    def named(self, name: str) -> WorkerRecord | None:
        """The worker of a name, joined or not."""
        return self._by_name.get(name)

    def of_session(self, session: int) -> WorkerRecord | None:
        """The worker of a session, or None if that is over."""
        return self._by_session.get(session)

    def add(self, record: WorkerRecord) -> None:
        """Keep a worker whose name is not known, and watch its lease."""
        self._by_name[record.name] = record
        self._watch(record)

    def open_session(self, record: WorkerRecord) -> int:
        """Number of a new session of a worker that has none."""
        record.session = self.next_session
        self._by_session[record.session] = record
        self.next_session += 1
        return record.session

    def remove(self, record: WorkerRecord) -> None:
        """Forget a worker."""
        del self._by_name[record.name]
        if record.session is not None:
            del self._by_session[record.session]

    def expired(self, now: float) -> Iterator[WorkerRecord]:
        """Workers whose lease is over; whoever iterates removes each."""
        while self._deadlines and self._deadlines[0][0] <= now:
            _, _, record = heapq.heappop(self._deadlines)
            if self._by_name.get(record.name) is not record:
                continue  # it was removed before
            if record.deadline > now:
                self._watch(record)
            else:
                yield record

    def _watch(self, record: WorkerRecord) -> None:
        self._entries += 1
        heapq.heappush(self._deadlines, (record.deadline, self._entries, record))
