"""Parameter servers, as they are played: what was measured, and links that wait for each other."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path

import pytest

from benchmarks.configuration import Configuration
from lightning_bytescheduler.simulation.link import LinkModel
from lightning_bytescheduler.simulation.prediction import chosen_schedule
from lightning_bytescheduler.simulation.simulator import simulate

LINK = LinkModel(workers=4, bandwidth="1Gbit/s")


def test_steps_are_those_that_were_measured() -> None:
    """All-reduce's step over that with servers, as the documentation has it: 15 MB of gradients, 300 Mbit/s."""
    page = (Path(__file__).parents[2] / "docs" / "parameter_servers.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d|no) servers? \| (\d\.\d+) \| (\d\.\d+) \|", page, re.MULTILINE)
    assert len(rows) == 3
    for servers, *measured in rows:
        for ratio, speed in zip((2, 8), map(float, measured), strict=True):
            here = Configuration(network="uniform", ratio=ratio, workers=4, mbit=300.0, megabytes=15.0)
            profile, link = here.profile, here.link
            served = replace(link, servers=0 if servers == "no" else int(servers))
            reduced, pushed = (simulate(profile, one, chosen_schedule(profile, one)) for one in (link, served))
            assert reduced / pushed == pytest.approx(speed, rel=0.05)


def test_only_links_to_spare_servers_wait_for_each_other() -> None:
    servers = replace(LINK, servers=2)
    assert servers.idle > 0
    assert servers.without_servers.idle == replace(servers, servers=0).idle == LINK.idle == 0
