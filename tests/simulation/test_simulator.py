from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_bytescheduler.exceptions import OptionError, UnsupportedError
from lightning_bytescheduler.simulation import (
    Launch,
    LinkModel,
    ModelProfile,
    Schedule,
    ddp_bound,
    lower_bound,
    network_profile,
    simulate,
)
from tests.simulation.profiles import CONTRIVED, links, model, models, plain_link, schedules, sizes, unhurried

FIFO = Schedule(order="fifo")


def seconds(profile: ModelProfile, link: LinkModel, schedule: Schedule) -> float:
    return simulate(profile, link, schedule).step_seconds


def test_ddp_waits_for_everything_and_the_others_only_for_their_own() -> None:
    # Backward 1, 1; the gradients of the last layer take 10, those of the first 1.
    profile = model([(1, 3, 1), (10, 4, 1)])
    assert seconds(profile, plain_link(), Schedule.ddp(bucket_bytes=1)) == 1 + 11 + 7
    assert seconds(profile, plain_link(), FIFO) == 1 + 11 + 7  # the first layer's come last
    # By priority, whole: the last layer's are on the link already when the first layer's are ready.
    assert seconds(profile, plain_link(), Schedule(credit_bytes=1)) == 1 + 11 + 7
    # Cut into pieces of 1: one of them, then the first layer's, 3 of forward pass, 9 - 3 of waiting.
    assert seconds(profile, plain_link(), Schedule.scheduled(partition_bytes=1)) == 2 + 1 + 3 + (9 - 3) + 4
    # A barrier waits for all of it even then.
    assert seconds(profile, plain_link(), Schedule(partition_bytes=1, credit_bytes=1, barrier=True)) == 19


@unhurried
@given(profile=models, link=links, bucket=sizes)
def test_crossing_the_barrier_is_worth_nothing_without_priority(
    profile: ModelProfile, link: LinkModel, bucket: int | None
) -> None:
    # In the order of the backward pass, what the forward pass needs first comes last.
    first, *others = profile.layers
    profile = replace(profile, layers=(replace(first, parameter_bytes=first.parameter_bytes + 1), *others))
    fifo = replace(FIFO, bucket_bytes=bucket)
    assert seconds(profile, link, fifo) == seconds(profile, link, replace(fifo, barrier=True))


def test_layers_without_parameters_go_first_across_the_barrier() -> None:
    profile = model([(0, 3, 1), (10, 4, 2)])
    assert seconds(profile, plain_link(), FIFO) == 2 + 10 + 4
    assert seconds(profile, plain_link(), Schedule.ddp()) == 2 + 10 + 7


@pytest.mark.parametrize("layers", [4, 20])
@pytest.mark.parametrize(("size", "slow"), [(1, False), (10, True)])
def test_ddp_is_its_formula_on_equal_layers(layers: int, size: int, slow: bool) -> None:
    profile = model([(size, 1, 2)] * layers)
    forward, backward, communication = layers * 1, layers * 2, layers * size
    expected = forward + (2 + communication if slow else backward + size)
    assert seconds(profile, plain_link(), Schedule.ddp(bucket_bytes=1)) == expected
    assert ddp_bound(profile, plain_link()) == expected


def test_larger_buckets_start_later_and_cost_less_overhead() -> None:
    profile = model([(1, 1, 2)] * 12)
    by_size = {size: Schedule.ddp(bucket_bytes=size) for size in (1, 3, 12)}
    # Without overhead, the last bucket is what is not hidden.
    assert [seconds(profile, plain_link(), schedule) for schedule in by_size.values()] == [37, 39, 48]
    # With 3 seconds of overhead, messages of one layer take 4, twice as long as its backward pass.
    assert [seconds(profile, plain_link(overhead=3.0), schedule) for schedule in by_size.values()] == [
        12 + 2 + 12 * 4,
        12 + 24 + 6,
        12 + 24 + 15,
    ]


def test_ddp_s_first_bucket_starts_early() -> None:
    profile = model([(10, 1, 1)] * 4)
    small = Schedule(order="fifo", bucket_bytes=30, first_bucket_bytes=10, barrier=True)
    assert seconds(profile, plain_link(), small) == 4 + 1 + 10 + 30
    assert seconds(profile, plain_link(), replace(small, first_bucket_bytes=None)) == 4 + 3 + 30 + 10


def test_a_window_hides_latency_if_it_covers_it() -> None:
    profile = model([(100, 1, 1)])
    link = plain_link(latency=15.0)  # 30 for an all-reduce: three pieces of 10 fit into it

    def step(credit: int) -> float:
        return seconds(profile, link, Schedule.scheduled(partition_bytes=10, credit_bytes=credit))

    assert step(1) == 2 + 10 * (10 + 30)  # one at a time
    assert step(10) == step(1)  # a window that one piece fills
    assert step(11) == 2 + 5 * (10 + 30) + 10  # two: the second is sent while the first is under way
    assert step(31) == 2 + 100 + 30  # four: the link is never idle
    assert step(10**9) == step(31)


