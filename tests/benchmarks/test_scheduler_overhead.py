"""Memory does not grow with the number of steps; what is timed is done."""

from __future__ import annotations

from benchmarks.scheduler_overhead import bytes_kept_per_step, processor_seconds


def test_memory_does_not_grow_with_steps() -> None:
    # A task that is kept is over 1,000 bytes, and a step has four.
    assert bytes_kept_per_step(steps=100) < 100


def test_everything_is_sent() -> None:
    assert processor_seconds(tasks=3, parts=3) > 0
