from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given

from benchmarks.configuration import ddp_bound
from lightning_bytescheduler.predicting.link import LinkModel
from lightning_bytescheduler.predicting.profiles import ModelProfile, network_profile
from lightning_bytescheduler.predicting.simulator import Schedule, lower_bound, simulate
from tests.predicting.profiles import links, model, models, plain_link, sizes, unhurried

FIFO = Schedule()  # without a window all is sent as it comes


def by_priority(partition: int, credit: int = 1) -> Schedule:
    return Schedule(partition_bytes=partition, credit_bytes=credit)


def test_ddp_waits_for_everything_and_the_others_only_for_their_own() -> None:
    # Backward 1, 1; the gradients of the last layer take 10, those of the first 1.
    profile = model([(1, 3, 1), (10, 4, 1)])
    assert simulate(profile, plain_link(), Schedule.ddp(bucket_bytes=1)) == 1 + 11 + 7
    assert simulate(profile, plain_link(), FIFO) == 1 + 11 + 7  # the first layer's come last
    # By priority, whole: the last layer's are on the link already when the first layer's are ready.
    assert simulate(profile, plain_link(), Schedule(credit_bytes=1)) == 1 + 11 + 7
    # Cut into pieces of 1: one of them, then the first layer's, 3 of forward pass, 9 - 3 of waiting.
    assert simulate(profile, plain_link(), by_priority(1)) == 2 + 1 + 3 + (9 - 3) + 4
    # A barrier waits for all of it even then.
    assert simulate(profile, plain_link(), Schedule(partition_bytes=1, credit_bytes=1, barrier=True)) == 19


@unhurried
@given(profile=models, link=links, bucket=sizes)
def test_crossing_the_barrier_is_worth_nothing_without_priority(
    profile: ModelProfile, link: LinkModel, bucket: int | None
) -> None:
    # In the order of the backward pass, what the forward pass needs first comes last.
    first, *others = profile.layers
    profile = replace(profile, layers=(replace(first, parameter_bytes=first.parameter_bytes + 1), *others))
    fifo = replace(FIFO, bucket_bytes=bucket)
    assert simulate(profile, link, fifo) == simulate(profile, link, replace(fifo, barrier=True))


def test_layers_without_parameters_go_first_across_the_barrier() -> None:
    profile = model([(0, 3, 1), (10, 4, 2)])
    assert simulate(profile, plain_link(), FIFO) == 2 + 10 + 4
    assert simulate(profile, plain_link(), Schedule.ddp()) == 2 + 10 + 7


@pytest.mark.parametrize("layers", [4, 20])
@pytest.mark.parametrize(("size", "slow"), [(1, False), (10, True)])
def test_ddp_is_its_formula_on_equal_layers(layers: int, size: int, slow: bool) -> None:
    profile = model([(size, 1, 2)] * layers)
    forward, backward, communication = layers * 1, layers * 2, layers * size
    expected = forward + (2 + communication if slow else backward + size)
    assert simulate(profile, plain_link(), Schedule.ddp(bucket_bytes=1)) == expected
    assert ddp_bound(profile, plain_link()) == expected


def test_larger_buckets_start_later() -> None:
    profile = model([(1, 1, 2)] * 12)
    by_size = {size: Schedule.ddp(bucket_bytes=size) for size in (1, 3, 12)}
    # The last bucket is what is not hidden.
    assert [simulate(profile, plain_link(), schedule) for schedule in by_size.values()] == [37, 39, 48]


def test_ddp_s_first_bucket_starts_early() -> None:
    profile = model([(10, 1, 1)] * 4)
    small = Schedule(bucket_bytes=30, first_bucket_bytes=10, barrier=True)
    assert simulate(profile, plain_link(), small) == 4 + 1 + 10 + 30
    assert simulate(profile, plain_link(), replace(small, first_bucket_bytes=None)) == 4 + 3 + 30 + 10


def test_a_window_hides_latency_if_it_covers_it() -> None:
    profile = model([(100, 1, 1)])
    link = plain_link(latency=15.0)  # 30 for an all-reduce: three pieces of 10 fit into it

    def step(credit: int) -> float:
        return simulate(profile, link, by_priority(10, credit))

    assert step(1) == 2 + 10 * (10 + 30)  # one at a time
    assert step(10) == step(1)  # a window that one piece fills
    assert step(11) == 2 + 5 * (10 + 30) + 10  # two: the second is sent while the first is under way
    assert step(31) == 2 + 100 + 30  # four: the link is never idle
    assert step(10**9) == step(31)


def test_a_window_too_large_lets_urgent_pieces_wait() -> None:
    # What is launched is not overtaken: of the last layer's 20 pieces, the window lets some go first.
    profile = model([(5, 10, 1), (20, 1, 1)])
    steps = [simulate(profile, plain_link(), by_priority(1, credit)) for credit in (1, 4, 10, 1000)]
    assert steps == [2 + 5 + 14 + 6 - 0, 2 + 3 + 5 + 11 + 1 + 5, 2 + 9 + 5 + 11, 1 + 20 + 5 + 11]


def test_layers_without_parameters_wait_for_nothing() -> None:
    schedule = Schedule()
    assert simulate(model([(0, 1, 2), (0, 3, 4)]), plain_link(), schedule) == 10


def test_more_workers_are_not_more_to_simulate() -> None:
    profile = network_profile("resnet50")
    schedule = by_priority(2**20, 2**24)
    links = [LinkModel(workers=workers, bandwidth=1e9, latency=1e-6) for workers in (4, 4096)]
    few, many = (simulate(profile, link, schedule) for link in links)
    assert lower_bound(profile, links[1]) <= many
    assert few < many
