"""Scheduling policies as the simulator plays them."""

from __future__ import annotations

import pytest
from hypothesis import given, settings

from lightning_bytescheduler.cli import main
from lightning_bytescheduler.scheduler.policies import POLICIES, policy_of
from lightning_bytescheduler.simulation import (
    LinkModel,
    ModelProfile,
    Schedule,
    lower_bound,
    network_profile,
    prediction,
    simulate,
)
from lightning_bytescheduler.simulation.prediction import policy_schedule, slices
from tests.simulation.profiles import links, models

VGG16 = network_profile("vgg16")
LINK = LinkModel(workers=4, bandwidth="33Gbit/s")
BUCKET = 4 << 20


def played(policy: str, link: LinkModel = LINK, profile: ModelProfile = VGG16) -> Schedule:
    return Schedule.by_policy(
        policy_of(policy),
        parameters=profile.parameter_bytes // 4,
        partition_bytes=1 << 20,
        credit_bytes=1 << 21,
        bucket_bytes=BUCKET,
    )


def test_each_is_what_its_name_says() -> None:
    link = LinkModel(workers=4, bandwidth="10Gbit/s", latency=1e-4, overhead=1e-4)
    for policy, same in (
        ("fifo", Schedule.fifo(bucket_bytes=BUCKET)),
        ("bytescheduler", Schedule.scheduled(partition_bytes=1 << 20, credit_bytes=1 << 21, bucket_bytes=BUCKET)),
        ("p3", Schedule.scheduled(partition_bytes=200_000, bucket_bytes=BUCKET)),
    ):
        found = simulate(VGG16, link, played(policy, link), steps=1)
        assert found == simulate(VGG16, link, same, steps=1), policy


@given(profile=models, link=links)
@settings(max_examples=25, deadline=None)
def test_no_policy_beats_the_bound_or_loses_a_byte(profile: ModelProfile, link: LinkModel) -> None:
    for name in POLICIES:
        run = simulate(profile, link, policy_schedule(profile, link, policy_of(name)), steps=1)
        assert run.step_seconds >= lower_bound(profile, link) * (1 - 1e-9)
        assert sum(launch.size for launch in run.launches) <= profile.parameter_bytes


def test_too_many_slices_are_not_played(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(prediction, "_MOST_SLICES", 100)
    assert [slices(VGG16, policy_of(name)) for name in POLICIES] == [1, 1, 2768]
    policies = ["--policy", "p3", "--policy", "fifo"]
    assert main(["predict", "--profile", "vgg16", "--workers", "4", "--bandwidth", "33Gbit/s", *policies]) == 0
    printed = capsys.readouterr().out
    assert "p3 is not played: it would cut the model into 2,768 slices." in " ".join(printed.split())
    assert "│ fifo " in printed
