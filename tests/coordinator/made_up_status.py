"""A status as a run might have it, for the page, the live table and the metrics."""

from __future__ import annotations

import random

from lightning_bytescheduler.coordinator.status import RoundSummary, RunStatus, WorkerStatus
from lightning_bytescheduler.diloco.round_record import RoundRecord, WorkerRound
from lightning_bytescheduler.slices.tracker import TrackerReport

STATES = ("training", "training", "sending", "arrived", "training", "lost", "paused", "joining")


def made_up_status(workers: int = 8, rounds: int = 40, *, seed: int = 7) -> RunStatus:
    """A status with that many workers and rounds that have ended."""
    chance = random.Random(seed)
    names = [f"node-{number:02d}.cluster-{'ab'[number % 2]}.example.org" for number in range(workers)]
    names[:1] = ["anna"]
    return RunStatus(
        version="0.9.0",
        uptime=12_345.6,
        round=rounds + 1,
        phase="training",
        last_round=500,
        target="65536 samples of all workers",
        left=23_120,
        weights_version=rounds,
        parameters=124_439_808,
        samples=65_536 * rounds,
        workers=tuple(
            WorkerStatus(
                name=name,
                state=STATES[number % len(STATES)],
                connected=STATES[number % len(STATES)] != "lost",
                leads=number == 0,
                ranks=1 + number % 3,
                steps=chance.randrange(200),
                samples=chance.randrange(20_000),
                samples_per_second=None if number == 7 else chance.uniform(80, 1500),
                heard_ago=chance.uniform(0, 3) + 50 * (number == 5),
                bytes_in=chance.randrange(10**10),
                bytes_out=chance.randrange(10**10),
                merged=chance.randrange(rounds + 1),
                late=chance.randrange(3),
                slices=chance.randrange(4),
            )
            for number, name in enumerate(names)
        ),
        rounds=tuple(
            RoundSummary(
                round=number + 1,
                seconds=chance.uniform(55, 70),
                ended=1.8e9 + 60 * number,
                samples=65_536,
                merged=workers - number % 2,
                workers=workers,
                live=workers,
                participation=(workers - number % 2) / workers,
                loss=2.4 + 6 * 0.9**number + chance.uniform(-0.1, 0.1),
            )
            for number in range(rounds)
        ),
        slices=TrackerReport(
            epoch=1,
            samples=9_600_000,
            trained=3_100_000,
            dropped=1200,
            unfinished=812,
            quarantined={"a/7": "its checksum differs"},
            ahead=960_000,
        ),
        counters={
            "joined": 14,
            "rejoined": 9,
            "left": 2,
            "expired": 4,
            "refused_token": 3,
            "refused_host": 1,
            "updates_added": 312,
            "updates_late": 5,
            "rounds": rounds,
            "states_saved": rounds,
            "bytes_in": 45 * 10**9,
            "bytes_out": 61 * 10**9,
        },
        spool_bytes=10**8,
        saved_round=rounds,
        timeline=tuple(_record(names, rounds - 3 + number, 60.0 * number, chance) for number in range(4)),
    )


def _record(names: list[str], number: int, start: float, chance: random.Random) -> RoundRecord:
    end = start + 60.0
    workers = []
    for index, name in enumerate(names):
        began = start + (1 + index % 3)
        sent = end - 12 + chance.uniform(0, 6)
        arrived = sent + chance.uniform(2, 5)
        workers.append(
            WorkerRound(
                worker=name,
                steps=chance.randrange(300),
                samples=chance.randrange(20_000),
                merged=(index + number) % 7 != 5,
                spans=(
                    ("receiving", start, began),
                    ("working", began, sent),
                    ("sending", sent, arrived),
                    ("waiting", arrived, end),
                ),
            )
        )
    return RoundRecord(round=max(number, 0), start=start, end=end, decided=end - 15, workers=tuple(workers))
