"""Scheduling policies as the simulator plays them."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings

from lightning_bytescheduler.exceptions import OptionError
from lightning_bytescheduler.scheduler.options import POLICIES, policy_of
from lightning_bytescheduler.simulation import (
    LinkModel,
    ModelProfile,
    Schedule,
    lower_bound,
    network_profile,
    simulate,
)
from lightning_bytescheduler.simulation.prediction import policy_schedule
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
        ("fifo", Schedule(order="fifo", bucket_bytes=BUCKET)),
        ("bytescheduler", Schedule.scheduled(partition_bytes=1 << 20, credit_bytes=1 << 21, bucket_bytes=BUCKET)),
        ("p3", Schedule.scheduled(partition_bytes=200_000, bucket_bytes=BUCKET)),
    ):
        found = simulate(VGG16, link, played(policy, link), steps=1)
        assert found == simulate(VGG16, link, same, steps=1), policy


def test_too_many_slices_are_refused() -> None:
    large = ModelProfile(name="large", layers=(replace(VGG16.layers[0], parameter_bytes=4 * 2_600_000_000),))
    with pytest.raises(OptionError, match=r"policy='p3' .* cuts this model into 50,000 slices at most"):
        policy_schedule(large, LINK, policy_of("p3"))
    assert policy_schedule(large, LINK, policy_of("fifo")).partition_bytes == large.parameter_bytes


@given(profile=models, link=links)
@settings(max_examples=25, deadline=None)
def test_no_policy_beats_the_bound_or_loses_a_byte(profile: ModelProfile, link: LinkModel) -> None:
    for name in POLICIES:
        run = simulate(profile, link, policy_schedule(profile, link, policy_of(name)), steps=1)
        assert run.step_seconds >= lower_bound(profile, link) * (1 - 1e-9)
        assert sum(launch.size for launch in run.launches) <= profile.parameter_bytes
