"""How a run stands, for people and for programs: what the status page, the live table and the metrics show.

Plain values only, and no secrets: no token, no session, no address of a worker.
"""

from __future__ import annotations

from collections.abc import Mapping

import msgspec

from lightning_bytescheduler.diloco.round_record import RoundRecord


class WorkerStatus(msgspec.Struct, frozen=True, kw_only=True):
    """One worker.

    Attributes:
        name: In this run.
        state: ``"waiting"``, ``"starting"``, ``"training"``, ``"sending"``, ``"arrived"``, ``"lost"``, ``"paused"``, or
            ``"joining"`` before it takes part in rounds.
        connected: Whether its WebSocket is open.
        leads: Whether it validates, logs and saves for all.
        ranks: That train together as this worker.
        steps: Taken in this round.
        samples: Processed in this round.
        seconds_per_step: Estimate, or ``None`` before it has taken enough.
        samples_per_second: Estimate, or ``None``.
        heard_ago: Seconds since it was last heard of.
        bytes_in: Of its updates so far.
        bytes_out: Of means and states that it was sent so far.
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
    seconds_per_step: float | None = None
    samples_per_second: float | None = None
    heard_ago: float = 0.0
    bytes_in: int = 0
    bytes_out: int = 0
    merged: int = 0
    late: int = 0
    slices: int = 0


class SliceStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How far the running epoch of the data is; see ``TrackerReport``.

    Attributes:
        epoch: From 0.
        samples: Of all slices.
        trained: Samples known to be trained on.
        dropped: Samples that the epoch will not train on.
        unfinished: Slices that are neither used nor left out.
        quarantined: Slices that are left out, as they cannot be read.
        returned: Slices that came back from workers that died or left.
        stolen: Slices taken from a slower worker that had not begun them.
        ahead: Samples of the next epoch that are trained on already, while the last slices of this one are held.
    """

    epoch: int
    samples: int
    trained: int
    dropped: int
    unfinished: int
    quarantined: int
    returned: int
    stolen: int
    ahead: int = 0


class RoundSummary(msgspec.Struct, frozen=True, kw_only=True):
    """A round that has ended.

    Attributes:
        round: Its number.
        seconds: That it took, from its start until its updates were merged.
        ended: When, in seconds since the epoch (1970).
        samples: That were merged.
        merged: Workers whose updates were.
        workers: That took part.
        deadline: Seconds from its start until it would have ended whoever was missing, or ``None`` where nobody was
            waited for.
        loss: Mean over the round, or ``None`` where nobody reports one.
        metrics: Other means over the round, by name.
    """

    round: int
    seconds: float
    ended: float
    samples: int
    merged: int
    workers: int
    deadline: float | None = None
    loss: float | None = None
    metrics: dict[str, float] = {}


class RunStatus(msgspec.Struct, frozen=True, kw_only=True):
    """How a run stands.

    Attributes:
        version: Of this package.
        uptime: Seconds since this coordinator was started.
        round: The round that is on; 0 before the first.
        phase: ``"waiting"`` (for weights or workers), ``"training"``, ``"collecting"``, ``"merging"`` or
            ``"finished"``.
        outer_steps: As it was asked for, or ``None``.
        last_round: The round that the run is over with, as things are, or ``None``: ``outer_steps``, a round for each
            fragment but one, and as many as had no update that counted.
        target: What ends a round, in words.
        left: What is to go in this round, in the target's unit.
        weights_version: Rounds that are part of the weights.
        chain: Of the weights, 32 hexadecimal digits.
        parameters: Numbers that are trained; 0 before the first worker.
        samples: That have become part of the weights.
        workers: Everyone known, by name.
        rounds: The last rounds, oldest first.
        slices: Of the data, or ``None`` where workers bring their own.
        counters: Events since it was started, by name: ``joined``, ``rejoined``, ``left``, ``silent``,
            ``expired``, ``refused_hellos``, ``wrong_frames``, ``slow_downs``, ``updates_added``, ``updates_late``,
            ``updates_dropped``, ``updates_refused``, ``updates_broken``, ``updates_again``, ``rounds``,
            ``empty_rounds``, ``bytes_in``, ``bytes_out``,
            and ``refused_REASON`` as ``serving.Refusals`` counts who was not let in.
        spool_bytes: Held by updates that are not merged yet.
        saved_round: The last round that is part of a saved state, or ``None``.
        timeline: What workers did in the last few rounds, oldest first; of many workers, some.
    """

    version: str
    uptime: float
    round: int
    phase: str
    outer_steps: int | None
    last_round: int | None
    target: str
    left: int
    weights_version: int
    chain: str
    parameters: int
    samples: int
    workers: tuple[WorkerStatus, ...]
    rounds: tuple[RoundSummary, ...]
    slices: SliceStatus | None
    counters: dict[str, int]
    spool_bytes: int = 0
    saved_round: int | None = None
    timeline: tuple[RoundRecord, ...] = ()


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
