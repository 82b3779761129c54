"""Makes the status of a run, of what its parts know."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping
from typing import Protocol

import msgspec

from lightning_bytescheduler.__about__ import __version__
from lightning_bytescheduler.coordinator.options import target_in_words
from lightning_bytescheduler.coordinator.run import Run
from lightning_bytescheduler.coordinator.run_status import RoundSummary, RunStatus, WorkerStatus
from lightning_bytescheduler.coordinator.slice_routes import SliceRoutes
from lightning_bytescheduler.diloco.round_record import RoundRecord

__all__ = ["StatusSource", "drawable", "status_of", "summary_of"]

_WORKERS_DRAWN = 40


class StatusSource(Protocol):
    """What is known beside the run's core."""

    slices: SliceRoutes | None
    rounds: deque[RoundSummary]
    timeline: deque[RoundRecord]
    refusals: Callable[[], Mapping[str, int]]

    @property
    def uptime(self) -> float:
        """Seconds since it was started."""

    @property
    def parameters(self) -> int:
        """Numbers that are trained."""

    @property
    def spool_taken(self) -> int:
        """Bytes of updates that are not merged yet."""

    @property
    def saved_round(self) -> int | None:
        """The last round that is saved."""

    def is_connected(self, name: str) -> bool:
        """Whether a worker's WebSocket is open."""


def summary_of(record: RoundRecord, metrics: Mapping[str, float], ended: float) -> RoundSummary:
    """A round, in a line.

    Args:
        record: Of the round.
        metrics: Means over it.
        ended: When, in seconds since the epoch.
    """
    return RoundSummary(
        round=record.round,
        seconds=record.end - record.start,
        ended=ended,
        samples=record.samples,
        merged=len(record.merged),
        workers=len(record.workers),
        deadline=None if record.deadline is None else record.deadline - record.start,
        loss=metrics.get("loss"),
        metrics={name: value for name, value in metrics.items() if name != "loss"},
    )


def drawable(record: RoundRecord) -> RoundRecord:
    """A round with as many of its workers as a page has room for."""
    return msgspec.structs.replace(record, workers=record.workers[:_WORKERS_DRAWN])


def status_of(run: Run, source: StatusSource, *, now: float) -> RunStatus:
    """How a run stands.

    Args:
        run: Its core.
        source: What is known beside it.
        now: In seconds of the run's clock.
    """
    return RunStatus(
        version=__version__,
        uptime=source.uptime,
        round=run.scheduler.round,
        phase=run.phase,
        outer_steps=run.options.run.outer_steps,
        last_round=run.scheduler.last_round,
        target=target_in_words(run.options.run),
        left=max(run.scheduler.left, 0),
        weights_version=run.lineage.version,
        chain=run.lineage.chain,
        parameters=source.parameters,
        samples=run.samples,
        workers=tuple(_worker(run, source, name, now) for name in sorted(member.name for member in run.members)),
        rounds=tuple(source.rounds),
        slices=None if source.slices is None else source.slices.status(),
        counters={**run.counters, **{f"refused_{reason}": count for reason, count in source.refusals().items()}},
        spool_bytes=source.spool_taken,
        saved_round=source.saved_round,
        timeline=tuple(source.timeline),
    )


def _worker(run: Run, source: StatusSource, name: str, now: float) -> WorkerStatus:
    member = run.members.by_name(name)
    progress = run.scheduler.workers.get(name)
    seconds = None if progress is None else progress.step_time.seconds
    batch_size = None if progress is None else progress.step_time.batch_size
    tally = run.tallies.get(name)
    state = "joining" if progress is None else progress.state.value
    return WorkerStatus(
        name=name,
        state="paused" if progress is not None and progress.paused else state,
        connected=source.is_connected(name),
        leads=name == run.leader,
        ranks=1 if member is None else member.ranks,
        steps=0 if progress is None else progress.steps,
        samples=0 if progress is None else progress.samples,
        seconds_per_step=seconds,
        samples_per_second=batch_size / seconds if seconds and batch_size else None,
        heard_ago=0.0 if member is None else max(now - member.heard, 0.0),
        bytes_in=0 if tally is None else tally.bytes_in,
        bytes_out=0 if tally is None else tally.bytes_out,
        merged=0 if tally is None else tally.merged,
        late=0 if tally is None else tally.late,
        slices=0 if source.slices is None else source.slices.held(name),
    )