def test_a_window_too_large_lets_urgent_pieces_wait() -> None:
    # What is launched is not overtaken: of the last layer's 20 pieces, the window lets some go first.
    profile = model([(5, 10, 1), (20, 1, 1)])
    steps = [
        seconds(profile, plain_link(), Schedule.scheduled(partition_bytes=1, credit_bytes=credit))
        for credit in (1, 4, 10, 1000)
    ]
    assert steps == [2 + 5 + 14 + 6 - 0, 2 + 3 + 5 + 11 + 1 + 5, 2 + 9 + 5 + 11, 1 + 20 + 5 + 11]


def test_the_backend_s_limit_of_messages_holds_too() -> None:
    profile = model([(100, 1, 1)])
    link = plain_link(latency=15.0, messages_in_flight=1)
    assert seconds(profile, link, Schedule.scheduled(partition_bytes=10, credit_bytes=1000)) == 2 + 10 * 40
    assert seconds(profile, link, FIFO) == 2 + 100 + 30


def test_push_and_pull_overlap_where_pieces_are_small() -> None:
    link = plain_link(architecture="ps", latency=1.0)
    profile = model([(100, 1, 1)])
    assert seconds(profile, link, FIFO) == 2 + 100 + 1 + 100 + 1
    assert seconds(profile, link, Schedule.scheduled(partition_bytes=10, credit_bytes=1000)) == 2 + 100 + 1 + 10 + 1


def test_clipping_waits_for_the_norm() -> None:
    # Reduce-scatters take 5 and 1. Gathered early, the last layer's all-gather fits in before the first layer's.
    profile = model([(2, 4, 11), (10, 4, 1)])
    link = plain_link(latency=0.5)  # each half of an all-reduce takes 0.5 to arrive, the norm 1
    reduced = 1 + 11 + 1 + 0.5
    run = simulate(profile, link, Schedule.scheduled(partition_bytes=100, credit_bytes=100, clipping=True))
    gathered = [(launch.layer, launch.gather) for launch in run.launches]
    assert gathered == [(1, False), (1, True), (0, False), (0, True)]
    # The first layer's all-gather goes out while the norm is made.
    assert run.step_seconds == reduced + max(1.0, 1 + 0.5) + 8


def test_clipping_takes_an_all_reduce() -> None:
    with pytest.raises(UnsupportedError, match="architecture='ps': use 'allreduce'"):
        simulate(CONTRIVED, plain_link(architecture="ps"), Schedule(clipping=True))


def test_launches_say_when_and_what() -> None:
    run = simulate(model([(3, 1, 1), (3, 1, 1)]), plain_link(), Schedule.scheduled(partition_bytes=2))
    assert run.launches == (
        Launch(seconds=1.0, layer=1, size=2, gather=False),
        Launch(seconds=3.0, layer=0, size=2, gather=False),
        Launch(seconds=5.0, layer=0, size=1, gather=False),
        Launch(seconds=6.0, layer=1, size=1, gather=False),
    )


@pytest.mark.parametrize("clipping", [False, True])
def test_layers_without_parameters_wait_for_nothing(clipping: bool) -> None:
    schedule = Schedule(clipping=clipping)
    run = simulate(model([(0, 1, 2), (0, 3, 4)]), plain_link(), schedule)
    assert run.step_seconds == 10
    assert run.launches == ()


@unhurried
@given(profile=models, link=links, schedule=schedules, clipping=st.booleans())
def test_all_steps_take_the_same_time(
    profile: ModelProfile, link: LinkModel, schedule: Schedule, clipping: bool
) -> None:
    if link.architecture != "ps":
        schedule = replace(schedule, clipping=clipping)
    four, one = (simulate(profile, link, schedule, steps=steps) for steps in (4, 1))
    assert len(four.steps) == 4
    assert four.steps == pytest.approx([one.step_seconds] * 4)
    assert four.launches == tuple(
        replace(launch, seconds=pytest.approx(launch.seconds, abs=1e-6)) for launch in one.launches
    )
    passages = 2 if schedule.clipping else 1
    assert sum(launch.size for launch in one.launches) == passages * profile.parameter_bytes


def test_more_workers_are_not_more_to_simulate() -> None:
    profile = network_profile("resnet50")
    schedule = Schedule.scheduled(partition_bytes=2**20, credit_bytes=2**24)
    links = [LinkModel(workers=workers, bandwidth=1e9, latency=1e-6) for workers in (4, 4096)]
    few, many = (simulate(profile, link, schedule, steps=1) for link in links)
    assert sorted((each.layer, each.size) for each in few.launches) == sorted(
        (each.layer, each.size) for each in many.launches
    )
    assert lower_bound(profile, links[1]) <= many.step_seconds
    assert few.step_seconds < many.step_seconds


@pytest.mark.parametrize("steps", [0, -1, 1.5, True])
def test_steps_are_whole(steps: int) -> None:
    with pytest.raises(OptionError, match=r"^steps=.* a whole number, 1 or more"):
        simulate(CONTRIVED, plain_link(), Schedule(), steps=steps)
