from __future__ import annotations

import re
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.simulation.link import LinkModel
from tests.simulation.profiles import unhurried

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(("workers", "factor"), [(1, 0.0), (2, 1.0), (4, 1.5), (4096, 2 * 4095 / 4096)])
def test_all_reduce_sends_almost_twice_the_bytes(workers: int, factor: float) -> None:
    link = LinkModel(workers=workers, bandwidth=100.0)
    assert link.seconds_per_byte == pytest.approx(factor / 100)


@pytest.mark.parametrize(("workers", "hops"), [(1, 0), (2, 2), (4096, 8190)])
def test_latency_is_that_of_the_hops_that_follow_each_other(workers: int, hops: int) -> None:
    link = LinkModel(workers=workers, bandwidth=1.0, latency=0.5)
    assert link.latency_seconds == hops * 0.5
    assert replace(link, servers=0).latency_seconds == (2 * 0.5 if workers > 1 else 0)


def test_servers_cost_what_byteps_states() -> None:
    def factor(workers: int, spare: int) -> float:
        link = LinkModel(workers=workers, bandwidth=1.0, servers=spare)
        return link.seconds_per_byte

    assert factor(1, 0) == factor(1, 1) == 0
    for workers in (2, 3, 8, 4096):
        assert factor(workers, 0) == pytest.approx(2 * (workers - 1) / workers)  # as an all-reduce
        assert factor(workers, workers) == pytest.approx(1.0)  # each link carries every byte once, each way
    assert factor(4, 2) == pytest.approx(2 * 4 * 3 / (16 + 8 - 4))


@unhurried
@given(workers=st.integers(3, 5000), data=st.data())
def test_each_spare_server_helps(workers: int, data: st.DataObject) -> None:
    spare = data.draw(st.integers(1, workers))
    more, fewer = (LinkModel(workers=workers, bandwidth=1.0, servers=k) for k in (spare, spare - 1))
    assert more.seconds_per_byte < fewer.seconds_per_byte


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("workers", 0, "a whole number, 1 or more"),
        ("workers", 2.0, "a whole number, 1 or more"),
        ("workers", True, "a whole number, 1 or more"),
        *[("bandwidth", bad, "a finite number of bytes per second, more than 0") for bad in (0, -1.0, NAN, INF)],
        ("bandwidth", "1", "a rate with its unit, such as 1Gbit/s or 1Mbit/s"),
        *[("latency", bad, "a finite number of seconds, 0 or more") for bad in (-1e-9, NAN, INF, None, True)],
        ("servers", -1, "a whole number, 0 or more"),
    ],
)
def test_a_link_that_cannot_be_is_refused(option: str, value: Any, allowed: str) -> None:
    with pytest.raises(OptionError) as caught:
        LinkModel(**{"workers": 2, "bandwidth": 1.0, option: value})
    assert (caught.value.option, caught.value.allowed) == (option, allowed)


def test_more_servers_than_workers_count_as_many_as_there_are_workers() -> None:
    more, as_many = (LinkModel(workers=4, bandwidth=1.0, servers=k) for k in (5, 4))
    assert more.seconds_per_byte == as_many.seconds_per_byte == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"architecture": "ps"}, "LinkModel has no option 'architecture'."),
        ({"spare_servers": 2}, "Did you mean 'servers'?"),
    ],
)
def test_other_words_are_told_the_right_one(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=re.escape(says)):
        LinkModel(**{"workers": 4, "bandwidth": 1.0, **options})
