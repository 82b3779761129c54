"""How a run stands, for people and for programs: the source of the status page, of the metrics and of ``/v1/status``.

It has plain values only and no secrets: no token, no session, no address of a worker.
"""

from __future__ import annotations

import msgspec

from lightning_bytescheduler.diloco.round_record import RoundRecord
from lightning_bytescheduler.slices.tracker import TrackerReport


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker.

    Attributes:
        name: Its name in this run.
        state: ``"waiting"``, ``"starting"``, ``"training"``, ``"sending"``, ``"arrived"``, ``"lost"``, ``"paused"``, or
            ``"joining"`` before it takes part in rounds.
        connected: Whether its WebSocket is open.
        leads: Whether it validates, logs and saves for all.
        ranks: Number of ranks that train together as this worker.
        steps: Steps taken in this round.
        samples: Samples processed in this round.
        samples_per_second: Estimate, or ``None`` before it has taken enough steps.
        heard_ago: Seconds since it was last heard of.
        bytes_in: Bytes of updates received from it so far.
        bytes_out: Bytes of means and states sent to it so far.
        merged: Rounds that its updates were part of.
        late: Updates that came too late for their round.
        slices: Slices of data that it holds.
    """

    name: str
    state: str
    connected: bool
    leads: bool = False
    ranks: int = 1
    steps: int = 0
    samples: int = 0
    samples_per_second: float | None = None
    heard_ago: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    merged: int = 0
    late: int = 0
    slices: int = 0


class RoundSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A round that has ended.

    Attributes:
        round: Its number.
        seconds: Seconds from its start until its updates were merged.
        ended: When it ended, in seconds since the epoch (1970).
        samples: Samples that were merged.
        merged: Workers whose updates were merged.
        workers: Workers that took part.
        live: Workers that were connected when it was merged, or are part of it.
        participation: Share of these whose updates are part of it; 0 in a round without a quorum.
        loss: Mean over the round; ``None`` if no worker reports one.
    """

    round: int
    seconds: float
    ended: float
    samples: int
    merged: int
    workers: int
    live: int = 0
    participation: float = 0.0
    loss: float | None = None


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How a run stands.

    Attributes:
        version: Version of this package.
        uptime: Seconds since this coordinator was started.
        round: The current round; 0 before the first.
        phase: ``"waiting"`` (for weights or workers), ``"training"``, ``"collecting"``, ``"merging"`` or
            ``"finished"``.
        last_round: The round that ends the run, or ``None``: ``outer_steps``, plus one for each fragment but the first.
        target: What ends a round, in words.
        left: What remains of this round, in the target's unit.
        weights_version: Rounds that are part of the weights.
        parameters: Number of trained elements; 0 before the first worker.
        samples: Samples that have become part of the weights.
        workers: All known workers, by name.
        rounds: The last rounds, oldest first.
        slices: Progress of the running epoch of the data; ``None`` where workers bring their own data.
        counters: Events since the start, by name: ``joined``, ``rejoined``, ``left``, ``silent``, ``expired``,
            ``refused_hellos``, ``wrong_frames``, ``slow_downs``, ``updates_added``, ``updates_late``,
            ``updates_dropped``, ``updates_refused``, ``updates_broken``, ``updates_again``, ``rounds``,
            ``empty_rounds``, ``bytes_in``, ``bytes_out``, and ``refused_REASON`` as ``serving.Refusals`` counts refused
            requests.
        spool_bytes: Bytes of updates that are not added yet.
        saved_round: The last round that is part of a saved state, or ``None``.
        timeline: What workers did in the last few rounds, oldest first; a part of the workers if there are many.
    """

    version: str
    uptime: float
    round: int
    phase: str
    last_round: int | None
    target: str
    left: int
    weights_version: int
    parameters: int
    samples: int
    workers: tuple[WorkerStatus, ...]
    rounds: tuple[RoundSummary, ...]
    slices: TrackerReport | None
    counters: dict[str, int]
    spool_bytes: int = 0
    saved_round: int | None = None
    timeline: tuple[RoundRecord, ...] = ()


def summary_of(record: RoundRecord, ended: float, *, live: int) -> RoundSummary:
    """The summary of a round.

    Args:
        record: The round's record.
        ended: When it ended, in seconds since the epoch.
        live: Workers that were there when it was merged.
    """
    return RoundSummary(
        round=record.round,
        seconds=record.end - record.start,
        ended=ended,
        samples=record.samples,
        merged=len(record.merged),
        workers=len(record.workers),
        live=live,
        participation=len(record.merged) / max(live, 1),
        loss=record.metrics.get("loss"),
    )
