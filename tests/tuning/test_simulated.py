"""Step times of simulated models on simulated links: no worse than 3% off the best of a grid."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest

from lightning_bytescheduler.predicting.link import LinkModel
from lightning_bytescheduler.predicting.profiles import NETWORKS, ModelProfile, network_profile
from lightning_bytescheduler.predicting.simulator import Schedule, simulate
from lightning_bytescheduler.tuning.sizes import (
    PLAIN_DDP,
    LinkEstimate,
    SchedulerSizes,
    SearchSpace,
    TuningPoint,
    default_sizes,
)
from tests.tuning.training import Training, tuning

STARTING = 2e-4  # start-up seconds of each message, in which the link is idle
LINKS = {
    "500 Mbit/s": LinkModel(workers=4, bandwidth=500e6 / 8, latency=1e-4),
    "1 Gbit/s": LinkModel(workers=4, bandwidth=1e9 / 8, latency=1e-4),
    "20 ms round trip": LinkModel(workers=4, bandwidth=1e9 / 8, latency=1e-2),
}


def sizes_for(profile: ModelProfile, link: LinkModel) -> SchedulerSizes:
    estimate = LinkEstimate(alpha=STARTING + link.latency_seconds, beta=link.seconds_per_byte)
    return default_sizes(parameters=profile.parameter_bytes // 4, bytes_per_parameter=4, link=estimate)


def step_times(profile: ModelProfile, link: LinkModel, bucket_bytes: int) -> Callable[[TuningPoint], float]:
    @functools.cache
    def seconds(point: TuningPoint) -> float:
        if point.is_plain_ddp:
            return simulate(profile, link, Schedule.ddp())
        credit, partition = point
        schedule = Schedule(partition_bytes=4 * partition, credit_bytes=4 * credit, bucket_bytes=bucket_bytes)
        return simulate(profile, link, schedule) + STARTING * profile.parameter_bytes / (4 * partition)

    return seconds


def grid(space: SearchSpace) -> set[TuningPoint]:
    """4 x 4 points, those above the diagonal moved onto it."""

    def along(low: int, high: int) -> list[int]:
        return [round(low * (high / low) ** (index / 3)) for index in range(4)]

    return {
        TuningPoint(credit=credit, partition_size=min(partition, credit))
        for credit in along(*space.credits)
        for partition in along(*space.partitions)
    }


@pytest.mark.parametrize(
    ("network", "link"),
    [
        *zip(NETWORKS, itertools.cycle(LINKS)),
        *(pytest.param(*each, marks=pytest.mark.slow) for each in itertools.product(NETWORKS, LINKS)),
    ],
)
def test_within_three_percent_of_the_best_of_a_grid(network: str, link: str) -> None:
    model = LINKS[link]
    profile = network_profile(network)
    profile = profile.scaled_to(0.9 * profile.parameter_bytes * model.seconds_per_byte)
    sizes = sizes_for(profile, model)
    start = TuningPoint(credit=sizes.credit, partition_size=sizes.partition_size)
    space = SearchSpace.for_model(profile.parameter_bytes // 4, start)
    seconds = step_times(profile, model, sizes.bucket_bytes)
    best = min(map(seconds, {*grid(space), PLAIN_DDP}))
    training = Training(tuning(space, start), seconds).run(500)
    assert sum(training.seconds) <= 1.02 * 500 * seconds(start)
    training.run(3000, until_settled=True)
    assert training.tuning.is_settled
    assert training.trials <= 15
    assert seconds(training.tuning.current) <= 1.03 * best


def test_a_link_that_is_reshaped_in_mid_run() -> None:
    """From 1 Gbit/s to 200 Mbit/s: it ends within 5% of what is best there."""
    profile = network_profile("resnet50").scaled_to(0.3)
    sizes = sizes_for(profile, LINKS["1 Gbit/s"])
    start = TuningPoint(credit=sizes.credit, partition_size=sizes.partition_size)
    space = SearchSpace.for_model(profile.parameter_bytes // 4, start)
    slow = replace(LINKS["1 Gbit/s"], bandwidth=200e6 / 8)
    before, after = (step_times(profile, link, sizes.bucket_bytes) for link in (LINKS["1 Gbit/s"], slow))
    now = [before]
    training = Training(tuning(space, start), lambda point: now[0](point)).run(800)
    now[0] = after
    training.run(3000)
    assert training.tuning.is_settled
    assert {entry.search for entry in training.tuning.entries} == {0, 1}
    assert after(training.tuning.current) <= 1.05 * min(map(after, {*grid(space), PLAIN_DDP}))
