from __future__ import annotations

import re
from typing import Any

import pytest

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.predicting.link import LinkModel

NAN, INF = float("nan"), float("inf")


@pytest.mark.parametrize(("workers", "factor"), [(2, 1.0), (4, 1.5), (4096, 2 * 4095 / 4096)])
def test_all_reduce_sends_almost_twice_the_bytes(workers: int, factor: float) -> None:
    link = LinkModel(workers=workers, bandwidth=100.0)
    assert link.seconds_per_byte == pytest.approx(factor / 100)


@pytest.mark.parametrize(("workers", "hops"), [(2, 2), (4096, 8190)])
def test_latency_is_that_of_the_hops_that_follow_each_other(workers: int, hops: int) -> None:
    link = LinkModel(workers=workers, bandwidth=1.0, latency=0.5)
    assert link.latency_seconds == hops * 0.5


def test_servers_cost_what_byteps_states_and_links_wait_for_each_other() -> None:
    """2n(n-1)/(n² + kn - 2k); with as many servers as workers, each link carries the gradients once each way."""
    for spare, factor in ((1, 24 / 18), (2, 24 / 20), (4, 1.0)):
        link = LinkModel(workers=4, bandwidth=100.0, latency=0.5, servers=spare)
        assert link.seconds_per_byte == pytest.approx(factor / 100 / 0.92)
        assert link.latency_seconds == 2 * 0.5
        assert link.without_servers == LinkModel(workers=4, bandwidth=100.0, latency=0.5)


@pytest.mark.parametrize(
    ("option", "value", "allowed"),
    [
        ("servers", 0, "a whole number, 1 or more"),
        ("servers", 3, "2 or less: more than one for each worker bring nothing"),
        ("workers", 1, "a whole number, 2 or more"),
        ("workers", 2.0, "a whole number, 2 or more"),
        ("workers", True, "a whole number, 2 or more"),
        *[("bandwidth", bad, "a finite number of bytes per second, more than 0") for bad in (0, -1.0, NAN, INF)],
        *[("latency", bad, "a finite number of seconds, 0 or more") for bad in (-1e-9, NAN, INF, None, True)],
    ],
)
def test_a_link_that_cannot_be_is_refused(option: str, value: Any, allowed: str) -> None:
    with pytest.raises(OptionError) as caught:
        LinkModel(**{"workers": 2, "bandwidth": 1.0, option: value})
    assert (caught.value.option, caught.value.allowed) == (option, allowed)


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"architecture": "ps"}, "LinkModel has no option 'architecture'."),
        ({"bandwith": 2}, "Did you mean 'bandwidth'?"),
    ],
)
def test_other_words_are_told_the_right_one(options: dict[str, Any], says: str) -> None:
    with pytest.raises(OptionError, match=re.escape(says)):
        LinkModel(**{"workers": 4, "bandwidth": 1.0, **options})
