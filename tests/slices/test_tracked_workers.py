"""How fast workers are, and whom to relieve."""

from __future__ import annotations

import pytest

from lightning_bytescheduler.slices.tracker_state import Holder, WorkerSpeed, holder_to_relieve


def speed_of(*intervals):
    speed, now = WorkerSpeed(), 0.0
    speed.begin(now)
    for samples, seconds in intervals:
        now += seconds
        speed.report(samples, now)
    return speed, now


def test_a_speed_is_the_median_so_a_pause_says_nothing():
    speed, now = speed_of(*[(10, 1.0)] * 4, (10, 600.0), *[(10, 1.0)] * 4)
    assert speed.samples_per_second(now) == 10.0


def test_a_worker_that_falls_silent_gets_slower():
    speed, now = speed_of(*[(10, 1.0)] * 4)
    assert speed.samples_per_second(now + 1.0) == 10.0
    assert speed.samples_per_second(now + 100.0) == pytest.approx(0.1)


def test_time_without_a_slice_does_not_count():
    speed, now = speed_of(*[(10, 1.0)] * 4)
    speed.pause()
    assert speed.samples_per_second(now + 100.0) == 10.0
    speed.report(5, now + 100.0)  # of a slice that was not begun
    speed.begin(now + 100.0)
    speed.report(10, now + 101.0)
    assert speed.samples_per_second(now + 101.0) == 10.0


def test_reports_at_one_reading_of_the_clock_are_added_up():
    speed, now = speed_of((10, 1.0), (10, 0.0), (20, 3.0))
    assert speed.samples_per_second(now) == 10.0


def test_without_reports_there_is_no_speed():
    assert speed_of()[0].samples_per_second(5.0) is None
    assert speed_of((0, 1.0))[0].samples_per_second(5.0) is None


@pytest.mark.parametrize(
    ("asking", "others", "found"),
    [
        ((0, 0, 1.0), [(200, 100, 1.0), (300, 100, 1.0)], 1),
        ((0, 0, 1.0), [(200, 100, 1.0), (150, 50, 0.1)], 1),
        ((0, 0, 1.0), [(200, 100, 1.0), (900, 0, 0.1)], 0),  # all of the slower one's is begun
        ((0, 0, 1.0), [(100, 100, 1.0)], None),  # no sooner
        ((0, 0, 0.1), [(200, 100, 1.0)], None),
        ((150, 0, 1.0), [(200, 100, 1.0)], None),
        ((0, 0, None), [(200, 100, None)], 0),
        ((0, 0, None), [(200, 100, 2.0), (200, 100, 4.0)], 0),
        ((0, 0, 1.0), [], None),
    ],
)
def test_the_one_that_is_done_last_is_relieved_if_that_helps(asking, others, found):
    def holder(left, last, speed):
        return Holder(left=left, last=last, speed=speed)

    assert holder_to_relieve(holder(*asking), [holder(*other) for other in others]) == found
