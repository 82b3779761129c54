"""The projection equals playing every step, and plays only a few of them."""

from __future__ import annotations

import heapq
from dataclasses import replace

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_bytescheduler.diloco.round_end import Pace, Projection, project


def played(to_go, paces, *, now=0.0, step_limit=None, time_limit=None) -> Projection:
    """Step by step, however many there are."""
    steps = [0] * len(paces)
    samples = sum(pace.sure * pace.batch_size for pace in paces)
    heap = [(pace.finish(1, now) - now, index) for index, pace in enumerate(paces) if pace.left != 0]
    heapq.heapify(heap)
    seconds = 0.0
    while True:
        if samples >= to_go:
            why = "target"
            break
        if step_limit is not None and max(steps, default=0) >= step_limit:
            why = "steps"
            break
        if time_limit is not None and seconds >= time_limit:
            why = "time"
            break
        if not heap:
            why = "idle"
            break
        instant = heap[0][0]
        while heap and heap[0][0] <= instant + 1e-9 * paces[heap[0][1]].step_seconds:
            seconds, index = heapq.heappop(heap)
            pace = paces[index]
            steps[index] += 1
            if steps[index] > pace.sure:
                samples += pace.batch_size
            if pace.left is None or steps[index] < pace.left:
                heapq.heappush(heap, (pace.finish(steps[index] + 1, now) - now, index))
    taken = tuple(max(count, pace.sure) for count, pace in zip(steps, paces, strict=True))
    last = max((pace.finish(count, now) - now for count, pace in zip(taken, paces, strict=True)), default=0.0)
    return Projection(seconds=max(seconds, last), samples=samples, left=to_go - samples, steps=taken, stopped=why)


SECONDS = st.one_of(
    st.sampled_from([0.1, 0.25, 1.0, 3.0]),  # whose steps end together, but for rounding
    st.floats(0.01, 5.0),
    st.floats(1e-4, 1e-2),
)
PACES = st.lists(
    st.builds(
        Pace,
        batch_size=st.integers(1, 50),
        step_seconds=SECONDS,
        began=st.one_of(st.sampled_from([0.0, 90.0, 100.0]), st.floats(0.0, 101.0)),
        steps=st.integers(0, 20),
        most=st.none() | st.integers(0, 3000),
        committed=st.integers(0, 5),
    ),
    max_size=5,
)


@given(
    PACES,
    st.integers(-5, 100) | st.integers(1000, 30_000),
    st.sampled_from([0.0, 100.0]),
    st.none() | st.integers(0, 4000),
    st.none() | st.floats(0.0, 50.0),
)
@example([Pace(batch_size=1, step_seconds=0.1, began=100.0)], 1000, 100.0, None, 0.5)  # rounding at a limit
def test_it_is_what_playing_every_step_says(paces, to_go, now, step_limit, time_limit):
    paces = [replace(pace, began=min(pace.began, now)) for pace in paces]
    if time_limit is None and step_limit is None and any(pace.most is None for pace in paces):
        to_go = min(to_go, 10_000)
    limits = {"now": now, "step_limit": step_limit, "time_limit": time_limit}
    assert project(to_go, paces, **limits) == played(to_go, paces, **limits)


@pytest.mark.parametrize(
    ("limits", "stopped"), [({}, "target"), ({"time_limit": 1e5}, "time"), ({"step_limit": 10**13}, "steps")]
)
@pytest.mark.timeout(120)
def test_no_number_of_steps_takes_long(limits, stopped):
    """One worker has steps of a nanosecond, and so much is to go that playing it would take days."""
    workers = [
        Pace(batch_size=1, step_seconds=1e-9, began=0.5),
        Pace(batch_size=64, step_seconds=100.0, began=0.25),
        Pace(batch_size=8, step_seconds=0.7, began=0.0, most=10_000_000),
        Pace(batch_size=2**40, step_seconds=0.1, most=3),
    ]
    to_go = 2**62 if limits else 10**15
    assert project(to_go, workers, now=1.0, **limits).stopped == stopped
