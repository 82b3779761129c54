"""When spare machines as parameter servers are worth their money."""

from __future__ import annotations

from dataclasses import replace

import pytest

from lightning_bytescheduler.simulation import LinkModel, lower_bound, network_profile
from lightning_bytescheduler.simulation.spare_machines import best_value, spare_machines, spare_machines_in_words

LINK = LinkModel(workers=4, bandwidth="1Gbit/s")


def communication(link: LinkModel) -> float:
    """A model that does nothing but communicate."""
    return link.seconds_per_byte


def test_the_gain_is_that_of_the_formula() -> None:
    one, two, four = spare_machines(communication, LINK)
    assert [one.servers, two.servers, four.servers] == [1, 2, 4]
    assert two.gain == pytest.approx((16 + 8 - 4) / 16)  # over an all-reduce's 2(n-1)/n
    assert four.gain == pytest.approx(1.5)
    # Two at this price make 1.25 times as much of 4 + 2c workers' money.
    assert two.worth == pytest.approx(0.5)
    assert 4 * two.gain / (4 + 2 * two.worth) == pytest.approx(1)


def test_the_networks_own_servers_are_tried_too() -> None:
    link = replace(LINK, architecture="ps", servers=3)
    assert [tried.servers for tried in spare_machines(communication, link)] == [1, 2, 3, 4]
    assert not spare_machines(communication, replace(link, workers=1))


def test_where_computing_hides_everything_they_are_worth_nothing() -> None:
    profile = network_profile("resnet50")

    def step(link: LinkModel) -> float:
        return lower_bound(profile, link)

    fast = spare_machines(step, LinkModel(workers=4, bandwidth="100Gbit/s"))
    assert best_value(fast) is None
    assert "bring nothing here" in spare_machines_in_words(fast)
    slow = spare_machines(step, LINK)
    best = best_value(slow)
    assert best is not None
    assert best.gain > 1.1


def test_the_price_is_said_in_words() -> None:
    words = spare_machines_in_words(spare_machines(communication, LINK))
    assert words == (
        "4 spare machines as parameter servers (architecture='ps') make a step 1.50x as fast, and are worth their "
        "money where each costs less than 50% of a worker."
    )
