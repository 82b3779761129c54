"""A small run for the tests of records and pictures."""

from __future__ import annotations

import functools
from pathlib import Path

from lightning_bytescheduler.diloco.round_end import RoundOptions, SampleTarget
from lightning_bytescheduler.diloco.round_record import RoundFile, RoundRecord
from tests.diloco.simulated_run import Machine, simulate


@functools.cache
def small_run() -> tuple[RoundRecord, ...]:
    """Three workers at 1 : 2 : 6, the slowest of which joins late, and the second of which dies in a later round."""
    machines = [
        Machine(batch_size=8, step_seconds=0.6, jitter=0.05, transfer=1.5, delay=0.02, joins=15.0),
        Machine(batch_size=12, step_seconds=0.3, jitter=0.05, transfer=0.8, delay=0.02, dies=51.0),
        Machine(batch_size=24, step_seconds=0.1, jitter=0.05, transfer=0.8, delay=0.02),
    ]
    options = RoundOptions(outer_steps=8, start_workers=2, grace=4.0, silent_after=1.0)
    return tuple(simulate(machines, SampleTarget(2_400), options).rounds)


def written(path: Path) -> Path:
    """The same in a file."""
    file = RoundFile(path, append=False)
    for record in small_run():
        file.write(record)
    file.close()
    return path
