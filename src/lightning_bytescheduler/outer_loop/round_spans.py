"""What workers that exchange updates with one another did in a round, from what the batch scheduler saw.

A worker that is through before the others can send nothing until they come: to the scheduler it is sending.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

from lightning_bytescheduler.diloco import RoundRecord
from lightning_bytescheduler.diloco.round_record import Activity

__all__ = ["with_common_waiting"]


def with_common_waiting(record: RoundRecord, sent_at: Mapping[str, float]) -> RoundRecord:
    """The same round, in which a worker waits until all are through, and sends only from then on.

    Args:
        record: By the batch scheduler.
        sent_at: When each worker was through, by the same clock.
    """
    last = max(sent_at.values(), default=record.end)
    workers = []
    for worker in record.workers:
        spans: list[tuple[Activity, float, float]] = []
        for activity, start, end in worker.spans:
            if activity == "sending" and start < last:
                spans.append(("waiting", start, min(last, end)))
                start = min(last, end)
            if start < end:
                spans.append((activity, start, end))
        workers.append(replace(worker, spans=tuple(spans)))
    return replace(record, workers=tuple(workers))
