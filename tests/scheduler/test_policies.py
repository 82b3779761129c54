"""What each policy wants, and which options it takes."""

from __future__ import annotations

from collections.abc import Mapping

import pytest

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.scheduler.options import POLICIES, SchedulerOptions, policy_of

MILLION = 1_000_000


def test_sizes_and_order_of_each() -> None:
    bytescheduler, fifo, p3 = map(policy_of, POLICIES)
    assert bytescheduler.name == "bytescheduler"
    assert [each.own_partition_size(10 * MILLION) for each in (bytescheduler, fifo, p3)] == [None, 10 * MILLION, 50_000]
    assert [each.by_first_use for each in (bytescheduler, fifo, p3)] == [True, False, True]
    assert [each.one_at_a_time for each in (bytescheduler, fifo, p3)] == [False, False, True]
    assert [each.is_tuned for each in (bytescheduler, fifo, p3)] == [True, False, False]


@pytest.mark.parametrize(
    ("policy", "says"),
    [
        ("fifi", "Did you mean 'fifo'?"),
        ("tictac", "one of 'bytescheduler', 'fifo', 'p3'"),
        (len, "one of 'bytescheduler', 'fifo', 'p3'"),
        (3, "one of 'bytescheduler', 'fifo', 'p3'"),
    ],
)
def test_what_is_no_policy_is_refused(policy: object, says: str) -> None:
    with pytest.raises(OptionError) as caught:
        SchedulerOptions.resolve(policy=policy, environ={})  # type: ignore[arg-type]
    assert caught.value.option == "policy"
    assert says in str(caught.value)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"policy": "fifo", "partition_size": 4}, "partition_size must be left out, as policy='fifo' has its own"),
        ({"policy": "fifo", "credit": 4}, "credit must be left out, as policy='fifo' has its own"),
        ({"policy": "p3", "credit": 4}, "credit must be left out"),
        ({"policy": "p3", "tuning": "credit"}, "tuning must be left out, as policy='p3' has nothing to tune"),
        ({"policy": "p3", "mode": "ddp"}, "policy must be left out where mode='ddp'"),
    ],
)
def test_options_that_a_policy_does_not_take_are_refused(options: Mapping[str, object], says: str) -> None:
    with pytest.raises(OptionError, match=says):
        SchedulerOptions.resolve(**options, environ={})  # type: ignore[arg-type]


def test_what_a_policy_takes_is_kept() -> None:
    slices = SchedulerOptions.resolve(policy="p3", partition_size=10_000, environ={})
    assert (slices.policy.name, slices.partition_size, slices.tunes_credit) == ("p3", 10_000, False)
    assert SchedulerOptions.resolve(environ={}).tunes_credit
