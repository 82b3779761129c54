"""When spare machines as parameter servers are worth their money."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.configuration import Configuration
from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.simulation import (
    LinkModel,
    lower_bound,
    network_profile,
    simulate,
)
from lightning_bytescheduler.simulation.prediction import chosen_schedule
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


def test_steps_are_those_that_were_measured() -> None:
    """All-reduce's step over that with servers, as the documentation has it: 15 MB of gradients, 300 Mbit/s."""
    page = (Path(__file__).parents[2] / "docs" / "parameter_servers.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d|no) servers? \| (\d\.\d+) \| (\d\.\d+) \|", page, re.MULTILINE)
    assert len(rows) == 3
    for servers, *measured in rows:
        for ratio, speed in zip((2, 8), map(float, measured), strict=True):
            here = Configuration(network="uniform", ratio=ratio, workers=4, mbit=300.0, megabytes=15.0)
            profile, link = here.profile, here.link
            served = replace(link, architecture="ps", servers=0 if servers == "no" else int(servers))
            expected, ideal = (
                simulate(profile, link, chosen_schedule(profile, link), steps=1).step_seconds
                / simulate(profile, one, chosen_schedule(profile, one), steps=1).step_seconds
                for one in (served, replace(served, idle_share=0.0))
            )
            assert expected == pytest.approx(speed, rel=0.05)
            assert ideal > (1.05 * speed if served.servers else 0.98 * speed)  # workers alone keep their links busy


def test_links_of_an_all_reduce_have_nobody_to_wait_for() -> None:
    with pytest.raises(OptionError, match="idle_share"):
        replace(LINK, idle_share=0.1)
    with pytest.raises(OptionError, match="idle_share"):
        replace(LINK, architecture="ps", idle_share=1.0)
    assert replace(LINK, architecture="ps", servers=2, idle_share=0.1).without_servers.idle == 0
